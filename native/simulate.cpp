#include "simulate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace penstock {
namespace {

constexpr double kNever = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Rounding of sums of rates must not make a resource look narrower than what flows through it.
constexpr double kSlack = 1.0 + 1e-12;

[[noreturn]] void reject(const char* name, std::size_t index, const std::string& value,
                         const std::string& expected) {
  throw std::invalid_argument(std::string(name) + "[" + std::to_string(index) + "] is " + value +
                              ": " + expected);
}

template <typename T>
void check_size(const char* name, const Slice<T>& slice, std::size_t expected) {
  if (slice.size != expected) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(slice.size) +
                                " elements, expected " + std::to_string(expected));
  }
}

void check_amounts(const char* name, const Slice<double>& slice) {
  for (std::size_t i = 0; i < slice.size; ++i) {
    if (!(slice[i] >= 0.0) || slice[i] == kInfinity) {
      reject(name, i, std::to_string(slice[i]), "expected a finite number, at least 0");
    }
  }
}

void check_rates(const char* name, const Slice<double>& slice) {
  for (std::size_t i = 0; i < slice.size; ++i) {
    if (!(slice[i] > 0.0)) reject(name, i, std::to_string(slice[i]), "expected a number above 0");
  }
}

void check_indices(const char* name, const Slice<std::int32_t>& slice, std::int64_t first,
                   std::size_t count) {
  for (std::size_t i = 0; i < slice.size; ++i) {
    if (slice[i] < first || slice[i] >= static_cast<std::int64_t>(count)) {
      reject(name, i, std::to_string(slice[i]),
             "expected " + std::to_string(first) + " or more and below " + std::to_string(count));
    }
  }
}

void check_offsets(const char* name, const Slice<std::int64_t>& offsets, std::size_t total) {
  if (offsets.size == 0 || offsets[0] != 0 ||
      offsets[offsets.size - 1] != static_cast<std::int64_t>(total)) {
    throw std::invalid_argument(std::string(name) + " must start at 0 and end at " +
                                std::to_string(total));
  }
  for (std::size_t i = 1; i < offsets.size; ++i) {
    if (offsets[i] < offsets[i - 1]) {
      reject(name, i, std::to_string(offsets[i]), "offsets must not fall");
    }
  }
}

void check_flows(const TaskGraph& graph) {
  check_amounts("amounts", graph.amounts);
  check_indices("routes", graph.routes, -1, graph.num_routes());
  for (std::size_t task = 0; task < graph.num_tasks(); ++task) {
    if (graph.routes[task] < 0 && graph.amounts[task] > 0.0) {
      reject("routes", task, "-1", "a task whose amount is not 0 needs a route");
    }
  }
}

void check_queues(const TaskGraph& graph) {
  check_offsets("queue_offsets", graph.queue_offsets, graph.num_tasks());
  check_size("queue_tasks", graph.queue_tasks, graph.num_tasks());
  check_indices("queue_tasks", graph.queue_tasks, 0, graph.num_tasks());
  std::vector<bool> queued(graph.num_tasks(), false);
  for (std::size_t i = 0; i < graph.num_tasks(); ++i) {
    const auto task = static_cast<std::size_t>(graph.queue_tasks[i]);
    if (queued[task]) reject("queue_tasks", i, std::to_string(task), "it is in a queue already");
    queued[task] = true;
  }
}

}  // namespace

void check_graph(const TaskGraph& graph) {
  const std::size_t num_tasks = graph.num_tasks();
  if (num_tasks > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::invalid_argument("too many tasks: their numbers must fit 32 bits");
  }
  check_size("amounts", graph.amounts, num_tasks);
  check_size("delays", graph.delays, num_tasks);
  check_size("routes", graph.routes, num_tasks);
  check_size("unordered", graph.unordered, num_tasks);
  check_size("edge_needs", graph.edge_needs, graph.edge_tasks.size);
  check_size("route_offsets", graph.route_offsets, graph.num_routes() + 1);
  check_amounts("seconds", graph.seconds);
  check_amounts("delays", graph.delays);
  check_flows(graph);
  check_indices("edge_tasks", graph.edge_tasks, 0, num_tasks);
  check_indices("edge_needs", graph.edge_needs, 0, num_tasks);
  check_queues(graph);
  check_rates("route_limits", graph.route_limits);
  check_offsets("route_offsets", graph.route_offsets, graph.route_resources.size);
  check_indices("route_resources", graph.route_resources, 0, graph.capacities.size);
  check_rates("capacities", graph.capacities);
}

