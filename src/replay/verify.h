// The truth of a replay: attention in fp64, computed from the hash alone, with the budget that a
// right output cannot leave.
#pragma once

#include <string>
#include <vector>

#include "raddle/tensor.h"
#include "raddle/variant.h"
#include "replay/synthetic.h"

namespace raddle::replay {

/// One layer's attention, causal, with the parts that the shipped models have.
struct LayerSpec {
  u64 seed = 0;
  i32 layer = 0;
  i32 num_qo_heads = 1, num_kv_heads = 1;
  i32 head_dim = 128;
  DType dtype = DType::bfloat16;
  double scale = 0.0;
  i32 window_left = -1;   ///< negative: no window
  double soft_cap = 0.0;  ///< 0: none
  bool sinks = false;
  RopeArgs rope;  ///< rotary_dim 0: none
  /// Whether the kernel rounds the softmax's weights to the dtype before P·V, as matrix units ask
  /// for.
  bool rounds_weights = false;
  SharedPrompts prompts;
};

/// The output of one row and head, as the engine gave it.
struct Sample {
  i32 request, position, head;
  const float* found;  ///< [head_dim]
};

/// The element that uses most of its budget.
struct Verdict {
  double ratio = 0.0;  ///< |found - expected| / budget; above 1: wrong
  i32 element = 0;
  double found = 0.0, expected = 0.0, budget = 0.0;
};

std::vector<Verdict> verify(const LayerSpec& spec, const std::vector<Sample>& samples);

}  // namespace raddle::replay
