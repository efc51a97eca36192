#include "kernel.h"
#include "vector_avx2.h"

namespace penstock {

const Kernels kAvx2Kernels = {"avx2", find_kernel<Avx2>};

}  // namespace penstock
