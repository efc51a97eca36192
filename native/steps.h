// The arithmetic of the optimizers, one vector of 16 parameters at a time. What else there is to
// know about an optimizer (hyper-parameters, names of its arrays) is in config/optimizers.py.
//
// Every operation rounds once, to float32, on every vector path, so all paths give the same bits. A
// step is a class, listed in Optimizers at the end of this file, with
//
//     kName                      the optimizer's name in configurations
//     kNumArrays                 how many arrays of state it has beside master, 1 or 2
//     kDecoupledDecay            whether weight decay multiplies master; else it joins the gradient
//     kBiasCorrected             whether step_size and inverse_sqrt_correction correct for zeros in
//                                the first moments (Kingma & Ba, section 3)
//     kUsualTypes                whether it has kernels of its own for the usual storage types:
//                                faster, at some 200 kB of code
//     step(old, grad_sum, c)     returns the state after the step
//     inverse(next, grad_sum, c) returns the state before it, as far as arithmetic can tell: what
//                                the step's rounding lost stays lost (the papers' rollback)
#pragma once

#include <cstddef>

#include "kernels.h"

namespace penstock {
namespace {

// The steps of the loop: a call would send their vectors through memory.
#define PENSTOCK_STEP __attribute__((always_inline)) inline

// What the code around the kernels needs to know about an optimizer.
struct OptimizerTraits {
  const char* name;
  std::size_t num_arrays;
  bool decoupled_decay;
  bool bias_corrected;
};

// Master and the arrays of state, in the order of Block::arrays; unused ones stay unread.
template <class V>
struct State {
  typename V::Floats master, first, second;
};

// The scalars of one step on one range of parameters, in every lane.
template <class V>
struct Constants {
  using Floats = typename V::Floats;

  Constants(const StepScalars& scalars, const RangeScalars& range)
      : coefficient(V::broadcast(scalars.coefficient)),
        beta1(V::broadcast(scalars.beta1)),
        one_minus_beta1(V::broadcast(scalars.one_minus_beta1)),
        inverse_beta1(V::broadcast(scalars.inverse_beta1)),
        beta2(V::broadcast(scalars.beta2)),
        one_minus_beta2(V::broadcast(scalars.one_minus_beta2)),
        inverse_beta2(V::broadcast(scalars.inverse_beta2)),
        inverse_sqrt_correction(V::broadcast(scalars.inverse_sqrt_correction)),
        eps(V::broadcast(scalars.eps)),
        step_size(V::broadcast(range.step_size)),
        keep(V::broadcast(range.keep)),
        l2(V::broadcast(range.l2)) {}

  // The gradient of the step: scaled, and with L2 decay where there is one.
  PENSTOCK_STEP Floats gradient(const Floats& grad_sum, const Floats& master) const {
    return V::add(V::mul(grad_sum, coefficient), V::mul(master, l2));
  }

  Floats coefficient, beta1, one_minus_beta1, inverse_beta1, beta2, one_minus_beta2, inverse_beta2,
      inverse_sqrt_correction, eps, step_size, keep, l2;
};

// Kingma & Ba, "Adam", 2015, Algorithm 1; with decoupled decay Loshchilov & Hutter, "Decoupled
// Weight Decay Regularization", 2019, Algorithm 2. The arrays are the moments m and v.
template <bool kDecoupled>
struct AdamStep {
  static constexpr const char* kName = kDecoupled ? "adamw" : "adam";
  static constexpr std::size_t kNumArrays = 2;
  static constexpr bool kDecoupledDecay = kDecoupled;
  static constexpr bool kBiasCorrected = true;
  static constexpr bool kUsualTypes = true;

  template <class V>
  PENSTOCK_STEP static typename V::Floats gradient(const typename V::Floats& grad_sum,
                                                   const typename V::Floats& master,
                                                   const Constants<V>& c) {
    return kDecoupled ? V::mul(grad_sum, c.coefficient) : c.gradient(grad_sum, master);
  }

  template <class V>
  PENSTOCK_STEP static typename V::Floats change(const State<V>& next, const Constants<V>& c) {
    const auto root = V::mul(V::sqrt(next.second), c.inverse_sqrt_correction);
    return V::div(V::mul(next.first, c.step_size), V::add(root, c.eps));
  }

  template <class V>
  PENSTOCK_STEP static State<V> step(const State<V>& old, const typename V::Floats& grad_sum,
                                     const Constants<V>& c) {
    const auto grad = gradient<V>(grad_sum, old.master, c);
    State<V> next;
    next.first = V::add(old.first, V::mul(V::sub(grad, old.first), c.one_minus_beta1));
    next.second =
        V::add(V::mul(old.second, c.beta2), V::mul(V::mul(grad, c.one_minus_beta2), grad));
    next.master = V::sub(V::mul(old.master, c.keep), change<V>(next, c));
    return next;
  }

  template <class V>
  PENSTOCK_STEP static State<V> inverse(const State<V>& next, const typename V::Floats& grad_sum,
                                        const Constants<V>& c) {
    State<V> old;
    old.master = V::div(V::add(next.master, change<V>(next, c)), c.keep);
    const auto grad = gradient<V>(grad_sum, old.master, c);
    old.first = V::mul(V::sub(next.first, V::mul(grad, c.one_minus_beta1)), c.inverse_beta1);
    const auto squares =
        V::mul(V::sub(next.second, V::mul(V::mul(grad, c.one_minus_beta2), grad)), c.inverse_beta2);
    old.second = V::max(squares, V::broadcast(0.0f));  // rounding may have made it negative
    return old;
  }
};

// torch.optim.SGD with momentum (beta1), without dampening or Nesterov's look ahead.
struct MomentumStep {
  static constexpr const char* kName = "sgd";
  static constexpr std::size_t kNumArrays = 1;
  static constexpr bool kDecoupledDecay = false;
  static constexpr bool kBiasCorrected = false;
  static constexpr bool kUsualTypes = false;

