// Checks K and V against a level and finds the strides by which kernels walk them.
#pragma once

#include <string>

#include "raddle/attention.h"
#include "raddle/engine/kernel/cpu/launch.h"

namespace raddle {

/// Raises where `name` is not `[expected…]` in `dtype` with a contiguous last dimension; -1 stands
/// for any extent.
void check_tensor(const std::string& name, const TensorRef& t, DType dtype,
                  const std::vector<i64>& expected);

/// The same for a tensor that is written: its elements must not coincide.
void check_output(const std::string& name, const TensorRef& t, DType dtype,
                  const std::vector<i64>& expected);

/// "[4, 8, 128] bfloat16"
std::string describe(const TensorRef& t);

/// K and V of one level as the kernels see them. `name` is the argument ("kv" or "kv[1]").
KvView view_kv(const std::string& name, const KvRef& kv, const Level& level,
               const AttentionSpec& spec);

}  // namespace raddle
