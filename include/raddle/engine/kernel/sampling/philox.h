// Philox 4x32-10 (Salmon et al., SC 2011): random bits as a function of a key and a counter, so
// that a draw needs no state and is the same wherever it is made.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

namespace sampling {

struct Random128 {
  u32 x[4];
};

RADDLE_FN u32 high_half(u32 a, u32 b) { return static_cast<u32>((u64{a} * b) >> 32); }

RADDLE_FN Random128 philox(u64 key, Random128 counter) {
  u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
  u32 c0 = counter.x[0], c1 = counter.x[1], c2 = counter.x[2], c3 = counter.x[3];
  RADDLE_UNROLL
  for (i32 round = 0; round < 10; ++round) {
    constexpr u32 m0 = 0xd2511f53u, m1 = 0xcd9e8d57u;
    const u32 h0 = high_half(m0, c0), l0 = m0 * c0, h1 = high_half(m1, c2), l1 = m1 * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

/// 64 random bits of stream `seed` at `offset`.
RADDLE_FN u64 random_bits(u64 seed, u64 offset) {
  const Random128 r =
      philox(seed, {{static_cast<u32>(offset), static_cast<u32>(offset >> 32), 0u, 0u}});
  return u64{r.x[1]} << 32 | r.x[0];
}

/// The upper half of the product of two 64-bit numbers: of random bits, a number below `b`.
RADDLE_FN u64 multiply_high(u64 a, u64 b) {
  const u64 a_low = a & 0xffffffffu, a_high = a >> 32, b_low = b & 0xffffffffu, b_high = b >> 32;
  const u64 middle = a_high * b_low + (a_low * b_low >> 32);
  const u64 other = a_low * b_high + (middle & 0xffffffffu);
  return a_high * b_high + (middle >> 32) + (other >> 32);
}

}  // namespace sampling

RADDLE_ENGINE_END
