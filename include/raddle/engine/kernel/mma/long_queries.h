// A work item of many fused rows: prefilling, or rows that share a prefix. What counts is to keep
// the tensor cores busy.
//
// Warp w holds rows 16 w … of every 64, `blocks` times 16 rows, and computes them against whole KV
// tiles, which all warps load together. No warp waits for all others: barriers in shared memory say
// when a slot is filled, and when all have used it.
#pragma once

#include "raddle/engine/kernel/mma/arrive.h"
#include "raddle/engine/kernel/mma/long_output.h"
#include "raddle/engine/kernel/mma/rows.h"
#include "raddle/engine/kernel/mma/softmax.h"
#include "raddle/engine/kernel/mma/tile_stream.h"

RADDLE_ENGINE_BEGIN

namespace mma {

template <class K, class V, i32 blocks>
class LongQueries {
  using T = typename K::T;
  using Layout = LongLayout<K>;
  using Stream = TileStream<K, Layout>;
  static constexpr Scan scan = scan_of<V>();
  static constexpr i32 tiles = Layout::tile_keys / 8;

 public:
  RADDLE_DEVICE LongQueries(const MmaLaunch& launch, const V& variant, i32 item)
      : launch_(launch),
        variant_(variant),
        item_(item),
        warp_(ptx::warp_index()),
        stream_(launch),
        q_address_(ptx::shared_address(Layout::query_memory()) +
                   static_cast<u32>(first_row(0) * K::QueryRows::pitch) +
                   a_offset<typename K::QueryRows>(ptx::lane_index())),
        k_offset_(b_offset<typename K::KeyRows>(ptx::lane_index())),
        v_offset_(a_offset<typename K::ValueRows>(ptx::lane_index())) {}

  /// Returns what next(item) says to the one thread that asks.
  template <class Next>
  RADDLE_DEVICE i32 run(Next next) {
    stream_.open(item());
    const i32 kv_head = item().kv_head;
    QueryRows<16 * blocks, K, long_block_rows> queries;
    queries.copy(launch_, tile(), kv_head, first_row(0), Layout::query_memory());
    create_barriers();
    ptx::sync_block();
    if (warp_ < Stream::ahead) stream_.find(warp_);
    RADDLE_ROLLED
    for (i32 n = 0; n < Layout::slots - lag; ++n) load(n % 2, n, n / 2);
    auto& facts = Layout::scratch();
    // Not looked up for itself, which all would wait for: whose keys are its own is any row's
    // request.
    const bool shared = launch_.levels[Layout::source(warp_).level].keys_are_shared;
    describe_item(shared ? -1 : queries.row().request, kv_head, facts);
    if (ptx::thread_index() == 0) {
      facts.num_rows = tile().num_rows;
      facts.partial_row = item().partial_row;
    }
    queries.complete(variant_, first_row(0), Layout::query_memory(), facts);
    mark<K>(launch_, TimelineStage::opened, item_);
    clear(o_);
    stats_.clear();
    ptx::sync_block();  // what is said of the item
    // That may take a while, but no other warp waits for it.
    if (ptx::thread_index() == 0) facts.next = next(item_);
    if (!(keys().flags[0] & TileFlags::empty)) {
      RADDLE_ROLLED
      while (!step()) {
      }
    }
    mark<K>(launch_, TimelineStage::computed, item_);
    ptx::sync_block();  // rows of O take the place of the ring
    destroy_barriers();
    finish();
    mark<K>(launch_, TimelineStage::finished, item_);
    ptx::sync_block();  // the next item reuses shared memory
    return Layout::scratch().next;
  }

 private:
  RADDLE_DEVICE i32 first_row(i32 r) const { return long_row(warp_, r); }
  // Looked up anew where they are asked for: in the loop, registers are O's.
  RADDLE_DEVICE const WorkItem& item() const { return launch_.plan.items[item_]; }
  RADDLE_DEVICE const QueryTile& tile() const {
    return launch_.plan.query_tiles[item().query_tile];
  }

  /// Uses count K and V of the tiles in turns, and so do loads: load n takes slot n % slots when
  /// use n - slots is over. A warp begins it when its own use n - slots + lag is: the others are
  /// done with theirs by then, as a rule.
  static constexpr i32 lag = Layout::slots > 2 ? 1 : 0;
  static constexpr i32 tiles_in_ring = Layout::slots / 2;
  static_assert(Layout::slots % 2 == 0);

  RADDLE_DEVICE void create_barriers() const {
    const i32 i = ptx::thread_index();
    if (i < Layout::slots) {
      ptx::barrier_create(Layout::filled(i), num_threads);
      ptx::barrier_create(Layout::freed(i), num_warps);
    }
    if (i < Layout::found_slots) ptx::barrier_create(Layout::found(i), Stream::barrier_arrivals);
  }
  RADDLE_DEVICE void destroy_barriers() const {
    const i32 i = ptx::thread_index();
    if (i < Layout::slots) {
      ptx::barrier_destroy(Layout::filled(i));
      ptx::barrier_destroy(Layout::freed(i));
    }
    if (i < Layout::found_slots) ptx::barrier_destroy(Layout::found(i));
  }

  /// Starts loading K (`which` 0) or V of tile number `nth`, if there is one.
  RADDLE_DEVICE void load(i32 which, i32 slot, i32 nth) {
    const bool loads = which == 0 ? stream_.load_keys(slot, nth) : stream_.load_values(slot, nth);
    if (loads) ptx::barrier_arrive_after_copies(Layout::filled(slot));
  }

