#include "plan/kernel_choice.h"

#include <algorithm>
#include <bit>
#include <string_view>

#include "plan/explain.h"
#include "plan/heuristics.h"
#include "raddle/engine/plan/bounds.h"
#include "raddle/engine/plan/units.h"
#include "raddle/error.h"

namespace raddle {
namespace {

constexpr const char* asked_for = "RADDLE_BACKEND asks for it";
constexpr const char* expected = "it is expected to be faster";

void check_asked_long_queries(const AttentionSpec& spec, const char* what) {
  if (const char* why = long_queries_unserved_by_wgmma(spec))
    fail<ValueError>("RADDLE_BACKEND is \"wgmma\", ", what, ", and ", why);
}

/// Whether the keys of a group are those of its blocks, one after another.
bool has_whole_blocks(const Level& level) {
  return level.page_size == 0 && level.block_index.empty() && level.block_pos.empty() &&
         level.block_first.empty() && level.block_count.empty();
}

/// Whether boxes can copy the level's keys for a plan.
bool boxes_copy(const Level& level) { return lies_in_boxes(level, addressed_block_size(level)); }

/// Whether every group has short queries, in the mma family's sense.
bool is_short(const LayoutView& layout, const PlanConfig& config) {
  for (i32 l = 0; l < layout.num_levels; ++l) {
    const LevelView& level = layout.levels[l];
    for (i32 g = 0; g < level.num_groups; ++g)
      if (shape_of(config, group_rows(level, g) * config.group_size) != short_queries) return false;
  }
  return true;
}

/// The most fused rows of a level's groups.
i32 most_rows(const AttentionSpec& spec, const LevelView& level) {
  i32 most = 0;
  for (i32 g = 0; g < level.num_groups; ++g) most = max(most, group_rows(level, g));
  return most * spec.group_size();
}

/// KernelChoice::short_rows of a layout for the wgmma family. With batch_invariant=True, groups
/// beside a request must not decide.
i32 short_rows_of(const AttentionSpec& spec, const LayoutView& layout) {
  if (spec.batch_invariant || !wgmma::has_short_kernels(spec.head_dim_qk, spec.head_dim_vo))
    return 0;
  i32 most = 0;
  for (i32 l = 0; l < layout.num_levels; ++l) most = max(most, most_rows(spec, layout.levels[l]));
  return wgmma::short_rows_for(most, spec.head_dim_vo);
}

/// Bytes of K and V up to which they are the first lines to leave the L2 cache. On an H200, whose
/// cache has 60 MB, displacing what other kernels have written there costs 3 µs; being displaced
/// early costs 5 % of a read's time.
constexpr i64 most_leaving_first = i64{128} << 20;

/// The wgmma family for a layout: its kernel of short queries in tiles of so many rows, or, with 0,
/// of long ones.
KernelChoice wgmma_for(const AttentionSpec& spec, const Layout& of_keys, i32 short_rows,
                       const char* reason) {
  const LayoutView& layout = of_keys.view();
  i64 keys = 0;
  for (i32 l = 0; l < layout.num_levels; ++l)
    for (i32 g = 0; g < layout.levels[l].num_groups; ++g) keys += layout.levels[l].columns[g];
  const i64 bytes = keys * spec.num_kv_heads *
                    read_bytes(spec.head_dim_qk, spec.head_dim_vo, spec.k_extends_v, spec.dtype);
  const auto& levels = of_keys.levels();
  const wgmma::Serves serves{layout.num_levels > 1,
                             !std::all_of(levels.begin(), levels.end(), boxes_copy)};
  return {KernelFamily::wgmma, reason, {}, short_rows, serves, bytes <= most_leaving_first};
}

/// Whether the wgmma family finds such a layout's keys fast: in boxes, or in pages of a power of
/// two, whose rows are looked up ahead (wgmma/gather.h). Others it reads in up to twice mma's time.
bool finds_keys_fast(const Layout& layout) {
  const auto looked_up_ahead = [](const Level& level) {
    return level.storage == KvStorage::paged && has_whole_blocks(level) &&
           is_power_of_two(addressed_block_size(level));
  };
  const std::vector<Level>& levels = layout.levels();
  return std::all_of(levels.begin(), levels.end(), [&](const Level& level) {
    return boxes_copy(level) || looked_up_ahead(level);
  });
}

/// Whether requests of so many fused rows decode, of heads for which the wgmma family's kernels of
/// short queries were measured to be as fast as mma's or faster (docs/lab/hopper.md): on a single
/// level, and with shared prefixes whose rows are those of one tile.
bool decodes_as_fast(const AttentionSpec& spec, i64 rows) {
  return spec.head_dim_qk <= 128 && spec.head_dim_vo <= 128 && rows <= 8;
}

/// Whether full batches of a reservation are mostly prompts, not queries of single tokens.
bool takes_prompts(const Maxima& maxima) {
  constexpr i64 tokens_of_prompt = 16;
  return maxima.max_qo_len == 0 &&
         maxima.max_qo_tokens >= tokens_of_prompt * i64{maxima.max_requests};
}

/// When workers that share the work equally are done with it; a mask is taken for a causal one.
/// Which queries are short is said by `mma`, whatever family `config` is of.
i64 equal_share(const LayoutView& layout, const PlanConfig& config, const PlanConfig& mma,
                bool masked) {
  const bool all_partial = layout.num_levels > 1;
  i64 total = 0;
  for (i32 l = 0; l < layout.num_levels; ++l) {
    const LevelView& level = layout.levels[l];
    const bool causal = masked && l + 1 == layout.num_levels;
    for (i32 g = 0; g < level.num_groups; ++g) {
      const i32 tokens = group_rows(level, g), rows = tokens * config.group_size;
      const i32 keys = max(level.columns[g] - (causal ? tokens / 2 : 0), 0);
      const TileShape& shape = config.shapes[shape_of(config, rows)];
      const CostModel& model = config.costs[shape_of(mma, rows)];
      const i64 tiles = count_tiles(config, rows), kv_tiles = ceil_div(keys, shape.keys);
      const UnitCost full = cost_of(model, min(rows, shape.rows), all_partial);
      total += tiles * (full.start + kv_tiles * full.tile);
    }
  }
  return total * config.num_kv_heads / config.num_workers;
}

}  // namespace

const char* name_of(KernelFamily family) { return family == KernelFamily::wgmma ? "wgmma" : "mma"; }

std::optional<KernelFamily> family_named(const char* value) {
  const std::string_view name = value ? value : "";
  if (name.empty()) return {};
  for (const KernelFamily family : {KernelFamily::mma, KernelFamily::wgmma})
    if (name == name_of(family)) return family;
  fail<ValueError>("RADDLE_BACKEND is \"", name, "\"; expected \"mma\" or \"wgmma\"");
}

std::string KernelChoice::explain() const {
  std::string text = std::string("kernel family: ") + name_of(family) + " (" + reason;
  for (i32 i = 0; i < num_families; ++i)
    if (time[i] > 0)
      text += std::string(i == 0 ? ": " : ", ") + name_of(static_cast<KernelFamily>(i)) + " " +
              in_time(time[i]);
  return text + ")";
}

const char* unserved_by_wgmma(const AttentionSpec& spec, const FamilyFacts& facts) {
  if (facts.arch != 90) return "wgmma is of sm_90 alone";
  if (!facts.takes_tensor_maps) return "wgmma needs the driver of CUDA 12.1 or later";
  if (spec.stored_dtype() != spec.dtype) return "wgmma does not serve a kv_dtype other than dtype";
  if (spec.k_extends_v) return "wgmma does not serve k_extends_v=True";
  if (!wgmma::has_short_kernels(spec.head_dim_qk, spec.head_dim_vo))
    return "wgmma does not serve such head dims: expected multiples of 8 up to 256";
  if (facts.changes_rows)
    return "wgmma does not serve variants with parts for queries, keys or values";
  return nullptr;
}

const char* long_queries_unserved_by_wgmma(const AttentionSpec& spec) {
  if (!wgmma::has_long_kernel(spec.head_dim_qk, spec.head_dim_vo))
    return "wgmma does not serve long queries of such head dims: expected up to 256, those of V "
           "multiples of 32";
  return nullptr;
}

i32 addressed_block_size(const Level& level) {
  constexpr i32 most = 1 << 30;
  if (wgmma::is_boxed(level.block_size) || level.block_size > most) return level.block_size;
  if (level.storage == KvStorage::ragged || !has_whole_blocks(level) || !level.mask_bits.empty())
    return level.block_size;
  const auto in_one = [&](i32 columns) { return columns <= level.block_size; };
  if (!std::all_of(level.columns.begin(), level.columns.end(), in_one)) return level.block_size;
  const auto rounded = static_cast<i32>(std::bit_ceil(static_cast<u32>(level.block_size)));
  return std::max(rounded, wgmma::least_box_rows);
}

bool lies_in_boxes(const Level& level, i32 block_size) {
  if (level.storage == KvStorage::ragged) return true;
  return level.page_size == 0 && level.block_first.empty() && wgmma::is_boxed(block_size);
}

bool takes_clusters(const AttentionSpec& spec) {
  // Steps of narrow heads take few bytes: half of them is less than the blocks' waits for one
  // another (docs/lab/hopper.md).
  return !spec.batch_invariant && max(spec.head_dim_qk, spec.head_dim_vo) > 64;
}

bool may_be_clusters(const AttentionSpec& spec, const KernelChoice& kernel, const Layout& layout,
                     i32 num_workers) {
  // Measured on an H200 (docs/lab/hopper.md): copies of pages of 16 to both blocks are slower.
  constexpr i32 least_rows = 64;
  const Level& level = layout.levels().front();
  return takes_clusters(spec) && num_workers > 1 && kernel.is_long_wgmma() && !kernel.serves.rows &&
         !kernel.serves.levels &&
         (level.storage == KvStorage::ragged || addressed_block_size(level) >= least_rows);
}

bool decodes_on_wgmma(const AttentionSpec& spec, const FamilyFacts& facts) {
  if (unserved_by_wgmma(spec, facts)) return false;
  if (facts.asked) return facts.asked == KernelFamily::wgmma;
  return !spec.batch_invariant && decodes_as_fast(spec, spec.group_size());
}

bool long_queries_on_wgmma(const AttentionSpec& spec, const FamilyFacts& facts) {
  if (unserved_by_wgmma(spec, facts)) return false;
  if (facts.asked && facts.asked != KernelFamily::wgmma) return false;
  return !long_queries_unserved_by_wgmma(spec);
}

void check_asked_family(const AttentionSpec& spec, const FamilyFacts& facts) {
  if (facts.asked != KernelFamily::wgmma) return;
  if (const char* why = unserved_by_wgmma(spec, facts))
    fail<ValueError>("RADDLE_BACKEND is \"wgmma\", and ", why);
}

i32 reserved_short_rows(const AttentionSpec& spec, const Maxima& maxima) {
  if (spec.batch_invariant || !wgmma::has_short_kernels(spec.head_dim_qk, spec.head_dim_vo))
    return 0;
  const bool finds_prefixes = maxima.max_levels > 1 && maxima.max_qo_len > 0;
  const i64 tokens = finds_prefixes ? maxima.max_qo_len : max_group_rows(maxima);
  const i64 rows = tokens * spec.group_size(), most = wgmma::most_short_rows(spec.head_dim_vo);
  if (rows > most) return 0;
  return wgmma::short_rows_for(static_cast<i32>(finds_prefixes ? most : rows), spec.head_dim_vo);
}

KernelChoice choose_reserved_kernel(const AttentionSpec& spec, const FamilyFacts& facts,
                                    const Maxima& maxima) {
  const wgmma::Serves serves{maxima.max_levels > 1, !wgmma::is_boxed(maxima.page_size)};
  if (facts.asked == KernelFamily::wgmma) {
    const i32 short_rows = reserved_short_rows(spec, maxima);
    if (short_rows == 0) check_asked_long_queries(spec, "a reservation of long queries is made");
    return {KernelFamily::wgmma, asked_for, {}, short_rows, serves};
  }
  if (facts.asked) return {*facts.asked, asked_for};
  if (const char* why = unserved_by_wgmma(spec, facts)) return {KernelFamily::mma, why};
  if (takes_prompts(maxima) && is_power_of_two(maxima.page_size) && !spec.batch_invariant &&
      !long_queries_unserved_by_wgmma(spec))
    return {
        KernelFamily::wgmma, "batches are mostly prompts, and page_size is known", {}, 0, serves};
  const i32 short_rows = maxima.max_qo_len > 0 ? reserved_short_rows(spec, maxima) : 0;
  if (short_rows == 0 || !decodes_as_fast(spec, i64{maxima.max_qo_len} * spec.group_size()))
    return {KernelFamily::mma, "a reservation takes any queries"};
  if (!is_power_of_two(maxima.page_size))
    return {KernelFamily::mma, "a reservation takes pages of any size"};
  const char* reason = "requests decode, and page_size is known";
  return {KernelFamily::wgmma, reason, {}, short_rows, serves};
}

KernelChoice choose_gpu_kernel(const AttentionSpec& spec, const FamilyFacts& facts,
                               const Layout& layout, const PlanConfig& mma,
                               const PlanConfig& wgmma) {
  if (facts.asked == KernelFamily::wgmma) {
    const KernelChoice choice =
        wgmma_for(spec, layout, short_rows_of(spec, layout.view()), asked_for);
    if (choice.short_rows == 0) check_asked_long_queries(spec, "layout has long queries");
    return choice;
  }
  if (facts.asked) return {*facts.asked, asked_for};
  if (const char* why = unserved_by_wgmma(spec, facts)) return {KernelFamily::mma, why};
  // Page sizes and neighbours must change no bit.
  if (spec.batch_invariant)
    return {KernelFamily::mma, "one family for all layouts, with batch_invariant=True"};
  if (!finds_keys_fast(layout))
    return {KernelFamily::mma, "wgmma is slower where keys do not lie in pages of a power of two"};
  const i32 short_rows = short_rows_of(spec, layout.view());
  const LevelView& requests = layout.view().levels[layout.view().num_levels - 1];
  const bool decodes = decodes_as_fast(spec, most_rows(spec, requests));
  if (decodes && short_rows > 0)
    return wgmma_for(spec, layout, short_rows, "all queries are short");
  if (is_short(layout.view(), mma))
    return {KernelFamily::mma, "all queries are short, and wgmma is not known to be faster"};
  if (const char* why = long_queries_unserved_by_wgmma(spec)) return {KernelFamily::mma, why};
  const auto time = [&](const PlanConfig& config) {
    return equal_share(layout.view(), config, mma, facts.masks);
  };
  const i64 of_mma = time(mma), of_long = time(wgmma);
  i64 of_wgmma = of_long;
  // Decodes whose shared prefixes have more rows than a tile: every tile reads the prefix, but
  // what a request's own keys take beside being read is little.
  const i32 most = wgmma::most_short_rows(spec.head_dim_vo);
  if (decodes) {
    const i64 of_tiles = time(gpu_plan_config(spec, facts.arch, KernelFamily::wgmma, most,
                                              wgmma.num_workers, wgmma.schedule));
    of_wgmma = std::min(of_long, of_tiles);
  }
  KernelChoice choice{KernelFamily::mma, expected};
  if (of_wgmma < of_mma) choice = wgmma_for(spec, layout, of_wgmma < of_long ? most : 0, expected);
  choice.time[0] = of_mma, choice.time[1] = of_wgmma;
  return choice;
}

}  // namespace raddle
