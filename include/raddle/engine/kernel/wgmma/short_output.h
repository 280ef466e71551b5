// The end of a short item: the states of both warpgroups are composed in shared memory. Few rows
// are composed and sent by the first, while the second goes on with the next item; of many rows,
// each composes and sends one half.
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
  static constexpr i32 all_fragments = Kernel::row_fragments;

 public:
  /// Whether each group sends one half of the rows.
  static constexpr bool has_many_rows = all_fragments >= 4;

  RADDLE_DEVICE ShortOutput(const GpuLaunch& launch, const Variant& variant, const ShortLane& lane,
                            float to_log2)
      : launch_(launch), variant_(variant), lane_(lane), to_log2_(to_log2) {}

  /// The second warpgroup leaves its state; `waits`: not for the first item's does it wait until
  /// the one before is taken.
  template <class Facts>
  RADDLE_DEVICE void leave(const O& o, Weighing& weighing, const Facts& facts, bool waits) const {
    if (waits) wait_until_taken();
    put_sums(weighing);
    put_numbers<0, all_fragments>(o, facts);
    ptx::arrive_threads(state_is_there, both_groups);
  }
  RADDLE_DEVICE static void wait_until_taken() { ptx::sync_threads(state_is_taken, both_groups); }

  /// The first one composes and sends.
  template <class Facts>
  RADDLE_DEVICE void send(const O& o, Weighing& weighing, const Facts& facts) const {
    put_sums(weighing);
    ptx::sync_threads(state_is_there, both_groups);
    compose_numbers<0, all_fragments>(o, weighing, facts);
    ptx::sync_threads(group_0, group_threads);
    send_rows_of_warp<max(8 * all_fragments / group_warps, 4)>(facts);
    ptx::arrive_threads(state_is_taken, both_groups);
  }

  /// Of many rows: each group leaves its state of the other's half, and composes and sends its own.
  template <class Facts>
  RADDLE_DEVICE void exchange(const O& o, Weighing& weighing, const Facts& facts,
                              bool waits) const {
    constexpr i32 half = all_fragments / consumer_groups;
    if (lane_.group == 1 && waits) wait_until_taken();
    put_sums(weighing);
    if (lane_.group == 0)
      put_numbers<half, all_fragments>(o, facts);
    else
      put_numbers<0, half>(o, facts);
    ptx::sync_threads(state_is_there, both_groups);
    if (lane_.group == 0)
      compose_numbers<0, half>(o, weighing, facts);
    else
      compose_numbers<half, all_fragments>(o, weighing, facts);
    ptx::sync_threads(group_0 + lane_.group, group_threads);
    send_rows_of_warp<8 * half / group_warps>(facts);
    ptx::sync_threads(state_is_there, both_groups);  // neither writes what the other still sends
    if (lane_.group == 0) ptx::arrive_threads(state_is_taken, both_groups);
  }

 private:
  RADDLE_DEVICE static Block& block() { return Block::get(); }

  /// f(row, column, half, n, e) for every number of O that this lane holds, of those fragments
  /// [first, end) of rows that the item has.
  template <i32 first, i32 end, class F>
  RADDLE_DEVICE void each_number(i32 num_rows, F f) const {
    RADDLE_UNROLL
    for (i32 n = first; n < end; ++n) {
      if (8 * n >= num_rows) return;
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * Kernel::vo_halves; ++i) {
        const i32 column = 64 * (i / 4) + lane_.key(i % 4 / 2);
        if (Kernel::dim_vo % 64 == 0 || column < Kernel::dim_vo)
          f(lane_.query(n, i % 4), column, i / 4, n, i % 4);
      }
    }
  }

  template <i32 first, i32 end, class Facts>
  RADDLE_DEVICE void put_numbers(const O& o, const Facts& facts) const {
    each_number<first, end>(facts.num_rows, [&](i32 row, i32 column, i32 half, i32 n, i32 e) {
      block().state[row][column] = o[half][n][e];
    });
  }

  /// Composes rows of which the other group has put its numbers.
  template <i32 first, i32 end, class Facts>
  RADDLE_DEVICE void compose_numbers(const O& o, const Weighing& weighing,
                                     const Facts& facts) const {
    OfQueries<Kernel> mine, others;
    RADDLE_UNROLL
    for (i32 i = 2 * first; i < 2 * end; ++i) compose(weighing, i / 2, i % 2, mine, others);
    each_number<first, end>(facts.num_rows, [&](i32 row, i32 column, i32 half, i32 n, i32 e) {
      float& x = block().state[row][column];
      x = scaled(x, others[n][e % 2]) + scaled(o[half][n][e], mine[n][e % 2]);
    });
  }

  RADDLE_DEVICE void put_sums(Weighing& weighing) const {
    weighing.sum_up();
    if (lane_.g != 0) return;
    each_query<Kernel>([&](i32 n, i32 e) {
      const i32 row = lane_.query(n, e);
      block().sum[lane_.group][lane_.warp][row] = weighing.sum[n][e];
      if (lane_.warp == 0) block().reference[lane_.group][row] = weighing.reference[n][e];
    });
  }

  /// What both groups' O is multiplied by, 0 where the group kept nothing: O may be NaN then; and
  /// the row's LSE.
  RADDLE_DEVICE void compose(const Weighing& weighing, i32 n, i32 e, OfQueries<Kernel>& mine,
                             OfQueries<Kernel>& others) const {
    const i32 row = lane_.query(n, e);
    float of_group[consumer_groups], factor[consumer_groups];
    RADDLE_UNROLL
    for (i32 i = 0; i < consumer_groups; ++i) {
      const auto& of_warp = block().sum[i ^ lane_.group];
      of_group[i] = of_warp[0][row];
      RADDLE_UNROLL
      for (i32 w = 1; w < group_warps; ++w) of_group[i] += of_warp[w][row];
      factor[i] = of_group[i] == 0.0f ? 0.0f : 1.0f;
    }
    float lse = 0.0f;
    if constexpr (scan == Scan::softmax) {
      const float reference[] = {weighing.reference[n][e], block().reference[lane_.group ^ 1][row]};
      const float top = ptx::max(reference[0], reference[1]);
      float sum = 0.0f;
      RADDLE_UNROLL
      for (i32 i = 0; i < consumer_groups; ++i) {
        factor[i] *= ptx::exp2((reference[i] - top) * to_log2_);
        sum = ptx::fma(of_group[i], factor[i], sum);
      }
      const float inverse = sum == 0.0f ? 0.0f : ptx::reciprocal(sum);
      factor[0] *= inverse, factor[1] *= inverse;
      lse = sum == 0.0f ? -math::infinity : ptx::fma(top, to_log2_, ptx::log2(sum)) * math::ln2;
    }
    mine[n][e] = factor[0] * output_scale(launch_),
    others[n][e] = factor[1] * output_scale(launch_);
    if (lane_.warp == 0 && lane_.g == 0) block().state[row][Kernel::dim_vo] = lse;
  }

  /// Each warp sends `count` of the rows, fewer than four of them never: they are sent in fours.
  template <i32 count, class Facts>
  RADDLE_DEVICE void send_rows_of_warp(const Facts& facts) const {
    const i32 warp = ConsumerTeam::warp();
    const auto number = [&](i32 i) { return count * warp + i; };
    if (number(0) >= facts.num_rows) return;
    send_rows<Kernel, count>(launch_, variant_, facts.num_rows, facts.partial_row, facts.row,
                             block().team().vector[warp], number, [&](i32 i) {
                               return block().state[min(number(i), Kernel::tile_rows - 1)];
                             });
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
  const ShortLane& lane_;
  const float to_log2_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
