// Q·Kᵀ and P·V of one query tile and one KV tile, on fp32 lanes (prefill). K and V are packed once
// into panels that all rows of the query tile reuse. short_products.h has the products of few rows.
#pragma once

#include "raddle/engine/kernel/cpu/register_blocks.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// K or V rows of the next tile, prefetched while this one is computed.
template <class T>
struct Upcoming {
  const T* const* rows;
  i32 n;

  RADDLE_FN void fetch(i32 first, i32 count, i32 dim) const {
    for (i32 j = first; j < min(first + count, n); ++j)
      for (i32 d = 0; d < dim; d += 64 / static_cast<i32>(sizeof(T))) simd::prefetch(rows[j] + d);
  }
};

/// Prefetches those rows into the L2 cache, evenly over `turns` turns: many lines at once would
/// occupy the fill buffers that a core needs for what it computes, and wait for each other.
template <class T>
class UpcomingLines {
 public:
  UpcomingLines(Upcoming<T> next, i32 dim, i32 turns)
      : next_(next),
        lines_(ceil_div(dim, line)),
        lines_per_turn_(ceil_div(next.n * lines_, max(turns, 1))) {}

  RADDLE_FN void turn() {
    for (i32 i = 0; i < lines_per_turn_ && row_ < next_.n; ++i) {
      simd::prefetch_l2(next_.rows[row_] + at_ * line);
      if (++at_ < lines_) continue;
      at_ = 0;
      ++row_;
    }
  }

 private:
  static constexpr i32 line = 64 / static_cast<i32>(sizeof(T));  ///< elements

  Upcoming<T> next_;
  i32 lines_, lines_per_turn_;  ///< of a row
  i32 row_ = 0, at_ = 0;        ///< the next line
};

/// Packs K of up to `panel_keys` keys as panel[d][key], zero past `n`.
template <class T>
RADDLE_FN void pack_k_panel(const T* const* k, i32 n, i32 dim, float* panel) {
  for (i32 j = 0; j < panel_keys; j += lanes)
    for (i32 d = 0; d < dim; d += lanes) {
      Vec rows[lanes];
#pragma GCC unroll 16
      for (i32 i = 0; i < lanes; ++i) rows[i] = j + i < n ? simd::load(k[j + i] + d) : Vec{};
      simd::transpose(rows);
#pragma GCC unroll 16
      for (i32 i = 0; i < lanes; ++i) simd::store(panel + (d + i) * panel_keys + j, rows[i]);
    }
}

