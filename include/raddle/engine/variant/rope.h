// Rotary position embedding fused into Q and K.
//
// The angle is kept in turns as a 64-bit fixed-point number: frequency i turns `freq_hi·2^-32 +
// freq_lo·2^-64` of a full turn per position, and position · frequency modulo one turn is a
// wrapping integer product. So the rotation is as exact at position one million as at zero, with
// equal bits on every backend. The host fills the tables (src/variant/rope.cpp): theta, Llama 3.1's
// and YaRN's frequency scaling. YaRN also scales the rotated elements, by `magnitude`; for all
// others that is 1.
#pragma once

#include "raddle/engine/variant/rotation.h"

RADDLE_ENGINE_BEGIN

template <Pairs pairs>
struct RopeOf {
  Tensor<const u32, 1> freq_hi;  ///< [rotary_dim / 2]
  Tensor<const u32, 1> freq_lo;  ///< [rotary_dim / 2]
  Tensor<const i32, 1> offset;   ///< [1] or [requests], added to every position
  float magnitude;               ///< of cosine and sine

  template <class Vec>
  RADDLE_FN void query(Vec& q, const Row& r) const {
    turn(q, r.q_pos + offset_of(offset, r.request));
  }

  template <class Vec>
  RADDLE_FN void key(Vec& k, const Key& c) const {
    turn(k, c.kv_pos + offset_of(offset, c.request));
  }

  template <class Vec>
  RADDLE_FN void turn(Vec& x, i32 pos) const {
    const u32* __restrict hi = freq_hi.data;
    const u32* __restrict lo = freq_lo.data;
    const float m = magnitude;
    rotate<pairs>(x, 2 * freq_hi.extent[0], [=](i32 i) {
      const math::SinCos t = Vec::sincos_turns(math::turns(pos, hi[i], lo[i]));
      return math::SinCos{t.sin * m, t.cos * m};
    });
  }
};

using Rope = RopeOf<Pairs::half>;

#define RADDLE_ROPE_MEMBERS(V)                                                                \
  RADDLE_RUN_TENSOR(V, freq_hi, half_head_dim), RADDLE_RUN_TENSOR(V, freq_lo, half_head_dim), \
      RADDLE_RUN_TENSOR(V, offset, one_or_requests),                                          \
      checked(RADDLE_RUN_MEMBER(V, magnitude), Check::positive)
RADDLE_VARIANT(Rope, "rope", RADDLE_ROPE_MEMBERS(Rope));

RADDLE_ENGINE_END
