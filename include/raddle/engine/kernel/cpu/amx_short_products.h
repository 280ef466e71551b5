// Q·Kᵀ and P·V of few query rows (decode) in tile registers. What bounds decode is how long a line
// of K or V keeps a core busy, since lines on their way have to be asked for meanwhile; here it is
// about six cycles for four rows of bf16, and a product takes as long for 16.
//
//   Sᵀ = K·Qᵀ: rows of K are tiles as they lie in the pool, and Q is rearranged once an item.
//   O  = P·V:  rows of V are interleaved by pairs of keys.
//
// K and V of 8 bits become bf16 on the way, which is exact.
#pragma once

#include "raddle/engine/kernel/cpu/amx_products.h"
#include "raddle/engine/kernel/cpu/scratch.h"
#include "raddle/engine/simd/amx_fp8.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Keys of a short tile, and dimensions that are rearranged at a time: two lines of bf16, one of
/// fp8.
constexpr i32 short_keys = 64;
constexpr i32 stripe = 2 * tile_depth;

/// What a run of short queries needs besides a worker's other scratch.
struct ShortTileScratch {
  bf16* q;        ///< [heads][dim / 32] squares of pairs of dimensions × rows
  bf16* k;        ///< [16, dim] rows of K that don't lie evenly, or aren't bf16
  bf16* v;        ///< [stripe / 16][short_keys / 32] squares, see rearrange_v
  bf16* p;        ///< [16, short_keys] weights
  float* result;  ///< [16, stripe] of one product
  i64 bytes;

  ShortTileScratch(const CpuLaunch& launch, i32 max_heads, void* base) {
    Carver carve(base);
    q = carve.take<bf16>(max_heads * tile_rows * launch.dim_qk);
    k = carve.take<bf16>(tile_rows * launch.dim_qk);
    v = carve.take<bf16>(short_keys * stripe);
    p = carve.take<bf16>(tile_rows * short_keys);
    result = carve.take<float>(tile_rows * stripe);
    bytes = carve.used();
  }
};

/// T: bf16 or e4m3.
template <class T>
class TileProducts {
 public:
  TileProducts(const CpuLaunch& launch, const ShortTileScratch& scratch)
      : dim_qk_(launch.dim_qk), dim_vo_(launch.dim_vo), x_(scratch) {}

  void begin() const { simd::configure_tiles(); }
  void end() const { simd::release_tiles(); }

  bool takes_k() const { return dim_qk_ % stripe == 0; }
  bool takes_v() const { return dim_vo_ % stripe == 0; }

  /// Rows of Q of the run's head number `head`.
  void load_queries(i32 head, float* q, i32 ldq, i32 rows) const {
    for (i32 d = 0; d < dim_qk_; d += tile_depth) {
      Vec pairs[tile_rows];
#pragma GCC unroll 16
      for (i32 m = 0; m < tile_rows; ++m) {
        const float* at = q + m * ldq + d;
        pairs[m] =
            m < rows
                ? reinterpret_cast<Vec>(simd::round_to_bf16(simd::load(at), simd::load(at + lanes)))
                : Vec{};
      }
      simd::transpose(pairs);
      bf16* to = squares_of(head) + d / tile_depth * square;
#pragma GCC unroll 16
      for (i32 r = 0; r < tile_rows; ++r)
        simd::store_words(to + r * tile_depth, reinterpret_cast<simd::VecW>(pairs[r]));
    }
  }

  /// S[rows, n] = scale · Q[rows, dim] · K[n, dim]ᵀ. S has room for 16 rows, and for n rounded up
  /// to 16 columns. `used(Int<bytes>)` is called as K is read.
  template <class Used>
  void qk(i32 head, const float*, i32, i32 rows, const T* const* k, i32 n, float scale, float* s,
          i32 lds, Used&& used) const {
    const bf16* q = squares_of(head);
    for (i32 j = 0; j < n; j += tile_rows) {
      const Rows keys = rows_of(k + j, n - j);
      simd::tile_zero<0>();
      simd::tile_zero<1>();
      for (i32 d = 0; d < dim_qk_; d += 2 * tile_depth) {
        const bf16* squares = q + d * tile_rows;
        multiply_keys<0>(keys, d, squares, used);
        multiply_keys<1>(keys, d + tile_depth, squares + square, used);
      }
      simd::tile_store<0>(x_.result, 64);
      simd::tile_store<1>(x_.result + square / 2, 64);
      for_rows(rows, [&](auto r) { transpose_to<decltype(r)::value>(scale, s + j, lds); });
    }
  }

