// The two matrix products of attention on a warp's fragments: S = Q · Kᵀ and O += P · V.
// `row_fragments` of 16 query rows share each fragment of K or V.
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

/// S = Q · Kᵀ. query(step, row fragment, a) loads a fragment of A; `keys` is this lane's address in
/// K.
template <class Kernel, i32 row_fragments, i32 key_fragments, class Query>
RADDLE_DEVICE void multiply_qk(Logits<row_fragments, key_fragments>& s, u32 keys, Query query) {
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

/// O += P · V; `values` is this lane's address in V.
template <class Kernel, i32 row_fragments, i32 key_fragments>
RADDLE_DEVICE void multiply_pv(Output<Kernel, row_fragments>& o,
                               const Weights<row_fragments, key_fragments>& p, u32 values) {
  using Rows = typename Kernel::ValueRows;
  RADDLE_UNROLL
  for (i32 n = 0; n < key_fragments / 2; ++n) {
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

}  // namespace mma

RADDLE_ENGINE_END
