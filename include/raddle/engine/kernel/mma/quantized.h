// Quantised K and V as fragments of the matrix products: bytes in shared memory, 16 bits in
// registers, and scales.
//
// An operand of a matrix instruction holds two neighbours in a register, and loading 8 × 8 units of
// 16 bits gives a lane four bytes. Of K these are four elements of a key, 4t … 4t + 3. With the
// pairs (4t, 4t + 1) and (4t + 2, 4t + 3) in the places of (2t, 2t + 1) and (2t + 8, 2t + 9), no
// element has to move between lanes, provided that Q's elements are in the same order. Of V,
// transposed, these are columns 2g and 2g + 1 of two keys: one register for each column. So 16
// columns of O lie in two fragments, in the order 0, 2, 4 …, 14 and 1, 3, 5 …, 15.
#pragma once

#include "raddle/engine/kernel/gpu/scales.h"
#include "raddle/engine/kernel/mma/products.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Two e4m3 in the upper bytes of x's halves, as f16, for architectures without an instruction for
/// it. Shifted right by one, but for the sign, the bits of an e4m3 are an f16 of 2^-8 times its
/// value; except for NaN, whose bits are all set and would carry.
RADDLE_DEVICE u32 e4m3_bits_to_f16(u32 x) {
  const u32 body = x & 0x7f007f00u;
  const u32 nan = (body + 0x01000100u) >> 1 & 0x40004000u;
  return ptx::multiply_pair(body >> 1 | nan | (x & 0x80008000u), 0x5c005c00u);  // by 256
}

/// Two integers, plus 128, in the lower bytes of x's halves, as f16: as the last bits of an f16
/// from 1024 on, they add to it.
RADDLE_DEVICE u32 biased_to_f16(u32 x) {
  return ptx::subtract_pair(x | 0x64006400u, 0x64806480u);  // 1024 + 128
}

/// Four stored numbers as f16, in the order of bytes 0 and 1, then 2 and 3.
RADDLE_DEVICE void widen_in_order(u32 (&y)[2], u32 x, e4m3) {
  if constexpr (ptx::converts_e4m3) return ptx::e4m3_to_f16(y, x);
  y[0] = e4m3_bits_to_f16(ptx::select_bytes<0x1404>(x));
  y[1] = e4m3_bits_to_f16(ptx::select_bytes<0x3424>(x));
}
RADDLE_DEVICE void widen_in_order(u32 (&y)[2], u32 x, e5m2) {
  y[0] = ptx::select_bytes<0x1404>(x);
  y[1] = ptx::select_bytes<0x3424>(x);
}

RADDLE_DEVICE void widen_in_order(u32 (&y)[2], u32 x, s8) {
  const u32 biased = x ^ 0x80808080u;
  y[0] = biased_to_f16(ptx::select_bytes<0x4140>(biased));
  y[1] = biased_to_f16(ptx::select_bytes<0x4342>(biased));
}

/// Four stored numbers as f16, in the order of bytes 0 and 2, then 1 and 3.
RADDLE_DEVICE void widen_in_turns(u32 (&y)[2], u32 x, e4m3) {
  if constexpr (ptx::converts_e4m3) return ptx::e4m3_to_f16(y, ptx::select_bytes<0x3120>(x));
  y[0] = e4m3_bits_to_f16(x << 8);
  y[1] = e4m3_bits_to_f16(x);
}
RADDLE_DEVICE void widen_in_turns(u32 (&y)[2], u32 x, e5m2) {
  y[0] = ptx::select_bytes<0x2404>(x);
  y[1] = x & 0xff00ff00u;
}

RADDLE_DEVICE void widen_in_turns(u32 (&y)[2], u32 x, s8) {
  const u32 biased = x ^ 0x80808080u;
  y[0] = biased_to_f16(biased & 0x00ff00ffu);
  y[1] = biased_to_f16(biased >> 8 & 0x00ff00ffu);
}

