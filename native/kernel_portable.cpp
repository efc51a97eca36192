#include "kernel.h"
#include "vector_portable.h"

namespace penstock {

const Kernels kPortableKernels = {"portable", find_kernel<Portable>};

}  // namespace penstock
