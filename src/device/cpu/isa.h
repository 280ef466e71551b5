// The kernels of each instruction set that this library was built for, and its limits.
#pragma once

#include "device/cpu/compute_loops.h"
#include "device/cpu/topology.h"
#include "raddle/engine/kernel/cpu/launch.h"

namespace raddle {

namespace generic {
const CpuKernels& cpu_kernels();
const ComputeLoops& compute_loops();
}  // namespace generic
#if defined(__x86_64__)
namespace avx2 {
const CpuKernels& cpu_kernels();
const ComputeLoops& compute_loops();
}  // namespace avx2
namespace avx512 {
const CpuKernels& cpu_kernels();
const ComputeLoops& compute_loops();
}  // namespace avx512
namespace amx {
const CpuKernels& cpu_kernels();
const ComputeLoops& compute_loops();
}  // namespace amx
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

inline const ComputeLoops& compute_loops(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::amx) return amx::compute_loops();
  if (isa == Isa::avx512) return avx512::compute_loops();
  if (isa == Isa::avx2) return avx2::compute_loops();
#endif
  static_cast<void>(isa);
  return generic::compute_loops();
}

}  // namespace cpu

}  // namespace raddle
