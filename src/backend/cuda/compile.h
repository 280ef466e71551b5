// GPU kernels of specs: chosen, compiled, reported on.
#pragma once

#include <string>

#include "jit/gpu_kernel.h"
#include "jit/planner_kernel.h"
#include "plan/kernel_choice.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/gpu/config.h"

namespace raddle::cuda {

/// The family's kernel of plans with queries of any length. Raises ValueError for a spec that has
/// no GPU kernel (float32).
jit::GpuKernel kernel_of(const AttentionSpec& spec, const BoundVariant& variant,
                         const std::string& arch, KernelFamily family);

/// What that kernel takes of a multiprocessor. Raises ValueError where it does not fit.
KernelConfig config_of(const AttentionSpec& spec, const std::string& arch, KernelFamily family,
                       i32 short_rows);

/// What the choice of a family is made by. `makes_tensor_maps`: the driver does.
FamilyFacts facts_of(const BoundVariant& variant, const std::string& arch, bool makes_tensor_maps,
                     std::optional<KernelFamily> asked);

/// The kernel that plans on the device.
jit::PlannerKernel planner_of(const AttentionSpec& spec, const BoundVariant& variant,
                              bool prefixes);

/// A kernel as the compiler reports it.
struct KernelReport {
  i32 registers;     ///< a thread
  i32 spill_bytes;   ///< stores and loads of spilled registers
  i32 shared_bytes;  ///< a block
  double seconds;    ///< of compilation
  std::string log;
  std::string cubin;  ///< or PTX, of a virtual architecture
};

/// Compiles the spec's kernel of a family with NVRTC: of the mma family any, or `short_only`, that
/// of plans with short queries only; of the wgmma family that of long queries, or that of short
/// ones with tiles of `short_rows` (8, 16, 32, 64); `serves` says what its kernels serve.
/// `scales_output`: the one like it that multiplies O by a scale of V. Needs no GPU. Raises
/// CompileError, and ValueError for a spec that has no such kernel.
KernelReport compile(const AttentionSpec& spec, const std::string& arch, KernelFamily family,
                     bool short_only, i32 short_rows, wgmma::Serves serves, bool scales_output);

/// The same for the kernel that plans on the device; its shared memory depends on the maxima: 0.
KernelReport compile_planner(const AttentionSpec& spec, const std::string& arch, bool prefixes);

/// Sees to it that the kernels of all families that serve the spec are in the cache; needs no GPU.
void warm(const AttentionSpec& spec, const std::string& arch);

}  // namespace raddle::cuda
