// How K and V are rearranged for products of bf16, a slice of keys at a time: K by squares of 16
// keys × 32 dimensions, whose pairs of dimensions are transposed; V by squares of 32 keys × 16
// dimensions, whose pairs of keys are interleaved. Each square is one KiB. They lie in the order in
// which products of 2 × 2 tiles use them up, so that what comes next is always what lies behind.
#pragma once

#include "raddle/engine/kernel/cpu/micro.h"
#include "raddle/engine/simd/bf16.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

using simd::tile_depth;
using simd::tile_rows;

/// Keys and dimensions are padded to this with zeros.
constexpr i32 padded_unit = tile_depth;
constexpr i32 square = tile_rows * tile_depth;  ///< elements of a rearranged square
constexpr i32 two_squares = 2 * square;         ///< B of one step of a product

/// Query rows of a strip: its logits stay in the L1 cache from Q·Kᵀ to P·V.
constexpr i32 strip_rows = 2 * tile_rows;

/// C = A · B, or C += A · B, of one strip. C is computed in blocks of 32 columns, each over the
/// whole depth, which have two squares of B for every 32 of it.
struct Operands {
  i32 rows = 0;
  const bf16* a = nullptr;
  i32 lda = 0;
  const bf16* b = nullptr;  ///< squares in their order
  i64 skip = 0;             ///< elements of B that are left out between blocks
  i32 depth = 0;            ///< in squares
  float* c = nullptr;
  i32 ldc = 0;
  i32 blocks = 0;
};

/// Keys that a strip of query rows takes at a time. With 64, O (16 KiB of a strip where D = 128), Q
/// (8) and two blocks of logits (8 each) would stay in an L1 cache of 48 KiB while squares go
/// through it; twice as many halve what O is loaded and stored, which is worth more (by 2-4 %).
constexpr i32 slice_keys = 128;
static_assert(slice_keys % padded_unit == 0);

/// K's squares of up to slice_keys keys: to[key / 32][d / 32][key % 32 / 16]. `dim` is a multiple
/// of 32; keys past n are zero.
RADDLE_FN void rearrange_k(const bf16* const* k, i32 n, i32 dim, bf16* to, Upcoming<bf16> next) {
  for (i32 j = 0; j < round_up(n, padded_unit); j += tile_rows) {
    next.fetch(j, tile_rows, dim);
    bf16* at = to + j / padded_unit * (padded_unit * dim) + j / tile_rows % 2 * square;
    for (i32 d = 0; d < dim; d += tile_depth, at += two_squares) {
      Vec pairs[tile_rows];
#pragma GCC unroll 16
      for (i32 i = 0; i < tile_rows; ++i)
        pairs[i] = j + i < n ? reinterpret_cast<Vec>(simd::load_words(k[j + i] + d)) : Vec{};
      simd::transpose(pairs);
#pragma GCC unroll 16
      for (i32 i = 0; i < tile_rows; ++i)
        simd::store_words(at + i * tile_depth, reinterpret_cast<simd::VecW>(pairs[i]));
    }
  }
}

/// V's squares of up to slice_keys keys: to[d / 32][key / 32][d % 32 / 16]. `dim` is a multiple of
/// 32; keys past n are zero.
RADDLE_FN void rearrange_v(const bf16* const* v, i32 n, i32 dim, bf16* to, Upcoming<bf16> next) {
  for (i32 j = 0; j < n; j += tile_depth) {
    next.fetch(j, tile_depth, dim);
    for (i32 r = 0; r < tile_rows; ++r)
      for (i32 d = 0; d < dim; d += 2 * tile_rows) {
        const i32 key = j + 2 * r;
        const simd::VecW even = key < n ? simd::load_words(v[key] + d) : simd::VecW{};
        const simd::VecW odd = key + 1 < n ? simd::load_words(v[key + 1] + d) : simd::VecW{};
        simd::VecW low, high;
        simd::interleave(even, odd, low, high);
        bf16* at = to + d * slice_keys + j / tile_depth * two_squares + r * tile_depth;
        simd::store_words(at, low);
        simd::store_words(at + square, high);
      }
  }
}

}  // namespace cpu

RADDLE_ENGINE_END
