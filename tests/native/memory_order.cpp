// Steps as the processes of a run take them, with nothing between the parties but control words: a
// worker that reads weights and writes gradients, and an optimizer that sweeps on a pool of threads.
// Here they are threads, so that a thread sanitizer sees whether each byte that one party reads was
// written before, by the order of the words alone (docs/INTERNALS.md, "Control segment").
//
// Arguments: the cores of the pool. Prints the sum of the last weights.
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "atomics.h"
#include "sweeps.h"

namespace {

constexpr std::uint64_t kElements = 16 * 4096;  // 16 chunks: both threads of a pool have some
constexpr std::uint64_t kSteps = 6;
constexpr std::uint64_t kInvalid = ~std::uint64_t{0};

struct alignas(64) Array {
  float values[kElements] = {};
};

struct Memory {
  Array master, first, second;
  Array weights[2];  // slot v % 2 has version v
  Array grads[2];    // copy t % 2 has the gradients of the step to version t
  std::uint64_t slot_version[2] = {0, kInvalid};
  std::uint64_t ready = 0;  // target version of the gradients that are complete
};

void await(const std::uint64_t* word, std::uint64_t value) {
  while (penstock::load_acquire(word) != value) {
    sched_yield();
  }
}

void work(Memory& memory) {
  for (std::uint64_t version = 0; version < kSteps; ++version) {
    const std::size_t slot = version % 2;
    await(&memory.slot_version[slot], version);
    float* grads = memory.grads[(version + 1) % 2].values;
    for (std::uint64_t i = 0; i < kElements; ++i) {
      grads[i] = 0.5f * memory.weights[slot].values[i] + 1.0f;
    }
    penstock::store_release(&memory.ready, version + 1);
  }
}

void optimize(Memory& memory, const std::vector<int>& cores) {
  penstock::Pool pool(cores, "portable");
  const std::size_t bytes = penstock::Undo::bytes_for(cores.size());
  void* area = std::aligned_alloc(64, bytes);
  std::fill_n(static_cast<char*>(area), bytes, 0);
  penstock::Block block{kElements, {}, {{0, kElements, 0.0}}};
  block.state.master = memory.master.values;
  block.state.arrays[0] = memory.first.values;
  block.state.arrays[1] = memory.second.values;
  const auto grads_of = [&](std::uint64_t target) {
    penstock::Gradients grads{penstock::GradType::kFloat32, {}};
    grads.contributions.data[0] = memory.grads[target % 2].values;
    grads.contributions.count = 1;
    return grads;
  };
  const auto hyper_of = [](std::uint64_t step) {
    return penstock::Hyper{0, 1e-3, 0.9, 0.999, 1e-8, step, 1.0};
  };
  for (std::uint64_t target = 1; target <= kSteps; ++target) {
    await(&memory.ready, target);
    const std::size_t slot = target % 2;
    penstock::store_release(&memory.slot_version[slot], kInvalid);
    const penstock::Weights weights{penstock::WeightsType::kFloat32, memory.weights[slot].values};
    if (target == 1) {
      penstock::preview(pool, block, grads_of(1), hyper_of(1), weights);
    } else {
      penstock::advance(pool, block, grads_of(target - 1), hyper_of(target - 1), grads_of(target),
                        hyper_of(target), weights,
                        {penstock::Undo(area, bytes), {{0, kElements}}, target});
    }
    penstock::store_release(&memory.slot_version[slot], target);
  }
  std::free(area);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> cores;
  for (int i = 1; i < argc; ++i) {
    cores.push_back(std::atoi(argv[i]));
  }
  static Memory memory;
  std::thread worker(work, std::ref(memory));
  optimize(memory, cores);
  worker.join();
  double sum = 0;
  for (const float value : memory.weights[kSteps % 2].values) {
    sum += value;
  }
  std::printf("%.17g\n", sum);
}
