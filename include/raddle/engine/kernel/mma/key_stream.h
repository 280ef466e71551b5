// The KV tiles of work items on their way to shared memory. Every warp walks the tiles by itself
// and loads its share of each tile's keys: K rows, then V rows, a group of asynchronous copies
// each.
//
// Lanes 0–15 know where a key's K row lies, lanes 16–31 its V row, and tell the others when it is
// copied.
#pragma once

#include "raddle/engine/kernel/mma/shared.h"
#include "raddle/engine/tile/walk.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A KV tile, as far as one lane knows it.
struct FoundTile {
  i32 level, kv_head;
  i32 flags;   ///< TileFlags
  i32 column;  ///< of this lane's key,
  Column at;   ///< and where it lies
};

/// What of tile `span` of an item this lane is to load.
template <class Layout>
RADDLE_DEVICE FoundTile find_tile(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head,
                                  const Span& span, bool last) {
  const LevelView& level = launch.levels[tile.level];
  const i32 begin = max(span.begin, tile.col_begin), end = min(span.end, tile.col_end);
  const i32 j = ptx::thread_index() % 16;
  const bool ragged = end - begin < Layout::tile_keys || level.block_count;
  FoundTile found;
  found.level = tile.level;
  found.kv_head = kv_head;
  found.flags = (span.partial ? TileFlags::partial : 0) | (ragged ? TileFlags::ragged : 0) |
                (last ? TileFlags::last : 0);
  found.column = span.begin + Layout::warp_keys * (ptx::thread_index() / 32) + j;
  // A column without a key repeats one that has one, so that variants only see keys that exist.
  found.at = column_at(level, tile.group, min(max(found.column, begin), end - 1));
  if (j >= Layout::warp_keys || found.column < begin || found.column >= end) found.at.valid = false;
  return found;
}

/// An item without keys has one tile that is empty.
RADDLE_DEVICE FoundTile empty_tile() {
  return FoundTile{0, 0, TileFlags::empty | TileFlags::last, -1, Column{0, 0, 0, 0, false}};
}

/// The tiles of one item. Keeps little between them, for registers are what long queries lack.
template <class Layout>
class ItemCursor {
 public:
  RADDLE_DEVICE ItemCursor(const MmaLaunch& launch, i32 item, i32)
      : item_(item), walk_(launch.plan, launch.plan.items[item]) {}

  RADDLE_DEVICE bool next(const MmaLaunch& launch, FoundTile& found) {
    if (done_) return false;
    const WorkItem& item = launch.plan.items[item_];
    Span span, after;
    if (!walk_.next(span)) {
      done_ = true;
      found = empty_tile();
      return true;
    }
    done_ = !TileWalk(walk_).next(after);
    found = find_tile<Layout>(launch, launch.plan.query_tiles[item.query_tile], item.kv_head, span,
                              done_);
    return true;
  }

 private:
  i32 item_;
  TileWalk walk_;
  bool done_ = false;
};

/// The tiles of items [item, end), or up to the first item of another tile shape.
template <class Layout>
class QueueCursor {
 public:
  RADDLE_DEVICE QueueCursor(const MmaLaunch&, i32 item, i32 end) : item_(item), end_(end) {}

  RADDLE_DEVICE bool next(const MmaLaunch& launch, FoundTile& found) {
    if (!inside_ && !open(launch)) return false;
    if (!more_) {
      inside_ = false;
      found = empty_tile();
      return true;
    }
    const Span span = next_;
    more_ = walk_.next(next_);
    inside_ = more_;
    found = find_tile<Layout>(launch, *tile_, kv_head_, span, !more_);
    return true;
  }

 private:
  RADDLE_DEVICE bool open(const MmaLaunch& launch) {
    if (item_ == end_) return false;
    const WorkItem item = launch.plan.items[item_];
    tile_ = &launch.plan.query_tiles[item.query_tile];
    if (tile_->shape != 0) {
      item_ = end_;
      return false;
    }
    ++item_;
    kv_head_ = item.kv_head;
    walk_ = TileWalk(launch.plan, item);
    more_ = walk_.next(next_);
    inside_ = true;
    return true;
  }

