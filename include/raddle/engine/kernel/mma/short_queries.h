// The loop for work items of up to 16 fused rows: decode. The aim is to keep the memory busy.
//
// Every warp holds all rows and computes them against a quarter of each KV tile's keys, which it
// loaded itself. No warp waits for another until an item ends, and loads of the next items are
// issued meanwhile. At an item's end the team adds up the states of its warps.
#pragma once

#include "raddle/engine/kernel/gpu/arrive.h"
#include "raddle/engine/kernel/gpu/softmax.h"
#include "raddle/engine/kernel/gpu/variant.h"
#include "raddle/engine/kernel/mma/key_stream.h"
#include "raddle/engine/kernel/mma/rows.h"
#include "raddle/engine/kernel/mma/short_output.h"

RADDLE_ENGINE_BEGIN

namespace mma {

template <class Kernel, class Variant>
class ShortQueries {
  using T = typename Kernel::T;
  using Layout = ShortLayout<Kernel>;
  static constexpr Scan scan = scan_of<Variant>();
  static constexpr i32 warp_keys = Layout::warp_keys;
  static constexpr i32 key_fragments = warp_keys / 8;
  using Slabs = WholeSlabs<Layout, Kernel::out_fragments>;
  /// An output part sees whole rows, which are put together in the memory of the ring; so the ring
  /// cannot run on into the next item.
  static constexpr bool runs_on = !has_output<Variant>;

 public:
  /// For items [first, end), or up to the first item of another shape.
  RADDLE_DEVICE ShortQueries(const GpuLaunch& launch, const Variant& variant, i32 first, i32 end)
      : launch_(launch),
        variant_(variant),
        next_(first),
        end_(runs_on ? end : first + 1),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()),
        stream_(launch, first, end_),
        k_offset_(static_cast<u32>(Layout::template part_of<typename Kernel::KeyRows>(warp_)) +
                  b_offset<typename Kernel::KeyRows>(lane_)),
        v_offset_(static_cast<u32>(Layout::template part_of<typename Kernel::ValueRows>(warp_)) +
                  a_offset<typename Kernel::ValueRows>(lane_)) {
    if constexpr (fills_apart) fill();
  }

  /// Returns the number of the item after the last one computed.
  RADDLE_DEVICE i32 run() {
    RADDLE_ROLLED
    while (attend()) {
    }
    return next_;
  }
  /// Whether rows of these items are composed in shares.
  RADDLE_DEVICE bool leaves_shares() const { return leaves_shares_; }

 private:
  static constexpr i32 share = short_rows / num_warps;  ///< rows of Q that a warp loads

  RADDLE_DEVICE const QueryTile& tile_of(const WorkItem& item) const {
    return launch_.plan.query_tiles[item.query_tile];
  }

  /// Queries stay in registers, except for wide heads, whose outputs need these registers.
  static constexpr i32 kept_steps = Kernel::k_steps <= 8 ? Kernel::k_steps : 0;
  RADDLE_DEVICE void load_fragment(i32 step, u32 (&a)[4]) const {
    const u32 from = ptx::shared_address(Layout::query_memory());
    ptx::load_matrices(
        a, Kernel::QueryRows::step_from(from + a_offset<typename Kernel::QueryRows>(lane_), step));
  }

  /// Facts about an item that are read before its keys are requested: read later, they would arrive
  /// behind the keys.
  struct OpenedItem {
    WorkItem item;
    i32 num_rows, request;
    ArrivalTicket ticket;
    bool paired;  ///< the block's other team ends with the other half of this unit
  };

  /// Where registers are short, because the variant changes keys or O is wide, the facts are read
  /// again when the keys have been used.
  static constexpr bool keeps_opened = Kernel::spare_registers;

  RADDLE_DEVICE OpenedItem open(i32 number) const {
    OpenedItem opened;
    opened.item = launch_.plan.items[number];
    const QueryTile& tile = tile_of(opened.item);
    opened.num_rows = tile.num_rows;
    opened.request = request_of_keys(launch_, tile);
    opened.ticket.find(launch_, opened.item, tile, ptx::thread_index());
    opened.paired =
        Slabs::fit && tile.num_rows <= slab_rows && ends_with_paired_half<Kernel>(opened.item);
    if (opened.paired) opened.item.partial_row = -1;  // no state is stored
    return opened;
  }

