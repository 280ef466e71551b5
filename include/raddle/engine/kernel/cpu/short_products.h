// Q·Kᵀ and P·V of few query rows (decode) on fp32 lanes. K and V are read where they lie, each line
// once for a block of up to four rows: Q·Kᵀ as register blocks of dot products that are summed over
// the lanes together, P·V along the lanes.
//
// They are bound by the instructions for a line: at 15 GB/s a core of 2.5 GHz has ten cycles for
// one. A line of bf16 takes, with four rows, one shift, one mask and eight FMAs, because rows of Q
// are rearranged once as load_two reads K.
#pragma once

#include "raddle/engine/kernel/cpu/ahead.h"
#include "raddle/engine/kernel/cpu/register_blocks.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// acc[row · keys + key] += Q · K for the nth vector of two. A row of Q is loaded once for all
/// keys: two loads for every product would take longer than the products.
template <i32 nth, class T, i32 rows, i32 keys>
RADDLE_FN void add_products(const float* q, i32 ldq, const T* const* k, i32 d, Vec (&acc)[lanes]) {
  Vec of_row[rows];
#pragma GCC unroll 16
  for (i32 m = 0; m < rows; ++m)
    of_row[m] = simd::in_register(simd::load(q + m * ldq + d + nth * lanes));
#pragma GCC unroll 16
  for (i32 j = 0; j < keys; ++j) {
    const Vec of_key = simd::load_of_two<nth>(k[j] + d);
#pragma GCC unroll 16
    for (i32 m = 0; m < rows; ++m)
      acc[m * keys + j] = simd::fma(of_row[m], of_key, acc[m * keys + j]);
  }
}

/// add_products of both vectors, for types that are cheaper to load two vectors at a time.
template <class T, i32 rows, i32 keys>
RADDLE_FN void add_both_products(const float* q, i32 ldq, const T* const* k, i32 d,
                                 Vec (&acc)[lanes]) {
#pragma GCC unroll 16
  for (i32 j = 0; j < keys; ++j) {
    Vec a, b;
    simd::load_two(k[j] + d, a, b);
#pragma GCC unroll 16
    for (i32 m = 0; m < rows; ++m)
      acc[m * keys + j] = simd::fma(simd::load(q + m * ldq + d), a, acc[m * keys + j]);
#pragma GCC unroll 16
    for (i32 m = 0; m < rows; ++m)
      acc[m * keys + j] = simd::fma(simd::load(q + m * ldq + d + lanes), b, acc[m * keys + j]);
  }
}

/// Dot products of `rows` queries with `keys` keys; rows · keys <= lanes. Q is arranged as T.
/// Prefetches by `ahead` at the rate at which it reads K. Like all register blocks it is not
/// inlined: the caller's variables would take registers, and some sums would lie in memory.
template <class T, i32 rows, i32 keys>
[[gnu::noinline]] void dot_block(const float* q, i32 ldq, const T* const* k, i32 dim, float scale,
                                 float* s, i32 lds, Ahead& ahead) {
  Vec acc[lanes] = {};
  i32 d = 0;
  for (; d + 2 * lanes <= dim; d += 2 * lanes) {
    ahead.used_in_loop(Int<keys * 2 * lanes* static_cast<i32>(sizeof(T))>{});
    if constexpr (simd::loads_singly<T>) {
      add_products<0, T, rows, keys>(q, ldq, k, d, acc);
      add_products<1, T, rows, keys>(q, ldq, k, d, acc);
    } else {
      add_both_products<T, rows, keys>(q, ldq, k, d, acc);
    }
  }
  if (d < dim) {
#pragma GCC unroll 16
    for (i32 j = 0; j < keys; ++j) {
      const Vec a = simd::load_unit(k[j] + d);
#pragma GCC unroll 16
      for (i32 m = 0; m < rows; ++m)
        acc[m * keys + j] = simd::fma(simd::load(q + m * ldq + d), a, acc[m * keys + j]);
    }
  }
  float sums[lanes];
  simd::store(sums, simd::sum_each(acc) * (scale * simd::unit<T>));
#pragma GCC unroll 16
  for (i32 m = 0; m < rows; ++m)
    __builtin_memcpy(s + m * lds, sums + m * keys, keys * sizeof(float));
}

/// S[rows, n] = scale · Q[rows, dim] · K[n, dim]ᵀ. `dim` is a multiple of `lanes`; Q is arranged as
/// T. Prefetches by `ahead` while it reads K for the first time.
template <class T>
void short_qk(const float* q, i32 ldq, i32 rows, const T* const* k, i32 n, i32 dim, float scale,
              float* s, i32 lds, Ahead& ahead) {
  Ahead nothing;
  for_blocks<4>(rows, [&](i32 m, auto r) {
    constexpr i32 block = decltype(r)::value;
    // Few rows leave room for more keys, up to as many as the accumulators are.
    constexpr i32 keys = min(lanes / block, simd::registers / 2);
    Ahead& prefetches = m == 0 ? ahead : nothing;
    for_blocks<keys>(n, [&](i32 j, auto c) {
      dot_block<T, block, decltype(c)::value>(q + m * ldq, ldq, k + j, dim, scale, s + m * lds + j,
                                              lds, prefetches);
      prefetches.catch_up();
    });
  });
}

