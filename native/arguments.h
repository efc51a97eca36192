// Turns Python arguments into what the sweeps take; each error names the argument, its value and
// what would do.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "sweeps.h"

namespace penstock {

using RangeTuple = std::tuple<std::int64_t, std::int64_t, double, double>;
using SpanTuple = std::tuple<std::int64_t, std::int64_t>;

// A contiguous buffer held through Python's buffer protocol (bytearray, memoryview, mmap, array).
class BufferView {
 public:
  BufferView(nanobind::handle object, bool writable);
  ~BufferView();
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  void* data() const { return view_.buf; }
  std::size_t num_bytes() const { return static_cast<std::size_t>(view_.len); }
  // The 8-byte word at an offset; throws std::invalid_argument unless inside and aligned.
  std::uint64_t* word(std::int64_t byte_offset) const;

 private:
  Py_buffer view_;
};

// Collects the arrays of one call, checks that they fit each other, and keeps them alive.
class ArrayArguments {
 public:
  // `master` is a float32 array, or the pair (upper halves, lower halves) of one that is split;
  // `arrays` are the optimizer's own, as many as it has.
  StateArrays state(nanobind::handle master, const std::vector<nanobind::object>& arrays);
  const float* constant(const char* name, nanobind::handle array);
  Gradients gradients(const char* name, const std::vector<nanobind::object>& arrays);
  Weights weights(nanobind::handle array, WeightsType type);
  std::uint64_t num_elements() const { return num_elements_; }

 private:
  enum class Access { kRead, kWrite };
  float* floats(const std::string& name, nanobind::handle array);
  std::uint16_t* halves(const std::string& name, nanobind::handle array);
  const nanobind::ndarray<nanobind::ro>& add(const std::string& name, nanobind::handle array,
                                             Access access);

  std::vector<nanobind::ndarray<nanobind::ro>> arrays_;
  std::string first_name_;
  std::uint64_t num_elements_ = 0;
};

std::vector<StepRange> check_ranges(const std::vector<RangeTuple>& ranges,
                                    std::uint64_t num_elements);
// No spans means the whole block.
std::vector<Span> check_spans(const std::optional<std::vector<SpanTuple>>& spans,
                              std::uint64_t num_elements);
Undo check_undo(const BufferView& buffer);
// The index of an optimizer in Optimizers; throws std::invalid_argument with the names there are.
std::size_t find_optimizer(const std::string& name);
void check_hyper(const Hyper& hyper);
// Throws unless the state has the arrays of the optimizer.
void check_state(const StateArrays& state, const Hyper& hyper);
// Throws unless the weights can be the upper halves of a master that is split.
void check_weights(const StateArrays& state, const Weights& weights);

}  // namespace penstock
