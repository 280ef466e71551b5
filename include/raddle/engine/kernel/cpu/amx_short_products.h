// Q·Kᵀ and P·V of few query rows (decode) in tile registers. Decoding is bound by how many cycles a
// core spends on a line of K or V, because it prefetches other lines meanwhile: about six for four
// rows of bf16, and a tile product takes as long for 16 rows.
//
//   Sᵀ = K·Qᵀ: rows of K are loaded as tiles where they lie in the pool; Q is packed once per item.
//   O  = P·V:  pairs of V's rows are interleaved.
//
// A product waits 52 cycles for an earlier product on one result, and a load waits for stores to
// the lines that it reads. So four results are computed at a time, and V is packed 32 keys ahead of
// its products. K and V of 8 bits become bf16 on the way, which is exact.
#pragma once

#include "raddle/engine/kernel/cpu/amx_products.h"
#include "raddle/engine/kernel/cpu/scratch.h"
#include "raddle/engine/simd/amx_rows.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Most keys of a short tile.
constexpr i32 short_keys = max_tile_keys;
/// Dimensions that are packed at a time: two lines of bf16, one of fp8.
constexpr i32 packed_dims = 2 * tile_depth;
/// Results that are computed side by side, in tiles 0 to 3.
constexpr i32 num_results = 4;

/// Scratch memory that a run of short queries needs besides Scratch.
struct ShortTileScratch {
  bf16* q;        ///< [heads][dim / 32] packed blocks: pairs of dimensions × rows
  bf16* k;        ///< [2 · 16, dim] copies of rows of K that don't lie evenly, or aren't bf16
  bf16* v[2];     ///< [packed_dims / 16] packed blocks of 32 keys, see pair_rows
  bf16* p;        ///< [16, short_keys] weights
  float* result;  ///< [16, packed_dims] of one product, or [4][16, 16]
  i64 bytes;

  ShortTileScratch(const CpuLaunch& launch, i32 max_heads, void* base) {
    Carver carve(base);
    q = carve.take<bf16>(max_heads * tile_rows * launch.dim_qk);
    k = carve.take<bf16>(2 * tile_rows * launch.dim_qk);
    for (bf16*& blocks : v) blocks = carve.take<bf16>(tile_depth * packed_dims);
    p = carve.take<bf16>(tile_rows * short_keys);
    result = carve.take<float>(tile_rows * packed_dims);
    bytes = carve.used();
  }
};

/// T is bf16 or e4m3.
template <class T>
class TileProducts {
 public:
  TileProducts(const CpuLaunch& launch, const ShortTileScratch& scratch)
      : dim_qk_(launch.dim_qk),
        dim_vo_(launch.dim_vo),
        k_begin_(launch.k_begin),
        scratch_(scratch) {}

  void begin() const { simd::configure_tiles(); }
  void end() const { simd::release_tiles(); }

  bool takes_k() const { return dim_qk_ % packed_dims == 0 && k_begin_ % packed_dims == 0; }
  bool takes_v() const { return dim_vo_ % packed_dims == 0; }

  /// Packs Q of the run's head number `head`.
  void load_queries(i32 head, float* q, i32 ldq, i32 rows) const {
    for (i32 d = 0; d < dim_qk_; d += tile_depth)
      simd::pair_columns(q + d, ldq, rows, packed_queries(head) + d * tile_rows);
  }

  /// S[rows, n] = scale · Q[rows, …] · K[n, …]ᵀ over the keys' columns [begin, end), which lie at
  /// `k`. S has room for 16 rows, and for n rounded up to 16 columns. Prefetches by `ahead` at the
  /// rate at which it reads K.
  void qk(i32 head, i32 begin, i32 end, const float*, i32, i32 rows, const T* const* k, i32 n,
          float scale, float* s, i32 lds, Ahead& ahead) const {
    const bf16* q = packed_queries(head) + begin * tile_rows;
    const i32 dim = end - begin;
    i32 j = 0;
    for (; j + tile_rows < n; j += 2 * tile_rows)
      multiply_keys<2>(q, dim, rows, k + j, n - j, scale, s + j, lds, ahead);
    if (j < n) multiply_keys<1>(q, dim, rows, k + j, n - j, scale, s + j, lds, ahead);
  }

