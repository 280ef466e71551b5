// Rotary position embedding fused into Q and K, half-split pairs (x[i], x[i + rotary_dim/2]).
//
// The angle is kept in turns as a 64-bit fixed-point number: frequency i turns `freq_hi·2^-32 +
// freq_lo·2^-64` of a full turn a position, and position · frequency modulo one turn is a wrapping
// integer product. So the rotation is as exact at position one million as at zero, and has the same
// bits on every backend. The host fills the tables (src/api/rope.cpp): theta, and Llama 3.1's
// frequency scaling.
#pragma once

#include "raddle/engine/variant/contract.h"

RADDLE_ENGINE_BEGIN

struct Rope {
  Tensor<const u32, 1> freq_hi;  ///< [rotary_dim / 2]
  Tensor<const u32, 1> freq_lo;  ///< [rotary_dim / 2]
  Tensor<const i32, 1> offset;   ///< [1] or [requests], added to every position

  template <class Vec>
  RADDLE_FN void query(Vec& q, const Row& r) const {
    rotate(q, r.q_pos + offset.data[offset.extent[0] == 1 ? 0 : r.request]);
  }

  template <class Vec>
  RADDLE_FN void key(Vec& k, const Key& c) const {
    rotate(k, c.kv_pos + offset.data[offset.extent[0] == 1 ? 0 : c.request]);
  }

 private:
  template <class Vec>
  RADDLE_FN void rotate(Vec& x, i32 pos) const {
    const u32* __restrict hi = freq_hi.data;
    const u32* __restrict lo = freq_lo.data;
    const u32 p = static_cast<u32>(pos);
    const u32 sign = pos < 0 ? 0xffffffffu : 0u;
    x.half_pairs(2 * freq_hi.extent[0], [=](float& a, float& b, i32 i) {
      const u32 carry = static_cast<u32>((static_cast<u64>(p) * lo[i]) >> 32) - (lo[i] & sign);
      const math::SinCos t = math::sincos_turns(p * hi[i] + carry);
      const float rotated = a * t.cos - b * t.sin;
      b = b * t.cos + a * t.sin;
      a = rotated;
    });
  }
};
RADDLE_VARIANT(Rope, "rope", RADDLE_RUN_TENSOR(Rope, freq_hi, half_head_dim),
               RADDLE_RUN_TENSOR(Rope, freq_lo, half_head_dim),
               RADDLE_RUN_TENSOR(Rope, offset, one_or_requests));

RADDLE_ENGINE_END
