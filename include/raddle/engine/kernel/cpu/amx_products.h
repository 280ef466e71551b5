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

/// K's squares: to[key / 16][d / 32]. `dim` is a multiple of 32; keys past n are zero. `turn` is
/// called now and then.
template <class Turn>
RADDLE_FN void rearrange_k(const bf16* const* k, i32 n, i32 dim, bf16* to, Upcoming<bf16> next,
                           Turn turn) {
  for (i32 j = 0; j < round_up(n, padded_unit); j += tile_rows) {
    next.fetch(j, tile_rows, dim);
    for (i32 d = 0; d < dim; d += tile_depth, to += square) {
      turn();
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

/// C = A · B or C += A · B of one strip, in steps short enough to stand between the rows of another
/// strip's softmax: the tile unit works on a step while the vector units work on a row. C has 16 or
/// 32 rows and is computed in blocks of 32 columns, each over the whole depth.
class Product {
 public:
  Product() = default;

  /// S = Q · Kᵀ, not yet scaled, for keys [begin, end) of the tile, multiples of 32.
  RADDLE_FN static Product qk(i32 rows, const bf16* q, i32 dim, const bf16* k, i32 begin, i32 end,
                              float* s, i32 lds) {
    return Product(rows, q, dim, k + i64{begin} * dim, square, i64{tile_rows} * dim, dim, s + begin,
                   lds, (end - begin) / tile_rows, false);
  }

  /// O += P · V for the same keys. `dim` is a multiple of 16; V's squares are laid out for it
  /// rounded up to 32.
  RADDLE_FN static Product pv(i32 rows, const bf16* p, i32 ldp, const bf16* v, i32 begin, i32 end,
                              i32 dim, float* o, i32 ldo) {
    const i64 next_depth = i64{tile_depth} * round_up(dim, padded_unit);
    return Product(rows, p + begin, ldp, v + begin / tile_depth * next_depth, next_depth, square,
                   end - begin, o, ldo, dim / tile_rows, true);
  }

  RADDLE_FN i32 num_steps() const { return ceil_div(columns_, 2) * (depth_ / tile_depth); }

  /// Multiplies 32 of the depth for one block. False: all was done before.
  RADDLE_FN bool step() {
    if (columns_ <= 0) return false;
    if (d_ == 0) start_block();
    multiply();
    d_ += tile_depth;
    if (d_ == depth_) finish_block();
    return true;
  }

  RADDLE_FN void finish() {
    while (step()) {
    }
  }

 private:
  RADDLE_FN Product(i32 rows, const bf16* a, i32 lda, const bf16* b, i64 next_depth,
                    i64 next_column, i32 depth, float* c, i32 ldc, i32 columns, bool adds)
      : a_(a),
        b_(b),
        c_(c),
        lda_(lda),
        ldc_(ldc),
        next_depth_(next_depth),
        next_column_(next_column),
        depth_(depth),
        columns_(columns),
        has_two_rows_(rows > tile_rows),
        adds_(adds) {}

  /// Calls f(tile, address) for the block's results, tiles 0 to 3.
  template <class F>
  RADDLE_FN void for_results(F f) const {
    f(Int<0>{}, c_);
    if (columns_ > 1) f(Int<1>{}, c_ + tile_rows);
    if (!has_two_rows_) return;
    f(Int<2>{}, c_ + tile_rows * ldc_);
    if (columns_ > 1) f(Int<3>{}, c_ + tile_rows * ldc_ + tile_rows);
  }

  RADDLE_FN void start_block() const {
    const i64 stride = ldc_ * static_cast<i64>(sizeof(float));
    for_results([&](auto t, float* at) {
      if (adds_)
        simd::tile_load<decltype(t)::value>(at, stride);
      else
        simd::tile_zero<decltype(t)::value>();
    });
  }

  RADDLE_FN void finish_block() {
    const i64 stride = ldc_ * static_cast<i64>(sizeof(float));
    for_results([&](auto t, float* at) { simd::tile_store<decltype(t)::value>(at, stride); });
    d_ = 0;
    b_ += 2 * next_column_;
    c_ += 2 * tile_rows;
    columns_ -= 2;
  }

  RADDLE_FN void multiply() const {
    const i64 stride = lda_ * static_cast<i64>(sizeof(bf16));
    const bf16* b = b_ + d_ / tile_depth * next_depth_;
    fetch_next(b);
    simd::tile_load<4>(a_ + d_, stride);
    simd::tile_load<6>(b, 64);
    simd::tile_dot<0, 4, 6>();
    if (has_two_rows_) {
      simd::tile_load<5>(a_ + tile_rows * lda_ + d_, stride);
      simd::tile_dot<2, 5, 6>();
    }
    if (columns_ > 1) {
      simd::tile_load<7>(b + next_column_, 64);
      simd::tile_dot<1, 4, 7>();
      if (has_two_rows_) simd::tile_dot<3, 5, 7>();
    }
  }

  /// Asks for B of the next step, and for a part of the next block's C: from the L2 cache they come
  /// too late for a unit that starts a product every 16 cycles.
  RADDLE_FN void fetch_next(const bf16* b) const {
    const bf16* next = d_ + tile_depth < depth_ ? b + next_depth_ : b_ + 2 * next_column_;
    for (i32 i = 0; i < square; i += 32) {
      simd::prefetch(next + i);
      simd::prefetch(next + next_column_ + i);
    }
    if (!adds_) return;
    const i32 rows = ceil_div(2 * tile_rows * tile_depth, depth_);
    const float* c = c_ + 2 * tile_rows + d_ / tile_depth * rows * ldc_;
    for (i32 m = 0; m < rows; ++m, c += ldc_) {
      simd::prefetch(c);
      simd::prefetch(c + tile_rows);
    }
  }

  const bf16* a_;
  const bf16* b_;
  float* c_;
  i64 lda_, ldc_, next_depth_, next_column_;
  i32 depth_ = 0;
  i32 columns_ = 0;  ///< tiles across that are left
  i32 d_ = 0;
  bool has_two_rows_, adds_;
};

/// Two products, one after the other, a fair share of which is done whenever somebody asks.
class Products {
 public:
  RADDLE_FN Products(const Product& first, const Product& second, i32 num_turns)
      : first_(first),
        second_(second),
        steps_(ceil_div(first.num_steps() + second.num_steps(), num_turns)) {}

  RADDLE_FN void turn() {
    for (i32 i = 0; i < steps_; ++i)
      if (!first_.step()) second_.step();
  }

  RADDLE_FN void finish() {
    first_.finish();
    second_.finish();
  }

 private:
  Product first_, second_;
  i32 steps_;
};

}  // namespace cpu

RADDLE_ENGINE_END
