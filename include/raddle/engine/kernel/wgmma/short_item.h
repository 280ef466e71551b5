// An item of short queries, computed by a warpgroup: the tiles that are the group's, and what
// becomes of their states. Products are swapped, so that the keys of a tile take the 64 rows of a
// matrix instruction, and queries its 8 to 64 columns.
#pragma once

#include "raddle/engine/kernel/wgmma/products.h"
#include "raddle/engine/kernel/wgmma/short_output.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

RADDLE_DEVICE void wait(const u64& barrier, i32 parity) {
  ptx::barrier_wait(ptx::shared_address(&barrier), parity);
}
/// This warp needs a slot no more.
RADDLE_DEVICE void release_of_warp(const u64& barrier) {
  ptx::sync_warp();
  ptx::barrier_arrive_if(ptx::lane_index() == 0, ptx::shared_address(&barrier));
}

template <class Kernel, class Variant>
class ShortItem {
  using T = typename Kernel::T;
  using Block = ShortMemory<Kernel>;
  static constexpr Scan scan = Kernel::scan;
  /// Whether logits are scaled here, not by the softmax. A scale that is not positive turns the
  /// queries (queries.h).
  static constexpr bool scales_here = has_logits<Variant> || scan == Scan::sum;
  static constexpr i32 no_slot = -1;

 public:
  RADDLE_DEVICE ShortItem(const GpuLaunch& launch, const Variant& variant, const ShortLane& lane)
      : launch_(launch),
        variant_(variant),
        lane_(lane),
        to_log2_((scales_here || launch.scale == 0.0f ? 1.0f : math::abs(launch.scale)) *
                 math::log2e) {}

  /// The group's tiles of the nth item: every other one. Its first tile is either group's in turn,
  /// so that items of one tile are shared, too. The group has computed `tiles` before.
  template <class Facts>
  RADDLE_DEVICE void attend(const Facts& facts, i32 nth, i32& tiles) {
    const auto place = block().queries.place(nth);
    wait(block().queries.full[place.slot], place.parity);
    mark<Kernel>(launch_, TimelineStage::opened, facts.item);
    const u32 queries = ptx::uniform(ptx::shared_address(block().q[place.slot]));
    weighing_.clear();
    clear(o_);
    i32 in_use = no_slot;  // of values that a product under way reads
    RADDLE_ROLLED
    for (i32 i = (lane_.group ^ nth) & 1; i < facts.num_tiles; i += consumer_groups) {
      const TilePlace<Kernel> at(lane_.group, tiles++);
      await_tile<Kernel>(ptx::shared_address(&block().key_slots.full[at.slot]), at.parity);
      const i32 flags = block().tile[at.facts].flags;  // on their way while products are
      multiply_short_keys<Kernel>(s_, ptx::uniform(ptx::shared_address(block().k[at.slot])),
                                  queries);
      ptx::products_wait<0>(s_);
      read_outputs();
      release(block().key_slots.free[at.slot]);
      if (in_use != no_slot) release(block().value_slots.free[in_use]);
      change_logits(facts, at, flags);
      weigh_tile();
      await_tile<Kernel>(ptx::shared_address(&block().value_slots.full[at.slot]), at.parity);
      multiply_short_values<Kernel>(o_, ptx::uniform(ptx::shared_address(block().v[at.slot])),
                                    ptx::uniform(ptx::shared_address(block().p[lane_.group])));
      in_use = at.slot;
    }
    ptx::products_wait<0>(o_[0]);
    read_outputs();
    if (in_use != no_slot) release(block().value_slots.free[in_use]);
    release_of_warp(block().queries.free[place.slot]);
  }

  /// Both groups' states become rows of the output, or of partial states.
  template <class Facts>
  RADDLE_DEVICE void send(const Facts& facts, i32 nth) {
    using Output = ShortOutput<Kernel, Variant>;
    const Output output(launch_, variant_, lane_, to_log2_);
    if constexpr (Output::has_many_rows)
      output.exchange(o_, weighing_, facts, nth > 0);
    else if (lane_.group == 0)
      output.send(o_, weighing_, facts);
    else
      output.leave(o_, weighing_, facts, nth > 0);
  }

