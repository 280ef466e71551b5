// The KV tiles of work items on their way to shared memory. Every warp walks the tiles by itself
// and loads its share of each tile's keys: K rows, then V rows, a group of asynchronous copies
// each.
//
// A lane finds where its key's rows lie; a table tells the others, who copy the rows together.
#pragma once

#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// One lane's work, for its warp.
RADDLE_DEVICE void open_source(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head,
                               KeySource& source) {
  const LevelView& level = launch.levels[tile.level];
  const KvView& kv = launch.kv[tile.level];
  const i32 first = level.block_begin[tile.group];
  const PoolView* pools[2] = {&kv.k, &kv.v};
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const PoolView& pool = *pools[i];
    const i64 origin = kv_head * pool.head_stride + (level.blocks ? 0 : first * pool.block_stride);
    source.row[i] = static_cast<const u8*>(pool.data) + 2 * origin;
    source.block_stride[i] = 2 * pool.block_stride;
    source.row_stride[i] = 2 * (level.blocks ? pool.row_stride : pool.block_stride);
  }
  const i32 size = level.block_size;
  i32 shift = 0;
  while (shift < 30 && (1 << shift) < size) ++shift;
  source.blocks = level.blocks ? level.blocks + first : nullptr;
  source.block_size = size;
  source.block_shift = 1 << shift == size ? shift : -1;
  source.first_index = level.kv_begin ? level.kv_begin[tile.group] : 0;
  source.level = tile.level;
  source.group = tile.group;
  source.col_begin = tile.col_begin;
  source.col_end = tile.col_end;
  source.plain = !level.block_index && !level.block_pos && !level.block_first && !level.block_count;
  source.holes = level.block_count != nullptr;
}

/// The block of the group's list that holds column c.
RADDLE_DEVICE i32 nth_block(const KeySource& source, i32 c) {
  return source.block_shift >= 0 ? c >> source.block_shift : c / source.block_size;
}

/// column_at, with what open_source worked out; `block` is what the list says, if that is `known`.
RADDLE_DEVICE Column find_column(const MmaLaunch& launch, const KeySource& source, i32 c,
                                 bool known, i32 block) {
  if (!source.plain) return column_at(launch.levels[source.level], source.group, c);
  const i32 index = source.first_index + c;
  if (!source.blocks) return Column{0, c, index, index, true};
  const i32 nth = nth_block(source, c);
  return Column{known ? block : source.blocks[nth], c - nth * source.block_size, index, index,
                true};
}

/// As long as the longest row.
template <i32 dim>
RADDLE_ZEROS(Packed8, zero_row, ceil_div(dim, 8));

/// A warp's tiles: of items [item, end), or up to the first item of another tile shape. K and V
/// take turns in the slots of a ring. `ahead`: the next tile's rows are looked up when a tile has
/// been loaded, so that nobody waits for the page table; else when it is loaded.
template <class K, class Layout, bool ahead>
class KeyStream {
  static constexpr i32 warp_keys = Layout::warp_keys;
  static_assert(warp_keys <= 32);

 public:
  RADDLE_DEVICE KeyStream(const MmaLaunch& launch, i32 item, i32 end, i32 shape)
      : launch_(launch), walk_(Layout::walk(ptx::warp_index())) {
    if (ptx::lane_index() == 0) {
      walk_.item = item;
      walk_.end = end;
      walk_.shape = shape;
      walk_.inside = false;
      walk_.loading = false;
    }
    ptx::sync_warp();
    if (ahead) find_tile();
  }

  /// Load number `nth`, of K and V in turns, to `slot`: a group of copies. `nth` is known when this
  /// is compiled.
  RADDLE_DEVICE void load(i32 nth, i32 slot) {
    if (nth % 2 == 0)
      load_keys(slot);
    else
      load_values(slot);
  }

 private:
  /// Copies a tile's K, and says what there is to know of its keys.
  RADDLE_DEVICE void load_keys(i32 slot) {
    if (!ahead) find_tile();
    if (there_) {
      auto& keys = Layout::keys_at(keys_slot_);
      const i32 lane = ptx::lane_index(), warp = ptx::warp_index();
      if (lane < warp_keys) {
        const i32 j = warp_keys * warp + lane;
        keys.column[j] = at_.valid ? column_ : -1;
        keys.kv_index[j] = at_.kv_index;
        keys.kv_pos[j] = at_.kv_pos;
        if (lane == 0) keys.flags[warp] = flags_;
      }
      there_ = !(flags_ & TileFlags::empty);
      if (there_) {
        publish_rows();
        ptx::sync_warp();
        copy<typename K::QkRows, K::dim_qk>(Layout::slot_memory(slot), 0);
      }
    }
    if (!ahead) {
      ptx::sync_warp();  // all lanes have read what it was
      if (ptx::lane_index() == 0) walk_.loading = there_;
      ptx::sync_warp();
    }
    ptx::copy_commit();
    keys_slot_ = Layout::after(keys_slot_, Layout::key_slots);
  }

  /// Copies that tile's V.
  RADDLE_DEVICE void load_values(i32 slot) {
    if (ahead ? there_ : walk_.loading)
      copy<typename K::VoRows, K::dim_vo>(Layout::slot_memory(slot), 1);
    ptx::copy_commit();
    if (ahead) find_tile();
  }

  /// A row of zeros: where keys that are not there are copied from, for V's rows may hold anything
  /// and meet weights of zero.
  RADDLE_DEVICE static const u8* zeros() {
    return reinterpret_cast<const u8*>(&zero_row<max(K::dim_qk, K::dim_vo)>);
  }

