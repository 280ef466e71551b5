// Loads the KV tiles of short queries and of wide heads into shared memory. Every warp walks the
// tiles by itself and copies its share of each tile's keys: rows of K, then rows of V. The tiles of
// one item follow those of the item before without a pause.
//
// Each lane finds where the row of its key lies and writes the address to a table; then the lanes
// copy the rows together. The page table is read one tile ahead, so that no warp waits for it.
#pragma once

#include "raddle/engine/kernel/mma/copy.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A warp's tiles of items [item, end), or up to the first item of another shape. The warp loads K
/// and V of a tile in turns, and finds the next tile after V.
template <class Kernel, class Layout>
class KeyStream {
  static constexpr i32 warp_keys = Layout::warp_keys;
  static_assert(warp_keys <= 32);

 public:
  RADDLE_DEVICE KeyStream(const GpuLaunch& launch, i32 item, i32 end)
      : launch_(launch), source_(Layout::source(ptx::warp_index())), item_(item), end_(end) {}

  /// Opens the first item; to be called before the first load. A load of values does so, too.
  RADDLE_DEVICE void start() { find_tile(); }

  /// Starts copying a tile's K and writes the facts about its keys, if there is a tile; nothing is
  /// copied for a tile without columns.
  RADDLE_DEVICE void load_keys(i32 slot, i32 keys_slot) {
    if (there_) {
      describe_keys(Layout::keys_at(keys_slot));
      there_ = !(flags_ & TileFlags::empty);
    }
    if (!there_) return;
    publish_rows();
    copy<typename Kernel::KeyRows, Kernel::dim_qk, Kernel::narrow_keys>(slot, 0);
  }

  /// Starts copying V of the same tile, and finds the next one.
  RADDLE_DEVICE void load_values(i32 slot) {
    if (there_) copy<typename Kernel::ValueRows, Kernel::dim_vo, Kernel::narrow_values>(slot, 1);
    find_tile();
  }
  /// Finds the next tile without copying V, which is a part of K.
  RADDLE_DEVICE void skip_values() { find_tile(); }

 private:
  RADDLE_DEVICE void describe_keys(typename Layout::Keys& keys) const {
    const i32 lane = ptx::lane_index(), warp = ptx::warp_index();
    if (lane >= warp_keys) return;
    const i32 j = warp_keys * warp + lane;
    describe_key(keys, j, column_, at_);
    if (lane == 0) keys.flags[warp] = flags_;
    if constexpr (Kernel::quantized)
      if (!(flags_ & TileFlags::empty)) load_scales(source_, keys, j, at_);
  }

  /// With 16 keys a warp, a lane writes one address; with 32, two.
  RADDLE_DEVICE void publish_rows() const {
    auto& table = Layout::row_table(ptx::warp_index());
    ptx::sync_warp();  // all lanes have read the addresses of the tile before
    RADDLE_UNROLL
    for (i32 i = 0; i < ceil_div(2 * warp_keys, 32); ++i) {
      const i32 which = (ptx::lane_index() + 32 * i) / warp_keys;
      if (which > 1) continue;
      table.row[which][ptx::lane_index() % warp_keys] = row_address<Kernel>(source_, which, at_);
    }
    ptx::sync_warp();
  }

  /// Copies this warp's rows of K (`which` 0) or V.
  template <class Rows, i32 dim, bool narrow>
  RADDLE_DEVICE void copy(i32 slot, i32 which) const {
    const i32 warp = ptx::warp_index();
    copy_rows<Kernel, Rows, dim, narrow, warp_keys, 8>(
        Layout::slot_address(slot) + static_cast<u32>(Layout::template part_of<Rows>(warp)),
        Layout::first_of_part(warp), Layout::row_table(warp).row[which]);
  }

  /// Finds the next tile and the key of this lane.
  RADDLE_DEVICE void find_tile() {
    there_ = open_ || next_item();
    if (!there_) return;
    at_ = Column{0, 0, 0, 0, false};
    flags_ = TileFlags::empty | TileFlags::last;  // an item without keys has one empty tile
    open_ = false;
    if (rest_.begin == rest_.end) return;
    const Span tile = take_tile(rest_, Layout::tile_keys);
    if (rest_.begin == rest_.end) rest_ = next_run(source_);
    open_ = rest_.begin != rest_.end;
    column_ = column_of(tile);
    at_ = find_key(launch_, source_, tile, column_, next_page_);
    flags_ = tile_flags(source_, tile, Layout::tile_keys, !open_);
    if (open_) look_up();
  }

  RADDLE_DEVICE void look_up() { next_page_ = look_up_page(source_, rest_, column_of(rest_)); }

  /// This lane's column of a tile that begins where the span does.
  RADDLE_DEVICE static i32 column_of(const Span& span) {
    return span.begin + warp_keys * ptx::warp_index() + ptx::lane_index() % warp_keys;
  }

  /// Opens the next item; false where this stream has no other.
  RADDLE_DEVICE bool next_item() {
    if (item_ == end_) return false;
    const WorkItem item = launch_.plan.items[item_];
    const bool ours = launch_.plan.query_tiles[item.query_tile].shape == Layout::shape;
    item_ = ours ? item_ + 1 : end_;
    if (!ours) return false;
    rest_ = open_item<Kernel>(launch_, item, source_);
    if (rest_.begin < rest_.end) look_up();
    return true;
  }

  const GpuLaunch& launch_;
  typename Layout::Source& source_;
  i32 item_;  // the next item to open
  const i32 end_;
  bool open_ = false;  // the item has more tiles
  Span rest_;          // what is left of the current run
  i32 next_page_ = 0;  // page of this lane's key in the next tile
  // The tile that was found last and is loaded next.
  bool there_ = false;
  i32 flags_, column_;
  Column at_;
};

}  // namespace mma

RADDLE_ENGINE_END