/// Converts f16, which holds every stored number exactly, to matrix dtype T.
RADDLE_DEVICE void convert_pairs(u32 (&)[2], f16) {}
RADDLE_DEVICE void convert_pairs(u32 (&y)[2], bf16) {
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i) {
    float two[2];
    ptx::unpack(y[i], two[0], two[1], f16{});
    y[i] = ptx::pack(two[0], two[1], bf16{});
  }
}

/// Puts a row of Q in shared memory into the order that KeyOperand::multiply expects, as f16. The
/// range of bf16 is wider, so its rows are divided by a power of two, which is returned. What that
/// loses is below 2^-38 of the row's largest element, too little to show in a sum in fp32. The
/// whole warp calls it; afterwards its lanes see the complete row.
template <class Kernel>
RADDLE_DEVICE float arrange_query(u8* rows, i32 row) {
  using T = typename Kernel::T;
  constexpr i32 words = 8 * Kernel::k_steps, steps = ceil_div(words, 32);
  const i32 lane = ptx::lane_index();
  const auto word = [&](i32 chunk, i32 i) -> u32& {
    return reinterpret_cast<u32*>(rows + Kernel::QueryRows::at(row, chunk))[i];
  };
  u32 x[steps] = {};
  RADDLE_UNROLL
  for (i32 i = 0; i < steps; ++i) {
    const i32 w = lane + 32 * i;
    if (w < words) x[i] = word(w / 4, w % 4);
  }
  float factor = 1.0f;
  if constexpr (dtype_of<T>::value == DType::bfloat16) {
    u32 top = 0;
    RADDLE_UNROLL
    for (i32 i = 0; i < steps; ++i) top = max(top, max(x[i] & 0x7fffu, x[i] >> 16 & 0x7fffu));
    const u32 exponent = max(ptx::max_of_warp(top) >> 7, 15u);
    factor = bits_to_float((exponent - 14) << 23);
    const float inverse = bits_to_float((268 - exponent) << 23);
    RADDLE_UNROLL
    for (i32 i = 0; i < steps; ++i) {
      float two[2];
      ptx::unpack(x[i], two[0], two[1], T{});
      x[i] = ptx::pack(two[0] * inverse, two[1] * inverse, f16{});
    }
  }
  ptx::sync_warp();  // all lanes have read
  RADDLE_UNROLL
  for (i32 i = 0; i < steps; ++i) {
    const i32 w = lane + 32 * i;
    if (w < words) word(w / 8 * 2 + w % 2, w % 8 / 2) = x[i];
  }
  ptx::sync_warp();
  return factor;
}

/// K of bytes: multiplied as f16, which holds every stored number, and scaled afterwards.
template <class Kernel>
struct KeyOperand<Kernel, true> {
  template <i32 count, class Facts>
  RADDLE_DEVICE static void arrange_queries(u8* shared, i32 first, i32 rows, Facts& facts) {
    const i32 lane = ptx::lane_index();
    if (lane < count) facts.factor[first + lane] = 0.0f;
    for (i32 r = 0; r < rows; ++r) {
      const float factor = arrange_query<Kernel>(shared, first + r);
      if (lane == 0) facts.factor[first + r] = factor;
    }
  }

