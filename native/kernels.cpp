#include "kernels.h"

#include <stdexcept>

namespace penstock {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> paths;
#if defined(PENSTOCK_X86_KERNELS)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
    paths.push_back(&kAvx512Kernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    paths.push_back(&kAvx2Kernels);
  }
#endif
  paths.push_back(&kPortableKernels);
  return paths;
}

const Kernels& select_kernels(const std::string& name) {
  const std::vector<const Kernels*> paths = available_kernels();
  if (name.empty()) return *paths.front();
  std::string names;
  for (const Kernels* path : paths) {
    if (name == path->name) return *path;
    names += (names.empty() ? "" : ", ") + std::string(path->name);
  }
  throw std::invalid_argument("vector_path '" + name +
                              "' is not one of those of this processor: " + names);
}

}  // namespace penstock