/// One register block of P·V: O[rows, vecs · lanes] += P[rows, n] · V[n, …]; `vecs` is even, or 1.
/// The tile is summed apart first: two short sums err less than one long one.
template <class T, i32 rows, i32 vecs>
[[gnu::noinline]] void short_pv_block(const float* p, i32 ldp, const T* const* v, i32 n, i32 d,
                                      float* o, i32 ldo, Ahead& ahead) {
  Vec acc[rows][vecs]{};
#pragma GCC unroll 2
  for (i32 j = 0; j < n; ++j) {
    ahead.used_in_loop(Int<vecs * lanes* static_cast<i32>(sizeof(T))>{});
    Vec vv[vecs];
    if constexpr (vecs == 1) {
      vv[0] = simd::load_unit(v[j] + d);
    } else {
#pragma GCC unroll 4
      for (i32 x = 0; x < vecs; x += 2) simd::load_two(v[j] + d + x * lanes, vv[x], vv[x + 1]);
    }
#pragma GCC unroll 8
    for (i32 m = 0; m < rows; ++m) {
      const Vec pv = simd::broadcast(p[m * ldp + j]);
#pragma GCC unroll 4
      for (i32 x = 0; x < vecs; ++x) acc[m][x] = simd::fma(pv, vv[x], acc[m][x]);
    }
  }
#pragma GCC unroll 8
  for (i32 m = 0; m < rows; ++m) {
    if constexpr (vecs > 1) {
#pragma GCC unroll 4
      for (i32 x = 0; x < vecs; x += 2) simd::in_order<T>(acc[m][x], acc[m][x + 1]);
    }
#pragma GCC unroll 4
    for (i32 x = 0; x < vecs; ++x) {
      float* at = o + m * ldo + d + x * lanes;
      const Vec sum = simd::unit<T> == 1.0f ? acc[m][x] : acc[m][x] * simd::unit<T>;
      simd::store(at, simd::load(at) + sum);
    }
  }
}

/// O[rows, dim] += P[rows, n] · V[n, dim]; `dim` is a multiple of `lanes`.
template <class T>
void short_pv(const float* p, i32 ldp, i32 rows, const T* const* v, i32 n, i32 dim, float* o,
              i32 ldo, Ahead& ahead) {
  Ahead nothing;
  for_blocks<register_block_vecs>(dim / lanes, [&](i32 x, auto c) {
    for_blocks<4>(rows, [&](i32 m, auto r) {
      Ahead& prefetches = m == 0 ? ahead : nothing;
      short_pv_block<T, decltype(r)::value, decltype(c)::value>(p + m * ldp, ldp, v, n, x * lanes,
                                                                o + m * ldo, ldo, prefetches);
      prefetches.catch_up();
    });
  });
}

/// Both products for a run of short queries; TileProducts (amx_short_products.h) has these members,
/// too.
template <class T>
class LaneProducts {
 public:
  /// `k_begin` as of CpuLaunch.
  LaneProducts(i32 dim_qk, i32 dim_vo, i32 k_begin)
      : dim_qk_(dim_qk), dim_vo_(dim_vo), k_begin_(k_begin) {}

  void begin() const {}
  void end() const {}

  /// Whether rows of K, and of V, are whole vectors.
  bool takes_k() const { return dim_qk_ % lanes == 0 && k_begin_ % lanes == 0; }
  bool takes_v() const { return dim_vo_ % lanes == 0; }

  /// Prepares Q of the run's head number `head`.
  void load_queries(i32, float* q, i32 ldq, i32 rows) const {
    for (i32 m = 0; m < rows; ++m) {
      simd::arrange<T>(q + m * ldq, k_begin_);
      simd::arrange<T>(q + m * ldq + k_begin_, dim_qk_ - k_begin_);
    }
  }

  /// S over the keys' columns [begin, end), which lie at `k`. `q` was prepared by load_queries for
  /// this head.
  void qk(i32, i32 begin, i32 end, const float* q, i32 ldq, i32 rows, const T* const* k, i32 n,
          float scale, float* s, i32 lds, Ahead& ahead) const {
    short_qk(q + begin, ldq, rows, k, n, end - begin, scale, s, lds, ahead);
  }

  void pv(const float* p, i32 ldp, i32 rows, const T* const* v, i32 n, float* o, i32 ldo,
          Ahead& ahead) const {
    short_pv(p, ldp, rows, v, n, dim_vo_, o, ldo, ahead);
  }

  /// After the last `pv` of a head.
  void finish_output(float*, i32, i32) const {}

 private:
  i32 dim_qk_, dim_vo_, k_begin_;
};

}  // namespace cpu

RADDLE_ENGINE_END