  i32 item_;
  const i32 end_;
  bool inside_ = false, more_ = false;
  TileWalk walk_;
  Span next_;
  const QueryTile* tile_ = nullptr;
  i32 kv_head_ = 0;
};

/// Loads what a cursor finds. `ahead`: the next tile's rows are looked up when a tile has been
/// loaded, so that nobody waits for the page table; else when it is loaded.
template <class K, class Layout, class Cursor, bool ahead>
class KeyStream {
  using T = typename K::T;
  static constexpr i32 warp_keys = Layout::warp_keys;
  static_assert(warp_keys <= 16);

 public:
  RADDLE_DEVICE KeyStream(const MmaLaunch& launch, i32 item, i32 end)
      : launch_(launch), cursor_(launch, item, end) {}

  /// Copies a tile's K to its stage, and says what there is to know of its keys.
  RADDLE_DEVICE void load_keys() {
    if (!ahead) there_ = cursor_.next(launch_, found_);
    if (there_) {
      const i32 lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
      auto& keys = Layout::keys_at(slot_);
      if (lane < warp_keys) {
        const i32 j = warp_keys * warp + lane;
        keys.column[j] = found_.at.valid ? found_.column : -1;
        keys.kv_index[j] = found_.at.kv_index;
        keys.kv_pos[j] = found_.at.kv_pos;
        if (lane == 0) keys.flags[warp] = found_.flags;
      }
      const KvView& kv = launch_.kv[found_.level];
      const PoolView& pool = lane < 16 ? kv.k : kv.v;
      const i64 offset = found_.at.block * pool.block_stride + found_.at.offset * pool.row_stride +
                         found_.kv_head * pool.head_stride;
      row_ = found_.at.valid ? static_cast<const T*>(pool.data) + offset : nullptr;
      copies_ = !(found_.flags & TileFlags::empty);
      if (copies_) copy<typename K::QkRows, K::dim_qk>(Layout::key_memory(stage_), 0);
      slot_ = Layout::after(slot_, Layout::key_slots);
    }
    ptx::copy_commit();
  }

  /// Copies that tile's V. The first call of all, before there is a tile, looks up the first one.
  RADDLE_DEVICE void load_values() {
    if (there_) {
      if (copies_) copy<typename K::VoRows, K::dim_vo>(Layout::value_memory(stage_), 16);
      stage_ = Layout::after(stage_, Layout::stages);
    }
    ptx::copy_commit();
    if (ahead) there_ = cursor_.next(launch_, found_);
  }

 private:
  /// Copies this warp's rows; lane `first_lane` + r knows where row r lies. Rows that are not there
  /// become zero, for V's may hold anything and meet weights of zero.
  template <class Rows, i32 dim>
  RADDLE_DEVICE void copy(u8* stage, i32 first_lane) const {
    constexpr i32 chunks = Rows::chunks;
    const i32 lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
    const u32 to = ptx::shared_address(stage) + static_cast<u32>(warp_keys * warp * Rows::pitch);
    const u32 to_first = to + Rows::at(lane / chunks, lane % chunks);
    RADDLE_UNROLL
    for (i32 i = 0; i < ceil_div(warp_keys * chunks, 32); ++i) {
      const i32 row = (32 * i + lane) / chunks, chunk = (32 * i + lane) % chunks;
      const T* from = ptx::shuffle(row_, first_lane + (row & 15));
      if (warp_keys * chunks % 32 != 0 && row >= warp_keys) continue;
      const bool read = from != nullptr && (dim % 16 == 0 || 8 * chunk < dim);
      const u32 at = 32 % chunks == 0 ? Rows::rows_after(to_first, 32 / chunks * i)
                                      : to + Rows::at(row, chunk);
      ptx::copy_async(at, from + 8 * chunk, read);
    }
  }

  const MmaLaunch& launch_;
  Cursor cursor_;
  FoundTile found_;
  bool there_ = false, copies_ = false;
  i32 stage_ = 0, slot_ = 0;
  const T* row_ = nullptr;  // of this lane's key
};

}  // namespace mma

RADDLE_ENGINE_END
