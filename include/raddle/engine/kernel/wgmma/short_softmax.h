// The softmax of short queries. All keys of a tile are one warpgroup's, 16 a warp, so that the
// references of its rows are the group's: weights relative to them are multiplied by the values of
// all warps. A row's reference stays until a logit exceeds it by a threshold, which the group finds
// out at the barrier that it passes at every tile anyway.
#pragma once

#include "raddle/engine/kernel/gpu/softmax.h"
#include "raddle/engine/kernel/wgmma/short_fragments.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// The references and sums of a lane's queries over the tiles of its warpgroup.
template <class Kernel>
struct ShortWeighing {
  using S = ShortLogits<Kernel>;
  /// Logits, still without the factor to_log2. `none`, below which no number lies, is exceeded by
  /// every logit that a row keeps.
  OfQueries<Kernel> reference;
  /// Of the weights of this lane's keys. Under a plain sum, above 0 where a key was kept.
  OfQueries<Kernel> sum;

  static constexpr float none = __builtin_bit_cast(float, 0xff7fffffu);

  RADDLE_DEVICE void clear() {
    each_query<Kernel>([&](i32 n, i32 e) { reference[n][e] = none, sum[n][e] = 0.0f; });
  }

  /// The weight of a logit, and whether the logit is too large for it. The reference is subtracted
  /// before the factor is applied: a fused multiply-add would round their product, and logits of
  /// any size would differ by that.
  RADDLE_DEVICE float weigh(float s, i32 n, i32 e, float to_log2, bool& exceeds) const {
    const float x = (s - reference[n][e]) * to_log2;
    exceeds = exceeds | (x > rescale_threshold);
    return ptx::exp2(x);
  }

  /// Under a plain sum: which pairs of a tile were kept, a bit each.
  RADDLE_DEVICE void note_kept(u32 kept) {
    each_query<Kernel>([&](i32 n, i32 e) {
      if (kept >> (4 * n + e) & 5u) sum[n][e] = 1.0f;
    });
  }

  /// Raises the references that logits of the group's tile exceed; the sums, and O, shrink by
  /// `factor`. What other rows hold changes nothing for a row.
  RADDLE_DEVICE void raise(const S& s, const ShortLane& lane, float to_log2,
                           OfQueries<Kernel>& factor) {
    auto& of_warp = ShortMemory<Kernel>::get().top[lane.group];
    each_query<Kernel>([&](i32 n, i32 e) {
      float top = ptx::max(s[n][e], s[n][e + 2]);
      RADDLE_UNROLL
      for (i32 distance = 4; distance < 32; distance *= 2)
        top = ptx::max(top, ptx::shuffle_xor(top, distance));
      if (lane.g == 0) of_warp[lane.warp][lane.query(n, e)] = top;
    });
    ptx::sync_threads(group_0 + lane.group, group_threads);
    each_query<Kernel>([&](i32 n, i32 e) {
      float top = of_warp[0][lane.query(n, e)];
      RADDLE_UNROLL
      for (i32 w = 1; w < group_warps; ++w) top = ptx::max(top, of_warp[w][lane.query(n, e)]);
      const float before = reference[n][e];
      const bool grows = (top - before) * to_log2 > rescale_threshold;
      reference[n][e] = grows ? top : before;
      factor[n][e] = grows ? ptx::exp2((before - top) * to_log2) : 1.0f;
      sum[n][e] *= factor[n][e];
    });
  }

  /// Sums over the keys of the warp; all lanes of a row get them.
  RADDLE_DEVICE void sum_up() {
    each_query<Kernel>([&](i32 n, i32 e) {
      RADDLE_UNROLL
      for (i32 distance = 4; distance < 32; distance *= 2)
        sum[n][e] += ptx::shuffle_xor(sum[n][e], distance);
    });
  }
};

}  // namespace wgmma

RADDLE_ENGINE_END
