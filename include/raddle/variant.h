// Attention variants as values: which functor of engine/variant, with which members, in which
// order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "raddle/engine/variant/contract.h"
#include "raddle/tensor.h"

namespace raddle {

/// Raises ValueError unless a tensor of that shape has `size` elements.
void check_shape(std::size_t size, const std::vector<std::int64_t>& shape);

/// A captured tensor's values, row-major. Copies share them.
template <class T>
class Array {
 public:
  Array() : Array(std::vector<T>{}) {}
  /// Rank 1.
  Array(std::vector<T> values)  // NOLINT: a list is an array
      : Array(std::move(values), {}, true) {}
  /// Raises ValueError where the shape has another number of elements.
  Array(std::vector<T> values, std::vector<std::int64_t> shape)
      : Array(std::move(values), std::move(shape), false) {
    check_shape(size(), shape_);
  }
  /// Values that lie elsewhere, contiguous, and stay what they are as long as `owner` is kept.
  /// Those on a GPU, which only a run takes, are read there by its kernels, and by those of a
  /// captured graph in every replay: what work on the stream has written by then counts.
  static Array borrowed(std::shared_ptr<const void> owner, const T* data,
                        std::vector<std::int64_t> shape, DeviceId device = {}) {
    Array array;
    array.device_ = device;
    array.owner_ = std::move(owner);
    array.data_ = data;
    array.size_ = 1;
    for (const std::int64_t extent : shape) array.size_ *= static_cast<std::size_t>(extent);
    array.shape_ = std::move(shape);
    return array;
  }

  /// An address of device().
  const T* data() const { return data_; }
  DeviceId device() const { return device_; }
  bool is_on_host() const { return device_ == DeviceId{}; }
  /// Keeps the values where they are.
  std::shared_ptr<const void> owner() const { return owner_; }
  std::size_t size() const { return size_; }
  const T& front() const { return *data_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  bool operator==(const Array& other) const {
    return shape_ == other.shape_ && device_ == other.device_ &&
           (data_ == other.data_ ||
            (is_on_host() && std::equal(data_, data_ + size_, other.data_)));
  }

 private:
  Array(std::vector<T> values, std::vector<std::int64_t> shape, bool is_list)
      : shape_(std::move(shape)) {
    const auto owner = std::make_shared<const std::vector<T>>(std::move(values));
    data_ = owner->data();
    size_ = owner->size();
    if (is_list) shape_ = {static_cast<std::int64_t>(size_)};
    owner_ = owner;
  }

  std::shared_ptr<const void> owner_;
  const T* data_;
  std::size_t size_;
  std::vector<std::int64_t> shape_;
  DeviceId device_{};
};

/// The value of a variant's member: a scalar, or a captured tensor of rank 1 to 4.
using MemberValue = std::variant<double, Array<float>, Array<std::int32_t>, Array<std::uint32_t>,
                                 Array<std::uint8_t>>;

/// A member of a variant written as source: its type, and the extents it must have.
struct VariantParam {
  std::string name;
  MemberType type{};
  Extents extents{};
};

/// One operation of a function that was traced. Its operands stand before it in the list, whose
/// last entry is the result.
struct TracedNode {
  std::string op;         ///< "b", "h", "q", "kv", "score", "const", "param", "load", "add", …
  std::string dtype;      ///< "bool", "int" or "float"
  std::vector<i32> args;  ///< the operands' places in the list
  std::string member;     ///< of param and load
  double value = 0.0;     ///< of const
};

/// A variant written as C++ source: `struct <name>` of the variant contract
/// (engine/variant/contract.h).
struct VariantSource {
  std::string name;
  std::string text;
  std::vector<VariantParam> params;
  /// What `text` computes, where it was traced: by this, indices outside of captured arrays are
  /// found. Empty: they are clamped in silence.
  std::vector<TracedNode> expr{};
};

/// One functor with values for its members, or masks joined by & and |.
struct Variant {
  enum class Kind { leaf, all_of, any_of };
  Kind kind = Kind::leaf;
  std::string name;                             ///< leaf: the functor's name ("softcap")
  std::map<std::string, MemberValue> members;   ///< leaf: every member has a value
  std::vector<Variant> masks;                   ///< all_of, any_of: the joined masks
  std::shared_ptr<const VariantSource> source;  ///< leaf: null where the functor is shipped
};

/// A variant of the user's own: source that defines `struct <name>`. The members that a mask, its
/// spans or its coverage mention become plan members, all others run members. It is compiled when
/// an Attention is made of it.
Variant variant_from_source(VariantSource source, std::map<std::string, MemberValue> members = {});

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

/// Bit by bit: for request i a matrix [qo_len, kv_len] of bits from byte indptr[i] on, row-major,
/// LSB first, of ceil(qo_len·kv_len / 8) bytes; indptr [requests + 1].
Variant packed_mask(std::vector<std::uint8_t> bits, std::vector<std::int32_t> indptr);
/// logits + slope·(kv_pos - q_pos); one slope a query head ([Hq]).
Variant alibi(std::vector<float> slopes);
/// The slopes of the ALiBi paper (arXiv 2108.12409, section 3) for any number of heads.
std::vector<float> alibi_slopes(i32 num_heads);

/// All frequencies divided by `factor`: positions interpolated (arXiv 2306.15595).
struct LinearScaling {
  double factor = 1.0;
};

/// Llama 3.1's frequency scaling.
struct RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position = 8192.0;
};

/// YaRN's frequency scaling and attention temperature (arXiv 2309.00071).
struct YarnScaling {
  double factor = 1.0;
  double original_max_position = 4096.0;
  double beta_fast = 32.0;  ///< turns over the original context from which a pair keeps its speed
  double beta_slow = 1.0;   ///< … and below which it is slowed by `factor`
  std::optional<double> attention_factor;        ///< of cosine and sine; default by the next two
  std::optional<double> mscale, mscale_all_dim;  ///< both or neither
  bool truncate = true;                          ///< the ramp begins and ends at whole pairs
};

struct RopeArgs {
  i32 rotary_dim = 0;  ///< even, at most Dqk; the remaining elements pass unchanged
  double theta = 10000.0;
  std::vector<std::int32_t> offset{0};  ///< one for all, or one a request, added to every position
  std::variant<std::monostate, LinearScaling, RopeScaling, YarnScaling> scaling;
  bool interleaved = false;  ///< pairs (x[2i], x[2i + 1]) instead of (x[i], x[i + rotary_dim / 2])
};

/// Rotary position embedding of Q and K.
Variant rope(const RopeArgs& args);

struct RopeTablesArgs {
  Array<float> cos, sin;  ///< [positions, rotary_dim / 2]: row p turns what lies at position p
  std::vector<std::int32_t> offset{0};  ///< one for all, or one a request, added to every position
  bool interleaved = false;
};

/// Rotary position embedding by given tables. A batch with positions beyond them is refused.
Variant rope_tables(const RopeTablesArgs& args);

}  // namespace raddle
