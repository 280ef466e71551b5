// How large any plan can become under given maxima.
//
// Partial states. For W workers at most W - 1 cuts are made under every schedule of one level: by
// linear split, which makes one between neighbours; by Algorithm 1, because at most W - 1 chunks
// are both as long as its limit (all columns / W) and not the last of their unit. With R rows in
// the largest query tile, a cut adds one partial state of at most R rows, and each unit that is cut
// adds its own rows once; a unit of a layout with several levels always does. There, levels in step
// are cut into at most W chunks, and the last level between neighbours, too: at most 2 · (W - 1)
// cuts. A cut through all KV heads counts once for each.
//
// Batch invariance cuts regardless of W: a group of one query tile every C columns. A group of n
// tiles and f ≤ n · R fused rows over c columns is cut every n · C columns, so it stores at most
//   f · (c / (n · C) + 1) ≤ R · c / C + f rows.
#pragma once

#include "raddle/engine/plan/arrays.h"
#include "raddle/engine/plan/coverage.h"
#include "raddle/engine/plan/pieces.h"

namespace raddle {

/// What a reservation or a workspace is made for.
struct Maxima {
  i32 max_requests;   ///< groups of one level: requests, or row blocks of a BSR matrix
  i32 max_qo_tokens;  ///< rows of the ragged query tensor
  i64 max_kv_tokens;  ///< columns of all groups of one level: Σ kv_len where groups are requests
  i32 max_levels;
  i32 max_runs;            ///< coverage runs of one query tile, as PlanConfig::max_runs; 0: 64
  i32 max_qo_len = 0;      ///< rows of one request; 0: max_qo_tokens
  i32 max_mask_bytes = 0;  ///< of a packed mask's bits; 0: those of any batch (most_mask_bytes)
  i32 page_size = 0;       ///< keys of a page of all layouts, which have no others; 0: of any kind
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

/// Query rows of one group. Of several levels, a prefix has the rows of all that share it.
RADDLE_FN i32 max_group_rows(const Maxima& m) {
  return m.max_levels == 1 && m.max_qo_len > 0 ? min(m.max_qo_len, m.max_qo_tokens)
                                               : m.max_qo_tokens;
}

/// Bytes of a packed mask of any batch, each request's from a whole byte on; int_max where it would
/// be more, for offsets have 32 bits. A row may see the keys of all levels.
RADDLE_FN i32 most_mask_bytes(const Maxima& m) {
  if (m.max_mask_bytes > 0) return m.max_mask_bytes;
  // A request's rows, whatever the levels.
  const i64 rows = m.max_qo_len > 0 ? min(m.max_qo_len, m.max_qo_tokens) : m.max_qo_tokens;
  if (m.max_kv_tokens >= 8 * i64{int_max} / (rows * m.max_levels)) return int_max;
  const i64 bits = rows * m.max_levels * m.max_kv_tokens;
  return static_cast<i32>(min(bits / 8 + m.max_requests, i64{int_max}));
}

/// Query tiles of one level at most: ⌈f / R⌉ = ⌊(f - 1) / R⌋ + 1, summed over the groups.
RADDLE_FN i64 max_level_tiles(const PlanConfig& config, const Maxima& m) {
  const i64 fused = i64{m.max_qo_tokens} * config.group_size;
  const i64 groups = min(m.max_requests, m.max_qo_tokens);
  return groups + max(i64{0}, fused - groups) / config.shapes[long_queries].rows;
}

/// Rows of the largest query tile.
RADDLE_FN i64 max_tile_rows(const PlanConfig& config, const Maxima& m) {
  const i64 rows = max(config.shapes[short_queries].rows, config.shapes[long_queries].rows);
  return min(rows, i64{max_group_rows(m)} * config.group_size);
}

/// No absolute chunk of a request has fewer columns.
RADDLE_FN i64 least_absolute_chunk(const PlanConfig& config) {
  return min(absolute_chunk(config.invariant_chunk, config.shapes[short_queries].keys, 1),
             absolute_chunk(config.invariant_chunk, config.shapes[long_queries].keys, 1));
}

/// Sizes that no plan under `m` exceeds, whatever its schedule.
RADDLE_FN PlanSizes plan_bounds(const PlanConfig& config, const Maxima& m) {
  const i64 heads = config.num_kv_heads;
  const bool cascade = m.max_levels > 1;
  // Workers of the last level may have a chunk of a level before it, too (InStep).
  const i64 cuts = (cascade ? 2 : 1) * (i64{config.num_workers} - 1);
  const i64 fused = i64{m.max_qo_tokens} * config.group_size;
  const i64 level_tiles = max_level_tiles(config, m);
  const i64 tile_rows = max_tile_rows(config, m);
  PlanSizes n{};
  n.query_tiles = level_tiles * m.max_levels;
  n.runs = n.query_tiles * runs_limit(m.max_runs);
  n.queue_indptr = i64{config.num_workers} + 2;
  n.openings = config.has_openings ? config.num_workers : 0;
  i64 split_tiles = 0;
  if (config.batch_invariant) {
    // C is at least the smaller of the two shapes' roundings; one long group reaches the bound.
    const i64 chunk = least_absolute_chunk(config);
    n.items = heads * (n.query_tiles + m.max_kv_tokens / chunk);
    n.partial_rows = heads * (tile_rows * (m.max_kv_tokens / chunk) + fused);
    split_tiles = level_tiles;
  } else {
    // Tiles of short queries may be cut for all KV heads together.
    const i64 cut_heads = config.reads_whole_rows ? heads : 1;
    const i64 short_rows = min(tile_rows, i64{config.shapes[short_queries].rows});
    const i64 cut_rows = cuts * max(tile_rows, cut_heads * short_rows);
    n.items = heads * n.query_tiles + cuts * cut_heads;
    n.partial_rows =
        cut_rows + (cascade ? heads * fused * m.max_levels : min(cut_rows, heads * fused));
    split_tiles = cascade ? n.query_tiles : min(level_tiles, cuts);
  }
  n.splits = heads * split_tiles;
  n.contractions = cascade ? level_tiles : split_tiles;
  n.expected = heads * n.contractions;
  // A token's rows can straddle one boundary of its own tiles and one of the earlier level's.
  n.sources = n.contractions + (m.max_levels - 1) * (m.max_qo_tokens + 2 * level_tiles);
  n.dependents = n.sources;
  return n;
}

/// Bytes of the partial states (O and LSE in fp32) that `partial_rows` rows take.
RADDLE_FN i64 state_bytes(i64 partial_rows, i32 dim_vo) {
  return partial_rows * (i64{dim_vo} + 1) * 4;
}

/// Byte offsets in a set of scratch, which begins with the partial states.
struct ScratchOffsets {
  i64 drawn;    ///< counter of the shared queue
  i64 arrived;  ///< counters of finished items, one for each contraction and KV head
  i64 end;
};

RADDLE_FN ScratchOffsets scratch_offsets(i64 partial_rows, i64 expected, i32 dim_vo) {
  const i64 drawn = round_up(state_bytes(partial_rows, dim_vo), i64{16});
  const i64 arrived = drawn + 16;
  return ScratchOffsets{drawn, arrived, arrived + expected * i64{sizeof(i32)}};
}

/// Bytes of one set of scratch for any plan under `m`.
RADDLE_FN i64 workspace_bytes(const PlanConfig& config, const Maxima& m, i32 dim_vo) {
  const PlanSizes n = plan_bounds(config, m);
  return scratch_offsets(n.partial_rows, n.expected, dim_vo).end;
}

RADDLE_ENGINE_END
