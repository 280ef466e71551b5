// Q·Kᵀ and P·V of one strip of query rows and one slice of keys by products of pairs of bf16, which
// multiply twice as many numbers as those of fp32; amx_products.h has their like.
#pragma once

#include "raddle/engine/kernel/cpu/bf16_squares.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

RADDLE_FN void begin_products() {}
RADDLE_FN void end_products() {}

/// Rows of a result that stay in registers, 32 columns wide.
constexpr i32 product_rows = 8;

/// C = A · B, or C += A · B if `adds`, of one strip. C is computed in blocks of 32 columns, which
/// have two squares of B for every 32 of the depth.
template <bool adds>
class Product {
 public:
  Product() = default;

  /// Squares of B are read in their order, `skip` elements being left out between blocks. `depth`
  /// is in squares.
  RADDLE_FN Product(i32 rows, const bf16* a, i32 lda, const bf16* b, i64 skip, i32 depth, float* c,
                    i32 ldc, i32 blocks)
      : a_(a),
        b_(b),
        c_(c),
        rows_(rows),
        lda_(lda),
        ldc_(ldc),
        depth_(depth),
        blocks_(blocks),
        next_block_(i64{depth} * two_squares + skip) {}

  void run() const {
    const bf16* b = b_;
    for (i32 block = 0; block < blocks_; ++block, b += next_block_)
      for (i32 m = 0; m < rows_; m += product_rows)
        multiply(a_ + m * i64{lda_}, b, c_ + m * i64{ldc_} + block * 2 * tile_rows);
  }

 private:
  void multiply(const bf16* a, const bf16* b, float* c) const {
    Vec left[product_rows], right[product_rows];
#pragma GCC unroll 8
    for (i32 m = 0; m < product_rows; ++m) {
      left[m] = adds ? simd::load(c + m * ldc_) : Vec{};
      right[m] = adds ? simd::load(c + m * ldc_ + lanes) : Vec{};
    }
    for (i32 i = 0; i < depth_; ++i, a += tile_depth, b += two_squares)
#pragma GCC unroll 4
      for (i32 r = 0; r < tile_rows; ++r) {
        const simd::VecW low = simd::load_words(b + r * tile_depth);
        const simd::VecW high = simd::load_words(b + square + r * tile_depth);
#pragma GCC unroll 8
        for (i32 m = 0; m < product_rows; ++m) {
          u32 pair;
          __builtin_memcpy(&pair, a + m * i64{lda_} + 2 * r, sizeof(pair));
          left[m] = simd::dot_pairs(left[m], pair, low);
          right[m] = simd::dot_pairs(right[m], pair, high);
        }
      }
#pragma GCC unroll 8
    for (i32 m = 0; m < product_rows; ++m) {
      simd::store(c + m * ldc_, left[m]);
      simd::store(c + m * ldc_ + lanes, right[m]);
    }
  }

  const bf16* a_ = nullptr;
  const bf16* b_ = nullptr;
  float* c_ = nullptr;
  i32 rows_ = 0, lda_ = 0, ldc_ = 0, depth_ = 0, blocks_ = 0;
  i64 next_block_ = 0;  ///< elements of B from block to block
};

/// P·V of one strip, then Q·Kᵀ of another. Nothing works beside the vector units, so all of it is
/// done at the end.
class Products {
 public:
  RADDLE_FN Products(const Product<true>& values, const Product<false>& keys, i32)
      : values_(values), keys_(keys) {}

  RADDLE_FN void turn() {}
  void finish() const {
    values_.run();
    keys_.run();
  }

 private:
  Product<true> values_;
  Product<false> keys_;
};

}  // namespace cpu

RADDLE_ENGINE_END