  /// Lanes of a warp with 16 keys see to one row each, with 32 to two.
  RADDLE_DEVICE void publish_rows() const {
    const KeySource& source = walk_.source;
    auto& table = Layout::row_table().row[ptx::warp_index()];
    RADDLE_UNROLL
    for (i32 i = 0; i < ceil_div(2 * warp_keys, 32); ++i) {
      const i32 which = (ptx::lane_index() + 32 * i) / warp_keys;
      if (which > 1) continue;
      table[which][ptx::lane_index() % warp_keys] =
          at_.valid ? source.row[which] + at_.block * source.block_stride[which] +
                          at_.offset * source.row_stride[which]
                    : zeros();
    }
  }

  /// Finds the next tile and where this lane's row of it lies.
  RADDLE_DEVICE void find_tile() {
    if (!walk_.inside && !open_item()) {
      there_ = false;
      return;
    }
    there_ = true;
    const bool any = walk_.more;
    const Span span = walk_.next;
    TileWalk after = walk_.after;
    Span next{};
    const bool more = any && after.next(next);
    ptx::sync_warp();  // all lanes have read
    if (ptx::lane_index() == 0) {
      walk_.inside = more;
      walk_.more = more;
      walk_.next = next;
      walk_.after = after;
    }
    ptx::sync_warp();
    at_ = Column{0, 0, 0, 0, false};
    flags_ = TileFlags::empty | TileFlags::last;  // an item without keys has one empty tile
    if (any) find_row(span, !more);
    // The page table, one tile further ahead: memory is busy, and answers late.
    block_known_ = ahead && more && walk_.source.plain && walk_.source.blocks;
    if (block_known_) {
      const KeySource& source = walk_.source;
      next_block_ = source.blocks[nth_block(source, column_in(next))];
    }
  }

  /// This lane's column of a tile; one that has no key repeats one that has, for variants see only
  /// keys that exist.
  RADDLE_DEVICE i32 column_in(const Span& span) const {
    const Span read = columns_read(span);
    return min(max(column_of(span), read.begin), read.end - 1);
  }
  /// The columns of a tile that may be read.
  RADDLE_DEVICE Span columns_read(const Span& span) const {
    const KeySource& source = walk_.source;
    return Span{max(span.begin, source.col_begin), min(span.end, source.col_end), span.partial};
  }
  RADDLE_DEVICE i32 column_of(const Span& span) const {
    return span.begin + warp_keys * ptx::warp_index() + ptx::lane_index() % warp_keys;
  }

  RADDLE_DEVICE void find_row(const Span& span, bool last) {
    const KeySource& source = walk_.source;
    const Span read = columns_read(span);
    column_ = column_of(span);
    at_ = find_column(launch_, source, column_in(span), block_known_, next_block_);
    if (column_ < read.begin || column_ >= read.end) at_.valid = false;
    const bool ragged = read.end - read.begin < Layout::tile_keys || source.holes;
    flags_ = (span.partial ? TileFlags::partial : 0) | (ragged ? TileFlags::ragged : 0) |
             (last ? TileFlags::last : 0);
  }

  /// Opens the next item; false where there is none of this stream.
  RADDLE_DEVICE bool open_item() {
    const i32 item = walk_.item;
    if (item == walk_.end) return false;
    const WorkItem opened = launch_.plan.items[item];
    const QueryTile& tile = launch_.plan.query_tiles[opened.query_tile];
    const bool ours = tile.shape == walk_.shape;
    block_known_ = false;
    TileWalk after(launch_.plan, opened);
    Span next{};
    const bool more = ours && after.next(next);
    ptx::sync_warp();  // all lanes have read
    if (ptx::lane_index() == 0) {
      walk_.item = ours ? item + 1 : walk_.end;
      walk_.inside = ours;
      walk_.more = more;
      walk_.next = next;
      walk_.after = after;
      if (ours) open_source(launch_, tile, opened.kv_head, walk_.source);
    }
    ptx::sync_warp();
    return ours;
  }

  /// Copies this warp's rows of K (`which` 0) or V.
  template <class Rows, i32 dim>
  RADDLE_DEVICE void copy(u8* slot, i32 which) const {
    constexpr i32 chunks = Rows::chunks;
    const i32 lane = ptx::lane_index(), warp = ptx::warp_index();
    const u32 to = ptx::shared_address(slot) + static_cast<u32>(warp_keys * warp * Rows::pitch);
    const u32 to_first = to + Rows::at(lane / chunks, lane % chunks);
    const u8* const* source = Layout::row_table().row[warp][which];
    RADDLE_UNROLL
    for (i32 i = 0; i < ceil_div(warp_keys * chunks, 32); ++i) {
      // Where rows divide a warp, its lanes keep their chunk.
      constexpr bool even = 32 % chunks == 0;
      const i32 row = even ? lane / chunks + 32 / chunks * i : (32 * i + lane) / chunks;
      const i32 chunk = even ? lane % chunks : (32 * i + lane) % chunks;
      if (warp_keys * chunks % 32 != 0 && row >= warp_keys) continue;
      const u32 at = even ? Rows::rows_after(to_first, 32 / chunks * i) : to + Rows::at(row, chunk);
      ptx::copy_async(at, source[row] + 16 * chunk, dim % 16 == 0 || 8 * chunk < dim);
    }
  }

  const MmaLaunch& launch_;
  Walk& walk_;
  // The tile that is loaded next; with `ahead` also between the calls.
  bool there_ = false;
  i32 flags_, column_;
  Column at_;
  bool block_known_ = false;  // next_block_ is what the page table says of the tile after it
  i32 next_block_ = 0;
  i32 keys_slot_ = 0;  // where the keys loaded next are spoken of
};

}  // namespace mma

RADDLE_ENGINE_END
