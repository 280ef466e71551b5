// The loop for a work item of many fused rows: prefill, or rows that share a prefix. The aim is to
// keep the tensor cores busy.
//
// Warp w holds rows 16 w … of every 64, in `row_fragments` fragments of 16 rows, and computes them
// against whole KV tiles, which all warps load together. No warp waits for all others: barriers in
// shared memory say when a slot of the ring is filled, and when all warps have used it.
#pragma once

#include "raddle/engine/kernel/gpu/arrive.h"
#include "raddle/engine/kernel/gpu/softmax.h"
#include "raddle/engine/kernel/gpu/variant.h"
#include "raddle/engine/kernel/mma/long_output.h"
#include "raddle/engine/kernel/mma/rows.h"
#include "raddle/engine/kernel/mma/tile_ring.h"

RADDLE_ENGINE_BEGIN

namespace mma {

template <class Kernel, class Variant, i32 row_fragments>
class LongQueries {
  using T = typename Kernel::T;
  using Memory = LongMemory<Kernel>;
  using Stream = TileStream<Kernel, Memory>;
  static constexpr i32 key_fragments = Memory::tile_keys / 8;
  /// Whether masks are asked what each row keeps.
  static constexpr bool finds_intervals = keeps_spans<Variant>() && !has_key<Variant> &&
                                          !has_value<Variant> && Memory::has_room_for_kept;

 public:
  RADDLE_DEVICE LongQueries(const GpuLaunch& launch, const Variant& variant, i32 item)
      : launch_(launch),
        variant_(variant),
        item_(item),
        warp_(ptx::warp_index()),
        stream_(launch),
        q_address_(ptx::shared_address(Memory::query_memory()) +
                   static_cast<u32>(first_row(0) * Kernel::QueryRows::pitch) +
                   a_offset<typename Kernel::QueryRows>(ptx::lane_index())),
        k_offset_(b_offset<typename Kernel::KeyRows>(ptx::lane_index())),
        v_offset_(a_offset<typename Kernel::ValueRows>(ptx::lane_index())) {}

  /// Returns the result of next(item), which one thread calls.
  template <class Next>
  RADDLE_DEVICE i32 run(Next next) {
    stream_.open(item());
    const i32 kv_head = item().kv_head;
    QueryRows<16 * row_fragments, Kernel, team_fragment_rows> queries;
    queries.copy(launch_, tile(), kv_head, first_row(0), Memory::query_memory());
    ring_.create_barriers();
    ptx::sync_block();
    if (warp_ < Stream::ahead) stream_.find(warp_);
    ring_.fill(stream_);
    auto& facts = Memory::facts();
    // The request of the keys is that of any row; a look-up of its own would make all warps wait.
    const bool shared = launch_.levels[Memory::source(warp_).level].keys_are_shared;
    describe_item(shared ? -1 : queries.row().request, kv_head, facts);
    if (ptx::thread_index() == 0) {
      facts.num_rows = tile().num_rows;
      facts.partial_row = item().partial_row;
    }
    queries.complete(variant_, first_row(0), Memory::query_memory(), facts);
    if constexpr (finds_intervals) find_kept_columns(queries);
    mark<Kernel>(launch_, TimelineStage::opened, item_);
    clear(o_);
    stats_.clear();
    ptx::sync_block();  // the facts of the item are written
    // Drawing an item may take long, but no other warp waits for it here.
    if (ptx::thread_index() == 0) facts.next = next(item_);
    if (!(ring_.keys().flags[0] & TileFlags::empty)) {
      RADDLE_ROLLED
      while (!step()) {
      }
    }
    mark<Kernel>(launch_, TimelineStage::computed, item_);
    ptx::sync_block();  // rows of O overwrite the ring
    ring_.destroy_barriers();
    finish();
    mark<Kernel>(launch_, TimelineStage::finished, item_);
    ptx::sync_block();  // the next item overwrites shared memory
    return Memory::facts().next;
  }

 private:
  /// Rows of the tile: the first of this warp's row fragment r, and of this lane's two there.
  RADDLE_DEVICE i32 first_row(i32 r) const { return long_row(warp_, r); }
  RADDLE_DEVICE i32 lane_row(i32 r) const { return first_row(r) + ptx::lane_index() / 4; }
  RADDLE_DEVICE static KeptColumns* kept_of_rows() {
    if constexpr (finds_intervals) return Memory::kept_of_rows();
    return nullptr;
  }
  // Read again where they are needed: in the loop, O takes the registers.
  RADDLE_DEVICE const WorkItem& item() const { return launch_.plan.items[item_]; }
  RADDLE_DEVICE const QueryTile& tile() const {
    return launch_.plan.query_tiles[item().query_tile];
  }

