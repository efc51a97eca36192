// What a sweep hands to the vector kernels, and how a kernel is chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "undo.h"

namespace penstock {

constexpr std::size_t kChunk = 4096;           // elements per partial sum of squares
constexpr std::size_t kMaxContributions = 12;  // as many as the control segment has ready words

enum class GradType { kFloat32, kBfloat16, kFloat16 };
enum class WeightsType { kFloat32, kBfloat16, kFloat16 };
enum class Mode { kPreview, kSettle, kAdvance, kInPlace, kHold, kInvert, kStatus, kCast };

// Gradients of one attempt; their sum in this order, in float32, is the gradient.
struct Contributions {
  const void* data[kMaxContributions] = {};
  std::size_t count = 0;
};

// One optimizer step's constants that all parameters share, see derive_scalars() in sweeps.cpp.
struct StepScalars {
  float coefficient = 0;  // multiplies the summed gradient
  float beta1 = 0;
  float one_minus_beta1 = 0;
  float inverse_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float inverse_beta2 = 0;
  float inverse_sqrt_correction = 0;  // 1 / sqrt(1 - beta2^t)
  float eps = 0;
};

// Learning rate and weight decay of a range of parameters. Decoupled decay multiplies master by
// keep = 1 - lr * decay, and l2 is 0; otherwise l2 = decay times master joins the gradient, and keep
// is 1.
struct RangeScalars {
  float step_size = 0;  // lr; with bias correction lr / (1 - beta1^t)
  float keep = 1;
  float l2 = 0;
};

struct Range {
  std::uint64_t start = 0;
  std::uint64_t end = 0;
  RangeScalars pending;  // with the scalars of the gradients that are settled
  RangeScalars next;     // with the scalars of the gradients that are previewed
};

struct SweepArguments {
  float* master = nullptr;              // null where it is split
  const std::uint16_t* high = nullptr;  // upper halves of a split master: the weights before
  std::uint16_t* low = nullptr;
  float* first = nullptr;       // the optimizer's arrays
  float* second = nullptr;      // null where it has one
  Contributions pending_grads;  // settle and advance: written into master and state
  Contributions grads;          // all others
  GradType grad_type = GradType::kFloat32;
  void* weights = nullptr;
  WeightsType weights_type = WeightsType::kFloat32;
  StepScalars pending;
  StepScalars next;
  const Range* ranges = nullptr;  // sorted, without gaps; none for status and cast
  std::size_t num_ranges = 0;
};

// A part of a sweep that one thread runs. It begins and ends at a chunk boundary or at an end of the
// spans that restrict the sweep.
struct Piece {
  Span span;
  double* partials;  // one per chunk that the span touches: its sum of squares
  UndoPiece* undo;   // null for sweeps that need none
};

using PieceFunction = void (*)(const SweepArguments&, const Piece&);

struct Choice {
  Mode mode;
  std::size_t optimizer = 0;  // index in Optimizers (steps.h); modes without a step ignore it
  GradType grads = GradType::kFloat32;
  WeightsType weights = WeightsType::kFloat32;
  bool split = false;
};

struct Kernels {
  const char* name;
  PieceFunction (*find)(const Choice& choice);
};

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;    // x86-64 only
extern const Kernels kAvx512Kernels;  // x86-64 only

// The paths this processor can run, fastest first.
std::vector<const Kernels*> available_kernels();

// Finds a path by name; the empty name means the fastest. Throws std::invalid_argument.
const Kernels& select_kernels(const std::string& name);

}  // namespace penstock
