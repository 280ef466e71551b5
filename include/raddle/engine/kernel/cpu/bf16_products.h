// Q·Kᵀ and P·V of one row block and one key block by products of pairs of bf16, each of which
// multiplies twice as many numbers as one of fp32; amx_products.h computes them in tile registers.
#pragma once

#include "raddle/engine/kernel/cpu/bf16_packing.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

RADDLE_FN void begin_products() {}
RADDLE_FN void end_products() {}

/// Rows of a result that stay in registers, 32 columns wide.
constexpr i32 product_rows = 8;

/// C = A · B, or C += A · B if `adds`.
template <bool adds>
class Product {
 public:
  Product() = default;
  RADDLE_FN explicit Product(const Operands& operands) : operands_(operands) {}

  void run() const {
    const bf16* b = operands_.b;
    for (i32 block = 0; block < operands_.column_blocks;
         ++block, b += i64{operands_.depth} * step_elements + operands_.skip)
      for (i32 m = 0; m < operands_.rows; m += product_rows)
        multiply(operands_.a + m * i64{operands_.lda}, b,
                 operands_.c + m * i64{operands_.ldc} + block * 2 * tile_rows);
  }

 private:
  void multiply(const bf16* a, const bf16* b, float* c) const {
    Vec left[product_rows], right[product_rows];
#pragma GCC unroll 8
    for (i32 m = 0; m < product_rows; ++m) {
      left[m] = adds ? simd::load(c + m * operands_.ldc) : Vec{};
      right[m] = adds ? simd::load(c + m * operands_.ldc + lanes) : Vec{};
    }
    for (i32 i = 0; i < operands_.depth; ++i, a += tile_depth, b += step_elements)
#pragma GCC unroll 4
      for (i32 r = 0; r < tile_rows; ++r) {
        const simd::VecW low = simd::load_words(b + r * tile_depth);
        const simd::VecW high = simd::load_words(b + packed_block + r * tile_depth);
#pragma GCC unroll 8
        for (i32 m = 0; m < product_rows; ++m) {
          u32 pair;
          __builtin_memcpy(&pair, a + m * i64{operands_.lda} + 2 * r, sizeof(pair));
          left[m] = simd::dot_pairs(left[m], pair, low);
          right[m] = simd::dot_pairs(right[m], pair, high);
        }
      }
#pragma GCC unroll 8
    for (i32 m = 0; m < product_rows; ++m) {
      simd::store(c + m * operands_.ldc, left[m]);
      simd::store(c + m * operands_.ldc + lanes, right[m]);
    }
  }

  Operands operands_;
};

/// P·V of one logit block, then Q·Kᵀ of another. The vector units compute both products and the
/// softmax, so there is nothing to overlap: finish() computes all steps.
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
