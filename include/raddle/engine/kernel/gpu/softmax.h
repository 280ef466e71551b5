// The online softmax on fragments of logits (FlashAttention-2, algorithm 1). `half` says which of a
// lane's two rows of a row fragment is meant.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/kernel/gpu/fragments.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// The running statistics of rows: the largest logit, still without the factor to_log2, and the sum
/// of the weights of this lane's keys. Under a plain sum of which only `sum` is used, and says
/// whether a key was kept: it is 1 then.
template <i32 row_fragments>
struct RowStats {
  float top[row_fragments][2];
  float sum[row_fragments][2];

  RADDLE_DEVICE void clear() {
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 half = 0; half < 2; ++half) {
        top[r][half] = -math::infinity;
        sum[r][half] = 0.0f;
      }
    }
  }
};

/// Under a plain sum: all keys of a tile were kept, or those of which `kept` has this lane's bits.
template <i32 row_fragments>
RADDLE_DEVICE void note_all_kept(RowStats<row_fragments>& stats) {
  RADDLE_UNROLL
  for (i32 i = 0; i < 2 * row_fragments; ++i) stats.sum[i / 2][i % 2] = 1.0f;
}
template <i32 key_fragments, i32 row_fragments>
RADDLE_DEVICE void note_kept(RowStats<row_fragments>& stats, const u32 (&kept)[row_fragments][2]) {
  constexpr u32 of_lane = ~0u >> (32 - 2 * key_fragments);
  RADDLE_UNROLL
  for (i32 i = 0; i < 2 * row_fragments; ++i)
    if (kept[i / 2][i % 2] & of_lane) stats.sum[i / 2][i % 2] = 1.0f;
}

/// Makes O of rows that kept nothing 0. All their weights are 0, but where V of dropped keys is
/// infinite or NaN their products are NaN. `halves` as of softmax().
template <Scan scan, i32 row_fragments, i32 out_fragments>
RADDLE_DEVICE void clear_empty_rows(const RowStats<row_fragments>& stats,
                                    float (&o)[row_fragments][out_fragments][4], i32 halves) {
  bool empty = false;
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half)
      if (half < halves)
        empty = empty || (scan == Scan::softmax ? stats.top[r][half] == -math::infinity
                                                : stats.sum[r][half] == 0.0f);
  }
  if (!ptx::any(empty)) return;
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      float sum = stats.sum[r][half];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if (sum != 0.0f) continue;
      RADDLE_UNROLL
      for (i32 n = 0; n < out_fragments; ++n) o[r][n][2 * half] = o[r][n][2 * half + 1] = 0.0f;
    }
  }
}

/// The end of a row: the factor for its outputs, and its LSE; (0, -inf) where nothing was kept.
struct RowEnd {
  float factor, lse;
};

/// An element of O times its row's factor, and 0 where that is: of a row that kept nothing, where V
/// of dropped keys was infinite or NaN, O may be NaN.
RADDLE_DEVICE float scaled(float o, float factor) { return factor == 0.0f ? 0.0f : o * factor; }

/// Finishes this lane's row; the four lanes of a row do this together. Rows of a sum are left as
/// they are, where they kept a key.
template <Scan scan, i32 row_fragments>
RADDLE_DEVICE RowEnd end_row(const RowStats<row_fragments>& stats, i32 r, i32 half, float to_log2) {
  float sum = stats.sum[r][half];
  sum += ptx::shuffle_xor(sum, 1);
  sum += ptx::shuffle_xor(sum, 2);
  if constexpr (scan == Scan::sum) return RowEnd{sum == 0.0f ? 0.0f : 1.0f, 0.0f};
  const float top = stats.top[r][half];
  return RowEnd{sum == 0.0f ? 0.0f : 1.0f / sum,
                top == -math::infinity ? top : (top * to_log2 + math::log2(sum)) * math::ln2};
}

template <class Kernel, i32 row_fragments>
RADDLE_DEVICE void shrink(RowStats<row_fragments>& stats, Output<Kernel, row_fragments>& o,
                          const float (&factor)[row_fragments][2], i32 halves) {
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      stats.sum[r][half] *= factor[r][half];
      RADDLE_UNROLL
      for (i32 n = 0; n < Kernel::out_fragments; ++n) {
        o[r][n][2 * half] *= factor[r][half];
        o[r][n][2 * half + 1] *= factor[r][half];
      }
    }
  }
}

