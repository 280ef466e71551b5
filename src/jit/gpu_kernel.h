// GPU kernels: the source of one from a composition, and its compilation for an architecture.
#pragma once

#include <string>

#include "jit/background.h"
#include "jit/nvrtc.h"
#include "jit/source.h"
#include "raddle/engine/core/dtype.h"
#include "raddle/engine/kernel/gpu/config.h"
#include "raddle/engine/kernel/wgmma/config.h"

namespace raddle::jit {

/// What one GPU kernel is compiled from. Group size, layout and lengths are run-time values.
struct GpuKernel {
  KernelFamily family;
  DType dtype;     ///< float16 or bfloat16
  DType kv_dtype;  ///< what K and V are stored in: the same, or one of 8 bits
  i32 dim_qk, dim_vo;
  bool k_extends_v;
  CompositionSource composition;
  i32 variant_bytes;        ///< of the composition's struct; both compilers must agree
  bool short_only = false;  ///< of the mma family: for plans without long query tiles
  i32 short_rows = 0;  ///< of the wgmma family: rows of tiles of short queries; 0: of long ones
  wgmma::Serves serves = {};   ///< of the wgmma family
  bool scales_output = false;  ///< multiplies O by a scale of V, whose elements have 16 bits
};

/// The kernel's entry point.
constexpr const char* gpu_entry_point = "raddle_attention";

/// "sm_90a" as a number: 90.
i32 arch_number(const std::string& arch);
/// What it is called in errors and caches: "bf16 128/128 SoftCap Causal".
std::string label_of(const GpuKernel& kernel);

/// Complete source, headers included.
std::string source_of(const GpuKernel& kernel, const std::string& arch);

/// Compiles, without looking into the cache. Raises CompileError.
Cubin compile(const GpuKernel& kernel, const std::string& arch);

/// The cubin from the cache, or compiled into it, as of find_or_compile_cubin.
std::string cubin_of(const GpuKernel& kernel, const std::string& arch, Watch* watch = nullptr);

}  // namespace raddle::jit
