// The end of a short item: the states of both warpgroups are composed in shared memory by the
// first, which sends the rows, while the second goes on with the next item.
#pragma once

#include "raddle/engine/kernel/gpu/finish.h"
#include "raddle/engine/kernel/wgmma/short_softmax.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

template <class Kernel, class Variant>
class ShortOutput {
  using Block = ShortMemory<Kernel>;
  using O = ShortOutputs<Kernel>;
  using Weighing = ShortWeighing<Kernel>;
  static constexpr Scan scan = Kernel::scan;
  static constexpr i32 both_groups = consumer_groups * group_threads;

 public:
  RADDLE_DEVICE ShortOutput(const GpuLaunch& launch, const Variant& variant, const ShortLane& lane,
                            float to_log2)
      : launch_(launch), variant_(variant), lane_(lane), to_log2_(to_log2) {}

  /// The second warpgroup leaves its state; `waits`: not for the first item's does it wait until
  /// the one before is taken.
  template <class Facts>
  RADDLE_DEVICE void leave(const O& o, Weighing& weighing, const Facts& facts, bool waits) const {
    if (waits) wait_until_taken();
    put_sums(weighing);
    each_number(facts.num_rows, [&](i32 row, i32 column, i32 half, i32 n, i32 e) {
      block().state[row][column] = o[half][n][e];
    });
    ptx::arrive_threads(state_is_there, both_groups);
  }
  RADDLE_DEVICE static void wait_until_taken() { ptx::sync_threads(state_is_taken, both_groups); }

  /// The first one composes and sends.
  template <class Facts>
  RADDLE_DEVICE void send(const O& o, Weighing& weighing, const Facts& facts) const {
    put_sums(weighing);
    ptx::sync_threads(state_is_there, both_groups);
    OfQueries<Kernel> factor[consumer_groups];
    each_query<Kernel>([&](i32 n, i32 e) { compose(weighing, n, e, factor); });
    each_number(facts.num_rows, [&](i32 row, i32 column, i32 half, i32 n, i32 e) {
      float& x = block().state[row][column];
      x = scaled(x, factor[1][n][e % 2]) + scaled(o[half][n][e], factor[0][n][e % 2]);
    });
    ptx::sync_threads(group_0, group_threads);
    send_rows_of_warp(facts);
    ptx::arrive_threads(state_is_taken, both_groups);
  }

 private:
  RADDLE_DEVICE static Block& block() { return Block::get(); }

  /// f(row, column, half, n, e) for every number of O that this lane holds, of fragments of rows
  /// that the item has.
  template <class F>
  RADDLE_DEVICE void each_number(i32 num_rows, F f) const {
    RADDLE_UNROLL
    for (i32 n = 0; n < Kernel::row_fragments; ++n) {
      if (8 * n >= num_rows) return;
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * Kernel::vo_halves; ++i) {
        const i32 column = 64 * (i / 4) + lane_.key(i % 4 / 2);
        if (Kernel::dim_vo % 64 == 0 || column < Kernel::dim_vo)
          f(lane_.query(n, i % 4), column, i / 4, n, i % 4);
      }
    }
  }

  RADDLE_DEVICE void put_sums(Weighing& weighing) const {
    weighing.sum_up();
    if (lane_.g != 0) return;
    each_query<Kernel>([&](i32 n, i32 e) {
      const i32 row = lane_.query(n, e);
      block().sum[lane_.group][lane_.warp][row] = weighing.sum[n][e];
      if (lane_.group == 1 && lane_.warp == 0) block().reference[row] = weighing.reference[n][e];
    });
  }

  /// What both groups' O is multiplied by, 0 where the group kept nothing: O may be NaN then; and
  /// the row's LSE.
  RADDLE_DEVICE void compose(const Weighing& weighing, i32 n, i32 e,
                             OfQueries<Kernel> (&factor)[consumer_groups]) const {
    const i32 row = lane_.query(n, e);
    float of_group[consumer_groups];
    RADDLE_UNROLL
    for (i32 group = 0; group < consumer_groups; ++group) {
      const auto& of_warp = block().sum[group];
      of_group[group] = of_warp[0][row];
      RADDLE_UNROLL
      for (i32 w = 1; w < group_warps; ++w) of_group[group] += of_warp[w][row];
      factor[group][n][e] = of_group[group] == 0.0f ? 0.0f : 1.0f;
    }
    float lse = 0.0f;
    if constexpr (scan == Scan::softmax) {
      const float reference[] = {weighing.reference[n][e], block().reference[row]};
      const float top = ptx::max(reference[0], reference[1]);
      const float from = top == -math::infinity ? 0.0f : top;
      float sum = 0.0f;
      RADDLE_UNROLL
      for (i32 group = 0; group < consumer_groups; ++group) {
        factor[group][n][e] = ptx::exp2((reference[group] - from) * to_log2_);
        sum = ptx::fma(of_group[group], factor[group][n][e], sum);
      }
      const float inverse = sum == 0.0f ? 0.0f : ptx::reciprocal(sum);
      factor[0][n][e] *= inverse, factor[1][n][e] *= inverse;
      lse = top == -math::infinity ? top : ptx::fma(top, to_log2_, ptx::log2(sum)) * math::ln2;
    }
    factor[0][n][e] *= output_scale(launch_), factor[1][n][e] *= output_scale(launch_);
    if (lane_.warp == 0 && lane_.g == 0) block().state[row][Kernel::dim_vo] = lse;
  }

  /// Each warp sends some of the rows, fewer than four of them never: they are sent in fours.
  template <class Facts>
  RADDLE_DEVICE void send_rows_of_warp(const Facts& facts) const {
    constexpr i32 count = max(8 * Kernel::row_fragments / group_warps, 4);
    const auto number = [&](i32 i) { return count * lane_.warp + i; };
    if (number(0) >= facts.num_rows) return;
    send_rows<Kernel, count>(
        launch_, variant_, facts.num_rows, facts.partial_row, facts.row, block().vector[lane_.warp],
        number, [&](i32 i) { return block().state[min(number(i), Kernel::tile_rows - 1)]; });
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const ShortLane& lane_;
  const float to_log2_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
