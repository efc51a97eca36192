#include "kernel.h"
#include "vector_portable.h"

namespace penstock {

const Kernels kPortableKernels = make_kernels<Portable>("portable");

}  // namespace penstock