  /// Opens the next item and starts loading its queries, which arrive while the states of the last
  /// one are added up.
  RADDLE_DEVICE void fetch_queries() {
    opened_ = open(next_);
    queries_.fetch(launch_, tile_of(opened_.item), opened_.item.kv_head, share * warp_);
  }

  /// Whether separate code fills the ring, which is 0.5 µs faster. The kernel with both loops is as
  /// large as the instruction caches, and the warp would wait twice for instructions of loads and
  /// fetches; there, and where registers are short, steps that compute nothing fill the ring.
  static constexpr bool fills_apart = Kernel::short_only && Kernel::spare_registers;

  /// Fills the ring before the first item. The keys of one tile are requested before the queries,
  /// and those of the other slots behind them.
  RADDLE_DEVICE void fill() {
    RADDLE_ROLLED
    for (i32 n = -1; n < Layout::slots; ++n) {  // load -1 finds the first tile and copies nothing
      load(n, n);
      if (n == 0) fetch_queries();
    }
  }

  /// A step issues two loads; the very first load finds a tile and copies nothing.
  static constexpr i32 filling_steps = fills_apart ? 0 : Layout::slots / 2 + 1;
  static constexpr bool even = Layout::slots % 2 == 0;

  /// Fills a part of the ring, or computes the next item; returns whether there is more to do.
  RADDLE_DEVICE bool attend() {
    const bool fills = filling_steps > 0 && filling_ > 0, fetches = filling_ == filling_steps;
    const i32 number = next_;
    OpenedItem opened = opened_;
    if (fills)
      drop_item();
    else
      begin(opened, number);
    const ApplyVariant<Variant, 1, key_fragments> apply(launch_, variant_, number);
    to_log2_ = apply.to_log2();
    const i32 halves = opened.num_rows > 8 ? 2 : 1;
    RADDLE_ROLLED
    while (!step(apply, halves, fills)) {
    }
    if (fills && !fetches) return true;
    if (!fills) {
      mark<Kernel>(launch_, TimelineStage::computed, number);
      ++next_;
    }
    const bool more = fills || (next_ < end_ && tile_of(launch_.plan.items[next_]).shape == 0);
    if (more) fetch_queries();
    if (!fills) finish(opened, number, more);
    return more;
  }

  /// Puts the queries, which were fetched, where products take them.
  RADDLE_DEVICE void begin(OpenedItem& opened, i32 number) {
    describe_item(opened.request, opened.item.kv_head, Layout::scratch());
    queries_.store(variant_, share * warp_, Layout::query_memory(), Layout::scratch());
    Kernel::Team::sync();
    if (keeps_opened) opened.ticket.expect(launch_);
    RADDLE_UNROLL
    for (i32 i = 0; i < kept_steps; ++i) load_fragment(i, q_[i]);
    if constexpr (Kernel::narrow_keys) {
      factor_[0] = Layout::scratch().factor[lane_ / 4];
      factor_[1] = Layout::scratch().factor[lane_ / 4 + 8];
    }
    mark<Kernel>(launch_, TimelineStage::opened, number);
    clear();
  }

