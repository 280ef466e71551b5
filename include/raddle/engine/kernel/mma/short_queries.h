// The loop for work items of up to 16 fused rows: decode. The aim is to keep the memory busy.
//
// Every warp holds all rows and computes them against a quarter of each KV tile's keys, which it
// loaded itself. No warp waits for another until an item ends, and loads of the next items are
// issued meanwhile. At an item's end the team adds up the states of its warps.
#pragma once

#include "raddle/engine/kernel/gpu/arrive.h"
#include "raddle/engine/kernel/gpu/softmax.h"
#include "raddle/engine/kernel/gpu/variant.h"
#include "raddle/engine/kernel/mma/key_ring.h"
#include "raddle/engine/kernel/mma/short_output.h"

RADDLE_ENGINE_BEGIN

namespace mma {

template <class Kernel, class Variant>
class ShortQueries {
  using T = typename Kernel::T;
  using Memory = ShortMemory<Kernel>;
  static constexpr i32 warp_keys = Memory::warp_keys;
  static constexpr i32 key_fragments = warp_keys / 8;
  using Keys = typename Memory::Keys;
  using Slabs = WholeSlabs<Memory, Kernel::out_fragments>;
  using Out = ShortOutput<Kernel, Variant>;
  /// An output part sees whole rows, which are put together in the memory of the ring; so the ring
  /// cannot run on into the next item.
  static constexpr bool runs_on = !has_output<Variant>;

  /// Whether code of its own fills the ring before the first item. Otherwise steps that compute
  /// nothing fill it, and the code that finds and loads exists once: a second copy is a thousand
  /// instructions. The full kernel is as large as the instruction caches, and with that copy a
  /// cascade took 3 to 4 µs more. The short kernel has room for it and saves 0.5 µs. But it keeps
  /// more registers across the loop than transforms of keys and values leave.
  static constexpr bool fills_apart =
      Kernel::short_only && !has_key<Variant> && !has_value<Variant>;
  /// A step issues two loads; the very first load finds a tile and copies nothing.
  static constexpr i32 filling_steps = fills_apart ? 0 : Memory::slots / 2 + 1;

