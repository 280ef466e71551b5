// The two matrix products of attention on a warp's fragments: S = Q · Kᵀ and O += P · V. `blocks`
// are blocks of 16 query rows that share each fragment of K or V.
#pragma once

#include "raddle/engine/kernel/mma/shared.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// S: logits, then weights, of 16 · blocks rows by 8 · tiles keys.
template <i32 blocks, i32 tiles>
using Logits = float[blocks][tiles][4];

/// P: weights rounded to the matrix dtype, as A's fragments of 16 keys each.
template <i32 blocks, i32 tiles>
using Weights = u32[blocks][tiles / 2][4];

/// O: unnormalised output.
template <class K, i32 blocks>
using Output = float[blocks][K::out_tiles][4];

template <i32 a, i32 b>
RADDLE_DEVICE void clear(float (&x)[a][b][4]) {
  RADDLE_UNROLL
  for (i32 i = 0; i < a; ++i) {
    RADDLE_UNROLL
    for (i32 j = 0; j < b; ++j) {
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e) x[i][j][e] = 0.0f;
    }
  }
}

/// Where, from the first of 16 rows on, a lane takes its part of 16 × 16 elements of A: matrices in
/// the order (rows 0–7, k 0–7), (8–15, 0–7), (0–7, 8–15), (8–15, 8–15). Of V's rows, transposed,
/// these are B's.
template <class Rows>
RADDLE_DEVICE u32 a_offset(i32 lane) {
  return Rows::at(lane % 16, lane / 16);
}

/// The same of B where its columns are rows in memory (K), 16 columns wide: (columns 0–7, k 0–7),
/// (0–7, 8–15), (8–15, 0–7), (8–15, 8–15).
template <class Rows>
RADDLE_DEVICE u32 b_offset(i32 lane) {
  return Rows::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/// S = Q · Kᵀ, with A's fragments from `query(step, block, a)`; `keys` is this lane's address in K.
template <class K, i32 blocks, i32 tiles, class Query>
RADDLE_DEVICE void multiply_qk(Logits<blocks, tiles>& s, u32 keys, Query query) {
  using Rows = typename K::KeyRows;
  clear(s);
  RADDLE_UNROLL
  for (i32 first = 0; first < Rows::swizzled_steps; ++first) {
    RADDLE_UNROLL
    for (i32 step = first; step < K::k_steps; step += Rows::swizzled_steps) {
      u32 a[blocks][4];
      RADDLE_UNROLL
      for (i32 r = 0; r < blocks; ++r) query(step, r, a[r]);
      const u32 at = Rows::step_from(keys, step);
      RADDLE_UNROLL
      for (i32 n = 0; n < tiles; n += 2) {
        u32 b[4];
        ptx::load_matrices(b, at + static_cast<u32>(8 * n * Rows::pitch));
        RADDLE_UNROLL
        for (i32 r = 0; r < blocks; ++r) {
          ptx::multiply_add(s[r][n], a[r], b[0], b[1], typename K::QkElement{});
          ptx::multiply_add(s[r][n + 1], a[r], b[2], b[3], typename K::QkElement{});
        }
      }
    }
  }
}

/// S's fragments are P's as they lie.
template <class T, i32 blocks, i32 tiles>
RADDLE_DEVICE void round_weights(const Logits<blocks, tiles>& s, Weights<blocks, tiles>& p) {
  RADDLE_UNROLL
  for (i32 r = 0; r < blocks; ++r) {
    RADDLE_UNROLL
    for (i32 n = 0; n < tiles; ++n) {
      p[r][n / 2][n % 2 * 2] = ptx::pack(s[r][n][0], s[r][n][1], T{});
      p[r][n / 2][n % 2 * 2 + 1] = ptx::pack(s[r][n][2], s[r][n][3], T{});
    }
  }
}

/// O += P · V; `values` is this lane's address in V.
template <class K, i32 blocks, i32 tiles>
RADDLE_DEVICE void multiply_pv(Output<K, blocks>& o, const Weights<blocks, tiles>& p, u32 values) {
  using Rows = typename K::ValueRows;
  RADDLE_UNROLL
  for (i32 n = 0; n < tiles / 2; ++n) {
    RADDLE_UNROLL
    for (i32 d = 0; d < K::out_tiles; d += 2) {
      u32 b[4];
      ptx::load_matrices_transposed(
          b, Rows::step_from(values, d / 2) + static_cast<u32>(16 * n * Rows::pitch));
      RADDLE_UNROLL
      for (i32 r = 0; r < blocks; ++r) {
        ptx::multiply_add(o[r][d], p[r][n], b[0], b[1], typename K::VoElement{});
        ptx::multiply_add(o[r][d + 1], p[r][n], b[2], b[3], typename K::VoElement{});
      }
    }
  }
}

}  // namespace mma

RADDLE_ENGINE_END
