// The rings of K and V of short queries (WarpRing) and of wide heads (BlockRing). In both, every
// warp walks the tiles by itself and copies its share of each tile's keys (KeyStream): rows of K,
// then rows of V. The tiles of one item follow those of the item before without a pause.
//
// Each lane finds where the row of its key lies and writes the address to a table; then the lanes
// copy the rows together. The page table is read one tile ahead, so that no warp waits for it.
#pragma once

#include "raddle/engine/kernel/mma/rows.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// A warp's tiles of items [item, end), or up to the first item of another shape. The warp loads K
/// and V of a tile in turns, and finds the next tile after V.
template <class Kernel, class Memory>
class KeyStream {
  static constexpr i32 warp_keys = Memory::warp_keys;
  static_assert(warp_keys <= 32);

 public:
  RADDLE_DEVICE KeyStream(const GpuLaunch& launch, i32 item, i32 end)
      : launch_(launch), source_(Memory::source(ptx::warp_index())), item_(item), end_(end) {}

  /// Opens the first item; to be called before the first load. A load of values does so, too.
  RADDLE_DEVICE void start() { find_tile(); }

  /// Starts copying a tile's K and writes the facts about its keys, if there is a tile; nothing is
  /// copied for a tile without columns.
  RADDLE_DEVICE void load_keys(i32 slot, i32 keys_slot) {
    if (there_) {
      describe_keys(Memory::keys_at(keys_slot));
      there_ = !(flags_ & TileFlags::empty);
    }
    if (!there_) return;
    publish_rows();
    if constexpr (Kernel::k_extends_v)
      copy_extended(slot);
    else
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
  RADDLE_DEVICE void describe_keys(typename Memory::Keys& keys) const {
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
    auto& table = Memory::row_table(ptx::warp_index());
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
        Memory::slot_address(slot) + static_cast<u32>(Memory::template part_of<Rows>(warp)),
        Memory::first_of_part(warp), Memory::row_table(warp).row[which]);
  }

  /// Copies this warp's keys, each from two rows.
  RADDLE_DEVICE void copy_extended(i32 slot) const {
    using Rows = typename Kernel::KeyRows;
    constexpr i32 bytes = static_cast<i32>(sizeof(typename Kernel::Stored));
    const i32 warp = ptx::warp_index();
    const auto& table = Memory::row_table(warp);
    copy_extended_lines<Rows, bytes * Kernel::dim_vo, bytes * Kernel::dim_qk, warp_keys>(
        Memory::slot_address(slot) + static_cast<u32>(Memory::template part_of<Rows>(warp)),
        Memory::first_of_part(warp), table.row[1], table.row[0]);
  }

  /// Finds the next tile and the key of this lane.
  RADDLE_DEVICE void find_tile() {
    there_ = open_ || next_item();
    if (!there_) return;
    at_ = Column{0, 0, 0, 0, false};
    flags_ = TileFlags::empty | TileFlags::last;  // an item without keys has one empty tile
    open_ = false;
    if (rest_.begin == rest_.end) return;
    const Span tile = take_tile(rest_, Memory::tile_keys);
    if (rest_.begin == rest_.end) rest_ = next_run(source_);
    open_ = rest_.begin != rest_.end;
    column_ = column_of(tile);
    at_ = find_key(launch_, source_, tile, column_, next_page_);
    flags_ = tile_flags(source_, tile, Memory::tile_keys, !open_);
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
    const bool ours = launch_.plan.query_tiles[item.query_tile].shape == Memory::shape;
    item_ = ours ? item_ + 1 : end_;
    if (!ours) return false;
    rest_ = open_item<Kernel>(launch_, item, source_);
    if (rest_.begin < rest_.end) look_up();
    return true;
  }

  const GpuLaunch& launch_;
  typename Memory::Source& source_;
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

/// The ring of a warp of short queries, which uses only rows that it loaded itself. The slots hold
/// K and V of its tiles in turns, each loaded by one group of copies.
///
/// The ring is filled before the first tile is computed: by `fill`, or by the first
/// `filling_steps` steps, which issue loads like any other step and compute nothing.
template <class Kernel, class Memory, i32 filling_steps>
class WarpRing {
  static constexpr bool even = Memory::slots % 2 == 0;

 public:
  /// For items [item, end), or up to the first item of another shape.
  RADDLE_DEVICE WarpRing(const GpuLaunch& launch, i32 item, i32 end) : stream_(launch, item, end) {}

  /// Issues the first loads. The keys of one tile are requested before then() is called, and those
  /// of the other slots behind that.
  template <class Then>
  RADDLE_DEVICE void fill(Then then) {
    RADDLE_ROLLED
    for (i32 n = -1; n < Memory::slots; ++n) {  // load -1 finds the first tile and copies nothing
      load(n, n);
      if (n == 0) then();
    }
  }

  /// Whether the next step only fills the ring, and whether it is the first one.
  RADDLE_DEVICE bool fills() const { return filling_steps > 0 && filling_ > 0; }
  RADDLE_DEVICE bool is_new() const { return filling_ == filling_steps; }
  /// Counts a filling step. Returns whether the keys of one tile have been requested, or all of the
  /// ring has.
  RADDLE_DEVICE bool end_filling_step() {
    --filling_;
    return filling_ == 0 || filling_ == filling_steps - (even ? 2 : 1);
  }