  template <class V>
  PENSTOCK_STEP static State<V> step(const State<V>& old, const typename V::Floats& grad_sum,
                                     const Constants<V>& c) {
    State<V> next{};
    next.first = V::add(V::mul(old.first, c.beta1), c.gradient(grad_sum, old.master));
    next.master = V::sub(old.master, V::mul(next.first, c.step_size));
    return next;
  }

  template <class V>
  PENSTOCK_STEP static State<V> inverse(const State<V>& next, const typename V::Floats& grad_sum,
                                        const Constants<V>& c) {
    State<V> old{};
    old.master = V::add(next.master, V::mul(next.first, c.step_size));
    old.first = V::mul(V::sub(next.first, c.gradient(grad_sum, old.master)), c.inverse_beta1);
    return old;
  }
};

// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2.
struct LionStep {
  static constexpr const char* kName = "lion";
  static constexpr std::size_t kNumArrays = 1;
  static constexpr bool kDecoupledDecay = true;
  static constexpr bool kBiasCorrected = false;
  static constexpr bool kUsualTypes = false;

  template <class V>
  PENSTOCK_STEP static typename V::Floats change(const typename V::Floats& first,
                                                 const typename V::Floats& grad,
                                                 const Constants<V>& c) {
    const auto direction = V::add(first, V::mul(V::sub(grad, first), c.one_minus_beta1));
    return V::mul(V::sign(direction), c.step_size);
  }

  template <class V>
  PENSTOCK_STEP static State<V> step(const State<V>& old, const typename V::Floats& grad_sum,
                                     const Constants<V>& c) {
    const auto grad = V::mul(grad_sum, c.coefficient);
    State<V> next{};
    next.first = V::add(old.first, V::mul(V::sub(grad, old.first), c.one_minus_beta2));
    next.master = V::sub(V::mul(old.master, c.keep), change<V>(old.first, grad, c));
    return next;
  }

  template <class V>
  PENSTOCK_STEP static State<V> inverse(const State<V>& next, const typename V::Floats& grad_sum,
                                        const Constants<V>& c) {
    const auto grad = V::mul(grad_sum, c.coefficient);
    State<V> old{};
    old.first = V::mul(V::sub(next.first, V::mul(grad, c.one_minus_beta2)), c.inverse_beta2);
    old.master = V::div(V::add(next.master, change<V>(old.first, grad, c)), c.keep);
    return old;
  }
};

// torch.optim.Adagrad without decay of the learning rate. The array is the sum of squares.
struct AdagradStep {
  static constexpr const char* kName = "adagrad";
  static constexpr std::size_t kNumArrays = 1;
  static constexpr bool kDecoupledDecay = false;
  static constexpr bool kBiasCorrected = false;
  static constexpr bool kUsualTypes = false;

  // How far a gradient of 1 moves a parameter.
  template <class V>
  PENSTOCK_STEP static typename V::Floats rate(const State<V>& next, const Constants<V>& c) {
    return V::div(c.step_size, V::add(V::sqrt(next.first), c.eps));
  }

  template <class V>
  PENSTOCK_STEP static State<V> step(const State<V>& old, const typename V::Floats& grad_sum,
                                     const Constants<V>& c) {
    const auto grad = c.gradient(grad_sum, old.master);
    State<V> next{};
    next.first = V::add(old.first, V::mul(grad, grad));
    next.master = V::sub(old.master, V::mul(grad, rate<V>(next, c)));
    return next;
  }

  // The gradient has a part of the old master: p' = p - rate * (g + l2 * p), solved for p.
  template <class V>
  PENSTOCK_STEP static State<V> inverse(const State<V>& next, const typename V::Floats& grad_sum,
                                        const Constants<V>& c) {
    const auto rate_of_one = rate<V>(next, c);
    const auto change = V::mul(V::mul(grad_sum, c.coefficient), rate_of_one);
    const auto share = V::sub(V::broadcast(1.0f), V::mul(rate_of_one, c.l2));
    State<V> old{};
    old.master = V::div(V::add(next.master, change), share);
    const auto grad = c.gradient(grad_sum, old.master);
    old.first = V::max(V::sub(next.first, V::mul(grad, grad)), V::broadcast(0.0f));
    return old;
  }
};

template <class... Steps>
struct StepList {
  static constexpr OptimizerTraits kTraits[] = {
      {Steps::kName, Steps::kNumArrays, Steps::kDecoupledDecay, Steps::kBiasCorrected}...};

  // Calls f with a null pointer to the step of the optimizer with this index, for its type.
  template <class F>
  static void visit(std::size_t index, F&& f) {
    std::size_t at = 0;
    ((at++ == index ? f(static_cast<Steps*>(nullptr)) : void()), ...);
  }
};

// All optimizers. The C++ code knows them by their index here, Python by their names.
using Optimizers = StepList<AdamStep<true>, AdamStep<false>, MomentumStep, LionStep, AdagradStep>;

}  // namespace
}  // namespace penstock