namespace {

using Index = std::int32_t;

enum class EventKind : std::uint8_t { kSecondsOver, kFlowOver, kHeard };

// What happens to a task at a time. A flow's end is void when the flow's rate has changed since,
// which `version` tells.
struct Event {
  double time;
  Index task;
  EventKind kind;
  std::uint32_t version;

  bool operator>(const Event& other) const {
    if (time != other.time) return time > other.time;
    if (task != other.task) return task > other.task;
    return kind > other.kind;
  }
};

class Timeline {
 public:
  void add(const Event& event) { events_.push(event); }
  bool empty() const { return events_.empty(); }
  double time() const { return events_.top().time; }
  Event take() {
    const Event event = events_.top();
    events_.pop();
    return event;
  }

 private:
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
};

// The flows under way and their rates. A resource can hold flows back only if their limits exceed
// its capacity, so a change spreads over such resources only: the others are not even looked at.
class Network {
 public:
  Network(const TaskGraph& graph, Timeline& timeline, std::vector<RateChange>* changes)
      : graph_(graph),
        timeline_(timeline),
        changes_(changes),
        flows_of_(graph.capacities.size),
        resource_seen_(graph.capacities.size, 0),
        residual_(graph.capacities.size, 0.0),
        share_count_(graph.capacities.size, 0) {
    route_limits_.reserve(graph.num_routes());
    for (std::size_t route = 0; route < graph.num_routes(); ++route) {
      route_limits_.push_back(widest(route));
    }
  }

  // Resources that a route crosses.
  Slice<Index> resources(Index route) const {
    const auto first = static_cast<std::size_t>(graph_.route_offsets[index(route)]);
    const auto last = static_cast<std::size_t>(graph_.route_offsets[index(route) + 1]);
    return {graph_.route_resources.data + first, last - first};
  }

  void start(Index task, double now) {
    const Index route = graph_.routes[index(task)];
    const double amount = graph_.amounts[index(task)];
    const Slice<Index> crossed = resources(route);
    if (crossed.size == 0) {
      const double limit = route_limits_[index(route)];
      record(now, task, limit);
      timeline_.add({now + amount / limit, task, EventKind::kFlowOver, 0});
      return;
    }
    if (flow_of_.empty()) flow_of_.assign(graph_.num_tasks(), -1);
    flow_of_[index(task)] = new_flow(task, route, amount, now);
    for (std::size_t i = 0; i < crossed.size; ++i) {
      flows_of_[index(crossed[i])].push_back(flow_of_[index(task)]);
      dirty_.push_back(crossed[i]);
    }
  }

  // Whether the event is the flow's end and not one of its former plans.
  bool ends(const Event& event) const {
    if (resources(graph_.routes[index(event.task)]).size == 0) return true;
    const Index flow = flow_of_[index(event.task)];
    return flow >= 0 && flows_[index(flow)].version == event.version;
  }

  void end(Index task, double now) {
    record(now, task, 0.0);
    const Slice<Index> crossed = resources(graph_.routes[index(task)]);
    if (crossed.size == 0) return;
    const Index flow = flow_of_[index(task)];
    flow_of_[index(task)] = -1;
    free_flows_.push_back(flow);
    for (std::size_t i = 0; i < crossed.size; ++i) {
      std::vector<Index>& flows = flows_of_[index(crossed[i])];
      flows.erase(std::find(flows.begin(), flows.end(), flow));
      dirty_.push_back(crossed[i]);
    }
  }

  // Gives every flow that starts and ends since the last call may have touched its new rate.
  void share(double now) {
    if (dirty_.empty()) return;
    ++round_;
    touched_.clear();
    bound_.clear();
    for (const Index resource : dirty_) touch_flows(resource);
    for (std::size_t i = 0; i < touched_.size(); ++i) {
      const Slice<Index> crossed = resources(flows_[index(touched_[i])].route);
      for (std::size_t j = 0; j < crossed.size; ++j) spread(crossed[j]);
    }
    dirty_.clear();
    fill();
    for (const Index flow : touched_) apply(flows_[index(flow)], now);
  }

