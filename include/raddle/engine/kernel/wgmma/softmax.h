// The softmax of the loop of long queries, whose weights are relative to a logit that each row
// chose at its first tile, its reference, and not to the largest one so far. Weights may exceed 1
// then, by as much as P's dtype can hold; their sums say when they exceed it. So a tile's largest
// logits, which all weights would wait for, are seldom looked for, and O seldom shrinks.
#pragma once

#include "raddle/engine/kernel/gpu/softmax.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

using namespace gpu_kernel;

/// The largest sum of a lane's weights of a tile and row that P and O are taken to hold: half of
/// what fp16 does; bf16 reaches as far as fp32, of which O needs a part.
template <class T>
constexpr float most_weight = 1099511627776.0f;  // 2^40
template <>
inline constexpr float most_weight<f16> = 32768.0f;

/// The sums of a lane's weights of a tile, for each of its two rows.
struct TileSums {
  float even[2] = {}, odd[2] = {};  ///< so far, of even and of odd columns
  float of_row[2] = {};             ///< of all columns, when all have been weighed
  /// Whether the weights are more than `most` in all, or NaN.
  RADDLE_DEVICE bool exceed(float most) const { return !(of_row[0] + of_row[1] <= most); }
};

/// The references and sums of a lane's two rows.
struct Weighing {
  RowStats<1> stats;  ///< stats.top: the references
  float product[2];   ///< reference · to_log2, or 0 where logits are subtracted exactly
  bool searches;      ///< a row of the warp has no reference yet, or subtracts exactly

  RADDLE_DEVICE void clear() {
    stats.clear();
    product[0] = product[1] = 0.0f;
    searches = true;
  }

  /// Raises the references to the largest logits so far; `factor` becomes smaller by what the sums
  /// so far shrink by, and O is to.
  template <i32 key_fragments>
  RADDLE_DEVICE void raise(Logits<1, key_fragments>& s, float (&factor)[2], float to_log2) {
    float shift[1][2];
    bool exact = false, none = false;
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      const float before = stats.top[0][half];
      float top = before, other = -math::infinity;  // two chains, of even and odd columns
      RADDLE_UNROLL
      for (i32 n = 0; n < key_fragments; ++n) {
        top = ptx::max(top, s[0][n][2 * half]);
        other = ptx::max(other, s[0][n][2 * half + 1]);
      }
      top = ptx::max(top, other);
      top = ptx::max(top, ptx::shuffle_xor(top, 1));
      top = ptx::max(top, ptx::shuffle_xor(top, 2));
      stats.top[0][half] = top;
      // For a row that has kept nothing so far, subtracting 0 leaves every logit at -inf, and every
      // weight becomes 0.
      const float from = top == -math::infinity ? 0.0f : top;
      const float shrink = ptx::exp2((before - from) * to_log2);
      factor[half] *= shrink;
      stats.sum[0][half] *= shrink;
      const bool huge = !(math::abs(from * to_log2) <= fused_limit);
      shift[0][half] = huge ? from : 0.0f;
      product[half] = huge ? 0.0f : from * to_log2;
      exact = exact || huge, none = none || top == -math::infinity;
    }
    searches = ptx::any(exact || none);
    if (ptx::any(exact)) subtract(s, shift);
  }

  /// S -> weights, of key fragments [begin, end), whose sums are added to the tile's. Exponents of
  /// two are to_log2 · s + from(half, column), of columns from the lane's first one on.
  template <i32 begin, i32 end, i32 key_fragments, class From>
  RADDLE_DEVICE static void weigh(Logits<1, key_fragments>& s, TileSums& sums, float to_log2,
                                  From from) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      RADDLE_UNROLL
      for (i32 n = begin; n < end; ++n) {
        float(&x)[4] = s[0][n];
        x[2 * half] = ptx::exp2(ptx::fma(x[2 * half], to_log2, from(half, 8 * n)));
        x[2 * half + 1] = ptx::exp2(ptx::fma(x[2 * half + 1], to_log2, from(half, 8 * n + 1)));
        sums.even[half] += x[2 * half], sums.odd[half] += x[2 * half + 1];
      }
      if (begin < end && end == key_fragments)
        sums.of_row[half] = ptx::settled(sums.even[half] + sums.odd[half]);
    }
  }
  template <i32 begin, i32 end, i32 key_fragments>
  RADDLE_DEVICE void weigh(Logits<1, key_fragments>& s, TileSums& sums, float to_log2) const {
    weigh<begin, end>(s, sums, to_log2, [&](i32 half, i32) { return -product[half]; });
  }
  RADDLE_DEVICE void add(const TileSums& sums) {
    stats.sum[0][0] += sums.of_row[0], stats.sum[0][1] += sums.of_row[1];
  }
};

/// O times the factors of its rows.
template <i32 fragments>
RADDLE_DEVICE void shrink(float (&o)[1][fragments][4], const float (&factor)[2]) {
  RADDLE_UNROLL
  for (i32 i = 0; i < 4 * fragments; ++i) o[0][i / 4][i % 4] *= factor[i % 4 / 2];
}

}  // namespace wgmma

RADDLE_ENGINE_END