/// A row's maximum stays as it is until a logit exceeds it by this power of two. Weights may then
/// reach 2^8, which every dtype can hold, and O is seldom rescaled.
constexpr float rescale_threshold = 8.0f;

/// Largest maximum, as a power of two, up to which a weight takes one fused multiply-add: the
/// rounding of the product that is subtracted then stays below 2^-17. For huge logits the error
/// would decide which one wins.
constexpr float fused_limit = 128.0f;

/// S -> weights, 2^(S · to_log2 - product), and their sums.
template <i32 row_fragments, i32 key_fragments>
RADDLE_DEVICE void weigh(Logits<row_fragments, key_fragments>& s, RowStats<row_fragments>& stats,
                         const float (&product)[row_fragments][2], float to_log2, i32 halves) {
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      float sum = stats.sum[r][half];
      RADDLE_UNROLL
      for (i32 n = 0; n < key_fragments; ++n) {
        RADDLE_UNROLL
        for (i32 e = 2 * half; e < 2 * half + 2; ++e) {
          s[r][n][e] = ptx::exp2(ptx::fma(s[r][n][e], to_log2, -product[r][half]));
          sum += s[r][n][e];
        }
      }
      stats.sum[r][half] = sum;
    }
  }
}

/// S -= shift.
template <i32 row_fragments, i32 key_fragments>
RADDLE_DEVICE void subtract(Logits<row_fragments, key_fragments>& s,
                            const float (&shift)[row_fragments][2]) {
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 i = 0; i < 4 * key_fragments; ++i) s[r][i / 4][i % 4] -= shift[r][i % 4 / 2];
  }
}

/// S -> exp(S - max). O and the sums so far are rescaled where the maximum grew by more than the
/// threshold. Logits times to_log2 are exponents of two. `halves` is 1 where the second half of
/// every row fragment is padding. For variants whose scan is a sum, S is the weights already.
template <class Kernel, i32 row_fragments, i32 key_fragments>
RADDLE_DEVICE void softmax(Logits<row_fragments, key_fragments>& s, RowStats<row_fragments>& stats,
                           Output<Kernel, row_fragments>& o, float to_log2, i32 halves) {
  if constexpr (Kernel::scan == Scan::sum) return;
  float shift[row_fragments][2];  // the maximum that is subtracted
  float rescale[row_fragments][2];
  bool grew = false;
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      float top = ptx::max(s[r][0][2 * half], s[r][0][2 * half + 1]);
      RADDLE_UNROLL
      for (i32 n = 1; n < key_fragments; ++n)
        top = ptx::max(ptx::max(top, s[r][n][2 * half]), s[r][n][2 * half + 1]);
      top = ptx::max(top, ptx::shuffle_xor(top, 1));
      top = ptx::max(top, ptx::shuffle_xor(top, 2));
      const float before = stats.top[r][half];
      const bool grows = (top - before) * to_log2 > rescale_threshold;  // false for -inf and -inf
      top = grows ? top : before;
      grew = grew || grows;
      stats.top[r][half] = top;
      // For a row that has kept nothing so far, subtracting 0 leaves every logit at -inf, and every
      // weight becomes 0.
      shift[r][half] = top == -math::infinity ? 0.0f : top;
      rescale[r][half] = ptx::exp2((before - shift[r][half]) * to_log2);
    }
  }
  if (ptx::any(grew)) shrink<Kernel>(stats, o, rescale, halves);
  // The second multiply-add a weight takes a tenth of a long tile's time; few tiles need this exact
  // way.
  bool fused = key_fragments >= 8;
  float product[row_fragments][2];
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) shift[r][half] = 0.0f;
      product[r][half] = shift[r][half] * to_log2;
      fused = fused && math::abs(product[r][half]) <= fused_limit;
    }
  }
  if (ptx::any(!fused)) {
    // Only for rows that need it: the bits of other rows do not depend on them.
    RADDLE_UNROLL
    for (i32 i = 0; i < 2 * row_fragments; ++i) {
      float &by = shift[i / 2][i % 2], &later = product[i / 2][i % 2];
      const bool exact = key_fragments < 8 || !(math::abs(later) <= fused_limit);
      by = exact ? by : 0.0f;
      later = exact ? 0.0f : later;
    }
    subtract(s, shift);
  }
  weigh(s, stats, product, to_log2, halves);
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