 private:
  struct Flow {
    Index task;
    Index route;
    double remaining;
    double rate;
    double next_rate;
    double since;
    std::uint32_t version;
    std::uint64_t seen;
    bool fixed;
  };

  static std::size_t index(Index value) { return static_cast<std::size_t>(value); }

  // The rate of a flow that has its route for itself.
  double widest(std::size_t route) const {
    double limit = graph_.route_limits[route];
    const Slice<Index> crossed = resources(static_cast<Index>(route));
    for (std::size_t i = 0; i < crossed.size; ++i) {
      const auto uses = std::count(crossed.data, crossed.data + crossed.size, crossed[i]);
      limit = std::min(limit, graph_.capacities[index(crossed[i])] / static_cast<double>(uses));
    }
    return limit;
  }

  Index new_flow(Index task, Index route, double amount, double now) {
    if (free_flows_.empty()) {
      free_flows_.push_back(static_cast<Index>(flows_.size()));
      flows_.push_back({});
    }
    const Index flow = free_flows_.back();
    free_flows_.pop_back();
    const std::uint32_t version = flows_[index(flow)].version;
    flows_[index(flow)] = {task, route, amount, 0.0, 0.0, now, version, 0, false};
    return flow;
  }

  void touch_flows(Index resource) {
    for (const Index flow : flows_of_[index(resource)]) {
      if (flows_[index(flow)].seen == round_) continue;
      flows_[index(flow)].seen = round_;
      flows_[index(flow)].fixed = false;
      touched_.push_back(flow);
    }
  }

  void spread(Index resource) {
    if (resource_seen_[index(resource)] == round_) return;
    resource_seen_[index(resource)] = round_;
    double wanted = 0.0;
    for (const Index flow : flows_of_[index(resource)]) {
      wanted += route_limits_[index(flows_[index(flow)].route)];
    }
    if (wanted <= graph_.capacities[index(resource)] * kSlack) return;
    bound_.push_back(resource);
    residual_[index(resource)] = graph_.capacities[index(resource)];
    share_count_[index(resource)] = static_cast<Index>(flows_of_[index(resource)].size());
    touch_flows(resource);
  }

  // Max-min fairness by water filling: all rates rise together until a flow reaches its limit or a
  // resource is full, which fixes these flows; then the others go on.
  void fill() {
    double level = 0.0;
    unfixed_ = touched_;
    while (!unfixed_.empty()) {
      double lowest = kInfinity;
      for (const Index flow : unfixed_) {
        lowest = std::min(lowest, route_limits_[index(flows_[index(flow)].route)]);
      }
      for (const Index resource : bound_) {
        if (share_count_[index(resource)] > 0) lowest = std::min(lowest, fair_share(resource));
      }
      level = std::max(level, lowest);
      fix_limited(level);
      for (const Index resource : bound_) {
        if (share_count_[index(resource)] > 0 && fair_share(resource) <= level)
          fix_all(resource, level);
      }
      unfixed_.erase(std::remove_if(unfixed_.begin(), unfixed_.end(),
                                    [this](Index flow) { return flows_[index(flow)].fixed; }),
                     unfixed_.end());
    }
  }

  double fair_share(Index resource) const {
    return residual_[index(resource)] / static_cast<double>(share_count_[index(resource)]);
  }

  void fix_limited(double level) {
    for (const Index flow : unfixed_) {
      const double limit = route_limits_[index(flows_[index(flow)].route)];
      if (limit <= level) fix(flow, limit);
    }
  }

  void fix_all(Index resource, double level) {
    for (const Index flow : flows_of_[index(resource)]) {
      if (!flows_[index(flow)].fixed) fix(flow, level);
    }
  }

  void fix(Index flow, double rate) {
    flows_[index(flow)].fixed = true;
    flows_[index(flow)].next_rate = rate;
    const Slice<Index> crossed = resources(flows_[index(flow)].route);
    for (std::size_t i = 0; i < crossed.size; ++i) {
      residual_[index(crossed[i])] -= rate;
      --share_count_[index(crossed[i])];
    }
  }

