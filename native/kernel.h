// The one loop over model state, for any vector type and any pass.
//
// Included by exactly one source file per vector path, each compiled with that path's flags.
// Everything is in an anonymous namespace, so that the linker cannot replace a function of one path
// by the same function compiled for another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace penstock {
namespace {

// How far ahead of the loads the memory is asked for; the best of 128 to 1024 where measured.
constexpr std::size_t kPrefetchElements = 512;

// The steps of the loop: a call would send their vectors through memory.
#define PENSTOCK_STEP __attribute__((always_inline)) inline

constexpr DecayRange kNoDecay{};

inline std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

enum class Mode { kPreview, kSettle, kAdvance, kInPlace, kStatus, kCast };

constexpr bool settles(Mode mode) { return mode == Mode::kSettle || mode == Mode::kAdvance; }
constexpr bool reads_new_grads(Mode mode) { return mode != Mode::kSettle && mode != Mode::kCast; }
constexpr bool steps_on_new_grads(Mode mode) {
  return mode == Mode::kPreview || mode == Mode::kAdvance || mode == Mode::kInPlace;
}
constexpr bool reads_moments(Mode mode) { return settles(mode) || steps_on_new_grads(mode); }
constexpr bool writes_state(Mode mode) { return settles(mode) || mode == Mode::kInPlace; }
constexpr bool writes_weights(Mode mode) { return steps_on_new_grads(mode) || mode == Mode::kCast; }

// Gradient and weight types: how a vector of them is read or written.
struct Float32 {
  using Element = float;
  template <class V>
  static typename V::Floats load(const Element* from) {
    return V::load(from);
  }
  template <class V>
  static void store_weights(Element* to, const typename V::Floats& x) {
    V::store(to, x);
  }
};

struct Bfloat16 {
  using Element = std::uint16_t;
  template <class V>
  static typename V::Floats load(const Element* from) {
    return V::load_bf16(from);
  }
  template <class V>
  static void store_weights(Element* to, const typename V::Floats& x) {
    V::stream_bf16(to, x);
  }
};

struct Float16 {
  using Element = std::uint16_t;
  template <class V>
  static void store_weights(Element* to, const typename V::Floats& x) {
    V::stream_fp16(to, x);
  }
};

template <class V>
struct State {
  typename V::Floats master, exp_avg, exp_avg_sq;
};

// The scalars of one step on one range of parameters, in every lane.
template <class V>
struct Constants {
  Constants(const AdamScalars& scalars, const Decay& decay)
      : coefficient(V::broadcast(scalars.coefficient)),
        one_minus_beta1(V::broadcast(scalars.one_minus_beta1)),
        beta2(V::broadcast(scalars.beta2)),
        one_minus_beta2(V::broadcast(scalars.one_minus_beta2)),
        inverse_sqrt_correction(V::broadcast(scalars.inverse_sqrt_correction)),
        eps(V::broadcast(scalars.eps)),
        step_size(V::broadcast(scalars.step_size)),
        keep(V::broadcast(decay.keep)),
        l2(V::broadcast(decay.l2)) {}

