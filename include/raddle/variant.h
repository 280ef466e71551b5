// Attention variants as values: which functor of engine/variant, with which members, in which
// order.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "raddle/engine/core/config.h"

namespace raddle {

/// The value of a variant's member: a scalar, or a captured tensor of rank 1.
using MemberValue =
    std::variant<double, std::vector<float>, std::vector<std::int32_t>, std::vector<std::uint32_t>>;

/// One functor with values for its members, or masks joined by & and |.
struct Variant {
  enum class Kind { leaf, all_of, any_of };
  Kind kind = Kind::leaf;
  std::string name;                            ///< leaf: the functor's name ("softcap")
  std::map<std::string, MemberValue> members;  ///< leaf: every member has a value
  std::vector<Variant> masks;                  ///< all_of, any_of: the joined masks
};

Variant operator&(const Variant& a, const Variant& b);
Variant operator|(const Variant& a, const Variant& b);

/// Row r keeps keys with kv_index <= q_index.
Variant causal();
/// Keeps positions q_pos - left … q_pos + right; a negative bound is none.
Variant sliding_window(i32 left, i32 right = -1);
/// s -> cap·tanh(s / cap); cap > 0.
Variant soft_cap(float cap);
/// A learned logit a query head ([Hq]) in the softmax's denominator.
Variant sinks(std::vector<float> logit);
/// O = Σ sigmoid(s + bias)·v.
Variant sigmoid(float bias = 0.0f);

/// Llama 3.1's frequency scaling.
struct RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position = 8192.0;
};

struct RopeArgs {
  i32 rotary_dim = 0;  ///< even, at most Dqk; the remaining elements pass unchanged
  double theta = 10000.0;
  std::vector<std::int32_t> offset{0};  ///< one for all, or one a request, added to every position
  bool scaled = false;
  RopeScaling scaling;
};

/// Rotary position embedding of Q and K, half-split pairs.
Variant rope(const RopeArgs& args);

}  // namespace raddle