  void apply(Flow& flow, double now) {
    if (flow.rate == flow.next_rate) return;
    flow.remaining = std::max(0.0, flow.remaining - flow.rate * (now - flow.since));
    flow.since = now;
    flow.rate = flow.next_rate;
    ++flow.version;
    record(now, flow.task, flow.rate);
    timeline_.add(
        {now + flow.remaining / flow.rate, flow.task, EventKind::kFlowOver, flow.version});
  }

  void record(double now, Index task, double rate) {
    if (changes_ != nullptr) changes_->push_back({now, task, rate});
  }

  const TaskGraph& graph_;
  Timeline& timeline_;
  std::vector<RateChange>* const changes_;

  std::vector<double> route_limits_;
  std::vector<Flow> flows_;
  std::vector<Index> free_flows_;
  std::vector<Index> flow_of_;                // by task; -1: none
  std::vector<std::vector<Index>> flows_of_;  // by resource, once for each use
  std::vector<Index> dirty_;                  // resources where a flow came or went

  // Of one call of share().
  std::uint64_t round_ = 0;
  std::vector<std::uint64_t> resource_seen_;
  std::vector<Index> touched_;  // flows whose rate may change
  std::vector<Index> unfixed_;
  std::vector<Index> bound_;  // resources that may hold them back
  std::vector<double> residual_;
  std::vector<Index> share_count_;  // uses by flows that are not fixed
};

class Run {
 public:
  Run(const TaskGraph& graph, double* starts, double* ends, std::vector<RateChange>* changes)
      : graph_(graph),
        starts_(starts),
        ends_(ends),
        network_(graph, timeline_, changes),
        queue_of_(graph.num_tasks()),
        waits_for_(graph.num_tasks(), 0),
        queues_(graph.num_queues()) {
    std::fill_n(starts_, graph.num_tasks(), kNever);
    std::fill_n(ends_, graph.num_tasks(), kNever);
    build_queues();
    build_edges();
  }

  void run() {
    for (std::size_t task = 0; task < graph_.num_tasks(); ++task) {
      if (waits_for_[task] == 0) become_ready(static_cast<Index>(task));
    }
    serve();
    while (!timeline_.empty()) {
      now_ = timeline_.time();
      while (!timeline_.empty() && timeline_.time() == now_) handle(timeline_.take());
      serve();
    }
  }

 private:
  using Ready = std::pair<double, Index>;

  struct Queue {
    std::size_t next = 0;  // into queue_tasks: the first ordered task that has not started
    std::size_t stop = 0;
    bool busy = false;
    std::priority_queue<Ready, std::vector<Ready>, std::greater<Ready>> ready;  // unordered tasks
  };

  static std::size_t index(Index value) { return static_cast<std::size_t>(value); }

  void build_queues() {
    for (std::size_t queue = 0; queue < graph_.num_queues(); ++queue) {
      queues_[queue].next = static_cast<std::size_t>(graph_.queue_offsets[queue]);
      queues_[queue].stop = static_cast<std::size_t>(graph_.queue_offsets[queue + 1]);
      for (std::size_t i = queues_[queue].next; i < queues_[queue].stop; ++i) {
        queue_of_[index(graph_.queue_tasks[i])] = static_cast<Index>(queue);
      }
      skip_unordered(queues_[queue]);
    }
  }

  // dependents_[first_dependent_[t]] up to dependents_[first_dependent_[t + 1]] wait for task t.
  void build_edges() {
    first_dependent_.assign(graph_.num_tasks() + 1, 0);
    dependents_.resize(graph_.edge_tasks.size);
    for (std::size_t edge = 0; edge < graph_.edge_tasks.size; ++edge) {
      ++first_dependent_[index(graph_.edge_needs[edge]) + 1];
      ++waits_for_[index(graph_.edge_tasks[edge])];
    }
    for (std::size_t task = 0; task < graph_.num_tasks(); ++task) {
      first_dependent_[task + 1] += first_dependent_[task];
    }
    std::vector<std::size_t> place(first_dependent_.begin(), first_dependent_.end() - 1);
    for (std::size_t edge = 0; edge < graph_.edge_tasks.size; ++edge) {
      dependents_[place[index(graph_.edge_needs[edge])]++] = graph_.edge_tasks[edge];
    }
  }

