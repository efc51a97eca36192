// The sweeps over one block of model state: how they are cut into pieces, run and summed up.
//
// Arrays have n elements, a multiple of 16, and start at 64-byte boundaries. What the caller passes
// must have been checked (arguments.h); what concerns the undo area is checked here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"
#include "undo.h"

namespace penstock {

// Hyper-parameters of one step, with the names they have in the papers; config/optimizers.py
// says which keys of a configuration they come from. An optimizer ignores those it does not have.
struct Hyper {
  std::size_t optimizer;  // index in Optimizers (steps.h)
  double lr;
  double beta1;
  double beta2;
  double eps;
  std::uint64_t step;  // t >= 1, for the bias corrections
  double coefficient;  // multiplies the summed gradients: clip coefficient / loss scale
};

// Elements [start, end) with one weight decay, and one learning rate: the step's times rate.
struct StepRange {
  std::uint64_t start;
  std::uint64_t end;
  double weight_decay;
  double rate;
};

struct Gradients {
  GradType type;
  Contributions contributions;
};

struct Weights {
  WeightsType type;
  void* data;
};

struct Block {
  std::uint64_t num_elements;
  StateArrays state;
  std::vector<StepRange> ranges;
};

// What a sweep over new gradients learned about them.
struct Status {
  bool finite;         // every summed gradient
  double sum_squares;  // of the summed gradients, before the coefficient
};

struct Settlement {
  Undo undo;
  std::vector<Span> spans;  // what the sweep is restricted to; the whole block: {{0, n}}
  std::uint64_t tag;
};

struct Pool {
  Pool(const std::vector<int>& cores, const std::string& vector_path)
      : threads(cores), kernels(select_kernels(vector_path)) {}

  ThreadPool threads;
  const Kernels& kernels;
};

// Writes the weights that the step would lead to; no state changes.
Status preview(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
               const Weights& weights);

// Writes master and state.
void settle(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
            Settlement settlement);

// settle with the pending gradients, then preview with the new ones.
Status advance(Pool& pool, const Block& block, const Gradients& pending_grads,
               const Hyper& pending_hyper, const Gradients& grads, const Hyper& hyper,
               const Weights& weights, Settlement settlement);

// The classic step: master, state and weights; nothing can be undone.
Status step_in_place(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
                     const Weights& weights);

// The same, crash safe: for gradients that were validated before.
Status hold(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
            const Weights& weights, Settlement settlement);

// Takes a step in place back by arithmetic; what it rounded away is lost. Not for split masters.
void invert(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
            Settlement settlement);

Status gradient_status(Pool& pool, const Gradients& grads, std::uint64_t num_elements);

// The weights of a settled master: the same bits as the preview that led to it wrote.
void cast_weights(Pool& pool, const float* master, const Weights& weights,
                  std::uint64_t num_elements);

}  // namespace penstock
