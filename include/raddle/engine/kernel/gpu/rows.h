// Transforms of rows in shared memory: f_q, f_k and f_v in place.
#pragma once

#include "raddle/engine/kernel/gpu/finish.h"
#include "raddle/engine/tile/row_vector.h"
#include "raddle/engine/tile/warp_vector.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// Rows that a lane transforms at a time: enough to hide the latency of a sine, and no more than
/// fit in registers beside O and Q.
RADDLE_FN constexpr i32 rows_in_flight(i32 dim) { return dim <= 128 ? 4 : 1; }

/// transform_rows for variants whose pairs span whole rows.
template <i32 count, class T, i32 dim, class Exists, class F>
RADDLE_DEVICE void transform_whole(const RowShare<dim>& share, Exists exists, F transform) {
  constexpr i32 rows = RowShare<dim>::rows;
  constexpr i32 in_flight = min(rows_in_flight(dim), max(1, count / rows));
  static_assert(rows >= count || count % (rows * in_flight) == 0);
  RADDLE_ROLLED
  for (i32 down = 0; down < count; down += rows * in_flight) {
    const i32 r = down + share.nth_row();
    if (rows > count && r >= count) continue;
    RowVector<T, dim, true> x[in_flight];
    RADDLE_UNROLL
    for (i32 i = 0; i < in_flight; ++i) x[i].load(share, down + rows * i);
    RADDLE_UNROLL
    for (i32 i = 0; i < in_flight; ++i) transform(x[i], r + rows * i);
    RADDLE_UNROLL
    for (i32 i = 0; i < in_flight; ++i)
      if (exists(r + rows * i)) x[i].store(share, down + rows * i);
  }
}

/// transform_rows for variants whose pairs span parts of rows. The share is set up again for every
/// row: kept, it would take registers from the whole kernel.
template <i32 count, class T, i32 dim, class Exists, class F>
RADDLE_DEVICE void transform_parts(u8* memory, i32 first, Exists exists, F transform) {
  RADDLE_ROLLED
  for (i32 down = 0; down < count; down += RowShare<dim>::rows) {
    const RowShare<dim> share(memory, first);
    const i32 r = down + share.nth_row();
    if (r >= count || !exists(r)) continue;
    RowVector<T, dim, false> x;
    x.load(share, down);
    transform(x, r);
    x.store(share, down);
  }
}

/// Changes `count` rows in shared memory, from `first` on, by transform(vector, r), and rounds each
/// once. Rows that do not exist stay as they are, though transform may see them. All lanes of the
/// warp call it, and see the changed rows afterwards.
template <i32 count, class T, i32 dim, class Exists, class F>
RADDLE_DEVICE void transform_rows(u8* memory, i32 first, Exists exists, F transform) {
  const RowShare<dim> share(memory, first);
  // Tried once, outside of the loop: the compiler then knows that the pairs of the following
  // vectors span whole rows, and makes straight code for all rows in flight.
  WholePairs<dim> pairs;
  transform(pairs, min(share.nth_row(), count - 1));
  if (pairs.whole)
    transform_whole<count, T>(share, exists, transform);
  else
    transform_parts<count, T, dim>(memory, first, exists, transform);
  ptx::sync_warp();
}

/// transform(vector) changes one row in shared memory, in fp32; the result is rounded once to T.
/// The row holds numbers of type Stored, and its values are `scale` times these. All lanes of the
/// warp call it, and see the changed row afterwards.
template <class T, class Stored, class Rows, i32 dim, class F>
RADDLE_DEVICE void transform_stored_row(u8* rows, i32 row, float* vector, float scale,
                                        F transform) {
  const i32 lane = ptx::lane_index();
  constexpr i32 unit = 16 / static_cast<i32>(sizeof(Stored));
  for (i32 d = lane; d < dim; d += 32)
    vector[d] =
        to_float(reinterpret_cast<const Stored*>(rows + Rows::at(row, d / unit))[d % unit]) * scale;
  ptx::sync_warp();
  WarpVector x(vector, dim);
  transform(x);
  for (i32 d = lane; d < 8 * Rows::chunks; d += 32)
    reinterpret_cast<T*>(rows + Rows::at(row, d / 8))[d % 8] =
        d < dim ? from_float<T>(vector[d]) : T{};
  ptx::sync_warp();
}

