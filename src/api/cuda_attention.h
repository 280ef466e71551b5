// Attention on a GPU over tensors in host memory: the contract's trial, before GPUs are a device of
// Attention.
#pragma once

#include <string>

#include "raddle/attention.h"

namespace raddle::cuda {

/// A kernel as the compiler reports it.
struct KernelReport {
  i32 registers;     ///< a thread
  i32 spill_bytes;   ///< stores and loads of spilled registers
  i32 shared_bytes;  ///< a block
  double seconds;    ///< of compilation
  std::string log;
};

/// Compiles the spec's kernel with NVRTC; needs no GPU. Raises CompileError, and ValueError for a
/// spec that has no GPU kernel (float32).
KernelReport compile(const AttentionSpec& spec, const std::string& arch);

/// Sees to it that the kernel is in the cache; needs no GPU.
void warm(const AttentionSpec& spec, const std::string& arch);

/// Plans the layout for the GPU's kernel and runs it; options.num_workers 0: two blocks a
/// multiprocessor. Raises DeviceError where there is no GPU.
void attend(const AttentionSpec& spec, const LayoutPtr& layout, const PlanOptions& options,
            const RunArgs& args);

/// What runs: the GPU's name and the driver's and NVRTC's versions.
struct Machine {
  std::string gpu, arch, driver, nvrtc, nvrtc_path;
};
Machine machine();

}  // namespace raddle::cuda
