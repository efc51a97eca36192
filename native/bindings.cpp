// The Python module penstock._native. Its types and docstrings are in src/penstock/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "atomics.h"
#include "halves.h"
#include "simulate.h"
#include "steps.h"
#include "sweeps.h"

namespace penstock {
namespace nb = nanobind;
namespace {

using ObjectList = std::vector<nb::object>;
using RangeList = std::vector<RangeTuple>;
using SpanList = std::optional<std::vector<SpanTuple>>;

// Arguments that every sweep over model state has.
Block check_block(ArrayArguments& arrays, nb::handle master, const ObjectList& state,
                  const Hyper& hyper, const RangeList& ranges) {
  Block block;
  block.state = arrays.state(master, state);
  check_state(block.state, hyper);
  block.num_elements = arrays.num_elements();
  block.ranges = check_ranges(ranges, block.num_elements);
  return block;
}

Weights check_out(ArrayArguments& arrays, const Block& block, nb::handle weights,
                  WeightsType weights_dtype) {
  const Weights out = arrays.weights(weights, weights_dtype);
  check_weights(block.state, out);
  return out;
}

// preview and step_in_place take the same arguments.
using StatelessSweep = Status (*)(Pool&, const Block&, const Gradients&, const Hyper&,
                                  const Weights&);

template <StatelessSweep kSweep>
Status bound_sweep(Pool& pool, nb::handle master, const ObjectList& state, const ObjectList& grads,
                   nb::handle weights, WeightsType weights_dtype, const Hyper& hyper,
                   const RangeList& ranges) {
  ArrayArguments arrays;
  const Block block = check_block(arrays, master, state, hyper, ranges);
  const Gradients gradients = arrays.gradients("grads", grads);
  const Weights out = check_out(arrays, block, weights, weights_dtype);
  const nb::gil_scoped_release unlocked;
  return kSweep(pool, block, gradients, hyper, out);
}

// settle and invert, too.
using StateSweep = void (*)(Pool&, const Block&, const Gradients&, const Hyper&, Settlement);

template <StateSweep kSweep, bool kSplits>
void bound_state_sweep(Pool& pool, nb::handle master, const ObjectList& state,
                       const ObjectList& grads, const Hyper& hyper, const RangeList& ranges,
                       nb::handle undo, const SpanList& spans, std::uint64_t tag) {
  ArrayArguments arrays;
  const BufferView undo_buffer(undo, /*writable=*/true);
  const Block block = check_block(arrays, master, state, hyper, ranges);
  if (!kSplits && block.state.master == nullptr) {
    throw std::invalid_argument("master must not be split: what the step rounded is lost");
  }
  const Gradients gradients = arrays.gradients("grads", grads);
  const Settlement settlement{check_undo(undo_buffer), check_spans(spans, block.num_elements), tag};
  const nb::gil_scoped_release unlocked;
  kSweep(pool, block, gradients, hyper, settlement);
}

Status bound_hold(Pool& pool, nb::handle master, const ObjectList& state, const ObjectList& grads,
                  nb::handle weights, WeightsType weights_dtype, const Hyper& hyper,
                  const RangeList& ranges, nb::handle undo, const SpanList& spans,
                  std::uint64_t tag) {
  ArrayArguments arrays;
  const BufferView undo_buffer(undo, /*writable=*/true);
  const Block block = check_block(arrays, master, state, hyper, ranges);
  const Gradients gradients = arrays.gradients("grads", grads);
  const Weights out = check_out(arrays, block, weights, weights_dtype);
  const Settlement settlement{check_undo(undo_buffer), check_spans(spans, block.num_elements), tag};
  const nb::gil_scoped_release unlocked;
  return hold(pool, block, gradients, hyper, out, settlement);
}

Status bound_advance(Pool& pool, nb::handle master, const ObjectList& state,
                     const ObjectList& pending_grads, const Hyper& pending_hyper,
                     const ObjectList& grads, const Hyper& hyper, nb::handle weights,
                     WeightsType weights_dtype, const RangeList& ranges, nb::handle undo,
                     const SpanList& spans, std::uint64_t tag) {
  ArrayArguments arrays;
  const BufferView undo_buffer(undo, /*writable=*/true);
  const Block block = check_block(arrays, master, state, hyper, ranges);
  if (pending_hyper.optimizer != hyper.optimizer) {
    throw std::invalid_argument("pending_hyper and hyper must have the same optimizer");
  }
  const Gradients pending = arrays.gradients("pending_grads", pending_grads);
  const Gradients gradients = arrays.gradients("grads", grads);
  if (pending.type != gradients.type) {
    throw std::invalid_argument("pending_grads and grads must have the same dtype");
  }
  const Weights out = check_out(arrays, block, weights, weights_dtype);
  const Settlement settlement{check_undo(undo_buffer), check_spans(spans, block.num_elements), tag};
  const nb::gil_scoped_release unlocked;
  return advance(pool, block, pending, pending_hyper, gradients, hyper, out, settlement);
}

Status bound_gradient_status(Pool& pool, const ObjectList& grads) {
  ArrayArguments arrays;
  const Gradients gradients = arrays.gradients("grads", grads);
  const nb::gil_scoped_release unlocked;
  return gradient_status(pool, gradients, arrays.num_elements());
}

void bound_cast_weights(Pool& pool, nb::handle master, nb::handle weights,
                        WeightsType weights_dtype) {
  ArrayArguments arrays;
  const float* from = arrays.constant("master", master);
  const Weights out = arrays.weights(weights, weights_dtype);
  const nb::gil_scoped_release unlocked;
  cast_weights(pool, from, out, arrays.num_elements());
}

std::vector<SpanTuple> bound_repair(nb::handle undo, nb::handle master, const ObjectList& state) {
  ArrayArguments arrays;
  const BufferView undo_buffer(undo, /*writable=*/true);
  const StateArrays found = arrays.state(master, state);
  std::vector<SpanTuple> spans;
  for (const Span& span : check_undo(undo_buffer).repair(found, arrays.num_elements())) {
    spans.emplace_back(static_cast<std::int64_t>(span.start), static_cast<std::int64_t>(span.end));
  }
  return spans;
}

std::string hyper_repr(nb::handle self) {
  const Hyper& h = nb::cast<const Hyper&>(self);
  char text[256];
  std::snprintf(text, sizeof(text),
                "lr=%.17g, beta1=%.17g, beta2=%.17g, eps=%.17g, step=%llu, coefficient=%.17g)",
                h.lr, h.beta1, h.beta2, h.eps, static_cast<unsigned long long>(h.step),
                h.coefficient);
  return std::string("Hyper(optimizer='") + Optimizers::kTraits[h.optimizer].name + "', " + text;
}

std::string status_repr(const Status& status) {
  char text[96];
  std::snprintf(text, sizeof(text), "Status(finite=%s, sum_squares=%.17g)",
                status.finite ? "True" : "False", status.sum_squares);
  return text;
}

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<nb::numpy, double, nb::ndim<1>>;

template <typename T>
Slice<T> slice(const Vector<T>& vector) {
  return {vector.data(), vector.shape(0)};
}

bool bound_round_halves(const Vector<std::uint16_t>& high, const Vector<std::uint16_t>& low,
                        const Out<std::uint16_t>& out) {
  if (low.shape(0) != high.shape(0) || out.shape(0) != high.shape(0)) {
    throw std::invalid_argument("high, low and out must have equal lengths");
  }
  const nb::gil_scoped_release unlocked;
  return round_halves(high.data(), low.data(), high.shape(0), out.data());
}

Times new_times(std::size_t count) {
  auto* const times = new double[count];
  const nb::capsule owner(times, [](void* data) noexcept { delete[] static_cast<double*>(data); });
  return Times(times, {count}, owner);
}

std::tuple<Times, Times, std::vector<std::tuple<double, std::int32_t, double>>>
bound_simulate_tasks(const Vector<double>& seconds, const Vector<double>& amounts,
                     const Vector<double>& delays, const Vector<std::int32_t>& routes,
                     const Vector<std::uint8_t>& unordered, const Vector<std::int32_t>& edge_tasks,
                     const Vector<std::int32_t>& edge_needs,
                     const Vector<std::int64_t>& queue_offsets,
                     const Vector<std::int32_t>& queue_tasks, const Vector<double>& route_limits,
                     const Vector<std::int64_t>& route_offsets,
                     const Vector<std::int32_t>& route_resources, const Vector<double>& capacities,
                     bool record_rates) {
  const TaskGraph graph{slice(seconds),      slice(amounts),       slice(delays),
                        slice(routes),       slice(unordered),     slice(edge_tasks),
                        slice(edge_needs),   slice(queue_offsets), slice(queue_tasks),
                        slice(route_limits), slice(route_offsets), slice(route_resources),
                        slice(capacities)};
  Times starts = new_times(graph.num_tasks());
  Times ends = new_times(graph.num_tasks());
  std::vector<RateChange> changes;
  {
    const nb::gil_scoped_release unlocked;
    check_graph(graph);
    run_tasks(graph, starts.data(), ends.data(), record_rates ? &changes : nullptr);
  }
  std::vector<std::tuple<double, std::int32_t, double>> rates;
  rates.reserve(changes.size());
  for (const RateChange& c : changes) rates.emplace_back(c.time, c.task, c.rate);
  return {starts, ends, rates};
}

void bind_atomics(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def(
      "load_u64",
      [](nb::handle buffer, std::int64_t byte_offset) {
        return load_acquire(BufferView(buffer, /*writable=*/false).word(byte_offset));
      },
      "buffer"_a, "byte_offset"_a);
  module.def(
      "store_u64",
      [](nb::handle buffer, std::int64_t byte_offset, std::uint64_t value) {
        store_release(BufferView(buffer, /*writable=*/true).word(byte_offset), value);
      },
      "buffer"_a, "byte_offset"_a, "value"_a);
  module.def(
      "fetch_add_u64",
      [](nb::handle buffer, std::int64_t byte_offset, std::uint64_t addend) {
        return fetch_add(BufferView(buffer, /*writable=*/true).word(byte_offset), addend);
      },
      "buffer"_a, "byte_offset"_a, "addend"_a);
  module.def(
      "compare_exchange_u64",
      [](nb::handle buffer, std::int64_t byte_offset, std::uint64_t expected,
         std::uint64_t desired) {
        const BufferView view(buffer, /*writable=*/true);
        return compare_exchange(view.word(byte_offset), expected, desired);
      },
      "buffer"_a, "byte_offset"_a, "expected"_a, "desired"_a);
}

void bind_types(nb::module_& module) {
  using nb::literals::operator""_a;
  nb::enum_<WeightsType>(module, "WeightsDtype")
      .value("FLOAT32", WeightsType::kFloat32)
      .value("BFLOAT16", WeightsType::kBfloat16)
      .value("FLOAT16", WeightsType::kFloat16);
  nb::class_<Hyper>(module, "Hyper")
      .def(
          "__init__",
          [](Hyper* self, double lr, double beta1, double beta2, double eps, std::uint64_t step,
             double coefficient, const std::string& optimizer) {
            const Hyper hyper{find_optimizer(optimizer), lr, beta1, beta2, eps, step, coefficient};
            check_hyper(hyper);
            new (self) Hyper(hyper);
          },
          nb::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "step"_a, "coefficient"_a = 1.0,
          "optimizer"_a = "adamw")
      .def_ro("lr", &Hyper::lr)
      .def_ro("beta1", &Hyper::beta1)
      .def_ro("beta2", &Hyper::beta2)
      .def_ro("eps", &Hyper::eps)
      .def_ro("step", &Hyper::step)
      .def_ro("coefficient", &Hyper::coefficient)
      .def_prop_ro("optimizer",
                   [](const Hyper& hyper) { return Optimizers::kTraits[hyper.optimizer].name; })
      .def("__repr__", &hyper_repr);
  nb::class_<Status>(module, "Status")
      .def_ro("finite", &Status::finite)
      .def_ro("sum_squares", &Status::sum_squares)
      .def("__repr__", &status_repr);
  nb::class_<UndoState>(module, "UndoState")
      .def_ro("armed", &UndoState::armed)
      .def_ro("tag", &UndoState::tag)
      .def_ro("completed", &UndoState::completed);
}

void bind_pool(nb::module_& module) {
  using nb::literals::operator""_a;
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Pool>(module, "Pool")
      .def(nb::init<const std::vector<int>&, const std::string&>(), "cores"_a, nb::kw_only(),
           "vector_path"_a = "")
      .def_prop_ro("num_threads", [](const Pool& pool) { return pool.threads.num_threads(); })
      .def_prop_ro("vector_path", [](const Pool& pool) { return pool.kernels.name; })
      .def(
          "close", [](Pool& pool) { pool.threads.close(); }, Unlocked())
      .def(
          "__enter__", [](Pool& pool) -> Pool& { return pool; }, nb::rv_policy::reference)
      .def("__exit__", [](Pool& pool, nb::args) { pool.threads.close(); }, Unlocked());
  module.def("vector_path", [] { return available_kernels().front()->name; });
  module.def("available_vector_paths", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
  });
}

void bind_sweeps(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("preview", &bound_sweep<preview>, "pool"_a, nb::kw_only(), "master"_a, "arrays"_a,
             "grads"_a, "weights"_a, "weights_dtype"_a, "hyper"_a, "ranges"_a);
  module.def("step_in_place", &bound_sweep<step_in_place>, "pool"_a, nb::kw_only(), "master"_a,
             "arrays"_a, "grads"_a, "weights"_a, "weights_dtype"_a, "hyper"_a, "ranges"_a);
  module.def("settle", &bound_state_sweep<settle, true>, "pool"_a, nb::kw_only(), "master"_a,
             "arrays"_a, "grads"_a, "hyper"_a, "ranges"_a, "undo"_a, "spans"_a = nb::none(),
             "tag"_a = 0);
  module.def("invert", &bound_state_sweep<invert, false>, "pool"_a, nb::kw_only(), "master"_a,
             "arrays"_a, "grads"_a, "hyper"_a, "ranges"_a, "undo"_a, "spans"_a = nb::none(),
             "tag"_a = 0);
  module.def("hold", &bound_hold, "pool"_a, nb::kw_only(), "master"_a, "arrays"_a, "grads"_a,
             "weights"_a, "weights_dtype"_a, "hyper"_a, "ranges"_a, "undo"_a,
             "spans"_a = nb::none(), "tag"_a = 0);
  module.def("advance", &bound_advance, "pool"_a, nb::kw_only(), "master"_a, "arrays"_a,
             "pending_grads"_a, "pending_hyper"_a, "grads"_a, "hyper"_a, "weights"_a,
             "weights_dtype"_a, "ranges"_a, "undo"_a, "spans"_a = nb::none(), "tag"_a = 0);
  module.def("gradient_status", &bound_gradient_status, "pool"_a, nb::kw_only(), "grads"_a);
  module.def("cast_weights", &bound_cast_weights, "pool"_a, nb::kw_only(), "master"_a, "weights"_a,
             "weights_dtype"_a);
  module.def("round_halves", &bound_round_halves, nb::kw_only(), "high"_a.noconvert(),
             "low"_a.noconvert(), "out"_a.noconvert());
}

void bind_undo(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def(
      "undo_bytes",
      [](std::int64_t num_threads) {
        if (num_threads < 1) {
          throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                      ": it must be at least 1");
        }
        return Undo::bytes_for(static_cast<std::size_t>(num_threads));
      },
      "num_threads"_a);
  module.def(
      "undo_state",
      [](nb::handle undo) {
        const BufferView buffer(undo, /*writable=*/true);
        return check_undo(buffer).state();
      },
      "undo"_a);
  module.def("repair", &bound_repair, "undo"_a, nb::kw_only(), "master"_a, "arrays"_a);
}

void bind_simulate(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("simulate_tasks", &bound_simulate_tasks, nb::kw_only(), "seconds"_a.noconvert(),
             "amounts"_a.noconvert(), "delays"_a.noconvert(), "routes"_a.noconvert(),
             "unordered"_a.noconvert(), "edge_tasks"_a.noconvert(), "edge_needs"_a.noconvert(),
             "queue_offsets"_a.noconvert(), "queue_tasks"_a.noconvert(),
             "route_limits"_a.noconvert(), "route_offsets"_a.noconvert(),
             "route_resources"_a.noconvert(), "capacities"_a.noconvert(), "record_rates"_a = false);
}

}  // namespace
}  // namespace penstock

// _native, or _ceiling: the same functions with the kernels of a benchmark (ceiling.cpp).
NB_MODULE(PENSTOCK_MODULE, module) {
  penstock::bind_atomics(module);
  penstock::bind_types(module);
  penstock::bind_pool(module);
  penstock::bind_sweeps(module);
  penstock::bind_undo(module);
  penstock::bind_simulate(module);
}
