// Packing of K and V for products of bf16, one key block at a time: K in packed blocks of 16 keys ×
// 32 dimensions, whose pairs of dimensions are transposed; V in packed blocks of 32 keys × 16
// dimensions, whose pairs of keys are interleaved. A packed block is one KiB. Packed blocks lie in
// the order in which products of 2 × 2 tiles use them, so that a product reads them in the order of
// their addresses.
#pragma once

#include "raddle/engine/kernel/cpu/panel_products.h"
#include "raddle/engine/simd/bf16.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

using simd::tile_depth;
using simd::tile_rows;

/// Keys and dimensions are padded to this with zeros.
constexpr i32 padded_unit = tile_depth;
constexpr i32 packed_block = tile_rows * tile_depth;  ///< elements
constexpr i32 step_elements = 2 * packed_block;       ///< of B in one step of a product

/// Query rows of a row block: its logits stay in the L1 cache from Q·Kᵀ to P·V.
constexpr i32 row_block_rows = 2 * tile_rows;

/// C = A · B, or C += A · B, of one row block. C is computed in column blocks of 32 columns, each
/// over the whole depth, with two packed blocks of B for every 32 elements of it.
struct Operands {
  i32 rows = 0;
  const bf16* a = nullptr;
  i32 lda = 0;
  const bf16* b = nullptr;  ///< packed blocks in their order
  i64 skip = 0;             ///< elements of B to skip from one column block to the next
  i32 depth = 0;            ///< in packed blocks
  float* c = nullptr;
  i32 ldc = 0;
  i32 column_blocks = 0;
};

/// Keys of a key block. With 64, O (16 KiB of a row block where D = 128), Q (8 KiB) and two logit
/// blocks (8 KiB each) would stay in an L1 cache of 48 KiB while packed K and V pass through it;
/// with 128, O is loaded and stored half as often, which is worth more (by 2-4 %).
constexpr i32 key_block_keys = 128;
static_assert(key_block_keys % padded_unit == 0);

/// Copies n rows that consist of two parts to `to`, padded with zeros, and returns where they
/// begin.
RADDLE_FN const bf16* const* join_rows(const bf16* const* first, i32 first_dim,
                                       const bf16* const* second, i32 second_dim, i32 n, i32 padded,
                                       bf16* to, const bf16** rows) {
  constexpr u64 bytes = sizeof(bf16);
  for (i32 j = 0; j < n; ++j, to += padded) {
    rows[j] = to;
    __builtin_memcpy(to, first[j], static_cast<u64>(first_dim) * bytes);
    __builtin_memcpy(to + first_dim, second[j], static_cast<u64>(second_dim) * bytes);
    for (i32 d = first_dim + second_dim; d < padded; ++d) to[d] = bf16{0};
  }
  return rows;
}

/// Packs K of up to key_block_keys keys: to[key / 32][d / 32][key % 32 / 16]. `dim` is a multiple
/// of 32; keys past n are zero.
RADDLE_FN void pack_k(const bf16* const* k, i32 n, i32 dim, bf16* to, Upcoming<bf16> next) {
  for (i32 j = 0; j < round_up(n, padded_unit); j += tile_rows) {
    next.fetch(j, tile_rows, dim);
    bf16* at = to + j / padded_unit * (padded_unit * dim) + j / tile_rows % 2 * packed_block;
    for (i32 d = 0; d < dim; d += tile_depth, at += step_elements) {
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

/// Packs V of up to key_block_keys keys: to[d / 32][key / 32][d % 32 / 16]. `dim` is a multiple of
/// 32; keys past n are zero.
RADDLE_FN void pack_v(const bf16* const* v, i32 n, i32 dim, bf16* to, Upcoming<bf16> next) {
  for (i32 j = 0; j < n; j += tile_depth) {
    next.fetch(j, tile_depth, dim);
    for (i32 r = 0; r < tile_rows; ++r)
      for (i32 d = 0; d < dim; d += 2 * tile_rows) {
        const i32 key = j + 2 * r;
        const simd::VecW even = key < n ? simd::load_words(v[key] + d) : simd::VecW{};
        const simd::VecW odd = key + 1 < n ? simd::load_words(v[key + 1] + d) : simd::VecW{};
        simd::VecW low, high;
        simd::interleave(even, odd, low, high);
        bf16* at = to + d * key_block_keys + j / tile_depth * step_elements + r * tile_depth;
        simd::store_words(at, low);
        simd::store_words(at + packed_block, high);
      }
  }
}

}  // namespace cpu

RADDLE_ENGINE_END
