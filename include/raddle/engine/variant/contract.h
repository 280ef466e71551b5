// The variant contract. A variant is a struct of small functions, the same source on every backend;
// all parts are optional, and what is absent costs nothing:
//
//   struct MyVariant {
//     float cap;                                                       // members: run-time scalars
//     and Tensor<const float, 1> slopes;                                   // captured tensors
//     static constexpr Scan scan = Scan::softmax;                      // Scan::sum: O = Σ f(s)·v
//     template <class Vec> void query(Vec& q, const Row& r) const;     // a head vector: map,
//     pairs, sum template <class Vec> void key(Vec& k, const Key& c) const; template <class Vec>
//     void value(Vec& v, const Key& c) const; float logits(float s, const Row& r, const Key& c)
//     const;         // s is already scaled bool mask(const Row& r, const Key& c) const; // true =
//     keep; after logits KvSpan kv_span(const Tile& t) const;                             // O(1)
//     bounds on what a tile keeps Coverage coverage(const Tile& t) const; // must hold on the whole
//     hull float sink(const Row& r) const;                                  // logit of a key
//     without value template <class Vec> void output(Vec& o, const Row& r, float lse) const;   //
//     after the last ⊕
//   };
//
// A variant's file ends with its member list (RADDLE_VARIANT), by which the host finds members by
// name. Members that mask, kv_span or coverage read are plan members: they are fixed by `plan`. All
// others are run members and may differ from layer to layer.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/core/row.h"
#include "raddle/engine/core/tensor.h"

namespace raddle {

enum class MemberKind : i32 { float_scalar, int_scalar, float_tensor, int_tensor, uint_tensor };

/// When a member's value is fixed.
enum class MemberTime : i32 { plan, run };

/// How many elements a captured tensor must have.
enum class Extent : i32 {
  any,             ///< whatever is given at first; a parameter keeps it
  qo_heads,        ///< Hq
  kv_heads,        ///< Hkv
  half_head_dim,   ///< at most Dqk / 2
  one_or_requests  ///< 1, or one a request of the batch
};

struct Member {
  const char* name;
  MemberKind kind;
  MemberTime time;
  i32 offset;  ///< in the variant's struct, in bytes
  Extent extent;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

template <class T>
struct member_kind;
template <>
struct member_kind<float> {
  static constexpr MemberKind value = MemberKind::float_scalar;
};
template <>
struct member_kind<i32> {
  static constexpr MemberKind value = MemberKind::int_scalar;
};
template <>
struct member_kind<Tensor<const float, 1>> {
  static constexpr MemberKind value = MemberKind::float_tensor;
};
template <>
struct member_kind<Tensor<const i32, 1>> {
  static constexpr MemberKind value = MemberKind::int_tensor;
};
template <>
struct member_kind<Tensor<const u32, 1>> {
  static constexpr MemberKind value = MemberKind::uint_tensor;
};

#if defined(__CUDACC_RTC__)
// Names are the host's business: device code meets a variant's members at their offsets.
#define RADDLE_VARIANT(V, variant_name, ...) static_assert(sizeof(V) > 0)
#define RADDLE_VARIANT_PLAIN(V, variant_name) static_assert(sizeof(V) > 0)
#else
/// A variant's name and members; specialised by RADDLE_VARIANT at the end of the variant's file.
template <class V>
struct Describe;

template <class T>
constexpr Member make_member(const char* name, MemberTime time, u64 offset, Extent extent) {
  return Member{name, member_kind<T>::value, time, static_cast<i32>(offset), extent};
}

#define RADDLE_MEMBER(V, m, time, extent) \
  make_member<decltype(V::m)>(#m, time, __builtin_offsetof(V, m), extent)
#define RADDLE_PLAN_MEMBER(V, m) RADDLE_MEMBER(V, m, MemberTime::plan, Extent::any)
#define RADDLE_RUN_MEMBER(V, m) RADDLE_MEMBER(V, m, MemberTime::run, Extent::any)
/// A captured tensor with a stated extent.
#define RADDLE_RUN_TENSOR(V, m, extent) RADDLE_MEMBER(V, m, MemberTime::run, Extent::extent)
#define RADDLE_VARIANT(V, variant_name, ...)                             \
  template <>                                                            \
  struct Describe<V> {                                                   \
    static constexpr const char* name = variant_name;                    \
    static constexpr Member members[] = {__VA_ARGS__};                   \
    static constexpr i32 num_members = sizeof(members) / sizeof(Member); \
  }
/// For a variant without members.
#define RADDLE_VARIANT_PLAIN(V, variant_name)         \
  template <>                                         \
  struct Describe<V> {                                \
    static constexpr const char* name = variant_name; \
    static constexpr const Member* members = nullptr; \
    static constexpr i32 num_members = 0;             \
  }
#endif

/// A head vector in contiguous fp32 memory, as `query`, `key`, `value` and `output` see it on a
/// CPU.
class HeadVector {
 public:
  RADDLE_FN HeadVector(float* data, i32 size) : data_(data), size_(size) {}
  RADDLE_FN i32 size() const { return size_; }

  /// x[i] = f(x[i], i) for every element.
  template <class F>
  RADDLE_FN void map(F f) {
    for (i32 i = 0; i < size_; ++i) data_[i] = f(data_[i], i);
  }

  /// Half-split pairs (x[i], x[i + n/2]) of the first n elements: f(a, b, i) changes both in place.
  template <class F>
  RADDLE_FN void half_pairs(i32 n, F f) {
    float* __restrict lo = data_;
    float* __restrict hi = data_ + n / 2;
    for (i32 i = 0; i < n / 2; ++i) f(lo[i], hi[i], i);
  }

  /// Interleaved pairs (x[2i], x[2i + 1]) of the first n elements.
  template <class F>
  RADDLE_FN void interleaved_pairs(i32 n, F f) {
    for (i32 i = 0; i < n / 2; ++i) f(data_[2 * i], data_[2 * i + 1], i);
  }

  /// Sum of f(x[i]) over all elements, in index order.
  template <class F>
  RADDLE_FN float sum(F f) const {
    float total = 0.0f;
    for (i32 i = 0; i < size_; ++i) total += f(data_[i]);
    return total;
  }

 private:
  float* data_;
  i32 size_;
};

RADDLE_ENGINE_END
