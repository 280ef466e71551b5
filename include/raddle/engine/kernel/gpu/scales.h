// Scales of quantised K and V on fragments of logits and weights.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/kernel/gpu/fragments.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// S *= scale of the key · factor_of(row fragment, half) of the row. `scale` points at that of this
/// lane's first key.
template <class Kernel, i32 row_fragments, i32 key_fragments, class FactorOf>
RADDLE_DEVICE void scale_logits(Logits<row_fragments, key_fragments>& s, const float* scale,
                                FactorOf factor_of, i32 halves) {
  RADDLE_UNROLL
  for (i32 r = 0; r < row_fragments; ++r) {
    RADDLE_UNROLL
    for (i32 half = 0; half < 2; ++half) {
      if (half >= halves) continue;
      const float factor = factor_of(r, half);
      RADDLE_UNROLL
      for (i32 n = 0; n < key_fragments; ++n) {
        const Two of_keys = *reinterpret_cast<const Two*>(scale + 8 * n);
        RADDLE_UNROLL
        for (i32 e = 0; e < 2; ++e) {
          float& x = s[r][n][2 * half + e];
          if constexpr (dtype_of<typename Kernel::T>::value == DType::bfloat16) x *= factor;
          x *= of_keys.x[e];
        }
      }
    }
  }
}

/// Scales of V, which multiply the weights. Weights are rounded to a dtype that may be f16, and
/// scales of any size could underflow there. So O is kept relative to a power of two near the
/// largest scale that the warp has seen so far, scales of masked keys included. Weights lose
/// precision where a scale is below 2^-20 of that one.
template <class Kernel, i32 row_fragments>
class ValueScales {
  /// The largest scale becomes less than twice this power of two. Weights of a softmax are at most
  /// 2^(rescale_threshold + 1): their products use f16 up to its end, because small ones need its
  /// range. Weights of a sum may be large.
  static constexpr u32 headroom = Kernel::scan == Scan::softmax ? 6 : 0;
  static constexpr u32 least = headroom + 1, most = 253;

 public:
  /// Rescales O where the tile's largest scale exceeds the power of two so far. Called once a tile:
  /// `scale` has the scales of a warp's `count` keys.
  RADDLE_DEVICE void rebase(const float* scale, i32 count, Output<Kernel, row_fragments>& o) {
    u32 top = least;
    for (i32 j = ptx::lane_index(); j < count; j += 32)
      top = max(top, float_to_bits(scale[j]) >> 23 & 0xffu);
    top = min(ptx::max_of_warp(top), most);
    if (top <= exponent_) return;
    const float factor =
        top - exponent_ < 127 ? bits_to_float((127 + exponent_ - top) << 23) : 0.0f;
    exponent_ = top;
    RADDLE_UNROLL
    for (i32 r = 0; r < row_fragments; ++r) {
      RADDLE_UNROLL
      for (i32 i = 0; i < 4 * Kernel::out_fragments; ++i) o[r][i / 4][i % 4] *= factor;
    }
  }

  /// P *= scale of the key; `scale` points at that of this lane's first key.
  template <i32 key_fragments>
  RADDLE_DEVICE void apply(float (&p)[row_fragments][key_fragments][4], const float* scale) const {
    const float inverse = bits_to_float((254 + headroom - exponent_) << 23);
    RADDLE_UNROLL
    for (i32 n = 0; n < key_fragments; ++n) {
      const Two of_keys = *reinterpret_cast<const Two*>(scale + 8 * n);
      RADDLE_UNROLL
      for (i32 e = 0; e < 2; ++e) {
        const float factor = of_keys.x[e] * inverse;
        RADDLE_UNROLL
        for (i32 r = 0; r < row_fragments; ++r) {
          p[r][n][e] *= factor;
          p[r][n][2 + e] *= factor;
        }
      }
    }
  }

  RADDLE_DEVICE void clear() { exponent_ = least; }
  /// The power of two that O is relative to.
  RADDLE_DEVICE float unit() const { return bits_to_float((exponent_ - headroom) << 23); }

 private:
  u32 exponent_ = least;
};

}  // namespace gpu_kernel

RADDLE_ENGINE_END