  /// O[rows, dim] += P[rows, n] · V[n, dim], P padded with zeros to a multiple of 16 keys. The tile
  /// is summed by itself first.
  template <class Used>
  void pv(const float* p, i32 ldp, i32 rows, const T* const* v, i32 n, float* o, i32 ldo,
          Used&& used) const {
    round_weights(p, ldp, rows, n);
    for (i32 d = 0; d < dim_vo_; d += stripe) {
      rearrange(v, n, d, used);
      simd::tile_zero<0>();
      simd::tile_zero<1>();
      simd::tile_zero<2>();
      simd::tile_zero<3>();
      for (i32 j = 0; j < n; j += tile_depth) {
        const bf16* squares = x_.v + j * stripe;
        simd::tile_load<4>(x_.p + j, short_keys * sizeof(bf16));
        multiply_values<0, 6>(squares);
        multiply_values<1, 7>(squares);
        multiply_values<2, 6>(squares);
        multiply_values<3, 7>(squares);
      }
      store_result<0>();
      store_result<1>();
      store_result<2>();
      store_result<3>();
      for (i32 m = 0; m < rows; ++m)
        for (i32 i = 0; i < stripe; i += lanes) {
          float* at = o + m * ldo + d + i;
          simd::store(at, simd::load(at) + simd::load(x_.result + m * stripe + i));
        }
    }
  }

 private:
  /// 16 rows of bf16, `stride` bytes apart.
  struct Rows {
    const bf16* data;
    i64 stride;
  };

  bf16* squares_of(i32 head) const { return x_.q + head * tile_rows * dim_qk_; }

  /// The first 16 of n rows of K: as they lie, where that is evenly; copied where it isn't, with
  /// zeros past n.
  Rows rows_of(const T* const* k, i32 n) const {
    if constexpr (dtype_of<T>::value == DType::bfloat16) {
      if (n >= tile_rows) {
        const i64 stride = k[1] - k[0];
        bool even = true;
        for (i32 i = 2; i < tile_rows; ++i) even &= k[i] - k[i - 1] == stride;
        if (even) return {k[0], stride * static_cast<i64>(sizeof(bf16))};
      }
    }
    for (i32 i = 0; i < tile_rows; ++i)
      for (i32 d = 0; d < dim_qk_; d += stripe) {
        simd::VecW a{}, b{};
        if (i < n) simd::load_words(k[i] + d, a, b);
        simd::store_words(x_.k + i * dim_qk_ + d, a);
        simd::store_words(x_.k + i * dim_qk_ + d + tile_depth, b);
      }
    return {x_.k, dim_qk_ * static_cast<i64>(sizeof(bf16))};
  }

  template <i32 result, class Used>
  void multiply_keys(const Rows& keys, i32 d, const bf16* q, Used& used) const {
    used(Int<tile_rows * tile_depth* static_cast<i32>(sizeof(T))>{});
    simd::tile_load<2 + result>(keys.data + d, keys.stride);
    simd::tile_load<4 + result>(q, 64);
    simd::tile_dot<result, 2 + result, 4 + result>();
  }

  template <i32 result, i32 operand>
  void multiply_values(const bf16* squares) const {
    simd::tile_load<operand>(squares + result * square, 64);
    simd::tile_dot<result, 4, operand>();
  }

  template <i32 result>
  void store_result() const {
    simd::tile_store<result>(x_.result + result * tile_rows, stripe * sizeof(float));
  }

  /// Calls f(Int<r>) for the power of two r that holds `rows`, up to 16.
  template <i32 most = tile_rows, class F>
  RADDLE_FN static void for_rows(i32 rows, F f) {
    if constexpr (most > 1)
      if (rows <= most / 2) return for_rows<most / 2>(rows, f);
    f(Int<most>{});
  }

  /// The sum of the two results, [16 keys, 16 rows], to rows of S. What isn't stored isn't
  /// transposed either.
  template <i32 rows>
  void transpose_to(float scale, float* s, i32 lds) const {
    Vec keys[lanes];
#pragma GCC unroll 16
    for (i32 i = 0; i < lanes; ++i) {
      const float* at = x_.result + i * tile_rows;
      keys[i] = simd::load(at) + simd::load(at + square / 2);
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
        simd::store_words(x_.p + m * short_keys + j, simd::round_to_bf16(simd::load(at), high));
      }
  }

  /// Squares of dimensions [d, d + stripe); keys past n are zero.
  template <class Used>
  void rearrange(const T* const* v, i32 n, i32 d, Used& used) const {
    bf16* to = x_.v;
    for (i32 j = 0; j < n; j += tile_depth, to += tile_depth * stripe)
      for (i32 r = 0; r < tile_rows; ++r) {
        used(Int<2 * stripe* static_cast<i32>(sizeof(T))>{});
        const i32 key = j + 2 * r;
        simd::VecW even[2]{}, odd[2]{};
        if (key < n) simd::load_words(v[key] + d, even[0], even[1]);
        if (key + 1 < n) simd::load_words(v[key + 1] + d, odd[0], odd[1]);
#pragma GCC unroll 2
        for (i32 i = 0; i < 2; ++i) {
          simd::VecW low, high;
          simd::interleave(even[i], odd[i], low, high);
          bf16* at = to + 2 * i * square + r * tile_depth;
          simd::store_words(at, low);
          simd::store_words(at + square, high);
        }
      }
  }

  i32 dim_qk_, dim_vo_;
  ShortTileScratch x_;
};

}  // namespace cpu

RADDLE_ENGINE_END
