// Scores of pages in tile registers: a tile of 16 pages' minima or maxima is multiplied by a
// group's query vectors, so that reading the summaries takes most of the time.
#pragma once

#include "raddle/engine/kernel/cache/lane_scores.h"
#include "raddle/engine/kernel/cpu/ahead.h"
#include "raddle/engine/kernel/cpu/bf16_packing.h"
#include "raddle/engine/simd/amx_rows.h"

RADDLE_ENGINE_BEGIN

namespace cpu {
namespace {

constexpr i32 pages_of_tile = tile_rows;
/// A bound has two: q⁺ · max and q⁻ · min.
constexpr i32 parts = 2;

inline bool fits_tiles(const SelectView& view) {
  return view.summary.dim % tile_depth == 0 && view.group_size <= tile_rows;
}

inline i64 blocks_of_head(const SelectView& view) {
  return i64{parts} * view.summary.dim / tile_depth;
}

/// Bytes of an arranged row before its packed blocks.
inline i64 bytes_before_blocks(const SelectView& view) {
  return round_up<i64>(parted_bytes(view), simd::tile_bytes);
}

/// A row is stored parted, as lanes need it, and behind that as packed blocks [heads, 2, D / 32] of
/// pairs of dimensions × vectors of the group.
inline i64 tiled_bytes(const SelectView& view) {
  const i64 blocks = fits_tiles(view) ? view.num_kv_heads * blocks_of_head(view) : 0;
  return bytes_before_blocks(view) + blocks * simd::tile_bytes;
}

inline const bf16* packed_queries(const ScoreJob& job, i32 row, i32 head) {
  const SelectView& view = *job.view;
  const u8* of_row = job.queries + row * job.row_bytes;
  return reinterpret_cast<const bf16*>(of_row + bytes_before_blocks(view)) +
         head * blocks_of_head(view) * packed_block;
}

inline void arrange_tiles(const SelectView& view, i32 row, u8* to) {
  part_row<bf16>(view, row, to);
  if (!fits_tiles(view)) return;
  const i32 dim = view.summary.dim;
  const auto* parted = reinterpret_cast<const float*>(to);
  auto* blocks = reinterpret_cast<bf16*>(to + bytes_before_blocks(view));
  for (i32 head = 0; head < view.num_kv_heads; ++head, parted += i64{view.group_size} * parts * dim)
    for (i32 d = 0; d < parts * dim; d += tile_depth, blocks += packed_block)
      simd::pair_columns(parted + d, parts * dim, view.group_size, blocks);
}

/// Addresses of the first head's minima and maxima of up to 16 pages; past the last page, the last
/// page's.
struct TilePages {
  const void* rows[parts * pages_of_tile];

  TilePages(const ScoreJob& job, i32 nth) {
    for (i32 p = 0; p < pages_of_tile; ++p)
      for (i32 which = 0; which < parts; ++which)
        rows[parts * p + which] = kv::summary_at<bf16>(
            job.view->summary, job.pages[min(nth + p, job.count - 1)], which, job.head_begin);
  }
};

/// Both parts of the bounds of 16 pages on a group's vectors, for one KV head, whose summaries lie
/// `offset` bytes behind the first one's.
inline void multiply_bounds(const TilePages& pages, i64 offset, i32 steps, const bf16* queries,
                            Ahead& ahead, float (&sums)[parts][pages_of_tile][lanes]) {
  // Pages lie anywhere, so their rows are copied to make tiles. Two copies take turns, because a
  // load waits for the stores before it.
  alignas(64) bf16 copies[2][parts][packed_block];
  simd::tile_zero<0>();
  simd::tile_zero<1>();
  for (i32 s = 0; s < steps; ++s, queries += packed_block) {
    auto& copy = copies[s % 2];
    for (i32 p = 0; p < pages_of_tile; p += 2) {
#pragma GCC unroll 4
      for (i32 i = 0; i < 2 * parts; ++i) {
        const u8* from = static_cast<const u8*>(pages.rows[parts * p + i]) + offset;
        simd::store_words(copy[i % parts] + (p + i / parts) * tile_depth,
                          simd::load_words(reinterpret_cast<const bf16*>(from) + s * tile_depth));
      }
      ahead.used(Int<2 * parts * 64>{});
    }
    simd::tile_load<2>(copy[1], 64);
    simd::tile_load<3>(queries, 64);
    simd::tile_dot<0, 2, 3>();
    simd::tile_load<4>(copy[0], 64);
    simd::tile_load<5>(queries + steps * packed_block, 64);
    simd::tile_dot<1, 4, 5>();
  }
  simd::tile_store<0>(sums[0], 64);
  simd::tile_store<1>(sums[1], 64);
}

/// Scores 16 pages from the nth on, or as many as there are. Returns false where a bound is NaN.
inline bool score_tile(const ScoreJob& job, i32 nth) {
  const SelectView& view = *job.view;
  const SummaryBytes& summary = view.summary;
  const TilePages now(job, nth), next(job, nth + pages_of_tile);
  Ahead ahead(next.rows, nth + pages_of_tile < job.count ? parts * pages_of_tile : 0,
              job.head_end - job.head_begin, summary.head_step,
              summary.dim * static_cast<i32>(sizeof(bf16)), false);
  alignas(64) float sums[parts][pages_of_tile][lanes];
  Vec best[pages_of_tile], doubt{};
  for (Vec& bound : best) bound = simd::broadcast(-math::infinity);
  for (i32 head = job.head_begin; head < job.head_end; ++head)
    for (i32 row = job.row_begin; row < job.row_end; ++row) {
      multiply_bounds(now, (head - job.head_begin) * summary.head_step, summary.dim / tile_depth,
                      packed_queries(job, row, head), ahead, sums);
      for (i32 p = 0; p < pages_of_tile; ++p) {
        const Vec bound = simd::load(sums[0][p]) + simd::load(sums[1][p]);
        best[p] = simd::max(best[p], bound);
        doubt += bound - bound;
      }
    }
  for (i32 g = 0; g < view.group_size; ++g)
    if (!(doubt[g] == 0.0f)) return false;
  for (i32 p = 0; p < min(pages_of_tile, job.count - nth); ++p) {
    float largest = best[p][0];
    for (i32 g = 1; g < view.group_size; ++g) largest = max(largest, best[p][g]);
    job.keys[nth + p] = kv::score_key(largest);
  }
  return true;
}

inline void score_in_tiles(const ScoreJob& job) {
  if (!fits_tiles(*job.view)) return score_pages<bf16>(job, 0, job.count);
  simd::configure_tiles();
  for (i32 nth = 0; nth < job.count; nth += pages_of_tile)
    if (!score_tile(job, nth)) score_pages<bf16>(job, nth, min(nth + pages_of_tile, job.count));
  simd::release_tiles();
}

}  // namespace
}  // namespace cpu

RADDLE_ENGINE_END