  /// O[rows, dim] += P[rows, n] · V[n, dim], P padded with zeros to a multiple of 16 keys. With 16
  /// rows, tiles accumulate in O itself, and finish_output puts its columns in order. With fewer,
  /// the product is summed apart first, because the rows behind them are another head's.
  void pv(const float* p, i32 ldp, i32 rows, const T* const* v, i32 n, float* o, i32 ldo,
          Ahead& ahead) const {
    round_weights(p, ldp, rows, n);
    if (rows == tile_rows)
      multiply_values<true>(v, n, rows, o, ldo, ahead);
    else
      multiply_values<false>(v, n, rows, o, ldo, ahead);
  }

  void finish_output(float* o, i32 ldo, i32 rows) const {
    if (rows < tile_rows) return;
    for (i32 m = 0; m < rows; ++m)
      for (i32 d = 0; d < dim_vo_; d += packed_dims) {
        Vec x[num_results];
        load_row(o + m * ldo + d, x);
        store_row(o + m * ldo + d, x);
      }
  }

 private:
  /// 16 rows of bf16, `stride` bytes apart.
  struct Rows {
    const bf16* data;
    i64 stride;
  };

  bf16* packed_queries(i32 head) const { return scratch_.q + head * tile_rows * dim_qk_; }

  /// The first 16 of n rows of K: in place where they lie evenly; else copied to `to`, with zeros
  /// past n.
  Rows rows_of(const T* const* k, i32 n, i32 dim, bf16* to) const {
    if constexpr (dtype_of<T>::value == DType::bfloat16) {
      if (n >= tile_rows) {
        const i64 stride = k[1] - k[0];
        bool even = true;
        for (i32 i = 2; i < tile_rows; ++i) even &= k[i] - k[i - 1] == stride;
        if (even) return {k[0], stride * static_cast<i64>(sizeof(bf16))};
      }
    }
    for (i32 i = 0; i < tile_rows; ++i)
      for (i32 d = 0; d < dim; d += packed_dims) {
        simd::VecW a{}, b{};
        if (i < n) simd::load_words(k[i] + d, a, b);
        simd::store_words(to + i * dim + d, a);
        simd::store_words(to + i * dim + d + tile_depth, b);
      }
    return {to, dim * static_cast<i64>(sizeof(bf16))};
  }

  /// Logits of the first `blocks` · 16 of n keys. Even and odd steps of the depth accumulate in
  /// separate results.
  template <i32 blocks>
  void multiply_keys(const bf16* q, i32 dim, i32 rows, const T* const* k, i32 n, float scale,
                     float* s, i32 lds, Ahead& ahead) const {
    Rows keys[blocks];
    for (i32 b = 0; b < blocks; ++b)
      keys[b] =
          rows_of(k + b * tile_rows, n - b * tile_rows, dim, scratch_.k + b * tile_rows * dim);
    zero_results<2 * blocks>();
    for (i32 d = 0; d < dim; d += 2 * tile_depth, q += 2 * packed_block) {
      multiply_depth<blocks, 0>(keys, d, q, ahead);
      multiply_depth<blocks, 1>(keys, d + tile_depth, q + packed_block, ahead);
    }
    store_results<2 * blocks>(scratch_.result, packed_block / 2, 64);
    for_rows(rows, [&](auto r) {
      for (i32 b = 0; b < blocks; ++b)
        transpose_to<decltype(r)::value>(scratch_.result + b * packed_block, scale,
                                         s + b * tile_rows, lds);
    });
  }

