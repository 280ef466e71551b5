// The matrix micro-kernels of many query rows (prefill): Q·Kᵀ and P·V on one tile, on fp32 lanes.
// This is the seam at which an ISA brings kernels of its own. The tile's keys are transposed once
// into panels that all rows reuse. short_products.h has those of few rows.
#pragma once

#include "raddle/engine/kernel/cpu/blocks.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// K or V rows of the tile after this one, asked for while this one is computed.
template <class T>
struct Upcoming {
  const T* const* rows;
  i32 n;

  RADDLE_FN void fetch(i32 first, i32 count, i32 dim) const {
    for (i32 j = first; j < min(first + count, n); ++j)
      for (i32 d = 0; d < dim; d += 64 / static_cast<i32>(sizeof(T))) simd::prefetch(rows[j] + d);
  }
};

/// Transposes up to `panel_keys` keys into panel[d][key], zero past `n`.
template <class T>
RADDLE_FN void pack_panel(const T* const* k, i32 n, i32 dim, float* panel) {
  for (i32 j = 0; j < panel_keys; j += lanes)
    for (i32 d = 0; d < dim; d += lanes) {
      Vec square[lanes];
#pragma GCC unroll 16
      for (i32 i = 0; i < lanes; ++i) square[i] = j + i < n ? simd::load(k[j + i] + d) : Vec{};
      simd::transpose(square);
#pragma GCC unroll 16
      for (i32 i = 0; i < lanes; ++i) simd::store(panel + (d + i) * panel_keys + j, square[i]);
    }
}

/// One register block of Q · panel: `rows` queries by panel_keys keys.
template <i32 rows>
RADDLE_FN void panel_block(const float* q, i32 ldq, const float* panel, i32 dim, float scale,
                           float* s, i32 lds) {
  Vec acc[rows][block_vecs] = {};
  for (i32 d = 0; d < dim; ++d) {
    Vec kv[block_vecs];
#pragma GCC unroll 4
    for (i32 v = 0; v < block_vecs; ++v) kv[v] = simd::load(panel + d * panel_keys + v * lanes);
#pragma GCC unroll 8
    for (i32 m = 0; m < rows; ++m) {
      const Vec qv = simd::broadcast(q[m * ldq + d]);
#pragma GCC unroll 4
      for (i32 v = 0; v < block_vecs; ++v) acc[m][v] = simd::fma(qv, kv[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (i32 m = 0; m < rows; ++m)
#pragma GCC unroll 4
    for (i32 v = 0; v < block_vecs; ++v) simd::store(s + m * lds + v * lanes, acc[m][v] * scale);
}

/// S[rows, n] = scale · Q[rows, dim] · K[n, dim]ᵀ. `dim` is a multiple of `lanes`; S has room for n
/// rounded up to panel_keys columns; `panel` for dim · panel_keys floats.
template <class T>
RADDLE_FN void multiply_qk(const float* q, i32 ldq, i32 rows, const T* const* k, i32 n, i32 dim,
                           float scale, float* s, i32 lds, Upcoming<T> next, float* panel) {
  for (i32 j = 0; j < n; j += panel_keys) {
    pack_panel(k + j, n - j, dim, panel);
    next.fetch(j, panel_keys, dim);
    i32 m = 0;
    for (; m + block_rows <= rows; m += block_rows)
      panel_block<block_rows>(q + m * ldq, ldq, panel, dim, scale, s + m * lds + j, lds);
    for_blocks<block_rows / 2>(rows - m, [&](i32 i, auto r) {
      panel_block<decltype(r)::value>(q + (m + i) * ldq, ldq, panel, dim, scale,
                                      s + (m + i) * lds + j, lds);
    });
  }
}

/// One register block of P·V: O[rows, vecs · lanes] += P[rows, n] · V[n, …]. The tile is summed by
/// itself first: two short sums err less than one long one.
template <class T, i32 rows, i32 vecs>
RADDLE_FN void pv_block(const float* p, i32 ldp, const T* const* v, i32 n, i32 d, float* o, i32 ldo,
                        Upcoming<T> next, i32 dim) {
  Vec acc[rows][vecs]{};
  for (i32 j = 0; j < n; ++j) {
    next.fetch(j, 1, dim);
    Vec vv[vecs];
#pragma GCC unroll 4
    for (i32 x = 0; x < vecs; ++x) vv[x] = simd::load(v[j] + d + x * lanes);
#pragma GCC unroll 8
    for (i32 m = 0; m < rows; ++m) {
      const Vec pv = simd::broadcast(p[m * ldp + j]);
#pragma GCC unroll 4
      for (i32 x = 0; x < vecs; ++x) acc[m][x] = simd::fma(pv, vv[x], acc[m][x]);
    }
  }
#pragma GCC unroll 8
  for (i32 m = 0; m < rows; ++m)
#pragma GCC unroll 4
    for (i32 x = 0; x < vecs; ++x) {
      float* at = o + m * ldo + d + x * lanes;
      simd::store(at, simd::load(at) + acc[m][x]);
    }
}

/// O[rows, dim] += P[rows, n] · V[n, dim]; `dim` is a multiple of `lanes`.
template <class T>
RADDLE_FN void multiply_pv(const float* p, i32 ldp, i32 rows, const T* const* v, i32 n, i32 dim,
                           float* o, i32 ldo, Upcoming<T> next) {
  const auto stripes = [&](i32 m, auto r, Upcoming<T> ahead) {
    for_blocks<block_vecs>(dim / lanes, [&](i32 x, auto c) {
      pv_block<T, decltype(r)::value, decltype(c)::value>(
          p + m * ldp, ldp, v, n, x * lanes, o + m * ldo, ldo,
          x == 0 ? ahead : Upcoming<T>{nullptr, 0}, dim);
    });
  };
  i32 m = 0;
  for (; m + block_rows <= rows; m += block_rows)
    stripes(m, Int<block_rows>{}, m == 0 ? next : Upcoming<T>{nullptr, 0});
  for_blocks<4>(rows - m, [&](i32 i, auto r) {
    stripes(m + i, r, m + i == 0 ? next : Upcoming<T>{nullptr, 0});
  });
  next.fetch(n, next.n - n, dim);
}

}  // namespace cpu

RADDLE_ENGINE_END