 private:
  /// Variant and mask of a tile's logits. Values of keys that do not exist are cleared, for a
  /// weight of zero does not remove NaN; the barrier of the weights is between that and the
  /// product.
  template <class Facts>
  RADDLE_DEVICE void change_logits(const Facts& facts, const TilePlace<Kernel>& at, i32 flags) {
    const auto& keys = block().keys_and_team.keys[at.facts];
    const ApplyToKeys<Kernel, Variant> apply(launch_, variant_, lane_);
    if constexpr (scales_here) apply.apply_logits(s_, keys, facts);
    u32 kept = ~0u;
    if (flags & (TileFlags::partial | TileFlags::ragged)) kept = apply.drop(s_, keys, flags, facts);
    if constexpr (scan == Scan::sum) weighing_.note_kept(kept);
    if (!(flags & TileFlags::ragged)) return;
    wait(block().value_slots.full[at.slot], at.parity);
    RADDLE_ROLLED
    for (i32 row = thread() / 8; row < Kernel::tile_keys; row += group_threads / 8) {
      if (keys.column[row] >= 0) continue;
      RADDLE_UNROLL
      for (i32 half = 0; half < Kernel::vo_halves; ++half)
        *reinterpret_cast<Packed8*>(block().v[at.slot] +
                                    Block::Values::at(row, 8 * half + thread() % 8)) = Packed8{};
    }
  }

  /// S -> weights -> P, in shared memory. The group passes one barrier; where a logit exceeds its
  /// row's reference by too much, it raises references and weighs once more.
  RADDLE_DEVICE void weigh_tile() {
    OfQueries<Kernel> sum;
    const bool exceeds = put_weights(sum);
    if (scan == Scan::sum) return ptx::sync_threads(group_0 + lane_.group, group_threads);
    if (ptx::sync_threads_any(group_0 + lane_.group, group_threads, exceeds)) {
      OfQueries<Kernel> factor;
      weighing_.raise(s_, lane_, to_log2_, factor);
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * Kernel::vo_halves * Kernel::row_fragments; ++i) {
        const i32 n = i / 4 % Kernel::row_fragments;
        o_[i / 4 / Kernel::row_fragments][n][i % 4] *= factor[n][i % 2];
      }
      put_weights(sum);
      ptx::sync_threads(group_0 + lane_.group, group_threads);
    }
    each_query<Kernel>([&](i32 n, i32 e) { weighing_.sum[n][e] += sum[n][e]; });
  }

  /// Stores the weights of S; returns their sums over this lane's keys, and whether a logit exceeds
  /// its reference.
  RADDLE_DEVICE bool put_weights(OfQueries<Kernel>& sum) const {
    bool exceeds = false;
    const i32 lane = ptx::lane_index();
    u8* p = block().p[lane_.group];
    RADDLE_UNROLL
    for (i32 n = 0; n < Kernel::row_fragments; ++n) {
      float x[4];
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e)
        x[e] =
            scan == Scan::sum ? s_[n][e] : weighing_.weigh(s_[n][e], n, e % 2, to_log2_, exceeds);
      sum[n][0] = x[0] + x[2], sum[n][1] = x[1] + x[3];
      const i32 at = Block::Weights::at(8 * n + lane % 8, 2 * lane_.warp + lane / 8 % 2);
      const u32 rounded[2] = {ptx::pack(x[0], x[1], T{}), ptx::pack(x[2], x[3], T{})};
      ptx::store_matrices_transposed(ptx::shared_address(p + at), rounded);
    }
    ptx::fence_proxy();
    return exceeds;
  }

  RADDLE_DEVICE void read_outputs() {
    RADDLE_UNROLL
    for (i32 half = 0; half < Kernel::vo_halves; ++half) ptx::products_read(o_[half]);
  }

  RADDLE_DEVICE static Block& block() { return Block::get(); }
  RADDLE_DEVICE static i32 thread() { return ptx::thread_index() % group_threads; }
  /// This warpgroup's products of a slot are done: one thread's are when all are.
  RADDLE_DEVICE static void release(const u64& barrier) {
    ptx::barrier_arrive_if(thread() == 0, ptx::shared_address(&barrier));
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const ShortLane& lane_;
  const float to_log2_;
  ShortLogits<Kernel> s_;
  ShortOutputs<Kernel> o_;
  ShortWeighing<Kernel> weighing_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
