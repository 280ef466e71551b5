// Rows on their way through shared memory: loading queries, transforming rows in place.
#pragma once

#include "raddle/engine/kernel/mma/finish.h"
#include "raddle/engine/kernel/mma/quantized.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// transform(vector) changes one row in shared memory through fp32; the result is rounded once. A
/// warp's work; the row is complete for its lanes. Of an element that is Stored in fewer bytes the
/// row holds those first, and the value is `scale` times it.
template <class T, class Stored, class Rows, i32 dim, class F>
RADDLE_DEVICE void transform_row(u8* rows, i32 row, float* vector, float scale, F transform) {
  const i32 lane = ptx::lane_index();
  const auto element = [&](i32 d) -> T& {
    return reinterpret_cast<T*>(rows + Rows::at(row, d / 8))[d % 8];
  };
  for (i32 d = lane; d < dim; d += 32) {
    if constexpr (is_quantized<Stored>)
      vector[d] = to_float(Stored{rows[Rows::at(row, d / 16) + static_cast<u32>(d % 16)]}) * scale;
    else
      vector[d] = to_float(element(d));
  }
  ptx::sync_warp();
  WarpVector x(vector, dim);
  transform(x);
  for (i32 d = lane; d < dim; d += 32) element(d) = from_float<T>(vector[d]);
  if constexpr (is_quantized<Stored>)
    for (i32 d = dim + lane; d < 8 * Rows::chunks; d += 32) element(d) = T{};
  ptx::sync_warp();
}

/// `count` rows of a query tile on their way to shared memory; a warp's work. Between fetch and
/// store, which waits, there is time for something else.
template <i32 count, class K>
class QueryRows {
  using T = typename K::T;
  using Rows = typename K::QueryRows;
  static constexpr i32 units = ceil_div(count * Rows::chunks, 32);
  static_assert(count <= 32);

 public:
  /// Starts loading rows `first` … of a tile.
  RADDLE_DEVICE void fetch(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head, i32 first) {
    const i32 lane = ptx::lane_index();
    rows_ = min(count, tile.num_rows - first);
    const T* mine = nullptr;
    if (lane < count) {
      row_ = make_row(launch.layout, launch.levels[tile.level], tile.group,
                      tile.row_begin + first + min(lane, tile.num_rows - 1 - first), kv_head,
                      launch.plan.group_size);
      if (lane < rows_)
        mine = static_cast<const T*>(launch.q.data) + row_.row * launch.q.row_stride +
               row_.q_head * launch.q.head_stride;
    }
    RADDLE_UNROLL
    for (i32 i = 0; i < units; ++i) {
      const i32 r = (32 * i + lane) / Rows::chunks, chunk = (32 * i + lane) % Rows::chunks;
      const T* from = ptx::shuffle(mine, min(r, 31));
      x_[i] = r < count && from && 8 * chunk < K::dim_qk
                  ? *reinterpret_cast<const Packed8*>(from + 8 * chunk)
                  : Packed8{};
    }
  }

  /// Puts them into the same rows of shared memory, applies f_q, and says what they are in `facts`.
  /// Rows past the tile's become zero.
  template <class V, class Facts>
  RADDLE_DEVICE void store(const V& variant, i32 first, u8* shared, Facts& facts,
                           float* vector) const {
    const i32 lane = ptx::lane_index();
    if (lane < count) facts.row[first + lane] = row_;
    RADDLE_UNROLL
    for (i32 i = 0; i < units; ++i) {
      const i32 r = (32 * i + lane) / Rows::chunks, chunk = (32 * i + lane) % Rows::chunks;
      if (r < count) *reinterpret_cast<Packed8*>(shared + Rows::at(first + r, chunk)) = x_[i];
    }
    ptx::sync_warp();
    if constexpr (has_query<V>) {
      for (i32 r = 0; r < rows_; ++r) {
        const Row& row = facts.row[first + r];
        transform_row<T, T, Rows, K::dim_qk>(shared, first + r, vector, 1.0f,
                                             [&](WarpVector& q) { variant.query(q, row); });
      }
    }
    if constexpr (K::narrow_keys) {
      if (lane < count) facts.factor[first + lane] = 0.0f;
      for (i32 r = 0; r < rows_; ++r) {
        const float factor = arrange_query<K>(shared, first + r);
        if (lane == 0) facts.factor[first + r] = factor;
      }
    }
  }

 private:
  i32 rows_ = 0;  // that are the tile's
  Row row_{};     // this lane's; padding repeats the tile's last one
  Packed8 x_[units];
};

/// Zeros in place of a row of a key that is not there.
template <class Rows>
RADDLE_DEVICE void clear_row(u8* rows, i32 row) {
  for (i32 chunk = ptx::lane_index(); chunk < Rows::chunks; chunk += 32)
    *reinterpret_cast<Packed8*>(rows + Rows::at(row, chunk)) = Packed8{};
}

/// f_k (`which` 0) or f_v of the keys of a tile that this warp loaded, in place; `rows` are its
/// own.
template <class K, class Rows, i32 dim, i32 which, i32 tile_keys, class Facts, class F>
RADDLE_DEVICE void transform_keys(u8* rows, const TileKeys<tile_keys, K::quantized>& keys,
                                  const Facts& facts, float* vector, F transform) {
  constexpr i32 warp_keys = tile_keys / num_warps;
  const i32 first = ptx::warp_index() * warp_keys;
  for (i32 i = 0; i < warp_keys; ++i) {
    const i32 j = first + i;
    if (keys.column[j] < 0) {
      if constexpr (K::quantized) clear_row<Rows>(rows, i);
      continue;
    }
    float scale = 1.0f;
    if constexpr (K::quantized) scale = keys.scale[which][j];
    const Key key{facts.request, keys.kv_index[j], keys.kv_pos[j], facts.kv_head};
    transform_row<typename K::T, typename K::Stored, Rows, dim>(
        rows, i, vector, scale, [&](WarpVector& x) { transform(x, key); });
  }
  if constexpr (K::quantized) ptx::sync_warp();  // what is clear
}

/// Says what all keys of an item share; the request is -1 where its rows are several requests'.
template <class Facts>
RADDLE_DEVICE void describe_item(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head,
                                 Facts& facts) {
  if (ptx::thread_index() != 0) return;
  const LevelView& level = launch.levels[tile.level];
  facts.kv_head = kv_head;
  facts.request = level.keys_are_shared ? -1
                                        : request_of(launch.layout, level, tile.group,
                                                     query_row(level, tile.group, 0));
}

}  // namespace mma

RADDLE_ENGINE_END
