// GPU kernels of specs: compiled, reported on, loaded.
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
  std::string cubin;  ///< or PTX, of a virtual architecture
};

/// Compiles the spec's kernel with NVRTC, or the one of plans with short queries only; needs no
/// GPU. Raises CompileError, and ValueError for a spec that has no GPU kernel (float32).
KernelReport compile(const AttentionSpec& spec, const std::string& arch, bool short_only);

/// The same for the kernel that plans on the device; its shared memory depends on the maxima: 0.
KernelReport compile_planner(const AttentionSpec& spec, const std::string& arch, bool prefixes);

/// Sees to it that the kernel is in the cache; needs no GPU.
void warm(const AttentionSpec& spec, const std::string& arch);

/// Kernels take rows 16 bytes at a time: refuses tensors that do not allow it. Called for every
/// tensor of a run, so no string is made before something is wrong. `level` at least 0 is part of
/// the name.
void check_rows(const TensorRef& t, const char* what, i64 level = -1);

}  // namespace raddle::cuda
