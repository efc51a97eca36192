// What memory allows: the kernels of penstock._ceiling, with which bench/optimizer.py compares.
//
// The module has the functions of penstock._native, but every step reads and writes what Adam's does
// and computes next to nothing, and sweeps save nothing in their undo area. Compiled once for each
// vector path, like kernel.cpp.
#include "kernel.h"
#include PENSTOCK_VECTOR_HEADER

namespace penstock {
namespace {

struct TouchStep {
  static constexpr std::size_t kNumArrays = 2;

  template <class V>
  PENSTOCK_STEP static State<V> step(const State<V>& old, const typename V::Floats& grad_sum,
                                     const Constants<V>&) {
    return {V::add(old.master, grad_sum), V::add(old.first, grad_sum),
            V::add(old.second, grad_sum)};
  }

  template <class V>
  PENSTOCK_STEP static State<V> inverse(const State<V>& next, const typename V::Floats& grad_sum,
                                        const Constants<V>&) {
    return {V::sub(next.master, grad_sum), V::sub(next.first, grad_sum),
            V::sub(next.second, grad_sum)};
  }
};

template <>
constexpr bool kSavesUndo<TouchStep> = false;

template <class V>
PieceFunction find_ceiling(const Choice& choice) {
  return find_usual<V, TouchStep>(choice);
}

}  // namespace

const Kernels PENSTOCK_KERNELS = {PENSTOCK_PATH, find_ceiling<PENSTOCK_VECTOR>};

}  // namespace penstock