  template <i32 blocks, i32 odd>
  void multiply_depth(const Rows (&keys)[blocks], i32 d, const bf16* q, Ahead& ahead) const {
    simd::tile_load<6 + odd>(q, 64);
    ahead.used(Int<blocks * tile_rows * tile_depth* static_cast<i32>(sizeof(T))>{});
    simd::tile_load<4>(keys[0].data + d, keys[0].stride);
    simd::tile_dot<odd, 4, 6 + odd>();
    if constexpr (blocks > 1) {
      simd::tile_load<5>(keys[1].data + d, keys[1].stride);
      simd::tile_dot<2 + odd, 5, 6 + odd>();
    }
  }

  /// Zeroes the first two results, or all four.
  template <i32 count>
  static void zero_results() {
    simd::tile_zero<0>();
    simd::tile_zero<1>();
    if constexpr (count > 2) {
      simd::tile_zero<2>();
      simd::tile_zero<3>();
    }
  }

  /// Stores the first two results, or all four, `step` elements apart.
  template <i32 count>
  static void store_results(float* to, i32 step, i64 stride) {
    simd::tile_store<0>(to, stride);
    simd::tile_store<1>(to + step, stride);
    if constexpr (count > 2) {
      simd::tile_store<2>(to + 2 * step, stride);
      simd::tile_store<3>(to + 3 * step, stride);
    }
  }

  /// Calls f(Int<r>) for the power of two r that holds `rows`, up to 16.
  template <i32 most = tile_rows, class F>
  RADDLE_FN static void for_rows(i32 rows, F f) {
    if constexpr (most > 1)
      if (rows <= most / 2) return for_rows<most / 2>(rows, f);
    f(Int<most>{});
  }

  /// Stores the sum of two results, [16 keys, 16 rows], transposed, as rows of S.
  template <i32 rows>
  void transpose_to(const float* results, float scale, float* s, i32 lds) const {
    Vec keys[lanes];
#pragma GCC unroll 16
    for (i32 i = 0; i < lanes; ++i) {
      const float* at = results + i * tile_rows;
      keys[i] = simd::load(at) + simd::load(at + packed_block / 2);
    }
    simd::transpose(keys);
#pragma GCC unroll 16
    for (i32 m = 0; m < rows; ++m) simd::store(s + m * lds, keys[m] * scale);
  }

  /// Weights in bf16, with zeros up to a whole tile of keys.
  void round_weights(const float* p, i32 ldp, i32 rows, i32 n) const {
    for (i32 m = 0; m < rows; ++m)
      for (i32 j = 0; j < n; j += tile_depth) {
        const float* at = p + m * ldp + j;
        const Vec high = j + lanes < n ? simd::load(at + lanes) : Vec{};
        simd::store_words(scratch_.p + m * short_keys + j,
                          simd::round_to_bf16(simd::load(at), high));
      }
  }

  /// See pv: 64 columns at a time, and of these 32 keys while the next 32 are packed. Packed keys
  /// stay in the L1 cache until they are multiplied.
  template <bool whole>
  void multiply_values(const T* const* v, i32 n, i32 rows, float* o, i32 ldo, Ahead& ahead) const {
    const i64 stride = (whole ? ldo : packed_dims) * static_cast<i64>(sizeof(float));
    i32 now = 0;  // scratch_.v[now] is multiplied; the other is packed
    for (i32 pair = 0; pair < tile_rows; pair += pairs_per_turn)
      pair_keys(v, n, 0, 0, pair, scratch_.v[now], ahead);
    for (i32 d = 0; d < dim_vo_; d += packed_dims) {
      start_results<whole>(o + d, stride);
      for (i32 j = 0; j < n; j += tile_depth) {
        const bool goes_on = j + tile_depth < n;
        const i32 next_j = goes_on ? j + tile_depth : 0, next_d = goes_on ? d : d + packed_dims;
        multiply_pairs(scratch_.p + j, scratch_.v[now], [&](i32 pair) {
          if (next_d < dim_vo_) pair_keys(v, n, next_j, next_d, pair, scratch_.v[now ^ 1], ahead);
        });
        now ^= 1;
      }
      store_results<num_results>(whole ? o + d : scratch_.result, tile_rows, stride);
      if constexpr (!whole) add_result(rows, o + d, ldo);
    }
  }

