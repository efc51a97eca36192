#include "kernel.h"
#include "vector_avx512.h"

namespace penstock {

const Kernels kAvx512Kernels = make_kernels<Avx512>("avx512");

}  // namespace penstock