  typename V::Floats coefficient, one_minus_beta1, beta2, one_minus_beta2, inverse_sqrt_correction,
      eps, step_size, keep, l2;
};

// Step: the optimizer's arithmetic. Each operation rounds once, on every path.
template <class V>
PENSTOCK_STEP State<V> adam_step(const State<V>& old, const typename V::Floats& grad_sum,
                                 const Constants<V>& c) {
  using Floats = typename V::Floats;
  const Floats scaled = V::mul(grad_sum, c.coefficient);
  const Floats grad = V::add(scaled, V::mul(old.master, c.l2));
  State<V> next;
  next.exp_avg = V::add(old.exp_avg, V::mul(V::sub(grad, old.exp_avg), c.one_minus_beta1));
  next.exp_avg_sq =
      V::add(V::mul(old.exp_avg_sq, c.beta2), V::mul(V::mul(grad, c.one_minus_beta2), grad));
  const Floats denominator =
      V::add(V::mul(V::sqrt(next.exp_avg_sq), c.inverse_sqrt_correction), c.eps);
  next.master =
      V::sub(V::mul(old.master, c.keep), V::div(V::mul(next.exp_avg, c.step_size), denominator));
  return next;
}

// Step: sum of the contributions, in list order. One contribution is the usual case: the loop over
// the others stays rolled up, out of its way.
template <class V, class Grad>
PENSTOCK_STEP typename V::Floats sum_contributions(const Contributions& grads,
                                                   std::size_t element) {
  using Element = typename Grad::Element;
  auto sum = Grad::template load<V>(static_cast<const Element*>(grads.data[0]) + element);
#pragma GCC unroll 1
  for (std::size_t i = 1; i < grads.count; ++i) {
    const auto* data = static_cast<const Element*>(grads.data[i]);
    sum = V::add(sum, Grad::template load<V>(data + element));
  }
  return sum;
}

// Between two groups of stores whose order matters after a kill, see undo.h. On x86 this only stops
// the compiler.
inline void keep_store_order() { __atomic_thread_fence(__ATOMIC_RELEASE); }

// Step: save the old values of the vector that is about to be written.
template <class V>
PENSTOCK_STEP void save_undo(UndoPiece& piece, std::size_t element, const State<V>& old) {
  UndoSlot& slot = piece.slots[(element / kVector) & 1];
  V::store(slot.master, old.master);
  V::store(slot.exp_avg, old.exp_avg);
  V::store(slot.exp_avg_sq, old.exp_avg_sq);
  keep_store_order();
  __atomic_store_n(&slot.position, element + 1, __ATOMIC_RELAXED);
  keep_store_order();
}

// Integer arithmetic, because the address may lie beyond the array.
template <bool kWrite, class Element>
void prefetch(const Element* base, std::size_t element) {
  const auto address = reinterpret_cast<std::uintptr_t>(base) + element * sizeof(Element);
  __builtin_prefetch(reinterpret_cast<const void*>(address), kWrite, 3);
}

template <class V, Mode kMode, class Grad, class Weights>
class PieceLoop {
 public:
  PieceLoop(const PassArguments& args, const Piece& piece)
      : args_(args),
        piece_(piece),
        master_(args.master),
        exp_avg_(args.exp_avg),
        exp_avg_sq_(args.exp_avg_sq),
        weights_(static_cast<typename Weights::Element*>(args.weights)) {}

  // Chunk by chunk, and within a chunk range by range of equal weight decay.
  void run() {
    std::size_t range = first_range();
    double* partial = piece_.partials;
    for (std::size_t begin = piece_.span.start; begin < piece_.span.end;) {
      const std::size_t chunk_end = smaller(piece_.span.end, (begin / kChunk + 1) * kChunk);
      typename V::Doubles squares = V::zero_doubles();
      while (begin < chunk_end) {
        const std::size_t end = smaller(chunk_end, range_end(range));
        run_vectors(begin, end, range, squares);
        if (end == range_end(range)) ++range;
        begin = end;
      }
      if constexpr (reads_new_grads(kMode)) *partial++ = sum_lanes(squares);
    }
    if constexpr (writes_weights(kMode)) V::finish_streams();
  }

 private:
  void run_vectors(std::size_t begin, std::size_t end, std::size_t range,
                   typename V::Doubles& squares_out) {
    const DecayRange decay = range < args_.num_ranges ? args_.ranges[range] : kNoDecay;
    const Constants<V> pending(args_.pending, decay.pending);
    const Constants<V> next(args_.next, decay.next);
    const Contributions pending_grads = args_.pending_grads;
    const Contributions grads = args_.grads;
    typename V::Doubles squares = squares_out;
    for (std::size_t i = begin; i < end; i += kVector) {
      prefetch_vector(pending_grads, grads, i + kPrefetchElements);
      State<V> state = load_state(i);
      if constexpr (settles(kMode)) {
        const State<V> settled =
            adam_step<V>(state, sum_contributions<V, Grad>(pending_grads, i), pending);
        save_undo<V>(*piece_.undo, i, state);
        store_state(i, settled);
        state = settled;
      }
      if constexpr (reads_new_grads(kMode)) {
        const auto grad_sum = sum_contributions<V, Grad>(grads, i);
        V::add_squares(squares, grad_sum);
        if constexpr (steps_on_new_grads(kMode)) state = adam_step<V>(state, grad_sum, next);
        if constexpr (kMode == Mode::kInPlace) store_state(i, state);
      }
      if constexpr (writes_weights(kMode))
        Weights::template store_weights<V>(weights_ + i, state.master);
    }
    squares_out = squares;
  }

  PENSTOCK_STEP State<V> load_state(std::size_t i) const {
    State<V> state{};
    if constexpr (reads_moments(kMode) || kMode == Mode::kCast) state.master = V::load(master_ + i);
    if constexpr (reads_moments(kMode)) {
      state.exp_avg = V::load(exp_avg_ + i);
      state.exp_avg_sq = V::load(exp_avg_sq_ + i);
    }
    return state;
  }

