// The planner kernel of a composition: coverage and kv_span are the variant's.
#pragma once

#include <string>

#include "jit/background.h"
#include "jit/nvrtc.h"
#include "jit/source.h"

namespace raddle::jit {

struct PlannerKernel {
  CompositionSource composition;
  i32 variant_bytes;       ///< of the composition's struct; both compilers must agree
  bool prefixes;           ///< finds equal leading pages: PlanLaunch::batch.min_prefix > 0
  bool in_shared = false;  ///< knows that PlanLaunch::scratch_in_shared is set; without, any launch
                           ///< is right, and takes longer
  bool fixed_chunks = false;  ///< cuts at absolute columns: PlanConfig::batch_invariant
};

/// The kernel's entry point: (PlanLaunch, the composition's struct), both by value.
constexpr const char* planner_entry_point = "raddle_planner";

/// What it is called in errors and caches: "planner with prefixes Causal".
std::string label_of(const PlannerKernel& kernel);

/// Complete source, headers included.
std::string source_of(const PlannerKernel& kernel);

/// Compiles, without looking into the cache. Raises CompileError.
Cubin compile(const PlannerKernel& kernel, const std::string& arch);

/// The cubin from the cache, or compiled into it, as of find_or_compile_cubin.
std::string cubin_of(const PlannerKernel& kernel, const std::string& arch, Watch* watch = nullptr);

}  // namespace raddle::jit
