// Q·Kᵀ and P·V of one row block and one key block in tile registers; bf16_products.h computes them
// in vector registers. Both products keep 2 × 2 results in tiles 0 to 3; tiles 4 and 5 hold rows of
// Q or P, tiles 6 and 7 packed blocks of K or V.
#pragma once

#include "raddle/engine/kernel/cpu/bf16_packing.h"
#include "raddle/engine/simd/amx.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

RADDLE_FN void begin_products() { simd::configure_tiles(); }
RADDLE_FN void end_products() { simd::release_tiles(); }

/// How many steps ahead packed blocks are prefetched: without that they arrive from the L2 cache
/// too late for a unit that starts a product every 16 cycles. 0: never.
constexpr i32 steps_ahead = 1;

/// C = A · B, or C += A · B if `adds`, in steps that the kernel issues between the rows of another
/// block's softmax: the tile unit computes a step while the vector units compute rows. C has 16 or
/// 32 rows. A step covers 32 elements of the depth, and uses two packed blocks of B.
template <bool adds>
class Product {
 public:
  Product() = default;

  RADDLE_FN explicit Product(const Operands& operands)
      : next_a_(operands.a),
        next_b_(operands.b),
        next_c_(operands.c),
        skip_(operands.skip),
        row_bytes_a_(operands.lda * static_cast<i64>(sizeof(bf16))),
        row_bytes_c_(operands.ldc * static_cast<i64>(sizeof(float))),
        depth_(operands.depth),
        steps_left_(operands.depth),
        column_blocks_left_(operands.column_blocks),
        has_two_rows_(operands.rows > tile_rows) {}

  RADDLE_FN i32 num_steps() const { return column_blocks_left_ * depth_; }
  RADDLE_FN bool is_done() const { return column_blocks_left_ == 0; }

  /// Loads A and B of the step that comes next, if there is one.
  RADDLE_FN void load() const {
    if (is_done()) return;
    simd::tile_load<4>(next_a_, row_bytes_a_);
    simd::tile_load<6>(next_b_, 64);
    simd::tile_load<7>(next_b_ + packed_block, 64);
    if (has_two_rows_) simd::tile_load<5>(second_rows(next_a_, row_bytes_a_), row_bytes_a_);
  }

  /// One step, whose A and B have been loaded. It ends by loading A and B of the next step (after
  /// the last step, of `after`), so that these loads are issued before the row of softmax that
  /// follows.
  template <class After>
  RADDLE_FN void step(const After& after) {
    if (has_two_rows_)
      multiply<true>(after);
    else
      multiply<false>(after);
  }

 private:
  template <bool two_rows, class After>
  RADDLE_FN void multiply(const After& after) {
    if (steps_left_ == depth_) start_block<two_rows>();
    simd::tile_dot<0, 4, 6>();
    simd::tile_dot<1, 4, 7>();
    if constexpr (two_rows) {
      simd::tile_dot<2, 5, 6>();
      simd::tile_dot<3, 5, 7>();
    }
    next_a_ += tile_depth;
    next_b_ += step_elements;
    const bool ends_block = --steps_left_ == 0;
    if (ends_block) {
      next_a_ -= depth_ * tile_depth;
      next_b_ += skip_;
      steps_left_ = depth_;
      --column_blocks_left_;
    }
    if (is_done())
      after.load();
    else
      load();
    fetch_ahead();
    if (ends_block) finish_block<two_rows>();
  }

  /// Prefetches packed blocks of a later step.
  RADDLE_FN void fetch_ahead() const {
    if constexpr (steps_ahead > 0)
#pragma GCC unroll 32
      for (i32 i = 0; i < step_elements; i += 32)
        simd::prefetch(next_b_ + steps_ahead * step_elements + i);
  }

  template <class T>
  RADDLE_FN static T* second_rows(T* first, i64 row_bytes) {
    return first + tile_rows * row_bytes / static_cast<i64>(sizeof(T));
  }

  template <bool two_rows>
  RADDLE_FN void start_block() const {
    if constexpr (adds) {
      simd::tile_load<0>(next_c_, row_bytes_c_);
      simd::tile_load<1>(next_c_ + tile_rows, row_bytes_c_);
    } else {
      simd::tile_zero<0>();
      simd::tile_zero<1>();
    }
    if constexpr (two_rows) {
      if constexpr (adds) {
        const float* c = second_rows(next_c_, row_bytes_c_);
        simd::tile_load<2>(c, row_bytes_c_);
        simd::tile_load<3>(c + tile_rows, row_bytes_c_);
      } else {
        simd::tile_zero<2>();
        simd::tile_zero<3>();
      }
    }
  }

  template <bool two_rows>
  RADDLE_FN void finish_block() {
    simd::tile_store<0>(next_c_, row_bytes_c_);
    simd::tile_store<1>(next_c_ + tile_rows, row_bytes_c_);
    if constexpr (two_rows) {
      float* c = second_rows(next_c_, row_bytes_c_);
      simd::tile_store<2>(c, row_bytes_c_);
      simd::tile_store<3>(c + tile_rows, row_bytes_c_);
    }
    next_c_ += 2 * tile_rows;
  }

  const bf16* next_a_ = nullptr;
  const bf16* next_b_ = nullptr;
  float* next_c_ = nullptr;
  i64 skip_ = 0, row_bytes_a_ = 0, row_bytes_c_ = 0;
  i32 depth_ = 0;
  i32 steps_left_ = 0;          ///< of this column block
  i32 column_blocks_left_ = 0;  ///< this one included
  bool has_two_rows_ = false;
};

/// P·V of one logit block, then Q·Kᵀ of another. Each turn() computes an equal share of their
/// steps.
class Products {
 public:
  RADDLE_FN Products(const Product<true>& values, const Product<false>& keys, i32 num_turns)
      : values_(values),
        keys_(keys),
        steps_(values.num_steps() + keys.num_steps()),
        turns_(num_turns) {
    if (values_.is_done())
      keys_.load();
    else
      values_.load();
  }

  RADDLE_FN void turn() {
    for (due_ += steps_; due_ >= turns_; due_ -= turns_) step();
  }

  RADDLE_FN void finish() {
    while (!is_done()) step();
  }

 private:
  RADDLE_FN bool is_done() const { return values_.is_done() && keys_.is_done(); }

  RADDLE_FN void step() {
    if (!values_.is_done())
      values_.step(keys_);
    else if (!keys_.is_done())
      keys_.step(Product<false>{});
  }

  Product<true> values_;
  Product<false> keys_;
  i32 steps_, turns_;
  i32 due_ = 0;  ///< steps due but not computed yet, times turns_
};

}  // namespace cpu

RADDLE_ENGINE_END