  template <bool whole>
  void start_results(const float* o, i64 stride) const {
    if constexpr (whole) {
      simd::tile_load<0>(o, stride);
      simd::tile_load<1>(o + tile_rows, stride);
      simd::tile_load<2>(o + 2 * tile_rows, stride);
      simd::tile_load<3>(o + 3 * tile_rows, stride);
    } else {
      zero_results<num_results>();
    }
  }

  /// Multiplies 32 keys × 64 columns; calls turn(pair) after each product, for four pairs of keys.
  template <class Turn>
  void multiply_pairs(const bf16* p, const bf16* blocks, Turn turn) const {
    simd::tile_load<4>(p, short_keys * sizeof(bf16));
    simd::tile_load<6>(blocks, 64);
    simd::tile_dot<0, 4, 6>();
    turn(0);
    simd::tile_load<7>(blocks + packed_block, 64);
    simd::tile_dot<1, 4, 7>();
    turn(pairs_per_turn);
    simd::tile_load<6>(blocks + 2 * packed_block, 64);
    simd::tile_dot<2, 4, 6>();
    turn(2 * pairs_per_turn);
    simd::tile_load<7>(blocks + 3 * packed_block, 64);
    simd::tile_dot<3, 4, 7>();
    turn(3 * pairs_per_turn);
  }

  static constexpr i32 pairs_per_turn = 4;

  /// Packs some pairs of keys from j on, columns [d, d + packed_dims); keys past n are zero.
  void pair_keys(const T* const* v, i32 n, i32 j, i32 d, i32 pair, bf16* blocks,
                 Ahead& ahead) const {
    alignas(64) static constexpr T zeros[packed_dims]{};
    ahead.used(Int<pairs_per_turn * 2 * packed_dims* static_cast<i32>(sizeof(T))>{});
    bf16* to = blocks + pair * tile_depth;
#pragma GCC unroll 4
    for (i32 i = 0; i < pairs_per_turn; ++i, to += tile_depth) {
      const i32 key = j + 2 * (pair + i);
      simd::VecW pairs[num_results];
      simd::pair_rows(key < n ? v[key] + d : zeros, key + 1 < n ? v[key + 1] + d : zeros, pairs);
#pragma GCC unroll 4
      for (i32 t = 0; t < num_results; ++t) simd::store_words(to + t * packed_block, pairs[t]);
    }
  }

  /// O[rows, packed_dims] += the product in `result`.
  void add_result(i32 rows, float* o, i32 ldo) const {
    for (i32 m = 0; m < rows; ++m) {
      Vec x[num_results];
      load_row(scratch_.result + m * packed_dims, x);
#pragma GCC unroll 4
      for (i32 i = 0; i < num_results; ++i) {
        float* at = o + m * ldo + i * lanes;
        simd::store(at, simd::load(at) + x[i]);
      }
    }
  }

  /// 64 columns of one row as products leave them, put in order.
  static void load_row(const float* from, Vec (&x)[num_results]) {
#pragma GCC unroll 4
    for (i32 i = 0; i < num_results; ++i) x[i] = simd::load(from + i * lanes);
    simd::in_order(static_cast<const T*>(nullptr), x);
  }
  static void store_row(float* to, const Vec (&x)[num_results]) {
#pragma GCC unroll 4
    for (i32 i = 0; i < num_results; ++i) simd::store(to + i * lanes, x[i]);
  }

  i32 dim_qk_, dim_vo_, k_begin_;
  ShortTileScratch scratch_;
};

}  // namespace cpu

RADDLE_ENGINE_END
