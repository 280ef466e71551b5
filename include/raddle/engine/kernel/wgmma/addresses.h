// Where the rows of KV tiles lie that boxes cannot copy: in pages of any size, in parts of pages,
// in tensors whose strides no tensor map takes.
#pragma once

#include "raddle/engine/kernel/gpu/keys.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// Takes the next tile off a run of columns.
template <class Kernel>
RADDLE_DEVICE Span take_next_tile(Span& run) {
  constexpr i32 keys = Kernel::tile_keys;
  return Kernel::reads_from_end ? take_last_tile(run, keys) : take_tile(run, keys);
}

/// Finds the addresses of the rows of an item's tiles: each lane those of every 32nd row.
template <class Kernel>
class RowAddresses {
  static constexpr i32 lane_keys = Kernel::tile_keys / 32;

 public:
  /// The pages of this lane's rows.
  struct Found {
    i32 page[lane_keys];
  };

  RADDLE_DEVICE RowAddresses(const GpuLaunch& launch, const KeySource& source)
      : launch_(launch),
        source_(source),
        looks_ahead_(lies_in_pages(source) && is_short(source.page_stride) &&
                     is_short(source.row_stride)) {}

  /// Asks for the pages of a tile's rows, if they are looked up ahead.
  RADDLE_DEVICE Found find(const Span& tile) const {
    Found found{};
    if (looks_ahead_) look_up_pages(source_, tile, found.page);
    return found;
  }
  /// Writes the addresses of the tile's rows of K (`which` 0) or V. The source is read before the
  /// first one is written, because the compiler reads it again after every store.
  template <i32 which>
  RADDLE_DEVICE void write(const Span& tile, const Found& found, const u8** table) const {
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
        const bool exists = nth >= read.begin && nth < read.end;
        put(table, i, exists ? first + offset : zeros<Kernel>());
      }
    } else {
      RADDLE_ROLLED
      for (i32 i = 0; i < lane_keys; ++i) {
        const i32 nth = column(tile, i), page = look_up_page(source_, tile, nth);
        const Column key = find_key(launch_, source_, tile, nth, page);
        put(table, i, row_address<Kernel>(source_, which, key));
      }
    }
  }

 private:
  RADDLE_DEVICE static bool is_short(const i64 (&stride)[2]) {
    return static_cast<u64>(stride[0] | stride[1]) >> 32 == 0;
  }
  RADDLE_DEVICE static i32 column(const Span& tile, i32 i) {
    return tile.begin + 32 * i + ptx::lane_index();
  }
  RADDLE_DEVICE static void put(const u8** table, i32 i, const u8* row) {
    table[32 * i + ptx::lane_index()] = row;
  }

  const GpuLaunch& launch_;
  const KeySource& source_;
  /// Pages of a power of two of keys, less than 4 GB apart, are looked up ahead, and their
  /// addresses take few instructions; other layouts are looked up when addresses are written.
  const bool looks_ahead_;
};

/// Finds the addresses of all rows, of K and of V, ahead of the warps that copy them, which have
/// nothing else to do then.
template <class Kernel>
class AddressFinder {
  using Block = Memory<Kernel>;

 public:
  RADDLE_DEVICE explicit AddressFinder(const Launch& launch) : launch_(launch) {}

  /// Finds those of an item's first tile, unless boxes copy it. Its queries may have to wait for
  /// the slot of an item that is sent only when this tile is there.
  RADDLE_DEVICE void begin(const KeySource& source) {
    Span rest = source.rest;
    if (!copies_rows_of(source)) return;
    const RowAddresses<Kernel> addresses(launch_, source);
    const Span tile = take_next_tile<Kernel>(rest);
    put(addresses, tile, addresses.find(tile));
  }
  /// Finds those of its other tiles; pages of the next one are asked for ahead.
  RADDLE_DEVICE void finish(KeySource& source) {
    Span rest = source.rest;
    if (!copies_rows_of(source)) return;
    const RowAddresses<Kernel> addresses(launch_, source);
    Span tile = take_next_tile<Kernel>(rest);
    if (!find_rest(source, rest)) return;
    tile = take_next_tile<Kernel>(rest);
    auto found = addresses.find(tile);
    RADDLE_ROLLED
    for (bool last = false; !last;) {
      last = !find_rest(source, rest);
      const Span next = last ? tile : take_next_tile<Kernel>(rest);
      const auto next_found = addresses.find(next);
      put(addresses, tile, found);
      tile = next, found = next_found;
    }
  }

 private:
  RADDLE_DEVICE bool copies_rows_of(const KeySource& source) const {
    return source.rest.begin != source.rest.end && !launch_.in_boxes[source.level];
  }
  /// Goes on to the next run of columns where one has ended; returns whether any are left.
  RADDLE_DEVICE static bool find_rest(KeySource& source, Span& rest) {
    if (rest.begin == rest.end) rest = next_run<Kernel::reads_from_end>(source);
    return rest.begin != rest.end;
  }
  RADDLE_DEVICE void put(const RowAddresses<Kernel>& addresses, const Span& tile,
                         const typename RowAddresses<Kernel>::Found& found) {
    put<0>(addresses, tile, found);
    put<1>(addresses, tile, found);
    ++tiles_;
  }
  /// Writes the addresses of a tile's rows of K (`which` 0) or V, once those two tiles before have
  /// been read.
  template <i32 which>
  RADDLE_DEVICE void put(const RowAddresses<Kernel>& addresses, const Span& tile,
                         const typename RowAddresses<Kernel>::Found& found) const {
    Block& block = Block::get();
    const auto at = block.tables[which].place(tiles_);
    ptx::barrier_wait(ptx::shared_address(&block.tables[which].free[at.slot]), at.parity ^ 1);
    addresses.template write<which>(tile, found, block.scratch.rows[at.slot].row[which]);
    ptx::sync_warp();
    if (ptx::lane_index() == 0)
      ptx::barrier_arrive(ptx::shared_address(&block.tables[which].full[at.slot]));
  }

  const Launch& launch_;
  i32 tiles_ = 0;  ///< so far
};

}  // namespace wgmma

RADDLE_ENGINE_END