  /// Asks which columns a row keeps, a lane for each of this warp's rows.
  template <class Queries>
  RADDLE_DEVICE void find_kept_columns(const Queries& queries) const {
    i32 guess = 0;
    if (ptx::lane_index() < 16 * row_fragments)
      kept_of_rows()[queries.row_number(first_row(0))] =
          columns_kept(variant_, queries.row(), Memory::source(warp_), guess);
  }

  /// Computes one KV tile and refills its slots with the tile that comes a ring later. Returns
  /// whether the tile is the item's last.
  RADDLE_DEVICE bool step() {
    const ApplyVariant<Variant, row_fragments, key_fragments> apply(launch_, variant_, item_);
    const auto& facts = Memory::facts();
    ring_.wait_k_and_find_next(stream_);
    if constexpr (has_key<Variant>) {
      change_keys<Kernel, Memory>(variant_, ring_.k_slot(), ring_.keys());
      ptx::sync_block();
    }
    Logits<row_fragments, key_fragments> s;
    multiply_queries(s, Memory::slot_address(ring_.k_slot()) + k_offset_);
    const i32 flags = ring_.flags_after_product();
    ring_.release_k_and_load_next(stream_);
    KeyOperand<Kernel>::scale(
        s, ring_.keys(), ptx::lane_index() % 4 * 2,
        [&](i32 r, i32 half) {
          return KeyOperand<Kernel>::row_factor(facts, lane_row(r) + 8 * half);
        },
        2);
    apply(
        s, ring_.keys(), 0, flags, facts, [&](i32 r) { return lane_row(r); }, 2, stats_,
        kept_of_rows());
    // Wait before the weights rather than behind them: from there on, nothing must keep weights and
    // products apart.
    ring_.wait_v();
    softmax<Kernel>(s, stats_, o_, apply.to_log2(), 2);
    values_.scale(s, ring_.keys(), 0, Memory::tile_keys, ptx::lane_index() % 4 * 2, o_);
    Weights<row_fragments, key_fragments> p;
    round_weights<typename Kernel::VoElement>(s, p);
    if constexpr (has_value<Variant>) {
      change_values<Kernel, Memory>(variant_, ring_.v_slot(), ring_.keys());
      ptx::sync_block();
    }
    values_.multiply(o_, p, Memory::slot_address(ring_.v_slot()) + v_offset_);
    const bool last = (ring_.flags_after_product() & TileFlags::last) != 0;
    ring_.release_v_and_load_next(stream_);
    return last;
  }

  /// S = Q · Kᵀ. Q is loaded again for every tile: it does not fit in registers.
  RADDLE_DEVICE void multiply_queries(Logits<row_fragments, key_fragments>& s, u32 keys) const {
    KeyOperand<Kernel>::multiply(s, keys, [&](i32 at, i32 r, u32(&a)[4]) {
      ptx::load_matrices(a,
                         Kernel::QueryRows::step_from(q_address_, at) +
                             static_cast<u32>(r * team_fragment_rows * Kernel::QueryRows::pitch));
    });
  }

  RADDLE_DEVICE void finish() {
    const auto& facts = Memory::facts();
    LongOutput<Kernel, Variant, row_fragments>(launch_, variant_, facts.num_rows, facts.partial_row)
        .send(o_, stats_, values_,
              ApplyVariant<Variant, row_fragments, key_fragments>(launch_, variant_, item_)
                  .to_log2());
    mark<Kernel>(launch_, TimelineStage::stored, item_);
    if (facts.partial_row >= 0)
      arrive<Kernel>(launch_, variant_, item(),
                     look_up_ticket(launch_, item(), ptx::thread_index()), Memory::completed_bits(),
                     Memory::vector(warp_));
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const i32 item_;
  const i32 warp_;
  Stream stream_;
  TileRing<Kernel, Memory> ring_;
  // Addresses and offsets at which this lane loads matrix fragments.
  const u32 q_address_, k_offset_, v_offset_;
  Output<Kernel, row_fragments> o_;
  RowStats<row_fragments> stats_;
  ValueOperand<Kernel, row_fragments> values_;
};

}  // namespace mma

RADDLE_ENGINE_END
