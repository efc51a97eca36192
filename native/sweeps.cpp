#include "sweeps.h"

#include <algorithm>
#include <cmath>

#include "steps.h"

namespace penstock {
namespace {

// By repeated squaring: only exactly rounded operations, so that every machine gets the same bits,
// which std::pow does not promise.
double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1, base *= base) {
    if (exponent & 1) result *= base;
  }
  return result;
}

float inverse_of(double beta) { return static_cast<float>(beta == 0 ? 0.0 : 1.0 / beta); }

const OptimizerTraits& traits_of(const Hyper& hyper) {
  return Optimizers::kTraits[hyper.optimizer];
}

// Here and in derive_range() hyper-parameters become float32: everything is derived in double and
// rounded once.
StepScalars derive_scalars(const Hyper& hyper) {
  const double correction2 = 1.0 - power(hyper.beta2, hyper.step);
  StepScalars scalars;
  scalars.coefficient = static_cast<float>(hyper.coefficient);
  scalars.beta1 = static_cast<float>(hyper.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  scalars.inverse_beta1 = inverse_of(hyper.beta1);
  scalars.beta2 = static_cast<float>(hyper.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  scalars.inverse_beta2 = inverse_of(hyper.beta2);
  scalars.inverse_sqrt_correction = static_cast<float>(1.0 / std::sqrt(correction2));
  scalars.eps = static_cast<float>(hyper.eps);
  return scalars;
}

RangeScalars derive_range(const Hyper& hyper, const StepRange& range) {
  const double lr = hyper.lr * range.rate;
  const double correction1 = 1.0 - power(hyper.beta1, hyper.step);
  RangeScalars scalars;
  scalars.step_size = static_cast<float>(traits_of(hyper).bias_corrected ? lr / correction1 : lr);
  if (traits_of(hyper).decoupled_decay) {
    scalars.keep = static_cast<float>(1.0 - lr * range.weight_decay);
  } else {
    scalars.l2 = static_cast<float>(range.weight_decay);
  }
  return scalars;
}

// A null hyper leaves its half of the ranges neutral: the sweep does not read it.
std::vector<Range> derive_ranges(const std::vector<StepRange>& ranges, const Hyper* pending,
                                 const Hyper* next) {
  std::vector<Range> derived;
  for (const StepRange& range : ranges) {
    Range scalars;
    scalars.start = range.start;
    scalars.end = range.end;
    if (pending != nullptr) scalars.pending = derive_range(*pending, range);
    if (next != nullptr) scalars.next = derive_range(*next, range);
    derived.push_back(scalars);
  }
  return derived;
}

// Cuts a span into at most num_parts parts of nearly equal length, at chunk boundaries.
void cut_span(const Span& span, std::uint64_t num_parts, std::vector<Span>& pieces) {
  std::uint64_t start = span.start;
  for (std::uint64_t part = 1; part <= num_parts; ++part) {
    std::uint64_t end = span.end;
    if (part < num_parts) {
      const std::uint64_t ideal = span.start + (span.end - span.start) / num_parts * part;
      end = (ideal + kChunk / 2) / kChunk * kChunk;
    }
    if (end <= start || end > span.end) continue;  // fewer chunks than parts
    pieces.push_back(Span{start, end});
    start = end;
  }
}

// One piece a thread when there are fewer spans than threads, else one a span. Repairing and
// cutting again therefore never makes more pieces than there were threads or spans.
std::vector<Span> cut_spans(const std::vector<Span>& spans, std::uint64_t max_pieces) {
  if (spans.size() >= max_pieces) return spans;
  double total = 0;
  for (const Span& span : spans) total += static_cast<double>(span.end - span.start);
  const auto extra = static_cast<double>(max_pieces - spans.size());
  std::vector<Span> pieces;
  for (const Span& span : spans) {
    const double share = static_cast<double>(span.end - span.start) / total;
    cut_span(span, 1 + static_cast<std::uint64_t>(extra * share), pieces);
  }
  return pieces;
}

std::size_t num_chunks(const Span& span) {
  return (span.end + kChunk - 1) / kChunk - span.start / kChunk;
}

// The pieces of a sweep and the sums they write, one per span and chunk whatever the pieces are.
struct Plan {
  std::vector<Piece> pieces;
  std::vector<double> partials;
};

Plan make_plan(const std::vector<Span>& spans) {
  Plan plan;
  std::size_t total_chunks = 0;
  for (const Span& span : spans) total_chunks += num_chunks(span);
  plan.partials.resize(total_chunks);
  double* next_partial = plan.partials.data();
  for (const Span& span : spans) {
    plan.pieces.push_back(Piece{span, next_partial, nullptr});
    next_partial += num_chunks(span);
  }
  return plan;
}

// Piece i runs on thread i modulo the number of threads. Partial sums are added in order, so that
// neither threads nor pieces change the result. Must not throw: an undo area may be armed.
Status run_pieces(const ThreadPool::Turn& turn, std::size_t num_threads, PieceFunction function,
                  const SweepArguments& args, const Plan& plan) noexcept {
  turn.run([&](std::size_t thread) {
    for (std::size_t i = thread; i < plan.pieces.size(); i += num_threads) {
      function(args, plan.pieces[i]);
    }
  });
  double sum_squares = 0;
  for (const double partial : plan.partials) sum_squares += partial;
  return Status{std::isfinite(sum_squares), sum_squares};
}

Status run_whole(Pool& pool, PieceFunction function, const SweepArguments& args,
                 std::uint64_t num_elements) {
  const ThreadPool::Turn turn(pool.threads);
  const std::size_t num_threads = pool.threads.num_threads();
  const Plan plan = make_plan(cut_spans({Span{0, num_elements}}, num_threads));
  return run_pieces(turn, num_threads, function, args, plan);
}

Status run_undoable(Pool& pool, PieceFunction function, const SweepArguments& args,
                    std::uint64_t num_elements, Settlement& settlement) {
  const ThreadPool::Turn turn(pool.threads);
  const std::size_t num_threads = pool.threads.num_threads();
  Undo& undo = settlement.undo;
  undo.check_ready(settlement.spans, num_elements, settlement.tag);
  const std::vector<Span> spans =
      cut_spans(settlement.spans, std::min(num_threads, undo.capacity()));
  Plan plan = make_plan(spans);
  const std::vector<UndoPiece*> places = undo.arm(spans, num_elements, settlement.tag);
  for (std::size_t i = 0; i < places.size(); ++i) plan.pieces[i].undo = places[i];
  const Status status = run_pieces(turn, num_threads, function, args, plan);
  undo.disarm();
  return status;
}

SweepArguments state_arguments(const Block& block, const std::vector<Range>& ranges) {
  SweepArguments args;
  args.master = block.state.master;
  args.high = block.state.high;
  args.low = block.state.low;
  args.first = block.state.arrays[0];
  args.second = block.state.arrays[1];
  args.ranges = ranges.data();
  args.num_ranges = ranges.size();
  return args;
}

// What steps on new gradients read and write.
SweepArguments step_arguments(const Block& block, const std::vector<Range>& ranges,
                              const Gradients& grads, const Hyper& hyper, const Weights& weights) {
  SweepArguments args = state_arguments(block, ranges);
  args.grads = grads.contributions;
  args.grad_type = grads.type;
  args.next = derive_scalars(hyper);
  args.weights = weights.data;
  args.weights_type = weights.type;
  return args;
}

PieceFunction find(const Pool& pool, Mode mode, const Block& block, const Hyper& hyper,
                   const SweepArguments& args) {
  return pool.kernels.find(Choice{mode, hyper.optimizer, args.grad_type, args.weights_type,
                                  block.state.master == nullptr});
}

}  // namespace

Status preview(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
               const Weights& weights) {
  const std::vector<Range> ranges = derive_ranges(block.ranges, nullptr, &hyper);
  const SweepArguments args = step_arguments(block, ranges, grads, hyper, weights);
  return run_whole(pool, find(pool, Mode::kPreview, block, hyper, args), args, block.num_elements);
}

void settle(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
            Settlement settlement) {
  const std::vector<Range> ranges = derive_ranges(block.ranges, &hyper, nullptr);
  SweepArguments args = state_arguments(block, ranges);
  args.pending_grads = grads.contributions;
  args.grad_type = grads.type;
  args.pending = derive_scalars(hyper);
  run_undoable(pool, find(pool, Mode::kSettle, block, hyper, args), args, block.num_elements,
               settlement);
}

Status advance(Pool& pool, const Block& block, const Gradients& pending_grads,
               const Hyper& pending_hyper, const Gradients& grads, const Hyper& hyper,
               const Weights& weights, Settlement settlement) {
  const std::vector<Range> ranges = derive_ranges(block.ranges, &pending_hyper, &hyper);
  SweepArguments args = step_arguments(block, ranges, grads, hyper, weights);
  args.pending_grads = pending_grads.contributions;
  args.pending = derive_scalars(pending_hyper);
  return run_undoable(pool, find(pool, Mode::kAdvance, block, hyper, args), args,
                      block.num_elements, settlement);
}

Status step_in_place(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
                     const Weights& weights) {
  const std::vector<Range> ranges = derive_ranges(block.ranges, nullptr, &hyper);
  const SweepArguments args = step_arguments(block, ranges, grads, hyper, weights);
  return run_whole(pool, find(pool, Mode::kInPlace, block, hyper, args), args, block.num_elements);
}

Status hold(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
            const Weights& weights, Settlement settlement) {
  const std::vector<Range> ranges = derive_ranges(block.ranges, nullptr, &hyper);
  const SweepArguments args = step_arguments(block, ranges, grads, hyper, weights);
  return run_undoable(pool, find(pool, Mode::kHold, block, hyper, args), args, block.num_elements,
                      settlement);
}

void invert(Pool& pool, const Block& block, const Gradients& grads, const Hyper& hyper,
            Settlement settlement) {
  const std::vector<Range> ranges = derive_ranges(block.ranges, nullptr, &hyper);
  const SweepArguments args = step_arguments(block, ranges, grads, hyper, Weights{});
  run_undoable(pool, find(pool, Mode::kInvert, block, hyper, args), args, block.num_elements,
               settlement);
}

Status gradient_status(Pool& pool, const Gradients& grads, std::uint64_t num_elements) {
  SweepArguments args;
  args.grads = grads.contributions;
  args.grad_type = grads.type;
  Choice choice{Mode::kStatus};
  choice.grads = grads.type;
  return run_whole(pool, pool.kernels.find(choice), args, num_elements);
}

void cast_weights(Pool& pool, const float* master, const Weights& weights,
                  std::uint64_t num_elements) {
  SweepArguments args;
  args.master = const_cast<float*>(master);  // this sweep only reads it
  args.weights = weights.data;
  args.weights_type = weights.type;
  run_whole(pool, pool.kernels.find(Choice{Mode::kCast}), args, num_elements);
}

}  // namespace penstock
