// What all rotary embeddings share: which elements of a head form a pair, and how a pair turns.
#pragma once

#include "raddle/engine/variant/contract.h"

RADDLE_ENGINE_BEGIN

enum class Pairs : i32 {
  half,        ///< (x[i], x[i + n/2]): GPT-NeoX, Llama as in transformers
  interleaved  ///< (x[2i], x[2i + 1]): RoFormer, GPT-J, DeepSeek
};

/// Turns the pairs of the first n elements; `angle(i)` gives sine and cosine for pair i. The
/// vector's own sincos_turns and multiply_add decide how exact these and the products are.
template <Pairs pairs, class Vec, class Angle>
RADDLE_FN void rotate(Vec& x, i32 n, Angle angle) {
  const auto turn = [=](float& a, float& b, i32 i) {
    const math::SinCos t = angle(i);
    const float rotated = Vec::multiply_add(a, t.cos, -(b * t.sin));
    b = Vec::multiply_add(b, t.cos, a * t.sin);
    a = rotated;
  };
  if constexpr (pairs == Pairs::half)
    x.half_pairs(n, turn);
  else
    x.interleaved_pairs(n, turn);
}

/// The offset that a request adds to its positions: one for all, or one per request. The index is
/// clamped, because a captured graph may run batches that the host has not checked.
RADDLE_FN i32 offset_of(const Tensor<const i32, 1>& offset, i32 request) {
  return offset.data[offset.extent[0] == 1 ? 0 : min(request, offset.extent[0] - 1)];
}

RADDLE_ENGINE_END
