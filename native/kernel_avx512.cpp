#include "kernel.h"
#include "vector_avx512.h"

namespace penstock {

const Kernels kAvx512Kernels = {"avx512", find_kernel<Avx512>};

}  // namespace penstock