  PENSTOCK_STEP void store_state(std::size_t i, const State<V>& state) const {
    V::store(master_ + i, state.master);
    V::store(exp_avg_ + i, state.exp_avg);
    V::store(exp_avg_sq_ + i, state.exp_avg_sq);
  }

  PENSTOCK_STEP void prefetch_vector(const Contributions& pending_grads, const Contributions& grads,
                                     std::size_t i) const {
    constexpr bool kWrite = writes_state(kMode);
    if constexpr (reads_moments(kMode) || kMode == Mode::kCast) prefetch<kWrite>(master_, i);
    if constexpr (reads_moments(kMode)) {
      prefetch<kWrite>(exp_avg_, i);
      prefetch<kWrite>(exp_avg_sq_, i);
    }
    if constexpr (settles(kMode)) prefetch_grads(pending_grads, i);
    if constexpr (reads_new_grads(kMode)) prefetch_grads(grads, i);
  }

  PENSTOCK_STEP static void prefetch_grads(const Contributions& grads, std::size_t i) {
#pragma GCC unroll 1
    for (std::size_t k = 0; k < grads.count; ++k) {
      prefetch<false>(static_cast<const typename Grad::Element*>(grads.data[k]), i);
    }
  }

  std::size_t first_range() const {
    std::size_t range = 0;
    while (range < args_.num_ranges && args_.ranges[range].end <= piece_.span.start) ++range;
    return range;
  }

  std::size_t range_end(std::size_t range) const {
    return range < args_.num_ranges ? args_.ranges[range].end : piece_.span.end;
  }

  // In lane order. A double holds the square of any float exactly and any sum of them without
  // overflow, so the sum is finite exactly when every gradient is.
  static double sum_lanes(const typename V::Doubles& squares) {
    double lanes[kVector];
    V::store(lanes, squares);
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    return sum;
  }

  const PassArguments& args_;
  const Piece& piece_;
  float* const master_;
  float* const exp_avg_;
  float* const exp_avg_sq_;
  typename Weights::Element* const weights_;
};

template <class V, Mode kMode, class Grad, class Weights>
void run_piece(const PassArguments& args, const Piece& piece) {
  PieceLoop<V, kMode, Grad, Weights>(args, piece).run();
}

template <class V>
constexpr Kernels make_kernels(const char* name) {
  return Kernels{
      name,
      {{run_piece<V, Mode::kPreview, Float32, Float32>,
        run_piece<V, Mode::kPreview, Float32, Bfloat16>,
        run_piece<V, Mode::kPreview, Float32, Float16>},
       {run_piece<V, Mode::kPreview, Bfloat16, Float32>,
        run_piece<V, Mode::kPreview, Bfloat16, Bfloat16>,
        run_piece<V, Mode::kPreview, Bfloat16, Float16>}},
      {run_piece<V, Mode::kSettle, Float32, Float32>,
       run_piece<V, Mode::kSettle, Bfloat16, Float32>},
      {{run_piece<V, Mode::kAdvance, Float32, Float32>,
        run_piece<V, Mode::kAdvance, Float32, Bfloat16>,
        run_piece<V, Mode::kAdvance, Float32, Float16>},
       {run_piece<V, Mode::kAdvance, Bfloat16, Float32>,
        run_piece<V, Mode::kAdvance, Bfloat16, Bfloat16>,
        run_piece<V, Mode::kAdvance, Bfloat16, Float16>}},
      {{run_piece<V, Mode::kInPlace, Float32, Float32>,
        run_piece<V, Mode::kInPlace, Float32, Bfloat16>,
        run_piece<V, Mode::kInPlace, Float32, Float16>},
       {run_piece<V, Mode::kInPlace, Bfloat16, Float32>,
        run_piece<V, Mode::kInPlace, Bfloat16, Bfloat16>,
        run_piece<V, Mode::kInPlace, Bfloat16, Float16>}},
      {run_piece<V, Mode::kStatus, Float32, Float32>,
       run_piece<V, Mode::kStatus, Bfloat16, Float32>},
      {run_piece<V, Mode::kCast, Float32, Float32>, run_piece<V, Mode::kCast, Float32, Bfloat16>,
       run_piece<V, Mode::kCast, Float32, Float16>},
  };
}

}  // namespace
}  // namespace penstock
