// Loops that do nothing but arithmetic in registers: their rates are an instruction set's limits.
// Plain data: it crosses from units compiled for an instruction set to the host's.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

struct LoopResult {
  double work;  ///< operations, or elements
  u64 sum;      ///< depends on all of them
};

/// Does the loop's work `repeat` times over.
using ComputeLoop = LoopResult (*)(i64 repeat);

struct ComputeLoops {
  ComputeLoop fma;
  ComputeLoop exp2;
  ComputeLoop bf16;  ///< null where the instruction set has no such products
};

}  // namespace raddle