  template <i32 row_fragments, i32 key_fragments, class Query>
  RADDLE_DEVICE static void multiply(Logits<row_fragments, key_fragments>& s, u32 keys,
                                     Query query) {
    using Rows = typename Kernel::KeyRows;
    clear(s);
    RADDLE_UNROLL
    for (i32 step = 0; step < Kernel::k_steps; step += 2) {
      u32 a[2][row_fragments][4];
      RADDLE_UNROLL
      for (i32 i = 0; i < min(2, Kernel::k_steps - step); ++i) {
        RADDLE_UNROLL
        for (i32 r = 0; r < row_fragments; ++r) query(step + i, r, a[i][r]);
      }
      const u32 at = Rows::step_from(keys, step / 2);
      RADDLE_UNROLL
      for (i32 n = 0; n < key_fragments; n += 2) {
        u32 bytes[4];
        ptx::load_matrices(bytes, at + static_cast<u32>(8 * n * Rows::pitch));
        RADDLE_UNROLL
        for (i32 i = 0; i < min(2, Kernel::k_steps - step); ++i) {
          RADDLE_UNROLL
          for (i32 h = 0; h < 2; ++h) {
            u32 b[2];
            widen_in_order(b, bytes[2 * h + i], typename Kernel::Stored{});
            RADDLE_UNROLL
            for (i32 r = 0; r < row_fragments; ++r)
              ptx::multiply_add(s[r][n + h], a[i][r], b[0], b[1], f16{});
          }
        }
      }
    }
  }

  template <class Facts>
  RADDLE_DEVICE static float row_factor(const Facts& facts, i32 m) {
    return facts.factor[m];
  }

  template <i32 row_fragments, i32 key_fragments, class Keys, class FactorOf>
  RADDLE_DEVICE static void scale(Logits<row_fragments, key_fragments>& s, const Keys& keys,
                                  i32 mine, FactorOf factor_of, i32 halves) {
    scale_logits<Kernel, row_fragments, key_fragments>(s, keys.scale[0] + mine, factor_of, halves);
  }
};

/// V of bytes: widened to T in registers; scales multiply the weights.
template <class Kernel, i32 row_fragments>
class ValueOperand<Kernel, row_fragments, true> {
 public:
  RADDLE_DEVICE void clear() { scales_.clear(); }

  template <i32 key_fragments, class Keys>
  RADDLE_DEVICE void scale(Logits<row_fragments, key_fragments>& p, const Keys& keys, i32 first,
                           i32 count, i32 mine, Output<Kernel, row_fragments>& o) {
    scales_.rebase(keys.scale[1] + first, count, o);
    scales_.apply(p, keys.scale[1] + mine);
  }

  template <i32 steps>
  RADDLE_DEVICE static void multiply(Output<Kernel, row_fragments>& o,
                                     const u32 (&p)[row_fragments][steps][4], u32 values) {
    using Rows = typename Kernel::ValueRows;
    using T = typename Kernel::VoElement;
    RADDLE_UNROLL
    for (i32 n = 0; n < steps; ++n) {
      RADDLE_UNROLL
      for (i32 d = 0; d < Kernel::out_fragments; d += 4) {
        u32 bytes[4];
        ptx::load_matrices_transposed(
            bytes, Rows::step_from(values, d / 4) + static_cast<u32>(16 * n * Rows::pitch));
        RADDLE_UNROLL
        for (i32 i = 0; i < min(4, Kernel::out_fragments - d); i += 2) {
          u32 first[2], second[2];  // keys 0–7 and 8–15, of even columns and of odd ones
          widen_in_turns(first, bytes[i], typename Kernel::Stored{});
          widen_in_turns(second, bytes[i + 1], typename Kernel::Stored{});
          convert_pairs(first, T{});
          convert_pairs(second, T{});
          RADDLE_UNROLL
          for (i32 r = 0; r < row_fragments; ++r) {
            RADDLE_UNROLL
            for (i32 e = 0; e < 2; ++e)
              ptx::multiply_add(o[r][d + i + e], p[r][n], first[e], second[e], T{});
          }
        }
      }
    }
  }

  RADDLE_DEVICE float unit() const { return scales_.unit(); }

  RADDLE_DEVICE static i32 column(i32 t, i32 n) { return 8 * (n - n % 2) + 4 * t + 2 * (n % 2); }
  RADDLE_DEVICE static float element(const float (&o)[Kernel::out_fragments][4], i32 n, i32 half,
                                     i32 e) {
    return o[n - n % 2 + e][2 * half + n % 2];
  }

 private:
  ValueScales<Kernel, row_fragments> scales_;
};

}  // namespace mma

RADDLE_ENGINE_END
