// The KV tiles of short queries, and of wide heads, on their way to shared memory. Every warp walks
// the tiles by itself and copies its share of each tile's keys: K rows, then V rows. Tiles run on
// over items.
//
// A lane finds where its key's rows lie; a table tells the others, who copy the rows together. The
// page table is read a tile ahead, so that nobody waits for it.
#pragma once

#include "raddle/engine/kernel/mma/key_source.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A warp's tiles, of items [item, end), or up to the first of another shape. K and V of a tile are
/// loaded in turns, and the next tile is found when one has been loaded.
template <class K, class Layout>
class KeyStream {
  static constexpr i32 warp_keys = Layout::warp_keys;
  static_assert(warp_keys <= 32);

 public:
  RADDLE_DEVICE KeyStream(const MmaLaunch& launch, i32 item, i32 end)
      : launch_(launch), source_(Layout::source(ptx::warp_index())), item_(item), end_(end) {}

  /// Opens the first item, before the first load; so does a load of values.
  RADDLE_DEVICE void start() { find_tile(); }

  /// Starts copying a tile's K, and says what there is to know of its keys, if there is a tile; one
  /// without columns has nothing to copy.
  RADDLE_DEVICE void load_keys(i32 slot, i32 keys_slot) {
    if (there_) {
      describe_keys(Layout::keys_at(keys_slot));
      there_ = !(flags_ & TileFlags::empty);
    }
    if (!there_) return;
    publish_rows();
    copy<typename K::KeyRows, K::dim_qk, K::narrow_keys>(slot, 0);
  }

  /// Starts copying that tile's V.
  RADDLE_DEVICE void load_values(i32 slot) {
    if (there_) copy<typename K::ValueRows, K::dim_vo, K::narrow_values>(slot, 1);
    find_tile();
  }
  /// Goes on without its V, which is a part of K.
  RADDLE_DEVICE void skip_values() { find_tile(); }

 private:
  RADDLE_DEVICE void describe_keys(typename Layout::Keys& keys) const {
    const i32 lane = ptx::lane_index(), warp = ptx::warp_index();
    if (lane >= warp_keys) return;
    const i32 j = warp_keys * warp + lane;
    describe_key(keys, j, column_, at_);
    if (lane == 0) keys.flags[warp] = flags_;
    if constexpr (K::quantized)
      if (!(flags_ & TileFlags::empty)) load_scales(source_, keys, j, at_);
  }

  /// Lanes of a warp with 16 keys see to one row each, with 32 to two.
  RADDLE_DEVICE void publish_rows() const {
    auto& table = Layout::row_table(ptx::warp_index());
    ptx::sync_warp();  // all lanes have read the last tile's
    RADDLE_UNROLL
    for (i32 i = 0; i < ceil_div(2 * warp_keys, 32); ++i) {
      const i32 which = (ptx::lane_index() + 32 * i) / warp_keys;
      if (which > 1) continue;
      table.row[which][ptx::lane_index() % warp_keys] = row_address<K>(source_, which, at_);
    }
    ptx::sync_warp();
  }

  /// Copies this warp's rows of K (`which` 0) or V. A batch's addresses are read together.
  template <class Rows, i32 dim, bool narrow>
  RADDLE_DEVICE void copy(i32 slot, i32 which) const {
    const i32 warp = ptx::warp_index();
    copy_rows<K, Rows, dim, narrow, warp_keys, 8>(
        Layout::slot_address(slot) + static_cast<u32>(Layout::template part_of<Rows>(warp)),
        Layout::first_of_part(warp), Layout::row_table(warp).row[which]);
  }

  /// Finds the next tile and where this lane's row of it lies.
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
    at_ = find_key(launch_, source_, tile, column_, next_block_);
    flags_ = tile_flags(source_, tile, Layout::tile_keys, !open_);
    if (open_) look_up();
  }

  RADDLE_DEVICE void look_up() { next_block_ = look_up_block(source_, rest_, column_of(rest_)); }

  /// This lane's column of a tile that begins where a span does.
  RADDLE_DEVICE static i32 column_of(const Span& span) {
    return span.begin + warp_keys * ptx::warp_index() + ptx::lane_index() % warp_keys;
  }

  /// Opens the next item; false where there is none of this stream.
  RADDLE_DEVICE bool next_item() {
    if (item_ == end_) return false;
    const WorkItem item = launch_.plan.items[item_];
    const bool ours = launch_.plan.query_tiles[item.query_tile].shape == Layout::shape;
    item_ = ours ? item_ + 1 : end_;
    if (!ours) return false;
    rest_ = open_item<K>(launch_, item, source_);
    if (rest_.begin < rest_.end) look_up();
    return true;
  }

  const MmaLaunch& launch_;
  typename Layout::Source& source_;
  i32 item_;  // the next one to open
  const i32 end_;
  bool open_ = false;   // the item has a tile to be found:
  Span rest_;           // of the run that it begins
  i32 next_block_ = 0;  // which this lane's row of it is in
  // The tile that was found last, and is loaded next.
  bool there_ = false;
  i32 flags_, column_;
  Column at_;
};

}  // namespace mma

RADDLE_ENGINE_END
