// The KV tiles of work items on their way to shared memory. Every warp walks the tiles by itself
// and copies its share of each tile's keys: K rows, then V rows.
//
// A lane finds where its key's rows lie; a table tells the others, who copy the rows together. The
// page table is read a tile ahead, so that nobody waits for it.
#pragma once

#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// One lane's work, for its warp.
RADDLE_DEVICE void open_source(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head,
                               i32 element_bytes, const i32* zeros, KeySource& source) {
  const LevelView& level = launch.levels[tile.level];
  const KvView& kv = launch.kv[tile.level];
  const i32 first = level.block_begin[tile.group];
  const PoolView* pools[2] = {&kv.k, &kv.v};
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const PoolView& pool = *pools[i];
    const i64 origin = kv_head * pool.head_stride + (level.blocks ? 0 : first * pool.block_stride);
    source.row[i] = static_cast<const u8*>(pool.data) + element_bytes * origin;
    source.block_stride[i] = element_bytes * pool.block_stride;
    source.row_stride[i] = element_bytes * (level.blocks ? pool.row_stride : pool.block_stride);
  }
  // One block of rows is a list of one, which says 0.
  const i32 size = level.blocks ? level.block_size : 1 << 30;
  i32 shift = 0;
  while (shift < 30 && (1 << shift) < size) ++shift;
  source.blocks = level.blocks ? level.blocks + first : zeros;
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

/// The same for the scales of its keys.
RADDLE_DEVICE void open_scales(const MmaLaunch& launch, const QueryTile& tile, i32 kv_head,
                               ScaledSource& source) {
  const LevelView& level = launch.levels[tile.level];
  const ScaleView* scales[2] = {&launch.kv_scales[tile.level].k, &launch.kv_scales[tile.level].v};
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    const ScaleView& scale = *scales[i];
    const i64 first = level.blocks ? 0 : level.block_begin[tile.group] * scale.block_stride;
    source.scale[i] = scale.data ? scale.data + kv_head * scale.head_stride + first : nullptr;
    source.scale_block_stride[i] = scale.block_stride;
    source.scale_row_stride[i] = level.blocks ? scale.row_stride : scale.block_stride;
    source.value[i] = scale.value;
  }
}

/// The block of the group's list that holds column c.
RADDLE_DEVICE i32 nth_block(const KeySource& source, i32 c) {
  return source.block_shift >= 0 ? c >> source.block_shift : c / source.block_size;
}

/// A column of a layout whose indices or positions have to be looked up.
RADDLE_COLD Column look_up_column(const LevelView& level, i32 group, i32 c) {
  return column_at(level, group, c);
}

/// column_at, with what open_source worked out; `block` is what the group's list says.
RADDLE_DEVICE Column find_column(const MmaLaunch& launch, const KeySource& source, i32 c,
                                 i32 block) {
  if (!source.plain) return look_up_column(launch.levels[source.level], source.group, c);
  const i32 index = source.first_index + c;
  return Column{block, c - nth_block(source, c) * source.block_size, index, index, true};
}

/// As long as the longest row.
template <i32 dim>
RADDLE_ZEROS(Packed8, zero_row, ceil_div(dim, 8));

/// A warp's tiles. K and V of a tile are loaded in turns. Where it `runs_on`, the tiles are of
/// items [item, end), or up to the first of long queries, and each is found when the one before has
/// been loaded; else they are those of one item, and each is found when it is loaded.
template <class K, class Layout, bool runs_on>
class KeyStream {
  static constexpr i32 warp_keys = Layout::warp_keys;
  static constexpr i32 element_bytes = static_cast<i32>(sizeof(typename K::Stored));
  static_assert(warp_keys <= 32);

 public:
  /// Opens the first item. The page table's answer is not waited for.
  RADDLE_DEVICE KeyStream(const MmaLaunch& launch, i32 item, i32 end)
      : launch_(launch), source_(Layout::source(ptx::warp_index())), item_(item), end_(end) {
    open_ = open_item();
  }

  /// Before the first load.
  RADDLE_DEVICE void start() {
    if (runs_on) find_tile();
  }

  /// Starts copying a tile's K, and says what there is to know of its keys. False where there is no
  /// tile; one without columns has nothing to copy.
  RADDLE_DEVICE bool load_keys(i32 slot, i32 keys_slot) {
    if (!runs_on) find_tile();
    const bool said = there_;
    if (there_) {
      describe_keys(Layout::keys_at(keys_slot));
      there_ = !(flags_ & TileFlags::empty);
    }
    if (there_) {
      if constexpr (K::quantized) load_scales(Layout::keys_at(keys_slot));
      publish_rows();
      copy<typename K::KeyRows, K::dim_qk, K::narrow_keys>(Layout::slot_memory(slot), 0);
    }
    return said;
  }

