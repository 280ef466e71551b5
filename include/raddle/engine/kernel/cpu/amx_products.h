// Q·Kᵀ and P·V of one strip of query rows in tile registers, and how K and V are rearranged for
// them. Both products keep a square of 2 × 2 results in tiles 0 to 3; tiles 4 and 5 hold rows of Q
// or P, 6 and 7 columns of Kᵀ or V.
//
// A KV tile is rearranged once and read by all strips: K by squares of 16 keys × 32 dimensions,
// whose pairs of dimensions are transposed; V by squares of 32 keys × 16 dimensions, whose pairs of
// keys are interleaved. Each square is one KiB.
#pragma once

#include "raddle/engine/kernel/cpu/micro.h"
#include "raddle/engine/simd/amx.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

using simd::tile_depth;
using simd::tile_rows;

/// Query rows of a strip: its logits stay in the L1 cache from Q·Kᵀ to P·V.
constexpr i32 strip_rows = 2 * tile_rows;
/// Keys and dimensions are padded to this with zeros.
constexpr i32 padded_unit = tile_depth;
constexpr i32 square = tile_rows * tile_depth;  ///< elements of a rearranged square

/// K's squares: to[key / 16][d / 32]. `dim` is a multiple of 32; keys past n are zero.
RADDLE_FN void rearrange_k(const bf16* const* k, i32 n, i32 dim, bf16* to, Upcoming<bf16> next) {
  for (i32 j = 0; j < round_up(n, padded_unit); j += tile_rows) {
    next.fetch(j, tile_rows, dim);
    for (i32 d = 0; d < dim; d += tile_depth, to += square) {
      Vec pairs[tile_rows];
#pragma GCC unroll 16
      for (i32 i = 0; i < tile_rows; ++i)
        pairs[i] = j + i < n ? reinterpret_cast<Vec>(simd::load_words(k[j + i] + d)) : Vec{};
      simd::transpose(pairs);
#pragma GCC unroll 16
      for (i32 i = 0; i < tile_rows; ++i)
        simd::store_words(to + i * tile_depth, reinterpret_cast<simd::VecW>(pairs[i]));
    }
  }
}

/// V's squares: to[key / 32][d / 16]. `dim` is a multiple of 32; keys past n are zero.
RADDLE_FN void rearrange_v(const bf16* const* v, i32 n, i32 dim, bf16* to, Upcoming<bf16> next) {
  for (i32 j = 0; j < n; j += tile_depth, to += tile_depth * dim) {
    next.fetch(j, tile_depth, dim);
    for (i32 r = 0; r < tile_rows; ++r)
      for (i32 d = 0; d < dim; d += 2 * tile_rows) {
        const i32 key = j + 2 * r;
        const simd::VecW even = key < n ? simd::load_words(v[key] + d) : simd::VecW{};
        const simd::VecW odd = key + 1 < n ? simd::load_words(v[key + 1] + d) : simd::VecW{};
        simd::VecW low, high;
        simd::interleave(even, odd, low, high);
        bf16* at = to + d * tile_depth + r * tile_depth;
        simd::store_words(at, low);
        simd::store_words(at + square, high);
      }
  }
}

/// A square of results: `rows` tiles of rows by `columns` tiles of columns (1 or 2 each), summed
/// over `depth` elements. Row tiles of A are 16 rows of `lda` elements; B's squares lie
/// `next_depth` elements apart along the depth, and `next_column` across.
template <i32 rows, i32 columns>
RADDLE_FN void multiply_tiles(const bf16* a, i64 lda, const bf16* b, i64 next_depth,
                              i64 next_column, i32 depth) {
  const i64 stride = lda * static_cast<i64>(sizeof(bf16));
  for (i32 d = 0; d < depth; d += tile_depth, b += next_depth) {
    simd::tile_load<4>(a + d, stride);
    simd::tile_load<6>(b, 64);
    simd::tile_dot<0, 4, 6>();
    if constexpr (rows > 1) {
      simd::tile_load<5>(a + tile_rows * lda + d, stride);
      simd::tile_dot<2, 5, 6>();
    }
    if constexpr (columns > 1) {
      simd::tile_load<7>(b + next_column, 64);
      simd::tile_dot<1, 4, 7>();
      if constexpr (rows > 1) simd::tile_dot<3, 5, 7>();
    }
  }
}

template <i32 rows, i32 columns, class F>
RADDLE_FN void for_results(float* c, i64 ldc, F f) {
  const i64 stride = ldc * static_cast<i64>(sizeof(float));
  f(Int<0>{}, c, stride);
  if constexpr (columns > 1) f(Int<1>{}, c + tile_rows, stride);
  if constexpr (rows > 1) f(Int<2>{}, c + tile_rows * ldc, stride);
  if constexpr (rows > 1 && columns > 1) f(Int<3>{}, c + tile_rows * ldc + tile_rows, stride);
}

template <i32 rows, i32 columns>
RADDLE_FN void load_results(const float* c, i64 ldc) {
  for_results<rows, columns>(const_cast<float*>(c), ldc, [](auto t, float* at, i64 stride) {
    simd::tile_load<decltype(t)::value>(at, stride);
  });
}

template <i32 rows, i32 columns>
RADDLE_FN void store_results(float* c, i64 ldc) {
  for_results<rows, columns>(c, ldc, [](auto t, float* at, i64 stride) {
    simd::tile_store<decltype(t)::value>(at, stride);
  });
}

RADDLE_FN void zero_results() {
  simd::tile_zero<0>();
  simd::tile_zero<1>();
  simd::tile_zero<2>();
  simd::tile_zero<3>();
}

/// S = Q · Kᵀ of a strip, not yet scaled, for keys [begin, end) of the tile, multiples of 32.
/// `tiles` of 16 rows each.
template <i32 tiles>
RADDLE_FN void strip_qk(const bf16* q, i32 dim, const bf16* k, i32 begin, i32 end, float* s,
                        i32 lds) {
  for (i32 j = begin; j < end; j += 2 * tile_rows) {
    zero_results();
    multiply_tiles<tiles, 2>(q, dim, k + static_cast<i64>(j) * dim, square, tile_rows * dim, dim);
    store_results<tiles, 2>(s + j, lds);
  }
}

/// O += P · V of a strip, for the same keys. `dim` is a multiple of 16, V's squares are laid out
/// for it rounded up to 32.
template <i32 tiles>
RADDLE_FN void strip_pv(const bf16* p, i32 ldp, const bf16* v, i32 begin, i32 end, i32 dim,
                        float* o, i32 ldo) {
  const i64 next_depth = i64{tile_depth} * round_up(dim, padded_unit);
  const bf16* first = v + begin / tile_depth * next_depth;
  for_blocks<2>(dim / tile_rows, [&](i32 x, auto c) {
    constexpr i32 columns = decltype(c)::value;
    float* at = o + x * tile_rows;
    load_results<tiles, columns>(at, ldo);
    multiply_tiles<tiles, columns>(p + begin, ldp, first + x * square, next_depth, square,
                                   end - begin);
    store_results<tiles, columns>(at, ldo);
  });
}

}  // namespace cpu

RADDLE_ENGINE_END
