// The one loop over model state, for any vector type and any sweep.
//
// Included by exactly one source file per vector path, each compiled with that path's flags.
// Everything is in an anonymous namespace, so that the linker cannot replace a function of one path
// by the same function compiled for another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "steps.h"
#include "storage.h"

namespace penstock {
namespace {

// How far ahead of the loads the memory is asked for: the best of 64 to 1536 on Zen 4, where sweeps
// are up to 1.2 times as fast as with 512.
constexpr std::size_t kPrefetchElements = 128;

constexpr Range kNoRange{};

inline std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

constexpr bool settles(Mode mode) { return mode == Mode::kSettle || mode == Mode::kAdvance; }
constexpr bool in_place(Mode mode) { return mode == Mode::kInPlace || mode == Mode::kHold; }
constexpr bool reads_new_grads(Mode mode) { return mode != Mode::kSettle && mode != Mode::kCast; }
constexpr bool steps_on_new_grads(Mode mode) {
  return mode == Mode::kPreview || mode == Mode::kAdvance || in_place(mode);
}
constexpr bool reads_state(Mode mode) { return mode != Mode::kStatus && mode != Mode::kCast; }
constexpr bool reads_master(Mode mode) { return mode != Mode::kStatus; }
constexpr bool writes_state(Mode mode) {
  return settles(mode) || in_place(mode) || mode == Mode::kInvert;
}
constexpr bool writes_weights(Mode mode) { return steps_on_new_grads(mode) || mode == Mode::kCast; }
// Whether sweeps that have an undo area save old values there; a benchmark's step need not.
template <class Step>
constexpr bool kSavesUndo = true;

// The classic step in place has no undo area: a kill leaves it torn.
template <class Step>
constexpr bool saves_undo(Mode mode) {
  return writes_state(mode) && mode != Mode::kInPlace && kSavesUndo<Step>;
}

// Of modes without a step, which look at gradients or master only.
struct NoStep {
  static constexpr std::size_t kNumArrays = 0;
};

// Step: sum of the contributions, in list order. One contribution is the usual case: the loop over
// the others stays rolled up, out of its way.
template <class V, class Grads>
PENSTOCK_STEP typename V::Floats sum_contributions(const Grads& type, const Contributions& grads,
                                                   std::size_t element) {
  auto sum = type.template load<V>(grads.data[0], element);
#pragma GCC unroll 1
  for (std::size_t i = 1; i < grads.count; ++i) {
    sum = V::add(sum, type.template load<V>(grads.data[i], element));
  }
  return sum;
}

// Between two groups of stores whose order matters after a kill, see undo.h. On x86 this only stops
// the compiler.
inline void keep_store_order() { __atomic_thread_fence(__ATOMIC_RELEASE); }

// Step: save the old values of the vector that is about to be written. The values go before their
// position, so that a slot with a position is whole; the position goes before the first store to the
// arrays, so that a vector that was touched has one.
template <class V, class Step>
PENSTOCK_STEP void save_undo(UndoPiece& piece, std::size_t element, const State<V>& old) {
  UndoSlot& slot = piece.slots[(element / kVector) & 1];
  V::store(slot.master, old.master);
  V::store(slot.arrays[0], old.first);
  if constexpr (Step::kNumArrays > 1) V::store(slot.arrays[1], old.second);
  keep_store_order();
  __atomic_store_n(&slot.position, element + 1, __ATOMIC_RELAXED);
  keep_store_order();
}

template <class V, Mode kMode, class Step, class Grads, class Store>
class PieceLoop {
 public:
  PieceLoop(const SweepArguments& args, const Piece& piece)
      : args_(args),
        piece_(piece),
        first_(args.first),
        second_(args.second),
        type_(args.grad_type),
        store_(args) {}

  // Chunk by chunk, and within a chunk range by range of equal learning rate and weight decay.
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
    // Streaming stores pass by the caches and are ordered by nothing else: they must be in memory
    // before the caller writes the slot's word.
    if constexpr (writes_weights(kMode)) V::finish_streams();
  }

 private:
  void run_vectors(std::size_t begin, std::size_t end, std::size_t range,
                   typename V::Doubles& squares_out) {
    const Range scalars = range < args_.num_ranges ? args_.ranges[range] : kNoRange;
    const Constants<V> pending(args_.pending, scalars.pending);
    const Constants<V> next(args_.next, scalars.next);
    const Contributions pending_grads = args_.pending_grads;
    const Contributions grads = args_.grads;
    const Store store = store_;
    typename V::Doubles squares = squares_out;
    for (std::size_t i = begin; i < end; i += kVector) {
      prefetch_vector(store, pending_grads, grads, i + kPrefetchElements);
      State<V> state = load_state(store, i);
      if constexpr (saves_undo<Step>(kMode)) save_undo<V, Step>(*piece_.undo, i, state);
      if constexpr (settles(kMode)) {
        const auto pending_sum = sum_contributions<V>(type_, pending_grads, i);
        state = Step::template step<V>(state, pending_sum, pending);
        store_state(store, i, state);
      }
      if constexpr (reads_new_grads(kMode)) {
        const auto grad_sum = sum_contributions<V>(type_, grads, i);
        V::add_squares(squares, grad_sum);
        if constexpr (kMode == Mode::kInvert) {
          state = Step::template inverse<V>(state, grad_sum, next);
          store_state(store, i, state);
        }
        if constexpr (steps_on_new_grads(kMode)) {
          state = Step::template step<V>(state, grad_sum, next);
        }
        if constexpr (in_place(kMode)) store_state(store, i, state);
      }
      if constexpr (writes_weights(kMode)) store.template store_weights<V>(i, state.master);
    }
    squares_out = squares;
  }

