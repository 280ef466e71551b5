// A thread block of a GPU that works on a row: each warp reads a span of it.
#pragma once

#include "raddle/engine/kernel/sampling/launch.h"
#include "raddle/engine/kernel/sampling/sample.h"
#include "raddle/engine/ptx/instructions.h"

RADDLE_ENGINE_BEGIN

namespace sampling {

RADDLE_DEVICE u64 shuffle_xor(u64 x, i32 mask) {
  const u32 low = ptx::shuffle_xor(static_cast<u32>(x), mask);
  const u32 high = ptx::shuffle_xor(static_cast<u32>(x >> 32), mask);
  return u64{high} << 32 | low;
}

/// x of all lanes joined by an operation whose order does not matter.
template <class Join>
RADDLE_DEVICE u64 over_warp(u64 x, const Join& join) {
  RADDLE_UNROLL
  for (i32 step = 1; step < 32; step *= 2) x = join(x, shuffle_xor(x, step));
  return x;
}

/// [begin, end) of a row.
struct Span {
  i32 begin, end;
};

/// What warp `warp` reads of a span: whole groups of 32.
RADDLE_DEVICE Span span_of_warp(const Span& span, i32 warp) {
  const i32 each = round_up(ceil_div(span.end - span.begin, num_warps), 32);
  const i32 begin = min(span.begin + warp * each, span.end);
  return {begin, min(begin + each, span.end)};
}

struct Block {
  template <class Row, class Use>
  RADDLE_DEVICE void each(i32 n, const Row& row, const Use& use) const {
    each_of({0, n}, row, use);
  }

  RADDLE_DEVICE void combine(Extremes& found) const {
    u64 best[1] = {found.best};
    u64 least[1] = {found.least};
    over_block(best, [](u64 a, u64 b) { return max(a, b); });
    over_block(least, [](u64 a, u64 b) { return min(a, b); });
    found = {best[0], static_cast<u32>(least[0])};
  }

  RADDLE_DEVICE void combine(KeyRange (&parts)[num_parts]) const {
    u64 sum[num_parts], least[num_parts], most[num_parts];
    RADDLE_UNROLL
    for (i32 p = 0; p < num_parts; ++p)
      sum[p] = parts[p].sum, least[p] = parts[p].least, most[p] = parts[p].most;
    over_block(sum, [](u64 a, u64 b) { return a + b; });
    over_block(least, [](u64 a, u64 b) { return min(a, b); });
    over_block(most, [](u64 a, u64 b) { return max(a, b); });
    RADDLE_UNROLL
    for (i32 p = 0; p < num_parts; ++p)
      parts[p] = {sum[p], static_cast<u32>(least[p]), static_cast<u32>(most[p])};
  }

  /// Reading all tokens again takes a block less than listing those that may still matter.
  struct Candidates {
    i32 n;
    template <class Row, class Use>
    RADDLE_DEVICE void each(const Row& row, const Use& use) const {
      Block{}.each(n, row, use);
    }
    RADDLE_DEVICE void combine(KeyRange (&parts)[num_parts]) const { Block{}.combine(parts); }
    template <class Row>
    RADDLE_DEVICE void narrow(const Row&, u32, u32) const {}
  };
  RADDLE_DEVICE Candidates candidates(i32 n) const { return {n}; }

  /// The warp's span that has the token is divided among the warps in turn, down to 32 tokens.
  template <class Row, class Measure, class Target>
  RADDLE_DEVICE i32 find(i32 n, const Row& row, const Measure& measure,
                         const Target& target) const {
    Span span{0, n};
    u64 left = 0;
    for (bool first = true; first || span.end - span.begin > 32; first = false) {
      u64 sum = 0;
      each_of(span, row, [&](i32 i, float x) { sum += measure(i, x); });
      u64* sums = gather(over_warp(sum, [](u64 a, u64 b) { return a + b; }));
      if (first) {
        u64 total = 0;
        for (i32 w = 0; w < num_warps; ++w) total += sums[w];
        if (total == 0) return no_token;
        left = target(total);
      }
      i32 warp = 0;
      for (; warp + 1 < num_warps && left >= sums[warp]; ++warp) left -= sums[warp];
      span = span_of_warp(span, warp);
    }
    // Every warp finds the same.
    const i32 mine = span.begin + ptx::lane_index();
    const u64 m = mine < span.end ? measure(mine, row(mine)) : u64{0};
    i32 lane = 0;
    for (; lane < 31; ++lane) {
      const u64 of_lane = value_at(m, lane);
      if (left < of_lane) break;
      left -= of_lane;
    }
    return span.begin + lane;
  }

 private:
  template <class Row, class Use>
  RADDLE_DEVICE void each_of(const Span& all, const Row& row, const Use& use) const {
    const Span span = span_of_warp(all, ptx::warp_index());
    // Loads of several tokens are on their way at a time.
    constexpr i32 ahead = 4;
    for (i32 first = span.begin + ptx::lane_index(); first < span.end; first += 32 * ahead) {
      float x[ahead];
      RADDLE_UNROLL
      for (i32 n = 0; n < ahead; ++n) x[n] = first + 32 * n < span.end ? row(first + 32 * n) : 0.0f;
      RADDLE_UNROLL
      for (i32 n = 0; n < ahead; ++n)
        if (first + 32 * n < span.end) use(first + 32 * n, x[n]);
    }
  }

  RADDLE_DEVICE static u64 value_at(u64 x, i32 lane) {
    const i32 low = ptx::shuffle(static_cast<i32>(static_cast<u32>(x)), lane);
    const i32 high = ptx::shuffle(static_cast<i32>(static_cast<u32>(x >> 32)), lane);
    return u64{static_cast<u32>(high)} << 32 | static_cast<u32>(low);
  }

  RADDLE_DEVICE static u64* numbers() { return static_cast<u64*>(ptx::shared_memory()); }

  /// Each warp's number, in shared memory.
  RADDLE_DEVICE u64* gather(u64 x) const {
    ptx::sync_block();  // what was gathered before has been read
    if (ptx::lane_index() == 0) numbers()[ptx::warp_index()] = x;
    ptx::sync_block();
    return numbers();
  }

  template <i32 n, class Join>
  RADDLE_DEVICE void over_block(u64 (&x)[n], const Join& join) const {
    static_assert(n <= max_combined);
    RADDLE_UNROLL
    for (i32 k = 0; k < n; ++k) x[k] = over_warp(x[k], join);
    ptx::sync_block();
    RADDLE_UNROLL
    for (i32 k = 0; k < n; ++k)
      if (ptx::lane_index() == 0) numbers()[k * num_warps + ptx::warp_index()] = x[k];
    ptx::sync_block();
    RADDLE_UNROLL
    for (i32 k = 0; k < n; ++k) {
      x[k] = numbers()[k * num_warps];
      for (i32 w = 1; w < num_warps; ++w) x[k] = join(x[k], numbers()[k * num_warps + w]);
    }
  }
};

/// A block a row. T is the element type of the logits.
template <class T>
RADDLE_DEVICE void sample_row(const SampleView& view) {
  const i32 row = ptx::block_index();
  if (row >= view.num_rows) return;
  const i32 token = draw_row<T>(Block{}, view, row);
  ptx::sync_block();  // the drawn token's count may still be read
  if (ptx::thread_index() == 0) store_token(view, row, token);
}

}  // namespace sampling

RADDLE_ENGINE_END
