// The GPU kernels of the KV cache: one source for all of a pair of
// dtypes, and for one composition of
// variants where keys are turned or states finished.
#pragma once

#include <string>

#include "jit/nvrtc.h"
#include "jit/source.h"
#include "raddle/engine/core/dtype.h"

namespace raddle::jit {

struct KvKernels {
  DType dtype;                    ///< of new rows, summaries and states
  DType kv_dtype;                 ///< of pools: that, or one of 8 bits
  CompositionSource composition;  ///< its key part is applied by append, sink and output by merge
  i32 variant_bytes;              ///< of the composition's struct; both compilers must agree
};

// Entry points. Their parameters are the structs of engine/kernel/cache/launch.h; append and merge
// take the composition's struct as a second one.
constexpr const char* append_entry = "raddle_kv_append";
constexpr const char* copy_entry = "raddle_kv_copy";
constexpr const char* accept_entry = "raddle_kv_accept";
constexpr const char* summarize_entry = "raddle_kv_summarize";
constexpr const char* score_entry = "raddle_kv_score";
constexpr const char* select_entry = "raddle_kv_select";
constexpr const char* merge_entry = "raddle_kv_merge";

/// Complete source, headers included.
std::string source_of(const KvKernels& kernels);

/// Compiles, without looking into the cache. Raises CompileError.
Cubin compile(const KvKernels& kernels, const std::string& arch);

/// The cubin from the cache, or compiled into it.
std::string cubin_of(const KvKernels& kernels, const std::string& arch);

}  // namespace raddle::jit