  PENSTOCK_STEP State<V> load_state(const Store& store, std::size_t i) const {
    State<V> state{};
    if constexpr (reads_master(kMode)) state.master = store.template load_master<V>(i);
    if constexpr (reads_state(kMode)) {
      state.first = V::load(first_ + i);
      if constexpr (Step::kNumArrays > 1) state.second = V::load(second_ + i);
    }
    return state;
  }

  PENSTOCK_STEP void store_state(const Store& store, std::size_t i, const State<V>& state) const {
    store.template store_master<V>(i, state.master);
    V::store(first_ + i, state.first);
    if constexpr (Step::kNumArrays > 1) V::store(second_ + i, state.second);
  }

  PENSTOCK_STEP void prefetch_vector(const Store& store, const Contributions& pending_grads,
                                     const Contributions& grads, std::size_t i) const {
    constexpr bool kWrite = writes_state(kMode);
    if constexpr (reads_master(kMode)) store.template prefetch_master<kWrite>(i);
    if constexpr (reads_state(kMode)) {
      prefetch_at<kWrite>(first_, i * sizeof(float));
      if constexpr (Step::kNumArrays > 1) prefetch_at<kWrite>(second_, i * sizeof(float));
    }
    if constexpr (settles(kMode)) prefetch_grads(pending_grads, i);
    if constexpr (reads_new_grads(kMode)) prefetch_grads(grads, i);
  }

  PENSTOCK_STEP void prefetch_grads(const Contributions& grads, std::size_t i) const {
#pragma GCC unroll 1
    for (std::size_t k = 0; k < grads.count; ++k) {
      prefetch_at<false>(grads.data[k], i * type_.element_bytes());
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

  const SweepArguments& args_;
  const Piece& piece_;
  float* const first_;
  float* const second_;
  const Grads type_;
  const Store store_;
};

template <class V, Mode kMode, class Step, class Grads, class Store>
void run_piece(const SweepArguments& args, const Piece& piece) {
  PieceLoop<V, kMode, Step, Grads, Store>(args, piece).run();
}

template <class V, class Step, class Grads, class Store>
PieceFunction find_step(Mode mode) {
  switch (mode) {
    case Mode::kPreview:
      return run_piece<V, Mode::kPreview, Step, Grads, Store>;
    case Mode::kSettle:
      return run_piece<V, Mode::kSettle, Step, Grads, Store>;
    case Mode::kAdvance:
      return run_piece<V, Mode::kAdvance, Step, Grads, Store>;
    case Mode::kInPlace:
      return run_piece<V, Mode::kInPlace, Step, Grads, Store>;
    case Mode::kHold:
      return run_piece<V, Mode::kHold, Step, Grads, Store>;
    case Mode::kInvert:
      return run_piece<V, Mode::kInvert, Step, Grads, WideStore<AnyWeights>>;
    default:
      return nullptr;  // no step
  }
}

// With kernels of their own for the types that training uses most.
template <class V, class Step>
PieceFunction find_usual(const Choice& choice) {
  const bool fp32 = choice.grads == GradType::kFloat32;
  const bool bf16 = choice.grads == GradType::kBfloat16;
  if (choice.split) {
    if (fp32) return find_step<V, Step, Float32Grads, SplitStore>(choice.mode);
    if (bf16) return find_step<V, Step, Bfloat16Grads, SplitStore>(choice.mode);
    return find_step<V, Step, AnyGrads, SplitStore>(choice.mode);
  }
  if (choice.weights == WeightsType::kBfloat16) {
    if (fp32) return find_step<V, Step, Float32Grads, WideStore<Bfloat16Weights>>(choice.mode);
    if (bf16) return find_step<V, Step, Bfloat16Grads, WideStore<Bfloat16Weights>>(choice.mode);
  }
  if (choice.weights == WeightsType::kFloat32 && fp32) {
    return find_step<V, Step, Float32Grads, WideStore<Float32Weights>>(choice.mode);
  }
  return find_step<V, Step, AnyGrads, WideStore<AnyWeights>>(choice.mode);
}

template <class V, class Step>
PieceFunction find_any(const Choice& choice) {
  if (choice.split) return find_step<V, Step, AnyGrads, SplitStore>(choice.mode);
  return find_step<V, Step, AnyGrads, WideStore<AnyWeights>>(choice.mode);
}

template <class V>
PieceFunction find_status(GradType type) {
  using Store = WideStore<AnyWeights>;
  if (type == GradType::kFloat32) {
    return run_piece<V, Mode::kStatus, NoStep, Float32Grads, Store>;
  }
  if (type == GradType::kBfloat16) {
    return run_piece<V, Mode::kStatus, NoStep, Bfloat16Grads, Store>;
  }
  return run_piece<V, Mode::kStatus, NoStep, AnyGrads, Store>;
}

template <class V>
PieceFunction find_kernel(const Choice& choice) {
  if (choice.mode == Mode::kStatus) return find_status<V>(choice.grads);
  if (choice.mode == Mode::kCast) {
    return run_piece<V, Mode::kCast, NoStep, AnyGrads, WideStore<AnyWeights>>;
  }
  PieceFunction found = nullptr;
  Optimizers::visit(choice.optimizer, [&](auto* step) {
    using Step = std::remove_pointer_t<decltype(step)>;
    if constexpr (Step::kUsualTypes) {
      found = find_usual<V, Step>(choice);
    } else {
      found = find_any<V, Step>(choice);
    }
  });
  return found;
}

}  // namespace
}  // namespace penstock
