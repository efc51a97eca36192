#include "kernel.h"
#include "vector_avx2.h"

namespace penstock {

const Kernels kAvx2Kernels = make_kernels<Avx2>("avx2");

}  // namespace penstock