  /// Starts copying that tile's V.
  RADDLE_DEVICE bool load_values(i32 slot) {
    const bool copies = there_;
    if (there_)
      copy<typename K::ValueRows, K::dim_vo, K::narrow_values>(Layout::slot_memory(slot), 1);
    if (runs_on) find_tile();
    return copies;
  }

 private:
  /// A row of zeros: where keys that are not there are copied from, for V's rows may hold anything
  /// and meet weights of zero.
  RADDLE_DEVICE static const u8* zeros() {
    return reinterpret_cast<const u8*>(&zero_row<max(K::dim_qk, K::dim_vo)>);
  }

  RADDLE_DEVICE void describe_keys(typename Layout::Keys& keys) const {
    const i32 lane = ptx::lane_index(), warp = ptx::warp_index();
    if (lane >= warp_keys) return;
    const i32 j = warp_keys * warp + lane;
    keys.column[j] = at_.valid ? column_ : -1;
    keys.kv_index[j] = at_.kv_index;
    keys.kv_pos[j] = at_.kv_pos;
    if (lane == 0) keys.flags[warp] = flags_;
  }

  /// Starts copying the scales of this lane's key, K's and V's.
  RADDLE_DEVICE void load_scales(typename Layout::Keys& keys) const {
    const i32 lane = ptx::lane_index();
    if (lane >= warp_keys) return;
    const i32 j = warp_keys * ptx::warp_index() + lane;
    RADDLE_UNROLL
    for (i32 i = 0; i < 2; ++i) {
      float& to = keys.scale[i][j];
      const float* first = source_.scale[i];
      if (first && at_.valid)
        ptx::copy_word_async(ptx::shared_address(&to),
                             first + at_.block * source_.scale_block_stride[i] +
                                 at_.offset * source_.scale_row_stride[i]);
      else
        to = at_.valid ? source_.value[i] : 0.0f;
    }
  }

  /// Lanes of a warp with 16 keys see to one row each, with 32 to two.
  RADDLE_DEVICE void publish_rows() const {
    auto& table = Layout::row_table().row[ptx::warp_index()];
    ptx::sync_warp();  // all lanes have read the last tile's
    RADDLE_UNROLL
    for (i32 i = 0; i < ceil_div(2 * warp_keys, 32); ++i) {
      const i32 which = (ptx::lane_index() + 32 * i) / warp_keys;
      if (which > 1) continue;
      table[which][ptx::lane_index() % warp_keys] =
          at_.valid ? source_.row[which] + at_.block * source_.block_stride[which] +
                          at_.offset * source_.row_stride[which]
                    : zeros();
    }
    ptx::sync_warp();
  }

  /// Finds the next tile and where this lane's row of it lies.
  RADDLE_DEVICE void find_tile() {
    there_ = open_ || (runs_on && open_item());
    if (!there_) return;
    at_ = Column{0, 0, 0, 0, false};
    flags_ = TileFlags::empty | TileFlags::last;  // an item without keys has one empty tile
    open_ = false;
    if (rest_.begin == rest_.end) return;
    const Span tile = take_tile(rest_, Layout::tile_keys);
    if (rest_.begin == rest_.end) next_run();
    open_ = rest_.begin != rest_.end;
    find_row(tile);
    if (open_) look_up();
  }

  /// What the page table says of the next tile; lists of other kinds are looked up when they are
  /// needed.
  RADDLE_DEVICE void look_up() {
    if (source_.plain) next_block_ = source_.blocks[nth_block(source_, column_in(rest_))];
  }

  /// This lane's column of a tile that begins where a span does.
  RADDLE_DEVICE static i32 column_of(const Span& span) {
    return span.begin + warp_keys * ptx::warp_index() + ptx::lane_index() % warp_keys;
  }
  /// The columns of a span that may be read.
  RADDLE_DEVICE Span columns_read(const Span& span) const {
    return Span{max(span.begin, source_.col_begin), min(span.end, source_.col_end), span.partial};
  }
  /// A column that has no key repeats one that has, for variants see only keys that exist.
  RADDLE_DEVICE i32 column_in(const Span& span) const {
    const Span read = columns_read(span);
    return min(max(column_of(span), read.begin), read.end - 1);
  }

