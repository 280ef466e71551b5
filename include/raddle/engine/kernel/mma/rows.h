// Rows in shared memory: loading queries, and transforming rows in place.
#pragma once

#include "raddle/engine/kernel/mma/finish.h"
#include "raddle/engine/kernel/mma/quantized.h"
#include "raddle/engine/tile/row_vector.h"

RADDLE_ENGINE_BEGIN

namespace mma {

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

/// Loads `count` rows of a query tile into shared memory; all lanes of a warp call it. With more
/// than 16 rows, the second 16 lie `apart` rows behind the first. There are two ways: `fetch` loads
/// into registers and `store` writes shared memory once that is free; or `copy` starts asynchronous
/// copies and `complete` waits for them. Other work fits between the two calls.
template <i32 count, class Kernel, i32 apart = 16>
class QueryRows {
  using T = typename Kernel::T;
  using Rows = typename Kernel::QueryRows;
  static constexpr i32 units = ceil_div(count * Rows::chunks, 32);
  static constexpr i32 block = min(count, 16);
  static_assert(count <= 32 && count % block == 0);

 public:
  /// Starts loading rows `first` … of a tile into registers.
  RADDLE_DEVICE void fetch(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head, i32 first) {
    const T* mine = find(launch, tile, kv_head, first);
    if (nth(ptx::lane_index()) >= rows_) mine = nullptr;
    each([&](i32 i, i32 r, i32 chunk) {
      const T* from = ptx::shuffle(mine, min(r, 31));
      chunks_[i] = r < count && from && 8 * chunk < Kernel::dim_qk
                       ? *reinterpret_cast<const Packed8*>(from + 8 * chunk)
                       : Packed8{};
    });
  }

  /// Writes them to the same rows of shared memory, applies f_q, and writes the row facts to
  /// `facts`. Rows beyond the tile's become zero.
  template <class Variant, class Facts>
  RADDLE_DEVICE void store(const Variant& variant, i32 first, u8* shared, Facts& facts) const {
    each([&](i32 i, i32 r, i32 chunk) {
      if (r < count)
        *reinterpret_cast<Packed8*>(shared + Rows::at(first + nth(r), chunk)) = chunks_[i];
    });
    describe(variant, first, shared, facts);
  }

  /// Starts copying rows `first` … of a tile to the same rows of shared memory, as one group of
  /// copies. Rows beyond the tile's become zero.
  RADDLE_DEVICE void copy(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head, i32 first,
                          u8* shared) {
    static_assert(count * Rows::chunks % 32 == 0);
    const T* mine = find(launch, tile, kv_head, first);
    const u32 to = ptx::shared_address(shared);
    constexpr i32 batch =
        units % 4 == 0 ? 4 : 1;  // copies unrolled together; the code runs once an item
    each<batch>([&](i32, i32 r, i32 chunk) {
      const T* from = ptx::shuffle(mine, r);
      const i32 bytes = nth(r) < rows_ ? max(0, min(16, 2 * (Kernel::dim_qk - 8 * chunk))) : 0;
      ptx::copy_async(to + Rows::at(first + nth(r), chunk), bytes > 0 ? from + 8 * chunk : from,
                      bytes);
    });
    ptx::copy_commit();
  }

  /// Waits for the copies, applies f_q, and writes the row facts to `facts`.
  template <class Variant, class Facts>
  RADDLE_DEVICE void complete(const Variant& variant, i32 first, u8* shared, Facts& facts) const {
    ptx::copy_wait<0>();
    describe(variant, first, shared, facts);
  }

  /// The facts of this lane's row, after fetch or copy.
  RADDLE_DEVICE const Row& row() const { return row_; }

 private:
  RADDLE_DEVICE static i32 nth(i32 r) { return count <= 16 ? r : r / 16 * apart + r % 16; }

  /// f(i, row, chunk) for this lane's chunks, `batch` of them unrolled.
  template <i32 batch = units, class F>
  RADDLE_DEVICE static void each(F f) {
    RADDLE_ROLLED
    for (i32 done = 0; done < units; done += batch) {
      RADDLE_UNROLL
      for (i32 i = 0; i < batch; ++i) {
        const i32 at = 32 * (done + i) + ptx::lane_index();
        f(done + i, at / Rows::chunks, at % Rows::chunks);
      }
    }
  }