  void skip_unordered(Queue& queue) {
    while (queue.next < queue.stop && graph_.unordered[index(graph_.queue_tasks[queue.next])]) {
      ++queue.next;
    }
  }

  void become_ready(Index task) {
    const Index queue = queue_of_[index(task)];
    if (graph_.unordered[index(task)]) {
      queues_[index(queue)].ready.emplace(now_, task);
    } else {
      const Queue& server = queues_[index(queue)];
      if (server.next >= server.stop || graph_.queue_tasks[server.next] != task) return;
    }
    look_at(queue);
  }

  void look_at(Index queue) { (has_ordered(queue) ? ordered_ : unordered_).push_back(queue); }

  // Whether the next ordered task of a queue could start if the queue were free.
  bool has_ordered(Index queue) const {
    const Queue& server = queues_[index(queue)];
    return server.next < server.stop && waits_for_[index(graph_.queue_tasks[server.next])] == 0;
  }

  // Starts what can start now. Ordered tasks go first, so that whatever is ready at this instant is
  // known when an unordered task is chosen.
  void serve() {
    while (!ordered_.empty() || !unordered_.empty()) {
      if (!ordered_.empty()) {
        const Index queue = ordered_.back();
        ordered_.pop_back();
        start_next(queue);
      } else {
        std::vector<Index> waiting;
        waiting.swap(unordered_);
        std::sort(waiting.begin(), waiting.end());
        for (const Index queue : waiting) start_next(queue);
      }
    }
    network_.share(now_);
  }

  void start_next(Index queue) {
    Queue& server = queues_[index(queue)];
    if (server.busy) return;
    Index task = -1;
    if (has_ordered(queue)) {
      task = graph_.queue_tasks[server.next++];
      skip_unordered(server);
    } else if (!server.ready.empty()) {
      task = server.ready.top().second;
      server.ready.pop();
    } else {
      return;
    }
    server.busy = true;
    starts_[index(task)] = now_;
    const double seconds = graph_.seconds[index(task)];
    if (seconds > 0.0) {
      timeline_.add({now_ + seconds, task, EventKind::kSecondsOver, 0});
    } else {
      seconds_over(task);
    }
  }

  void handle(const Event& event) {
    switch (event.kind) {
      case EventKind::kSecondsOver:
        seconds_over(event.task);
        break;
      case EventKind::kFlowOver:
        if (network_.ends(event)) {
          network_.end(event.task, now_);
          end(event.task);
        }
        break;
      case EventKind::kHeard:
        tell_dependents(event.task);
        break;
    }
  }

  void seconds_over(Index task) {
    if (graph_.amounts[index(task)] > 0.0) {
      network_.start(task, now_);
    } else {
      end(task);
    }
  }

  void end(Index task) {
    ends_[index(task)] = now_;
    queues_[index(queue_of_[index(task)])].busy = false;
    look_at(queue_of_[index(task)]);
    const double delay = graph_.delays[index(task)];
    if (delay > 0.0) {
      timeline_.add({now_ + delay, task, EventKind::kHeard, 0});
    } else {
      tell_dependents(task);
    }
  }

  void tell_dependents(Index task) {
    for (std::size_t i = first_dependent_[index(task)]; i < first_dependent_[index(task) + 1];
         ++i) {
      if (--waits_for_[index(dependents_[i])] == 0) become_ready(dependents_[i]);
    }
  }

  const TaskGraph& graph_;
  double* const starts_;
  double* const ends_;
  double now_ = 0.0;
  Timeline timeline_;
  Network network_;
  std::vector<Index> queue_of_;
  std::vector<Index> waits_for_;  // dependencies that have not ended
  std::vector<std::size_t> first_dependent_;
  std::vector<Index> dependents_;
  std::vector<Queue> queues_;
  std::vector<Index> ordered_;    // queues whose next ordered task may start
  std::vector<Index> unordered_;  // queues where only unordered tasks may
};

}  // namespace

void run_tasks(const TaskGraph& graph, double* starts, double* ends,
               std::vector<RateChange>* changes) {
  Run(graph, starts, ends, changes).run();
}

}  // namespace penstock
