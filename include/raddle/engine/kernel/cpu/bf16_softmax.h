// From logits to weights in bf16, one key block at a time, in few instructions: where there is a
// tile unit, the vector units are as busy as the tile unit.
//
// O is rescaled late. A row's shift, which is subtracted from its logits, is the maximum of the
// first key block of which the row keeps a key. The shift stays until the sum of a key block's
// weights exceeds rescale_threshold. Until then no key block needs a maximum or rescales O, and the
// sum stays split over the lanes. Weights may exceed 1: as floating-point numbers they lose no
// accuracy.
#pragma once

#include "raddle/engine/kernel/cpu/bf16_packing.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// The shift of a row before the first key that it keeps: NaN, so that weights are, too.
constexpr float no_shift = __builtin_bit_cast(float, 0x7fc00000u);
RADDLE_FN bool is_shift(float minus) { return minus == minus; }

/// The softmax of some rows so far. A shift is in powers of two: weights are 2^(s · factor +
/// minus).
struct RowShifts {
  float* minus;  ///< no_shift at first
  float* sums;   ///< [rows, lanes] Σ weights, not rounded
};

/// What O of a row block's rows must be multiplied by before the key block's P·V.
struct Rescaling {
  float* factors;       ///< [row_block_rows]
  bool needed = false;  ///< else all are 1, and `factors` may hold anything
};

/// The largest sum of a lane's weights of a key block before a row's shift moves.
constexpr float rescale_threshold = 65536.0f;
constexpr i32 key_block_vecs = key_block_keys / lanes;
static_assert(key_block_vecs % 2 == 0);

/// The weights of a row's key block; returns their sums by lanes.
RADDLE_FN Vec weights_of(const float* s, Vec factor, Vec minus, Vec (&p)[key_block_vecs]) {
  Vec total{};
#pragma GCC unroll 8
  for (i32 v = 0; v < key_block_vecs; v += 2) {
    p[v] = simd::exp2_unguarded(simd::fma(simd::load(s + v * lanes), factor, minus));
    p[v + 1] = simd::exp2_unguarded(simd::fma(simd::load(s + (v + 1) * lanes), factor, minus));
    const Vec both = p[v] + p[v + 1];
    total = v == 0 ? both : total + both;
  }
  return total;
}

/// The largest logits of a row's key block, by lanes.
RADDLE_FN Vec max_of_row(const float* s) {
  Vec top = simd::load(s);
#pragma GCC unroll 8
  for (i32 j = lanes; j < key_block_keys; j += lanes) top = simd::max(simd::load(s + j), top);
  return top;
}

/// Of 16 rows from m on, sets the shift of those that have none yet to the largest of the key
/// block's logits, if they keep any.
RADDLE_FN void start_shifts(const float* s, float factor, RowShifts rows, i32 m) {
  const Vec before = simd::load(rows.minus + m);
  if (simd::all_at_most(before, math::infinity)) return;
  Vec tops[tile_rows];
#pragma GCC unroll 16
  for (i32 i = 0; i < tile_rows; ++i) tops[i] = max_of_row(s + i * key_block_keys);
  const Vec top = simd::max_each(tops);
  const Vec minus = top > -math::infinity ? top * -factor : simd::broadcast(no_shift);
  simd::store(rows.minus + m, before == before ? before : minus);
}

/// Moves the shift of row m to the largest of the key block's logits, where weights grew too large.
[[gnu::noinline]] inline void move_shift(const float* s, float factor, RowShifts rows, i32 m,
                                         Rescaling& rescaling, i32 nth) {
  const float before = rows.minus[m];
  const float minus = simd::reduce_max(max_of_row(s)) * -factor;
  if (!(minus < before)) return;  // NaN, or nothing is kept so far
  rows.minus[m] = minus;
  const Vec rescale = simd::exp2_nonpositive(simd::broadcast(minus - before));
  float* sums = rows.sums + m * lanes;
  simd::store(sums, simd::load(sums) * rescale);
  if (!rescaling.needed)
    for (i32 i = 0; i < 2 * tile_rows; ++i) rescaling.factors[i] = 1.0f;
  rescaling.needed = true;
  rescaling.factors[nth] = rescale[0];
}

/// One step of the online softmax (FlashAttention-2, algorithm 1) for the `nth` row of a row block,
/// row m of the query tile, after start_shifts: writes the weights exp(scale · s - shift) to `p`,
/// which may equal `s`; `factor` is scale · log2(e).
RADDLE_FN void softmax_row(const float* s, float factor, RowShifts rows, i32 m,
                           Rescaling& rescaling, i32 nth, bf16* p) {
  Vec weights[key_block_vecs];
  const Vec factors = simd::broadcast(factor);
  Vec total = weights_of(s, factors, simd::broadcast(rows.minus[m]), weights);
  if (!simd::all_at_most(total, rescale_threshold)) [[unlikely]] {
    move_shift(s, factor, rows, m, rescaling, nth);
    // A row with nothing kept so far: subtracting 0 leaves every logit at -inf.
    const float minus = rows.minus[m];
    total = weights_of(s, factors, simd::broadcast(is_shift(minus) ? minus : 0.0f), weights);
  }
  float* sums = rows.sums + m * lanes;
  simd::store(sums, simd::load(sums) + total);
#pragma GCC unroll 8
  for (i32 v = 0; v < key_block_vecs; v += 2)
    simd::store_words(p + v * lanes, simd::round_to_bf16(weights[v], weights[v + 1]));
}

/// Weights of a plain sum: a row's s, rounded, for keys [begin, end), multiples of 32. `p` may
/// equal `s`.
RADDLE_FN void round_weights(const float* s, i32 begin, i32 end, bf16* p) {
  for (i32 j = begin; j < end; j += 2 * lanes)
    simd::store_words(p + j, simd::round_to_bf16(simd::load(s + j), simd::load(s + j + lanes)));
}

}  // namespace cpu

RADDLE_ENGINE_END
