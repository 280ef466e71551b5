// The rows of a KV tile where boxes cannot copy them: of pages of any size, of parts of pages, of
// tensors whose strides no tensor map takes.
#pragma once

#include "raddle/engine/kernel/gpu/keys.h"
#include "raddle/engine/kernel/wgmma/row_copies.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// The rows of an item's tiles. Each lane finds every 32nd of a tile's, and eight lanes copy one,
/// whose address they read from shared memory.
template <class Kernel, i32 which>
class Gather {
  static constexpr i32 tile_keys = Kernel::tile_keys, lane_keys = tile_keys / 32;
  static constexpr i32 dim = which == 0 ? Kernel::dim_qk : Kernel::dim_vo;
  using T = typename Kernel::T;
  using Slots = Slot<tile_keys, ceil_div(dim, 64)>;

 public:
  /// The pages of this lane's rows.
  struct Found {
    i32 page[lane_keys];
  };
  /// Rows without a key are copied from a row of zeros.
  static constexpr bool clears_missing = true;
  static constexpr bool leaves_time = false;  ///< to ask about parts of tiles

  RADDLE_DEVICE Gather(const GpuLaunch& launch, const KeySource& source)
      : launch_(launch),
        source_(source),
        looks_ahead_(lies_in_pages(source) && is_short(source.page_stride) &&
                     is_short(source.row_stride)) {}

  RADDLE_DEVICE Found find(const Span& tile) const {
    Found found{};
    if (looks_ahead_) look_up_pages(source_, tile, found.page);
    return found;
  }
  /// Writes the addresses of the tile's rows. The source is read before the first one is written,
  /// because the compiler reads it again after every store.
  RADDLE_DEVICE void prepare(const Span& tile, const Found& found) const {
    ptx::sync_warp();  // all lanes have read those of the tile before
    if (looks_ahead_) {
      const Span read = columns_read(source_, tile);
      const u8* first = source_.row[which];
      const u32 page_stride = static_cast<u32>(source_.page_stride[which]),
                row_stride = static_cast<u32>(source_.row_stride[which]);
      const i32 mask = (1 << source_.page_shift) - 1;
      RADDLE_UNROLL
      for (i32 i = 0; i < lane_keys; ++i) {
        const i32 nth = column(tile, i);
        const u64 offset = u64{static_cast<u32>(found.page[i])} * page_stride +
                           u64{static_cast<u32>(nth & mask)} * row_stride;
        put(i, nth >= read.begin && nth < read.end ? first + offset : zeros<Kernel>());
      }
    } else {
      RADDLE_ROLLED
      for (i32 i = 0; i < lane_keys; ++i) {
        const i32 nth = column(tile, i), page = look_up_page(source_, tile, nth);
        put(i, row_address<Kernel>(source_, which, find_key(launch_, source_, tile, nth, page)));
      }
    }
    ptx::sync_warp();
  }
  /// Starts copying the tile that has been prepared to a slot, which `full` waits for. What the
  /// copies write, products see behind a fence of the threads that wait (await_tile).
  RADDLE_DEVICE void copy(const Span&, const Found&, u32 slot, u32 full) const {
    RADDLE_ROLLED
    for (i32 first = 0; first < tile_keys; first += 32)
      copy_rows<Slots, dim, 32, T>(slot + static_cast<u32>(128 * first), [first](i32 m) {
        return *reinterpret_cast<const RowPair<T>*>(table() + first + m);
      });
    ptx::barrier_await_copies(full);
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(full);
  }

 private:
  RADDLE_DEVICE static bool is_short(const i64 (&stride)[2]) {
    return static_cast<u64>(stride[which]) >> 32 == 0;
  }
  RADDLE_DEVICE static i32 column(const Span& tile, i32 i) {
    return tile.begin + 32 * i + ptx::lane_index();
  }
  RADDLE_DEVICE static const u8** table() { return Memory<Kernel>::get().rows.row[which]; }
  RADDLE_DEVICE static void put(i32 i, const u8* row) { table()[32 * i + ptx::lane_index()] = row; }

  const GpuLaunch& launch_;
  const KeySource& source_;
  /// Pages of a power of two of keys, less than 4 GB apart, are looked up ahead, and their
  /// addresses take few instructions; other layouts are looked up when a tile is prepared.
  const bool looks_ahead_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