/// f_k or f_v of the 16-bit keys of a tile that this warp loaded, in place; its rows begin at row
/// `first_row` of `rows`.
template <class T, i32 dim, i32 tile_keys, i32 num_warps, class Facts, class F>
RADDLE_DEVICE void transform_keys(u8* rows, i32 first_row,
                                  const TileKeys<tile_keys, false, num_warps>& keys,
                                  const Facts& facts, F transform) {
  constexpr i32 warp_keys = tile_keys / num_warps;
  const i32 first = ptx::warp_index() * warp_keys, lane = ptx::lane_index();
  const u32 exist = ptx::ballot(lane < warp_keys && keys.column[first + lane % warp_keys] >= 0);
  if (exist == 0) return;
  // A row without a key is seen as the first key that exists, because variants see existing keys
  // only.
  const i32 other = ptx::lowest_bit(exist);
  const auto exists = [=](i32 r) { return (exist >> r & 1u) != 0; };
  const i32 request = facts.request, kv_head = facts.kv_head;
  transform_rows<warp_keys, T, dim>(rows, first_row, exists, [&](auto& x, i32 r) {
    const i32 j = first + (exists(r) ? r : other);
    transform(x, Key{request, keys.kv_index[j], keys.kv_pos[j], kv_head});
  });
}

/// Writes zeros to the row of a missing key.
template <class Rows>
RADDLE_DEVICE void clear_row(u8* rows, i32 row) {
  for (i32 chunk = ptx::lane_index(); chunk < Rows::chunks; chunk += 32)
    *reinterpret_cast<Packed8*>(rows + Rows::at(row, chunk)) = Packed8{};
}

/// f_k or f_v of quantised keys, whose scales are `scale`: one row at a time, through `vector`.
template <class T, class Stored, i32 dim, i32 tile_keys, i32 num_warps, class Facts, class F>
RADDLE_DEVICE void transform_stored_keys(u8* rows, i32 first_row,
                                         const TileKeys<tile_keys, true, num_warps>& keys,
                                         const float (&scale)[tile_keys], const Facts& facts,
                                         float* vector, F transform) {
  using Rows = SharedRows<dim>;
  constexpr i32 warp_keys = tile_keys / num_warps;
  const i32 first = ptx::warp_index() * warp_keys;
  for (i32 i = 0; i < warp_keys; ++i) {
    const i32 j = first + i;
    if (keys.column[j] < 0) {
      clear_row<Rows>(rows, first_row + i);
      continue;
    }
    const Key key{facts.request, keys.kv_index[j], keys.kv_pos[j], facts.kv_head};
    transform_stored_row<T, Stored, Rows, dim>(rows, first_row + i, vector, scale[j],
                                               [&](WarpVector& x) { transform(x, key); });
  }
  ptx::sync_warp();  // the cleared rows
}

/// The request whose keys the rows of a group see; -1 where they belong to several requests.
RADDLE_DEVICE i32 request_of_keys(const GpuLaunch& launch, i32 nth_level, i32 group) {
  const LevelView& level = launch.levels[nth_level];
  if (level.keys_are_shared) return -1;
  return request_of(launch.layout, level, group, query_row(level, group, 0));
}

/// Writes the facts that all keys of an item have in common.
template <class Facts>
RADDLE_DEVICE void describe_item(i32 request, i32 kv_head, Facts& facts) {
  if (ptx::thread_index() != 0) return;
  facts.kv_head = kv_head;
  facts.request = request;
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