  /// This warp has used a slot, and starts loading the next K or V into one that all have used.
  RADDLE_DEVICE void pass_on(i32 used, i32 which, i32 slot, i32 parity) {
    ptx::sync_warp();
    if (ptx::lane_index() == 0) ptx::barrier_arrive(Layout::freed(used));
    ptx::barrier_wait(Layout::freed(slot), parity);
    load(which, slot, tile_number_ + (which == 0 ? tiles_in_ring : 1));
  }

  // Where the tile lies in rings: worked out anew where it is asked for.
  RADDLE_DEVICE const typename Layout::Keys& keys() const {
    return Layout::keys_at(ring_slot(tile_number_, Layout::key_slots));
  }
  RADDLE_DEVICE i32 k_slot() const { return 2 * ring_slot(tile_number_, tiles_in_ring); }
  RADDLE_DEVICE i32 v_slot() const { return k_slot() + 1; }
  RADDLE_DEVICE i32 v_before() const { return (k_slot() == 0 ? Layout::slots : k_slot()) - 1; }
  /// Of the ring's round.
  RADDLE_DEVICE i32 parity() const { return ring_round(tile_number_, tiles_in_ring) & 1; }
  /// Nothing that follows from the tile's number stays in registers from before to behind it.
  RADDLE_DEVICE void forget() { tile_number_ = ptx::renewed(tile_number_); }

  /// One KV tile, whose slots then take what is a ring further on. Returns whether it is the item's
  /// last.
  RADDLE_DEVICE bool step() {
    const ApplyVariant<V, blocks, tiles> apply(launch_, variant_, item_);
    [[maybe_unused]] auto& facts = Layout::scratch();
    ptx::barrier_wait(Layout::filled(k_slot()), parity());
    stream_.find(tile_number_ + Stream::ahead);
    forget();
    if constexpr (has_key<V>) {
      transform_slot<K, Layout, 0>(k_slot(), keys(),
                                   [v = variant_](auto& x, const Key& key) { v.key(x, key); });
      ptx::sync_block();
    }
    Logits<blocks, tiles> s;
    multiply_keys<K, blocks, tiles>(
        s, Layout::slot_address(k_slot()) + k_offset_, [&](i32 at, i32 r, u32(&a)[4]) {
          ptx::load_matrices(a, K::QueryRows::step_from(q_address_, at) +
                                    static_cast<u32>(r * long_block_rows * K::QueryRows::pitch));
        });
    forget();
    const i32 flags = keys().flags[0];
    // Of the first tile, no V is before: barriers answer at once for the round before the first.
    pass_on(k_slot(), lag, lag == 0 ? k_slot() : v_before(),
            k_slot() < 2 * lag ? parity() ^ 1 : parity());
    forget();
    if constexpr (K::narrow_keys)
      scale_logits<K, blocks, tiles>(
          s, keys().scale[0] + ptx::lane_index() % 4 * 2,
          [&](i32 r, i32 half) {
            return facts.factor[first_row(r) + ptx::lane_index() / 4 + 8 * half];
          },
          2);
    apply(
        s, keys(), 0, flags, facts, [&](i32 r) { return first_row(r) + ptx::lane_index() / 4; }, 2);
    // Before the weights, not behind them: from there on, nothing keeps weights and products apart.
    ptx::barrier_wait(Layout::filled(v_slot()), parity());
    forget();
    if constexpr (scan == Scan::softmax) softmax<K>(s, stats_, o_, apply.to_log2(), 2);
    if constexpr (K::narrow_values) {
      value_scales_.meet(keys().scale[1], Layout::tile_keys, o_);
      value_scales_.apply(s, keys().scale[1] + ptx::lane_index() % 4 * 2);
    }
    Weights<blocks, tiles> p;
    round_weights<typename K::VoElement>(s, p);
    if constexpr (has_value<V>) {
      transform_slot<K, Layout, 1>(v_slot(), keys(),
                                   [v = variant_](auto& x, const Key& key) { v.value(x, key); });
      ptx::sync_block();
    }
    multiply_values<K, blocks, tiles>(o_, p, Layout::slot_address(v_slot()) + v_offset_);
    forget();
    const bool last = (keys().flags[0] & TileFlags::last) != 0;
    pass_on(v_slot(), 1 - lag, lag == 0 ? v_slot() : k_slot(), parity());
    ++tile_number_;
    return last;
  }

  RADDLE_DEVICE void finish() {
    const auto& facts = Layout::scratch();
    LongOutput<K, V, blocks>(launch_, variant_, facts.num_rows, facts.partial_row)
        .send(o_, stats_, value_scales_,
              ApplyVariant<V, blocks, tiles>(launch_, variant_, item_).to_log2());
    mark<K>(launch_, TimelineStage::stored, item_);
    if (facts.partial_row >= 0)
      arrive<K>(launch_, variant_, item(), look_up_awaiting(launch_, item(), ptx::thread_index()),
                Layout::completed_bits(), Layout::vector(warp_));
  }

  const MmaLaunch& launch_;
  const V& variant_;
  const i32 item_;
  const i32 warp_;
  Stream stream_;
  i32 tile_number_ = 0;  // of the item's tiles
  // Where this lane takes its matrices.
  const u32 q_address_, k_offset_, v_offset_;
  Output<K, blocks> o_;
  RowStats<blocks> stats_;
  ValueScales<K, blocks> value_scales_;
};

}  // namespace mma

RADDLE_ENGINE_END
