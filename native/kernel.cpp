// The kernels of one vector path: compiled once for each path, with its flags (CMakeLists.txt).
#include "kernel.h"
#include PENSTOCK_VECTOR_HEADER

namespace penstock {

const Kernels PENSTOCK_KERNELS = {PENSTOCK_PATH, find_kernel<PENSTOCK_VECTOR>};

}  // namespace penstock
