// Rows of Q, K and V: asynchronous copies into shared memory, and transforms there.
#pragma once

#include "raddle/engine/kernel/gpu/keys.h"
#include "raddle/engine/kernel/gpu/rows.h"
#include "raddle/engine/kernel/mma/quantized.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// copy_rows for rows that are whole lines of 128 bytes: eight lanes copy a row, and each keeps its
/// chunk. Nothing reads what lies behind the last element.
template <class Rows, i32 row_bytes, i32 warp_keys>
RADDLE_DEVICE void copy_lines(u32 to, i32 first_row, const u8* const* source) {
  static_assert(Rows::swizzled && warp_keys % 4 == 0);
  const i32 lane = ptx::lane_index(), chunk = lane % 8;
  RADDLE_UNROLL
  for (i32 i = 0; i < warp_keys; i += 4) {
    const i32 row = i + lane / 8;
    const u8* from = source[row] + 16 * chunk;
    const u32 at = to + Rows::at(first_row + row, chunk);
    RADDLE_UNROLL
    for (i32 first = 0; first < row_bytes; first += 128) {
      const i32 bytes =
          first + 128 <= row_bytes ? 16 : max(0, min(16, row_bytes - first - 16 * chunk));
      ptx::copy_async(at + static_cast<u32>(first), from + first, bytes);
    }
  }
}

/// Copies a warp's keys where K extends V: rows of `row_bytes`, of which the first `v_bytes` are
/// those at `v`, and the others those at `k`.
template <class Rows, i32 v_bytes, i32 row_bytes, i32 warp_keys>
RADDLE_DEVICE void copy_extended_lines(u32 to, i32 first_row, const u8* const* v,
                                       const u8* const* k) {
  static_assert(Rows::swizzled && warp_keys % 4 == 0 && v_bytes % 16 == 0);
  const i32 lane = ptx::lane_index(), chunk = lane % 8;
  RADDLE_UNROLL
  for (i32 i = 0; i < warp_keys; i += 4) {
    const i32 row = i + lane / 8;
    const u8* of_v = v[row] + 16 * chunk;
    const u8* of_k = k[row] + 16 * chunk;
    const u32 at = to + Rows::at(first_row + row, chunk);
    RADDLE_UNROLL
    for (i32 first = 0; first < row_bytes; first += 128) {
      const i32 begin = first + 16 * chunk;
      ptx::copy_async(at + static_cast<u32>(first),
                      begin < v_bytes ? of_v + first : of_k + (first - v_bytes),
                      max(0, min(16, row_bytes - begin)));
    }
  }
}

/// Copies a warp's rows of K or V, whose addresses are in `source`, to shared memory, as rows from
/// `first_row` on. Rows that will be widened in place are copied to the first half of their room.
template <class Kernel, class Rows, i32 dim, bool narrow, i32 warp_keys, i32 batch>
RADDLE_DEVICE void copy_rows(u32 to, i32 first_row, const u8* const* source) {
  constexpr i32 row_bytes = dim * static_cast<i32>(sizeof(typename Kernel::Stored));
  constexpr i32 chunks = Kernel::quantized && !narrow ? Rows::chunks / 2 : Rows::chunks;
  const i32 lane = ptx::lane_index();
  if constexpr (Kernel::wide) return copy_lines<Rows, row_bytes, warp_keys>(to, first_row, source);
  const u32 to_first = to + Rows::at(first_row + lane / chunks, lane % chunks);
  // All addresses of a batch are read before its first copy starts, so that the warp waits once.
  constexpr i32 copies = ceil_div(warp_keys * chunks, 32);
  // Where the chunks of a row divide 32, a lane copies the same chunk of every row.
  constexpr bool even = 32 % chunks == 0;
  RADDLE_UNROLL
  for (i32 first = 0; first < copies; first += batch) {
    const u8* from[batch];
    RADDLE_UNROLL
    for (i32 i = first; i < min(first + batch, copies); ++i) {
      const i32 row = even ? lane / chunks + 32 / chunks * i : (32 * i + lane) / chunks;
      const i32 chunk = even ? lane % chunks : (32 * i + lane) % chunks;
      from[i - first] = source[min(row, warp_keys - 1)] + 16 * chunk;
    }
    RADDLE_UNROLL
    for (i32 i = first; i < min(first + batch, copies); ++i) {
      const i32 row = even ? lane / chunks + 32 / chunks * i : (32 * i + lane) / chunks;
      const i32 chunk = even ? lane % chunks : (32 * i + lane) % chunks;
      if (warp_keys * chunks % 32 != 0 && row >= warp_keys) continue;
      const u32 at = even ? Rows::rows_after(to_first, 32 / chunks * i)
                          : to + Rows::at(first_row + row, chunk);
      const i32 bytes =
          row_bytes % (16 * chunks) == 0 ? 16 : max(0, min(16, row_bytes - 16 * chunk));
      ptx::copy_async(at, from[i - first], bytes);
    }
  }
}

