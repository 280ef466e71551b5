// Which family of GPU kernels runs a plan: what each can compute, what it is expected to take, and
// why one is taken. Pure functions.
#pragma once

#include <optional>
#include <string>

#include "raddle/attention.h"
#include "raddle/engine/kernel/gpu/config.h"
#include "raddle/engine/kernel/wgmma/config.h"

namespace raddle {

/// What decides, beside spec and layout, which families can compute.
struct FamilyFacts {
  i32 arch = 0;                       ///< 90 for "sm_90a"
  bool takes_tensor_maps = false;     ///< the driver does
  bool changes_rows = false;          ///< the variant has parts for queries, keys or values
  bool masks = false;                 ///< the variant has masks
  std::optional<KernelFamily> asked;  ///< RADDLE_BACKEND
};

/// "mma"
const char* name_of(KernelFamily family);

/// The family that RADDLE_BACKEND's value names; nothing where it is null or empty. Raises
/// ValueError.
std::optional<KernelFamily> family_named(const char* value);

struct KernelChoice {
  KernelFamily family = KernelFamily::mma;
  const char* reason = "";
  /// Planned time of each family where they were weighed, else 0; in the CostModel's units.
  i64 time[num_families] = {};
  /// Of the wgmma family's kernels, the fused rows of the tiles of one of short queries; 0: the
  /// kernel of long queries.
  i32 short_rows = 0;
  /// Of the wgmma family's kernels. `clusters`: before the plan is made, whether its workers may be
  /// clusters; then, whether they are.
  wgmma::Serves serves = {};
  /// Whether K and V, which are few, are the first lines to leave the L2 cache (wgmma::Launch).
  bool keys_leave_first = false;
  /// Whether it is the wgmma family's kernel of long queries.
  bool is_long_wgmma() const { return family == KernelFamily::wgmma && short_rows == 0; }
  /// "kernel family: …", a line of text for people.
  std::string explain() const;
};

/// Why the wgmma family cannot compute the spec, or long queries of it; null: it can.
const char* unserved_by_wgmma(const AttentionSpec& spec, const FamilyFacts& facts);
const char* long_queries_unserved_by_wgmma(const AttentionSpec& spec);

/// The block size by which kernels of a plan find a level's keys: where each group's lie in one
/// block, as those of a contiguous cache do, the next power of two. Kernels shift where others
/// divide, and boxes may be copied. Not of a reservation, whose later layouts may have more blocks.
i32 addressed_block_size(const Level& level);

/// Whether the wgmma family can copy the keys of a level, found by that block size, in boxes; it
/// copies their rows singly else.
bool lies_in_boxes(const Level& level, i32 block_size);

/// Whether plans of decodes take the wgmma family's kernel of short queries, of most layouts: it is
/// the one that is needed first.
bool decodes_on_wgmma(const AttentionSpec& spec, const FamilyFacts& facts);

/// Whether plans of long queries may take the wgmma family's kernel of them.
bool long_queries_on_wgmma(const AttentionSpec& spec, const FamilyFacts& facts);

/// Raises ValueError, naming the argument, where RADDLE_BACKEND asks for a family that cannot
/// compute the spec.
void check_asked_family(const AttentionSpec& spec, const FamilyFacts& facts);

/// Whether clusters of two blocks may be workers of plans of the spec's long queries, and be
/// faster: of heads wider than 64. Not with batch_invariant=True: which plans have them depends on
/// the batch.
bool takes_clusters(const AttentionSpec& spec);

/// The same of a plan: of long queries on one level, whose keys lie in large boxes.
bool may_be_clusters(const AttentionSpec& spec, const KernelChoice& kernel, const Layout& layout,
                     i32 num_workers);

/// KernelChoice::short_rows of a reservation whose plans run in the wgmma family. With several
/// levels requests have at most max_qo_len rows, and prefixes those of many requests.
i32 reserved_short_rows(const AttentionSpec& spec, const Maxima& maxima);

/// The family of plans for all layouts of a reservation. Raises ValueError where RADDLE_BACKEND
/// asks for one that cannot compute them.
KernelChoice choose_reserved_kernel(const AttentionSpec& spec, const FamilyFacts& facts,
                                    const Maxima& maxima);

/// The family for a layout; `mma` and `wgmma` are what plans of each, of long queries, are made
/// with. Raises ValueError where RADDLE_BACKEND asks for one that cannot read it.
KernelChoice choose_gpu_kernel(const AttentionSpec& spec, const FamilyFacts& facts,
                               const Layout& layout, const PlanConfig& mma,
                               const PlanConfig& wgmma);

}  // namespace raddle