 public:
  /// For items [first, end), or up to the first item of another shape.
  RADDLE_DEVICE ShortQueries(const GpuLaunch& launch, const Variant& variant, i32 first, i32 end)
      : launch_(launch),
        variant_(variant),
        next_(first),
        end_(runs_on ? end : first + 1),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()),
        ring_(launch, first, end_),
        k_offset_(static_cast<u32>(Memory::template part_of<typename Kernel::KeyRows>(warp_)) +
                  b_offset<typename Kernel::KeyRows>(lane_)),
        v_offset_(static_cast<u32>(Memory::template part_of<typename Kernel::ValueRows>(warp_)) +
                  a_offset<typename Kernel::ValueRows>(lane_)) {
    if constexpr (fills_apart) ring_.fill([&] { fetch_queries(); });
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

  /// Queries stay in registers, except for heads above 128, whose outputs need these registers.
  static constexpr i32 kept_steps = Kernel::k_steps <= 8 ? Kernel::k_steps : 0;
  RADDLE_DEVICE void load_fragment(i32 step, u32 (&a)[4]) const {
    const u32 from = ptx::shared_address(Memory::query_memory());
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
    opened.request = request_of_keys(launch_, tile.level, tile.group);
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

  /// Computes the next item; or, before the first, fills a part of the ring (`filling_steps`).
  /// Returns whether there is more to do.
  RADDLE_DEVICE bool attend() {
    const bool fills = ring_.fills(), fetches = ring_.is_new();
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

  /// Begins an item: stores its queries, which have been fetched, where products load them.
  RADDLE_DEVICE void begin(OpenedItem& opened, i32 number) {
    describe_item(opened.request, opened.item.kv_head, Memory::facts());
    queries_.store(variant_, share * warp_, Memory::query_memory(), Memory::facts());
    Kernel::Team::sync();
    if (keeps_opened) opened.ticket.expect(launch_);
    RADDLE_UNROLL
    for (i32 i = 0; i < kept_steps; ++i) load_fragment(i, q_[i]);
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half)
      factor_[half] = KeyOperand<Kernel>::row_factor(Memory::facts(), lane_ / 4 + 8 * half);
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
    values_.clear();
    stats_.clear();
  }

  /// Stores what the warps computed, and counts the item at the contractions that wait for it.
  RADDLE_DEVICE void finish(OpenedItem& opened, i32 number, bool more) {
    if (!keeps_opened) {
      opened = open(number);
      opened.ticket.expect(launch_);
    }
    merge(opened, number, more);
    mark<Kernel>(launch_, TimelineStage::stored, number);
    if (opened.item.partial_row >= 0) {
      arrive<Kernel>(launch_, variant_, launch_.plan.items[number], opened.ticket,
                     Memory::completed_bits(), Memory::vector(warp_));
      if (!composed_at_once<typename Kernel::Team>(launch_, opened.num_rows)) leaves_shares_ = true;
    }
    mark<Kernel>(launch_, TimelineStage::finished, number);
  }

  /// Computes one KV tile and refills its slots with the tile that comes a ring later; a step that
  /// `fills` computes nothing. Returns whether the tile is the item's last.
  template <class Apply>
  RADDLE_DEVICE bool step(const Apply& apply, i32 halves, bool fills) {
    const auto& keys = ring_.keys();
    Logits<1, key_fragments> s;
    ring_.wait_k();
    const i32 flags = fills ? TileFlags::empty : keys.flags[warp_];
    const bool computes = !(flags & TileFlags::empty);
    if (computes) multiply_queries(s, keys);
    ring_.release_k_and_load_next();
    if (computes) {
      KeyOperand<Kernel>::scale(
          s, keys, lane_keys(), [&](i32, i32 half) { return factor_[half]; }, halves);
      apply(
          s, keys, warp_keys * warp_, flags, Memory::facts(), [&](i32) { return lane_ / 4; },
          halves, stats_);
      softmax<Kernel>(s, stats_, o_, to_log2_, halves);
    }
    ring_.wait_v();
    if (computes) add_values(s, keys);
    ring_.release_v_and_load_next();
    return fills ? ring_.end_filling_step() : (flags & TileFlags::last) != 0;
  }

  /// This lane's first key in the tile.
  RADDLE_DEVICE i32 lane_keys() const { return warp_keys * warp_ + lane_ % 4 * 2; }

  /// S = Q · Kᵀ over this warp's keys.
  RADDLE_DEVICE void multiply_queries(Logits<1, key_fragments>& s, const Keys& keys) const {
    change_keys<Kernel, Memory>(variant_, ring_.slot(), keys);
    KeyOperand<Kernel>::multiply(s, Memory::slot_address(ring_.slot()) + k_offset_,
                                 [&](i32 at, i32, u32(&a)[4]) {
                                   if (kept_steps == 0) return load_fragment(at, a);
                                   RADDLE_UNROLL
                                   for (i32 e = 0; e < 4; ++e) a[e] = q_[at][e];
                                 });
  }

  /// O += P · V over this warp's keys.
  RADDLE_DEVICE void add_values(Logits<1, key_fragments>& s, const Keys& keys) {
    change_values<Kernel, Memory>(variant_, ring_.slot(), keys);
    values_.scale(s, keys, warp_keys * warp_, warp_keys, lane_keys(), o_);
    Weights<1, key_fragments> p;
    round_weights<typename Kernel::VoElement>(s, p);
    values_.multiply(o_, p, Memory::slot_address(ring_.slot()) + v_offset_);
  }

  /// Adds up the states of the warps and stores the result, eight rows and a slab of columns at a
  /// time. Where no item follows, the ring is free, and the slab has all columns.
  RADDLE_DEVICE void merge(const OpenedItem& opened, i32 number, bool more) {
    const Out output(launch_, variant_, opened.item, to_log2_);
    const i32 g = lane_ / 4, t = lane_ % 4;
    clear_empty_rows<Kernel::scan>(stats_, o_, opened.num_rows > 8 ? 2 : 1);
    put_statistics(g, t);
    Kernel::Team::sync();
    float factor[2];
    find_factors(output, g, factor);
    constexpr i32 all_columns = Slabs::columns;
    const bool at_once = Slabs::fit && !more && !has_output<Variant>;
    const i32 columns = at_once ? all_columns : slab_columns, pitch = columns + 4;
    float* slab = at_once ? Slabs::of_team(Memory::team()) : Memory::slabs();
    float* mine = slab + (slab_rows * warp_ + g) * pitch;
    // A thread adds up four columns, of rows that lie `rows_of_a_turn` apart.
    const i32 quads = columns / 4, rows_of_a_turn = num_threads / quads;
    const i32 first_row = ptx::thread_index() / quads, c = 4 * (ptx::thread_index() % quads);
    RADDLE_ROLLED
    for (i32 half = 0; 8 * half < opened.num_rows; ++half) {
      const i32 rows = opened.paired ? 0 : min(slab_rows, opened.num_rows - 8 * half);
      typename Out::MergedTo to;
      if (first_row < rows) to = output.begin_row(8 * half + first_row, c == 0);
      RADDLE_ROLLED
      for (i32 first = 0; first < all_columns; first += columns) {
        put_slab(mine, t, first, columns, half, factor);
        if (Kernel::pairs_teams && opened.paired)
          return compose_paired_halves<Kernel, Variant, Memory>(launch_, variant_, number,
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
      if (opened.item.partial_row < 0 && !launch_.state_only) output.write_rows(opened.num_rows);
    }
  }

  // Of a fragment, a lane has rows g and g + 8, and columns 2t and 2t + 1 of each 8. Computed once
  // for all three, they save a register.

  /// Leaves this warp's maxima and sums for the team.
  RADDLE_DEVICE void put_statistics(i32 g, i32 t) {
    MergeStatistics& team = Memory::statistics();
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      float& sum = stats_.sum[0][half];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if (t != 0) continue;
      team.top[warp_][g + 8 * half] = stats_.top[0][half];
      team.sum[warp_][g + 8 * half] = sum;
    }
  }

  /// The factors that make this lane's rows of O a part of the team's.
  RADDLE_DEVICE void find_factors(const Out& output, i32 g, float (&factor)[2]) const {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      factor[half] = 1.0f;
      if constexpr (Kernel::scan == Scan::softmax) {
        const MergedRow row = output.merged(g + 8 * half);
        factor[half] = ptx::exp2((stats_.top[0][half] - row.shift) * to_log2_) * row.inverse;
      }
      factor[half] *= values_.unit() * output_scale(launch_);
    }
  }

  /// Writes columns [first, first + columns) of eight rows of this warp's O to its slab, where this
  /// lane's row begins at `mine`.
  RADDLE_DEVICE void put_slab(float* mine, i32 t, i32 first, i32 columns, i32 half,
                              const float (&factor)[2]) const {
    RADDLE_UNROLL
    for (i32 n = 0; n < Kernel::out_fragments; ++n) {
      if (8 * n < first || 8 * n >= first + columns) continue;
      float two[2];
      RADDLE_UNROLL
      for (i32 e = 0; e < 2; ++e)
        two[e] = half == 0 ? values_.element(o_[0], n, 0, e) * factor[0]
                           : values_.element(o_[0], n, 1, e) * factor[1];
      ptx::store_two(mine + values_.column(t, n) - first, two[0], two[1]);
    }
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  i32 next_;
  bool leaves_shares_ = false;
  const i32 end_, warp_, lane_;
  WarpRing<Kernel, Memory, filling_steps> ring_;
  OpenedItem opened_{};
  QueryRows<share, Kernel> queries_;
  const u32 k_offset_, v_offset_;  // offsets at which this lane loads matrix fragments
  float to_log2_;
  u32 q_[max(kept_steps, 1)][4];  // the row fragments of Q
  Output<Kernel, 1> o_;
  RowStats<1> stats_;
  float factor_[2];  // factors that logits of this lane's rows still need, where keys are bytes
  ValueOperand<Kernel, 1> values_;
};

}  // namespace mma

RADDLE_ENGINE_END