  /// Clears what belongs to an item, for steps that compute nothing: values kept across them would
  /// spill.
  RADDLE_DEVICE void drop_item() {
    RADDLE_UNROLL
    for (i32 i = 0; i < kept_steps; ++i) {
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e) q_[i][e] = 0;
    }
    clear();
  }

  RADDLE_DEVICE void clear() {
    mma::clear(o_);
    value_scales_.clear();
    stats_.clear();
  }

  /// Stores what the warps computed, and counts the item up at its contractions.
  RADDLE_DEVICE void finish(OpenedItem& opened, i32 number, bool more) {
    if (!keeps_opened) {
      opened = open(number);
      opened.ticket.expect(launch_);
    }
    merge(opened, number, more);
    mark<Kernel>(launch_, TimelineStage::stored, number);
    if (opened.item.partial_row >= 0) {
      arrive<Kernel>(launch_, variant_, launch_.plan.items[number], opened.ticket,
                     Layout::completed_bits(), Layout::vector(warp_));
      if (!composed_at_once<typename Kernel::Team>(launch_, opened.num_rows)) leaves_shares_ = true;
    }
    mark<Kernel>(launch_, TimelineStage::finished, number);
  }

  /// Issues load number `nth`, K and V in turns, as one group of copies.
  RADDLE_DEVICE void load(i32 nth, i32 slot) {
    if (nth % 2 == 0) {
      stream_.load_keys(slot, loading_);
      loading_ = Layout::after(loading_, Layout::key_slots);
    } else {
      stream_.load_values(slot);
    }
    ptx::copy_commit();
  }

  /// Computes one KV tile and refills its slots with the tile that comes a ring later; a step that
  /// `fills` computes nothing. Returns whether the tile is the item's last.
  template <class Apply>
  RADDLE_DEVICE bool step(const Apply& apply, i32 halves, bool fills) {
    constexpr i32 pending = Layout::slots - 1;
    const auto& keys = Layout::keys_at(computing_);
    const auto& facts = Layout::scratch();
    Logits<1, key_fragments> s;
    ptx::copy_wait<pending>();
    ptx::sync_warp();
    const i32 flags = fills ? TileFlags::empty : keys.flags[warp_];
    const bool computes = !(flags & TileFlags::empty);
    if (computes) {
      if constexpr (has_key<Variant>)
        transform_slot<Kernel, Layout, 0>(
            slot_, keys, [v = variant_](auto& x, const Key& key) { v.key(x, key); });
      multiply_keys<Kernel, 1, key_fragments>(s, Layout::slot_address(slot_) + k_offset_,
                                              [&](i32 at, i32, u32(&a)[4]) {
                                                if (kept_steps == 0) return load_fragment(at, a);
                                                RADDLE_UNROLL
                                                for (i32 e = 0; e < 4; ++e) a[e] = q_[at][e];
                                              });
    }
    ptx::sync_warp();
    load(Layout::slots, slot_);
    slot_ = Layout::after(slot_, Layout::slots);
    if (computes) {
      if constexpr (Kernel::narrow_keys)
        scale_logits<Kernel, 1, key_fragments>(
            s, keys.scale[0] + lane_keys(), [&](i32, i32 half) { return factor_[half]; }, halves);
      apply(
          s, keys, warp_keys * warp_, flags, facts, [&](i32) { return lane_ / 4; }, halves);
      if constexpr (scan == Scan::softmax) softmax<Kernel>(s, stats_, o_, to_log2_, halves);
    }
    ptx::copy_wait<pending>();
    ptx::sync_warp();
    if (computes) {
      if constexpr (has_value<Variant>)
        transform_slot<Kernel, Layout, 1>(
            slot_, keys, [v = variant_](auto& x, const Key& key) { v.value(x, key); });
      if constexpr (Kernel::narrow_values) {
        value_scales_.rebase(keys.scale[1] + warp_keys * warp_, warp_keys, o_);
        value_scales_.apply(s, keys.scale[1] + lane_keys());
      }
      Weights<1, key_fragments> p;
      round_weights<typename Kernel::VoElement>(s, p);
      multiply_values<Kernel, 1, key_fragments>(o_, p, Layout::slot_address(slot_) + v_offset_);
    }
    ptx::sync_warp();
    load(Layout::slots + 1, slot_);
    slot_ = Layout::after(slot_, Layout::slots);
    computing_ = Layout::after(computing_, Layout::key_slots);
    if (!fills) return (flags & TileFlags::last) != 0;
    --filling_;
    return filling_ == 0 ||
           filling_ == filling_steps - (even ? 2 : 1);  // the keys of one tile have been requested
  }

  /// The first key of this lane, in its warp's part.
  RADDLE_DEVICE i32 lane_keys() const { return warp_keys * warp_ + lane_ % 4 * 2; }

  /// Adds up the states of the warps and stores the result, eight rows and a slab of columns at a
  /// time. Where no item follows, the ring is free, and the slab has all columns.
  RADDLE_DEVICE void merge(const OpenedItem& opened, i32 number, bool more) {
    const ShortOutput<Kernel, Variant> output(launch_, variant_, opened.item, to_log2_);
    const i32 num_rows = opened.num_rows;
    MergeBuffer& buffer = Layout::merge_buffer();
    const i32 g = lane_ / 4, t = lane_ % 4;
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      float& sum = stats_.sum[0][half];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if (t != 0) continue;
      buffer.top[warp_][g + 8 * half] = stats_.top[0][half];
      buffer.sum[warp_][g + 8 * half] = sum;
    }
    Kernel::Team::sync();
    float factor[2] = {1.0f, 1.0f};
    if constexpr (scan == Scan::softmax) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        const MergedRow mine = output.merged(g + 8 * half);
        factor[half] = ptx::exp2((stats_.top[0][half] - mine.shift) * to_log2_) * mine.inverse;
      }
    }
    if constexpr (Kernel::narrow_values) {
      factor[0] *= value_scales_.unit();
      factor[1] *= value_scales_.unit();
    }
    constexpr i32 all_columns = Slabs::columns;
    const bool at_once = Slabs::fit && !more && !has_output<Variant>;
    const i32 columns = at_once ? all_columns : slab_columns, pitch = columns + 4;
    float* slab = at_once ? reinterpret_cast<float*>(Layout::slot_memory(0)) : buffer.o;
    float* mine = slab + (slab_rows * warp_ + g) * pitch;
    const i32 quads = columns / 4, rows_of_a_turn = num_threads / quads;
    const i32 first_row = ptx::thread_index() / quads, c = 4 * (ptx::thread_index() % quads);
    RADDLE_ROLLED
    for (i32 half = 0; 8 * half < num_rows; ++half) {
      const i32 rows = opened.paired ? 0 : min(slab_rows, num_rows - 8 * half);
      typename ShortOutput<Kernel, Variant>::MergedTo to;
      if (first_row < rows) to = output.begin_row(8 * half + first_row, c == 0);
      RADDLE_ROLLED
      for (i32 first = 0; first < all_columns; first += columns) {
        RADDLE_UNROLL
        for (i32 n = 0; n < Kernel::out_fragments; ++n) {
          if (8 * n < first || 8 * n >= first + columns) continue;
          float two[2];
          RADDLE_UNROLL
          for (i32 e = 0; e < 2; ++e)
            two[e] = half == 0 ? out_element<Kernel>(o_[0], n, 0, e) * factor[0]
                               : out_element<Kernel>(o_[0], n, 1, e) * factor[1];
          ptx::store_two(mine + out_column<Kernel>(t, n) - first, two[0], two[1]);
        }
        if (Kernel::pairs_teams && opened.paired)
          return compose_paired_halves<Kernel, Variant, Layout>(launch_, variant_, number,
                                                                to_log2_);
        Kernel::Team::sync();
        RADDLE_ROLLED
        for (i32 r = first_row; r < rows; r += rows_of_a_turn) {
          if (r != first_row) to = output.begin_row(8 * half + r, c == 0);
          if (first + c < Kernel::dim_vo)
            output.put_four(to, slab + r * pitch + c, slab_rows * pitch, first + c);
        }
        Kernel::Team::sync();
      }
    }
    if constexpr (has_output<Variant>) {
      if (opened.item.partial_row < 0 && !launch_.state_only) output.write_rows(num_rows);
    }
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  i32 next_;
  bool leaves_shares_ = false;
  const i32 end_, warp_, lane_;
  KeyStream<Kernel, Layout> stream_;
  i32 filling_ = filling_steps;  // filling steps that remain
  // Positions in the rings after these steps: the slot that is used next, the facts of its keys,
  i32 slot_ = (3 * Layout::slots - 2 * filling_steps) % Layout::slots;
  i32 computing_ = (2 * Layout::key_slots - filling_steps) % Layout::key_slots;
  i32 loading_ = filling_steps > 0 && even ? Layout::key_slots - 1
                                           : 0;  // and the facts of the keys that are loaded next
  OpenedItem opened_{};
  QueryRows<share, Kernel> queries_;
  const u32 k_offset_, v_offset_;  // offsets at which this lane loads matrix fragments
  float to_log2_;
  u32 q_[max(kept_steps, 1)][4];  // the row fragments of Q
  Output<Kernel, 1> o_;
  RowStats<1> stats_;
  float factor_[2];  // factors that logits of this lane's rows still need, where keys are bytes
  ValueScales<Kernel, 1> value_scales_;
};

}  // namespace mma

RADDLE_ENGINE_END