/// Rows of bytes become rows of T in place: a warp's, which lie in the first halves of their room,
/// from `first_row` on, each up to whole lines of T.
template <class Kernel, class Rows, i32 dim, i32 warp_keys>
RADDLE_DEVICE void widen_rows(u8* rows, i32 first_row) {
  constexpr i32 batch = 2, chunks = round_up(dim, line) / 16;
  constexpr i32 units = ceil_div(batch * chunks, 32);
  static_assert(warp_keys % batch == 0);
  RADDLE_ROLLED
  for (i32 first = first_row; first < first_row + warp_keys; first += batch) {
    Packed8 x[units];
    const auto each = [&](auto f) {
      RADDLE_UNROLL
      for (i32 i = 0; i < units; ++i) {
        const i32 at = 32 * i + ptx::lane_index();
        if (at < batch * chunks) f(x[i], first + at / chunks, at % chunks);
      }
    };
    const auto place = [&](i32 row, i32 chunk) {
      return reinterpret_cast<Packed8*>(rows + Rows::at(row, chunk));
    };
    each([&](Packed8& bytes, i32 row, i32 chunk) { bytes = *place(row, chunk); });
    ptx::sync_warp();  // all lanes have read
    each([&](const Packed8& bytes, i32 row, i32 chunk) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        Packed8 wide;
        RADDLE_UNROLL
        for (i32 i = 0; i < 2; ++i) {
          u32 y[2];
          widen_in_order(y, bytes.x[2 * half + i], typename Kernel::Stored{});
          convert_pairs(y, typename Kernel::T{});
          wide.x[2 * i] = y[0];
          wide.x[2 * i + 1] = y[1];
        }
        *place(row, 2 * chunk + half) = wide;
      }
    });
  }
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
  RADDLE_DEVICE void fetch(const GpuLaunch& launch, const QueryTile& tile, i32 kv_head, i32 first) {
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
  RADDLE_DEVICE void copy(const GpuLaunch& launch, const QueryTile& tile, i32 kv_head, i32 first,
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

  /// The facts of this lane's row, after fetch or copy, and which of the tile's it is if the first
  /// of these is `first`.
  RADDLE_DEVICE const Row& row() const { return row_; }
  RADDLE_DEVICE static i32 row_number(i32 first) { return first + nth(ptx::lane_index()); }

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
  RADDLE_DEVICE const T* find(const GpuLaunch& launch, const QueryTile& tile, i32 kv_head,
                              i32 first) {
    rows_ = tile.num_rows - first;
    const i32 lane = ptx::lane_index();
    if (lane >= count) return nullptr;
    row_ = make_row(launch.layout, launch.levels[tile.level], tile.group,
                    tile.row_begin + min(first + nth(lane), tile.num_rows - 1), kv_head,
                    launch.plan.group_size);
    return static_cast<const T*>(launch.q.data) + offset_in(launch.q, row_);
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
    KeyOperand<Kernel>::template arrange_queries<block>(shared, first, rows, facts);
  }

  i32 rows_ = 0;  // rows of the tile, from the first of these on
  Row row_{};     // facts of this lane's row; padding repeats the tile's last one
  Packed8 chunks_[units];
};

/// f_k (`which` 0) or f_v of the part of a slot that this warp loaded, in place.
template <class Kernel, class Memory, i32 which, class F>
RADDLE_DEVICE void transform_slot(i32 slot, const typename Memory::Keys& keys, F transform) {
  using Rows =
      typename Either<which == 0, typename Kernel::KeyRows, typename Kernel::ValueRows>::Type;
  constexpr i32 dim = which == 0 ? Kernel::dim_qk : Kernel::dim_vo;
  const i32 warp = ptx::warp_index();
  u8* rows = Memory::slot_memory(slot) + Memory::template part_of<Rows>(warp);
  const i32 first_row = Memory::first_of_part(warp);
  const auto& facts = Memory::facts();
  if constexpr (Kernel::quantized)
    transform_stored_keys<typename Kernel::T, typename Kernel::Stored, dim>(
        rows, first_row, keys, keys.scale[which], facts, Memory::vector(warp), transform);
  else
    transform_keys<typename Kernel::T, dim>(rows, first_row, keys, facts, transform);
}

/// f_k of the part of a slot that this warp loaded, in place, where the variant changes keys.
template <class Kernel, class Memory, class Variant>
RADDLE_DEVICE void change_keys(const Variant& variant, i32 slot,
                               const typename Memory::Keys& keys) {
  if constexpr (has_key<Variant>)
    transform_slot<Kernel, Memory, 0>(slot, keys,
                                      [v = variant](auto& x, const Key& key) { v.key(x, key); });
}

/// f_v of the part of a slot that this warp loaded, in place, where the variant changes values.
template <class Kernel, class Memory, class Variant>
RADDLE_DEVICE void change_values(const Variant& variant, i32 slot,
                                 const typename Memory::Keys& keys) {
  if constexpr (has_value<Variant>)
    transform_slot<Kernel, Memory, 1>(slot, keys,
                                      [v = variant](auto& x, const Key& key) { v.value(x, key); });
}

}  // namespace mma

RADDLE_ENGINE_END
