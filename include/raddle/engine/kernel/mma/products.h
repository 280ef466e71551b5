// The two matrix products of attention on a warp's fragments: S = Q · Kᵀ and O += P · V.
// `row_fragments` of 16 query rows share each fragment of K or V. K and V are operands of 16 bits
// here; quantized.h has those of bytes.
#pragma once

#include "raddle/engine/kernel/gpu/fragments.h"
#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Offset at which a lane loads its part of 16 × 16 elements of A, from the first of 16 rows on:
/// matrices in the order (rows 0–7, k 0–7), (8–15, 0–7), (0–7, 8–15), (8–15, 8–15). For rows of V,
/// transposed, these are B's.
template <class Rows>
RADDLE_DEVICE u32 a_offset(i32 lane) {
  return Rows::at(lane % 16, lane / 16);
}

/// Offset for 16 columns of B that are rows in memory (K): matrices in the order (columns 0–7, k
/// 0–7), (0–7, 8–15), (8–15, 0–7), (8–15, 8–15).
template <class Rows>
RADDLE_DEVICE u32 b_offset(i32 lane) {
  return Rows::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/// K as it lies in the ring.
template <class Kernel, bool narrow = Kernel::narrow_keys>
struct KeyOperand {
  /// Prepares rows of Q in shared memory for the product: `rows` of a block of `count`.
  template <i32 count, class Facts>
  RADDLE_DEVICE static void arrange_queries(u8*, i32, i32, Facts&) {}

  /// S = Q · Kᵀ. query(step, row fragment, a) loads a fragment of A; `keys` is this lane's address
  /// in K.
  template <i32 row_fragments, i32 key_fragments, class Query>
  RADDLE_DEVICE static void multiply(Logits<row_fragments, key_fragments>& s, u32 keys,
                                     Query query) {
    using Rows = typename Kernel::KeyRows;
    clear(s);
    RADDLE_UNROLL
    for (i32 first = 0; first < Rows::swizzled_steps; ++first) {
      RADDLE_UNROLL
      for (i32 step = first; step < Kernel::k_steps; step += Rows::swizzled_steps) {
        u32 a[row_fragments][4];
        RADDLE_UNROLL
        for (i32 r = 0; r < row_fragments; ++r) query(step, r, a[r]);
        const u32 at = Rows::step_from(keys, step);
        RADDLE_UNROLL
        for (i32 n = 0; n < key_fragments; n += 2) {
          u32 b[4];
          ptx::load_matrices(b, at + static_cast<u32>(8 * n * Rows::pitch));
          RADDLE_UNROLL
          for (i32 r = 0; r < row_fragments; ++r) {
            ptx::multiply_add(s[r][n], a[r], b[0], b[1], typename Kernel::QkElement{});
            ptx::multiply_add(s[r][n + 1], a[r], b[2], b[3], typename Kernel::QkElement{});
          }
        }
      }
    }
  }

  /// What the logits of row m still have to be multiplied by.
  template <class Facts>
  RADDLE_DEVICE static float row_factor(const Facts&, i32) {
    return 1.0f;
  }

  /// S *= scale of the key · factor_of(row fragment, half) of the row; `mine` is this lane's first
  /// key in the tile. Keys of 16 bits have no scales.
  template <i32 row_fragments, i32 key_fragments, class Keys, class FactorOf>
  RADDLE_DEVICE static void scale(Logits<row_fragments, key_fragments>&, const Keys&, i32, FactorOf,
                                  i32) {}
};

/// V as it lies in the ring, and the columns of O.
template <class Kernel, i32 row_fragments, bool narrow = Kernel::narrow_values>
class ValueOperand {
 public:
  RADDLE_DEVICE void clear() {}

  /// P *= scale of the key, for `count` keys of the tile from `first` on, of which `mine` is this
  /// lane's first; O may be rescaled. Values of 16 bits have no scales.
  template <i32 key_fragments, class Keys>
  RADDLE_DEVICE void scale(Logits<row_fragments, key_fragments>&, const Keys&, i32, i32, i32,
                           Output<Kernel, row_fragments>&) {}

  /// O += P · V in steps of 16 keys; `values` is this lane's address in V.
  template <i32 steps>
  RADDLE_DEVICE static void multiply(Output<Kernel, row_fragments>& o,
                                     const u32 (&p)[row_fragments][steps][4], u32 values) {
    using Rows = typename Kernel::ValueRows;
    RADDLE_UNROLL
    for (i32 n = 0; n < steps; ++n) {
      RADDLE_UNROLL
      for (i32 d = 0; d < Kernel::out_fragments; d += 2) {
        u32 b[4];
        ptx::load_matrices_transposed(
            b, Rows::step_from(values, d / 2) + static_cast<u32>(16 * n * Rows::pitch));
        RADDLE_UNROLL
        for (i32 r = 0; r < row_fragments; ++r) {
          ptx::multiply_add(o[r][d], p[r][n], b[0], b[1], typename Kernel::VoElement{});
          ptx::multiply_add(o[r][d + 1], p[r][n], b[2], b[3], typename Kernel::VoElement{});
        }
      }
    }
  }

  /// What O is relative to.
  RADDLE_DEVICE float unit() const { return 1.0f; }

  /// A lane holds pairs of neighbours in its rows of O; t is its number among the four lanes of a
  /// row. The column of the first of pair number n,
  RADDLE_DEVICE static i32 column(i32 t, i32 n) { return 8 * n + 2 * t; }
  /// and the pair's elements, e = 0 and 1, in one of the lane's two rows.
  RADDLE_DEVICE static float element(const float (&o)[Kernel::out_fragments][4], i32 n, i32 half,
                                     i32 e) {
    return o[n][2 * half + e];
  }
};

}  // namespace mma

RADDLE_ENGINE_END
