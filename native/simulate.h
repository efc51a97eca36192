// The event core of the planner's simulator: tasks in queues, with dependencies, whose bytes flow
// over shared resources. What the tasks stand for is planner/simulate's matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

// A view of somebody else's array.
template <typename T>
struct Slice {
  const T* data = nullptr;
  std::size_t size = 0;

  const T& operator[](std::size_t index) const { return data[index]; }
};

// What is simulated. All times are in seconds, amounts in bytes (or any unit that capacities share).
//
// A queue serves one task at a time. Its ordered tasks start in the order in which queue_tasks
// lists them, each when the tasks it depends on have ended; its unordered tasks start in the order
// in which they become ready (ties: lowest index), whenever the next ordered task cannot start.
//
// A task takes its seconds, then its amount flows over its route (-1: none, then its amount is 0).
// Its dependents hear of its end `delay` later; its queue is free at once. Flows share a resource
// fairly: rates are max-min fair, a route that lists a resource twice uses it twice, and no flow is
// faster than the limit of its route.
struct TaskGraph {
  Slice<double> seconds;
  Slice<double> amounts;
  Slice<double> delays;
  Slice<std::int32_t> routes;
  Slice<std::uint8_t> unordered;

  // edge_tasks[i] depends on edge_needs[i].
  Slice<std::int32_t> edge_tasks;
  Slice<std::int32_t> edge_needs;

  // Queue q serves queue_tasks[queue_offsets[q]] up to queue_tasks[queue_offsets[q + 1]].
  Slice<std::int64_t> queue_offsets;
  Slice<std::int32_t> queue_tasks;

  // Route r crosses route_resources[route_offsets[r]] up to route_resources[route_offsets[r + 1]].
  Slice<double> route_limits;
  Slice<std::int64_t> route_offsets;
  Slice<std::int32_t> route_resources;
  Slice<double> capacities;

  std::size_t num_tasks() const { return seconds.size; }
  std::size_t num_queues() const { return queue_offsets.size - 1; }
  std::size_t num_routes() const { return route_limits.size; }
};

// From `time` on the amount of `task` flows at `rate`, till its next change; 0 at its end.
struct RateChange {
  double time;
  std::int32_t task;
  double rate;
};

// Throws std::invalid_argument that names the array and the element that make no sense.
void check_graph(const TaskGraph& graph);

// Writes when each task starts and ends, NaN where it never does: tasks wait for each other in a
// circle. The graph must have passed check_graph. Rate changes, in the order of time, are recorded
// unless `changes` is null. Takes time proportional to tasks and edges, but for the logarithm of a
// heap and flows that share a resource; equal graphs give equal bits.
void run_tasks(const TaskGraph& graph, double* starts, double* ends,
               std::vector<RateChange>* changes);

}  // namespace penstock