  /// The slot of the tile that is used: K's, and after its release V's.
  RADDLE_DEVICE i32 slot() const { return slot_; }
  /// The facts of the tile's keys.
  RADDLE_DEVICE const typename Memory::Keys& keys() const { return Memory::keys_at(computing_); }

  RADDLE_DEVICE void wait_k() const { wait(); }
  RADDLE_DEVICE void wait_v() const { wait(); }
  RADDLE_DEVICE void release_k_and_load_next() { release_and_load(Memory::slots); }
  /// The tile's end: keys() are those of the next one.
  RADDLE_DEVICE void release_v_and_load_next() {
    release_and_load(Memory::slots + 1);
    computing_ = Memory::after(computing_, Memory::key_slots);
  }

 private:
  RADDLE_DEVICE void wait() const {
    ptx::copy_wait<Memory::slots - 1>();
    ptx::sync_warp();
  }

  RADDLE_DEVICE void release_and_load(i32 nth) {
    ptx::sync_warp();
    load(nth, slot_);
    slot_ = Memory::after(slot_, Memory::slots);
  }

  /// Issues load number `nth`, K and V in turns, as one group of copies.
  RADDLE_DEVICE void load(i32 nth, i32 slot) {
    if (nth % 2 == 0) {
      stream_.load_keys(slot, loading_);
      loading_ = Memory::after(loading_, Memory::key_slots);
    } else {
      stream_.load_values(slot);
    }
    ptx::copy_commit();
  }

  KeyStream<Kernel, Memory> stream_;
  i32 filling_ = filling_steps;  // filling steps that remain
  // Positions in the rings after these steps: the slot that is used next, the facts of its keys,
  i32 slot_ = (3 * Memory::slots - 2 * filling_steps) % Memory::slots;
  i32 computing_ = (2 * Memory::key_slots - filling_steps) % Memory::key_slots;
  i32 loading_ = filling_steps > 0 && even ? Memory::key_slots - 1
                                           : 0;  // and the facts of the keys that are loaded next
};

/// The ring of a block of wide heads, of which every warp uses all rows. A slot holds K of a tile,
/// or V, or, with `shares`, K whose first columns are V.
template <class Kernel, class Memory>
class BlockRing {
 public:
  RADDLE_DEVICE BlockRing(const GpuLaunch& launch, i32 item) : stream_(launch, item, item + 1) {}

  /// Opens the item; to be called before all else.
  RADDLE_DEVICE void start() { stream_.start(); }

  /// Issues the first loads.
  RADDLE_DEVICE void fill(bool shares) {
    shares_ = shares;
    RADDLE_ROLLED
    for (i32 n = 0; n < Memory::slots - 1; ++n) load();
  }

  /// The slot of K, and then that of V.
  RADDLE_DEVICE i32 slot() const { return slot_; }
  /// The facts of the tile's keys.
  RADDLE_DEVICE const typename Memory::Keys& keys() const { return Memory::keys_at(computing_); }

  RADDLE_DEVICE void wait_k_and_load_next() {
    if constexpr (Kernel::quantized) widen<typename Kernel::KeyRows, Kernel::dim_qk>();
    wait_and_load();
  }
  /// In both cases a barrier of the block: what the warps wrote to shared memory can be read.
  RADDLE_DEVICE void wait_v_and_load_next() {
    if (shares_) return ptx::sync_block();
    if constexpr (Kernel::quantized) widen<typename Kernel::ValueRows, Kernel::dim_vo>();
    wait_and_load();
  }
  RADDLE_DEVICE void next_tile() { computing_ = Memory::after(computing_, Memory::key_slots); }

 private:
  /// Waits for the next slot. All warps have used the slot before it, which is loaded again.
  RADDLE_DEVICE void wait_and_load() {
    ptx::copy_wait<Memory::slots - 2>();
    ptx::sync_block();
    load();
    slot_ = next_;
    next_ = Memory::after(next_, Memory::slots);
  }

  /// Rows of bytes of the next slot become rows of T; each warp widens those that it loaded.
  template <class Rows, i32 dim>
  RADDLE_DEVICE void widen() const {
    ptx::copy_wait<Memory::slots - 2>();
    ptx::sync_warp();  // what all lanes have copied
    const i32 warp = ptx::warp_index();
    widen_rows<Kernel, Rows, dim, Memory::warp_keys>(
        Memory::slot_memory(next_) + Memory::template part_of<Rows>(warp),
        Memory::first_of_part(warp));
  }

  /// Issues the next load: K and V in turns, or K alone.
  RADDLE_DEVICE void load() {
    if (loads_values_) {
      stream_.load_values(loading_);
    } else {
      stream_.load_keys(loading_, loading_keys_);
      loading_keys_ = Memory::after(loading_keys_, Memory::key_slots);
      if (shares_) stream_.skip_values();
    }
    ptx::copy_commit();
    loads_values_ = !shares_ && !loads_values_;
    loading_ = Memory::after(loading_, Memory::slots);
  }

  KeyStream<Kernel, Memory> stream_;
  bool shares_;
  bool loads_values_ = false;
  i32 loading_ = 0;       // the slot that is loaded next
  i32 loading_keys_ = 0;  // where the facts of its keys go
  i32 slot_ = 0;          // the slot that is used
  i32 next_ = 0;          // the slot that is used next
  i32 computing_ = 0;     // the facts of the tile's keys
};

}  // namespace mma

RADDLE_ENGINE_END