/// One register block of Q · panel: `rows` queries by the panel's first `vecs` vectors of keys. Not
/// inlined: it fills the registers, and the caller's variables would take some of them.
template <i32 rows, i32 vecs>
[[gnu::noinline]] void panel_block(const float* q, i32 ldq, const float* panel, i32 dim,
                                   float scale, float* s, i32 lds) {
  Vec acc[rows][vecs] = {};
  for (i32 d = 0; d < dim; ++d) {
    Vec kv[vecs];
#pragma GCC unroll 4
    for (i32 v = 0; v < vecs; ++v) kv[v] = simd::load(panel + d * panel_keys + v * lanes);
#pragma GCC unroll 8
    for (i32 m = 0; m < rows; ++m) {
      const Vec qv = simd::broadcast(q[m * ldq + d]);
#pragma GCC unroll 4
      for (i32 v = 0; v < vecs; ++v) acc[m][v] = simd::fma(qv, kv[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (i32 m = 0; m < rows; ++m)
#pragma GCC unroll 4
    for (i32 v = 0; v < vecs; ++v) simd::store(s + m * lds + v * lanes, acc[m][v] * scale);
}

/// How many of n keys `count` rows from `first` on need: the largest of their ends; all where
/// `ends` is null.
RADDLE_FN i32 keys_needed(const i32* ends, i32 first, i32 count, i32 n) {
  if (!ends) return n;
  i32 most = 0;
  for (i32 m = first; m < first + count; ++m) most = max(most, ends[m]);
  return most;
}

/// Register blocks that cover `rows` rows, about.
RADDLE_FN i32 num_row_blocks(i32 rows) { return ceil_div(rows, register_block_rows); }

/// Calls block(first, Int<count>) for blocks of rows that cover [0, rows).
template <class F>
RADDLE_FN void for_row_blocks(i32 rows, F block) {
  i32 m = 0;
  for (; m + register_block_rows <= rows; m += register_block_rows)
    block(m, Int<register_block_rows>{});
  for_blocks<4>(rows - m, [&](i32 i, auto count) { block(m + i, count); });
}

/// S[rows, n] = scale · Q[rows, dim] · K[n, dim]ᵀ. `dim` is a multiple of `lanes`; S has room for n
/// rounded up to panel_keys columns; `panel` for dim · panel_keys floats. Where `ends` is not null,
/// only the first ends[m] columns of row m are needed.
template <class T>
RADDLE_FN void multiply_qk(const float* q, i32 ldq, i32 rows, const T* const* k, i32 n, i32 dim,
                           float scale, float* s, i32 lds, Upcoming<T> next, float* panel,
                           const i32* ends) {
  UpcomingLines<T> upcoming(next, dim, ceil_div(n, panel_keys) * num_row_blocks(rows));
  for (i32 j = 0; j < n; j += panel_keys) {
    pack_k_panel(k + j, n - j, dim, panel);
    for_row_blocks(rows, [&](i32 m, auto r) {
      upcoming.turn();
      constexpr i32 count = decltype(r)::value;
      const i32 needed = keys_needed(ends, m, count, n) - j;
      if (needed <= 0) return;
      // On a diagonal, half of the row blocks need half a panel only.
      const auto block = needed <= panel_keys / 2 ? panel_block<count, register_block_vecs / 2>
                                                  : panel_block<count, register_block_vecs>;
      block(q + m * ldq, ldq, panel, dim, scale, s + m * lds + j, lds);
    });
  }
}

/// Packs `vecs` vectors of V's rows, from element d on, as panel[key], in fp32.
template <i32 vecs, class T>
RADDLE_FN void pack_v_panel(const T* const* v, i32 n, i32 d, float* panel) {
  for (i32 j = 0; j < n; ++j)
#pragma GCC unroll 4
    for (i32 x = 0; x < vecs; ++x)
      simd::store(panel + (j * vecs + x) * lanes, simd::load(v[j] + d + x * lanes));
}

/// One register block of P·V: O[rows, vecs · lanes] += P[rows, n] · panel. The tile is summed apart
/// first: two short sums err less than one long one.
template <i32 rows, i32 vecs>
[[gnu::noinline]] void pv_block(const float* p, i32 ldp, const float* panel, i32 n, float* o,
                                i32 ldo) {
  Vec acc[rows][vecs]{};
  for (i32 j = 0; j < n; ++j) {
    Vec vv[vecs];
#pragma GCC unroll 4
    for (i32 x = 0; x < vecs; ++x) vv[x] = simd::load(panel + (j * vecs + x) * lanes);
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
      float* at = o + m * ldo + x * lanes;
      simd::store(at, simd::load(at) + acc[m][x]);
    }
}

/// O[rows, dim] += P[rows, n] · V[n, dim]; `dim` is a multiple of `lanes`; `panel` for n ·
/// panel_keys floats. Some columns of V are packed once for all rows of the query tile: rows of the
/// pool lie far apart, and their columns would share a few sets of the L1 cache. Where `ends` is
/// not null, row m's weights are 0 from ends[m] on.
template <class T>
RADDLE_FN void multiply_pv(const float* p, i32 ldp, i32 rows, const T* const* v, i32 n, i32 dim,
                           float* o, i32 ldo, Upcoming<T> next, float* panel, const i32* ends) {
  UpcomingLines<T> upcoming(next, dim, dim / panel_keys * num_row_blocks(rows));
  for_blocks<register_block_vecs>(dim / lanes, [&](i32 x, auto vecs) {
    constexpr i32 width = decltype(vecs)::value;
    pack_v_panel<width>(v, n, x * lanes, panel);
    for_row_blocks(rows, [&](i32 m, auto r) {
      constexpr i32 count = decltype(r)::value;
      upcoming.turn();
      pv_block<count, width>(p + m * ldp, ldp, panel, keys_needed(ends, m, count, n),
                             o + m * ldo + x * lanes, ldo);
    });
  });
}

}  // namespace cpu

RADDLE_ENGINE_END