  /// Finds the facts of this lane's row, and returns its address. Padding repeats the tile's last
  /// row.
  RADDLE_DEVICE const T* find(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head,
                              i32 first) {
    rows_ = tile.num_rows - first;
    const i32 lane = ptx::lane_index();
    if (lane >= count) return nullptr;
    row_ = make_row(launch.layout, launch.levels[tile.level], tile.group,
                    tile.row_begin + min(first + nth(lane), tile.num_rows - 1), kv_head,
                    launch.plan.group_size);
    return static_cast<const T*>(launch.q.data) + row_.row * launch.q.row_stride +
           row_.q_head * launch.q.head_stride;
  }

  /// Writes the facts of rows that lie in shared memory, and applies f_q.
  template <class Variant, class Facts>
  RADDLE_DEVICE void describe(const Variant& variant, i32 first, u8* shared, Facts& facts) const {
    const i32 lane = ptx::lane_index();
    if (lane < count) facts.row[first + nth(lane)] = row_;
    ptx::sync_warp();
    RADDLE_ROLLED
    for (i32 r = 0; r < count; r += block)
      transform(variant, first + nth(r), min(block, rows_ - nth(r)), shared, facts);
  }

  /// f_q of up to 16 rows, of which `rows` are the tile's.
  template <class Variant, class Facts>
  RADDLE_DEVICE static void transform(const Variant& variant, i32 first, i32 rows, u8* shared,
                                      Facts& facts) {
    if constexpr (has_query<Variant> && !Kernel::wide) {
      // Rows beyond the tile's are seen as its last row.
      if (rows > 0)
        transform_rows<block, T, Kernel::dim_qk>(
            shared, first, [=](i32 r) { return r < rows; },
            [&, v = variant](auto& q, i32 r) { v.query(q, facts.row[first + r]); });
    }
    if constexpr (Kernel::narrow_keys) {
      const i32 lane = ptx::lane_index();
      if (lane < block) facts.factor[first + lane] = 0.0f;
      for (i32 r = 0; r < rows; ++r) {
        const float factor = arrange_query<Kernel>(shared, first + r);
        if (lane == 0) facts.factor[first + r] = factor;
      }
    }
  }

  i32 rows_ = 0;  // rows of the tile, from the first of these on
  Row row_{};     // facts of this lane's row; padding repeats the tile's last one
  Packed8 chunks_[units];
};

/// f_k or f_v of the 16-bit keys of a tile that this warp loaded, in place; its rows begin at row
/// `first_row` of `rows`.
template <class T, i32 dim, i32 tile_keys, class Facts, class F>
RADDLE_DEVICE void transform_keys(u8* rows, i32 first_row, const TileKeys<tile_keys, false>& keys,
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
template <class T, class Stored, i32 dim, i32 tile_keys, class Facts, class F>
RADDLE_DEVICE void transform_stored_keys(u8* rows, i32 first_row,
                                         const TileKeys<tile_keys, true>& keys,
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

/// f_k (`which` 0) or f_v of the part of a slot that this warp loaded, in place.
template <class Kernel, class Layout, i32 which, class F>
RADDLE_DEVICE void transform_slot(i32 slot, const typename Layout::Keys& keys, F transform) {
  using Rows =
      typename Either<which == 0, typename Kernel::KeyRows, typename Kernel::ValueRows>::Type;
  constexpr i32 dim = which == 0 ? Kernel::dim_qk : Kernel::dim_vo;
  const i32 warp = ptx::warp_index();
  u8* rows = Layout::slot_memory(slot) + Layout::template part_of<Rows>(warp);
  const i32 first_row = Layout::first_of_part(warp);
  const auto& facts = Layout::scratch();
  if constexpr (Kernel::quantized)
    transform_stored_keys<typename Kernel::T, typename Kernel::Stored, dim>(
        rows, first_row, keys, keys.scale[which], facts, Layout::vector(warp), transform);
  else
    transform_keys<typename Kernel::T, dim>(rows, first_row, keys, facts, transform);
}

/// The request whose keys a tile's rows see; -1 where the rows belong to several requests.
RADDLE_DEVICE i32 request_of_keys(const MmaLaunch& launch, const QueryTile& tile) {
  const LevelView& level = launch.levels[tile.level];
  if (level.keys_are_shared) return -1;
  return request_of(launch.layout, level, tile.group, query_row(level, tile.group, 0));
}

/// Writes the facts that all keys of an item have in common.
template <class Facts>
RADDLE_DEVICE void describe_item(i32 request, i32 kv_head, Facts& facts) {
  if (ptx::thread_index() != 0) return;
  facts.kv_head = kv_head;
  facts.request = request;
}

}  // namespace mma

RADDLE_ENGINE_END
