// The kernels of each instruction set that this library was built for.
#pragma once

#include "device/cpu/topology.h"
#include "raddle/engine/kernel/cpu/launch.h"

namespace raddle {

namespace generic {
const CpuKernels& cpu_kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const CpuKernels& cpu_kernels();
}
namespace avx512 {
const CpuKernels& cpu_kernels();
}
namespace amx {
const CpuKernels& cpu_kernels();
}
#endif

namespace cpu {

inline const CpuKernels& kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::amx) return amx::cpu_kernels();
  if (isa == Isa::avx512) return avx512::cpu_kernels();
  if (isa == Isa::avx2) return avx2::cpu_kernels();
#endif
  static_cast<void>(isa);
  return generic::cpu_kernels();
}

}  // namespace cpu

}  // namespace raddle
