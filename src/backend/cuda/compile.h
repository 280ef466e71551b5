// GPU kernels of specs: chosen, compiled, reported on.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "jit/gpu_kernel.h"
#include "jit/planner_kernel.h"
#include "plan/kernel_choice.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/gpu/config.h"

namespace raddle::cuda {

/// One of a spec's kernels.
struct KernelForm {
  enum Which {
    any_length,
    short_only,
    wgmma,
    wgmma_short_8,
    wgmma_short_16,
    wgmma_short_32,
    wgmma_short_64,
    count
  };
  Which which;
  wgmma::Serves serves = {};
  bool scales = false;  ///< V has 16 bits, and is multiplied by a scale

  bool operator<(const KernelForm& other) const { return members() < other.members(); }
  bool operator==(const KernelForm& other) const { return members() == other.members(); }
  KernelFamily family() const { return which >= wgmma ? KernelFamily::wgmma : KernelFamily::mma; }
  /// Of the wgmma family's of short queries: the fused rows of their tiles; else 0.
  i32 short_rows() const { return which > wgmma ? 8 << (which - wgmma_short_8) : 0; }

 private:
  std::tuple<Which, bool, bool, bool, bool> members() const {
    return {which, serves.levels, serves.rows, serves.clusters, scales};
  }
};

/// Those that an attention has compiled when it is made: that of decodes, which has all parts of
/// the variant, and that of long queries, if there is one.
std::vector<KernelForm> first_kernels(const AttentionSpec& spec, const FamilyFacts& facts);

/// The family's kernel whose tiles of short queries have so many rows (wgmma), or that of
/// `short_only` (mma); else the one that computes long queries.
KernelForm form_of(KernelFamily family, bool short_only, i32 short_rows);

/// Raises ValueError for a spec that has no GPU kernel (float32).
jit::GpuKernel kernel_of(const AttentionSpec& spec, const BoundVariant& variant,
                         const std::string& arch, const KernelForm& form);

/// What that kernel takes of a multiprocessor. Raises ValueError where it does not fit.
KernelConfig config_of(const AttentionSpec& spec, const std::string& arch, KernelFamily family,
                       i32 short_rows, bool outputs);

/// What the choice of a family is made by. `takes_tensor_maps`: the driver does.
FamilyFacts facts_of(const BoundVariant& variant, const std::string& arch, bool takes_tensor_maps,
                     std::optional<KernelFamily> asked);

/// The kernel that plans on the device. `in_shared`: all of its launches have the planner's arrays
/// in shared memory (plans_in_shared).
jit::PlannerKernel planner_of(const AttentionSpec& spec, const BoundVariant& variant, bool prefixes,
                              bool in_shared);

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
KernelReport compile_planner(const AttentionSpec& spec, const std::string& arch, bool prefixes,
                             bool in_shared);

/// A kernel that the cache may have.
struct KernelText {
  std::string label, source;
};
/// Kernels of a spec on GPUs of `arch`, that of decodes first: those that an attention has compiled
/// when it is made, or `all` that its plans and reservations may take. Only a run with a v_scale of
/// V that has 16 bits takes another. Raises ValueError for a spec that has no GPU kernel.
std::vector<KernelText> kernels_of(const AttentionSpec& spec, const std::string& arch, bool all);

}  // namespace raddle::cuda