  RADDLE_DEVICE void find_row(const Span& tile) {
    const Span read = columns_read(tile);
    column_ = column_of(tile);
    at_ = find_column(launch_, source_, column_in(tile), next_block_);
    if (column_ < read.begin || column_ >= read.end) at_.valid = false;
    const bool ragged = read.end - read.begin < Layout::tile_keys || source_.holes;
    flags_ = (tile.partial ? TileFlags::partial : 0) | (ragged ? TileFlags::ragged : 0) |
             (open_ ? 0 : TileFlags::last);
  }

  /// Goes on to the item's next run of columns.
  RADDLE_DEVICE void next_run() {
    RunWalk runs = source_.runs;
    rest_ = runs.next();
    ptx::sync_warp();  // all lanes have read
    if (ptx::lane_index() == 0) source_.runs = runs;
    ptx::sync_warp();
  }

  /// Opens the next item; false where there is none of this stream.
  RADDLE_DEVICE bool open_item() {
    if (item_ == end_) return false;
    const WorkItem item = launch_.plan.items[item_];
    const QueryTile& tile = launch_.plan.query_tiles[item.query_tile];
    const bool ours = !runs_on || tile.shape == 0;
    item_ = ours ? item_ + 1 : end_;
    if (!ours) return false;
    RunWalk runs(launch_.plan, item, tile);
    rest_ = runs.next();
    ptx::sync_warp();  // all lanes have read what it was
    if (ptx::lane_index() == 0) {
      open_source(launch_, tile, item.kv_head, element_bytes, reinterpret_cast<const i32*>(zeros()),
                  source_);
      if constexpr (K::quantized) open_scales(launch_, tile, item.kv_head, source_);
      source_.runs = runs;
    }
    ptx::sync_warp();
    if (rest_.begin < rest_.end) look_up();
    return true;
  }

  /// Copies this warp's rows of K (`which` 0) or V. Of rows that will be widened where they lie,
  /// bytes take the first half.
  template <class Rows, i32 dim, bool narrow>
  RADDLE_DEVICE void copy(u8* slot, i32 which) const {
    constexpr i32 row_bytes = dim * element_bytes;
    constexpr i32 chunks = K::quantized && !narrow ? Rows::chunks / 2 : Rows::chunks;
    const i32 lane = ptx::lane_index(), warp = ptx::warp_index();
    const u32 to =
        ptx::shared_address(slot) + static_cast<u32>(Layout::template part_of<Rows>(warp));
    const i32 part = Layout::first_of_part(warp);
    if constexpr (K::wide) return copy_lines<Rows, row_bytes>(to, part, which);
    const u32 to_first = to + Rows::at(part + lane / chunks, lane % chunks);
    const u8* const* source = Layout::row_table().row[warp][which];
    // A batch's addresses are all read before its first copy starts, so that one wait serves all.
    constexpr i32 copies = ceil_div(warp_keys * chunks, 32), batch = runs_on ? 8 : 4;
    // Where rows divide a warp, its lanes keep their chunk.
    constexpr bool even = 32 % chunks == 0;
    static_assert(!even || warp_keys % 8 == 0);
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
        const u32 at =
            even ? Rows::rows_after(to_first, 32 / chunks * i) : to + Rows::at(part + row, chunk);
        const i32 bytes =
            row_bytes % (16 * chunks) == 0 ? 16 : max(0, min(16, row_bytes - 16 * chunk));
        ptx::copy_async(at, from[i - first], bytes);
      }
    }
  }

  /// The same of rows of whole lines of 128 bytes: eight lanes copy a row's, and each keeps its
  /// place in them. What lies behind the last one that has elements nobody reads.
  template <class Rows, i32 row_bytes>
  RADDLE_DEVICE static void copy_lines(u32 to, i32 part, i32 which) {
    static_assert(Rows::swizzled && warp_keys % 4 == 0);
    const i32 lane = ptx::lane_index(), chunk = lane % 8;
    const u8* const* source = Layout::row_table().row[ptx::warp_index()][which];
    RADDLE_UNROLL
    for (i32 i = 0; i < warp_keys; i += 4) {
      const i32 row = i + lane / 8;
      const u8* from = source[row] + 16 * chunk;
      const u32 at = to + Rows::at(part + row, chunk);
      RADDLE_UNROLL
      for (i32 first = 0; first < row_bytes; first += 128) {
        const i32 bytes =
            first + 128 <= row_bytes ? 16 : max(0, min(16, row_bytes - first - 16 * chunk));
        ptx::copy_async(at + static_cast<u32>(first), from + first, bytes);
      }
    }
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
