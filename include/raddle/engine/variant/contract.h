// The variant contract. A variant is a struct of small functions, its parts; every backend compiles
// one source. All parts are optional, and an absent part costs nothing. A `Vec` is one head's
// vector, of which a kernel may hold a share in each lane: it has map, half_pairs,
// interleaved_pairs and sum (HeadVector below is a CPU's), and sincos_turns and multiply_add for
// rotations (rotation.h).
//
// clang-format off
//   struct MyVariant {
//     float cap;                        // members: run-time scalars (float, i32),
//     Tensor<const float, 1> slopes;    //   captured tensors with their extents,
//     SpanTensor<const i32, 1> doc;     //   captured tensors of which coverage needs minima and maxima
//     static constexpr Scan scan = Scan::softmax;                             // Scan::sum: O = Σ f(s)·v
//     template <class Vec> RADDLE_FN void query(Vec& q, const Row& r) const;  // changes q in place
//     template <class Vec> RADDLE_FN void key(Vec& k, const Key& c) const;
//     template <class Vec> RADDLE_FN void value(Vec& v, const Key& c) const;
//     RADDLE_FN float logits(float s, const Row& r, const Key& c) const;      // s is already scaled
//     RADDLE_FN float near_logits(float s, float scale, const Row& r, const Key& c) const;  // logits(scale · s), sooner,
//     RADDLE_FN float near_limit(float scale) const;                          //   where |s| is at most this
//     RADDLE_FN float distance_slope(const Row& r) const;                     // logits is s + this · (c.kv_pos - r.q_pos)
//     RADDLE_FN bool mask(const Row& r, const Key& c) const;                  // true = keep; after logits
//     RADDLE_FN KvSpan kv_span(const Tile& t) const;                          // bounds on what t's rows keep of its keys
//     RADDLE_FN KvSpan row_span(const Row& r, Range keys) const;              // all that r keeps of keys at such positions (RowKeys)
//     RADDLE_FN bool knows_spans() const;                                     // false: the two bound nothing for these members
//     RADDLE_FN Coverage coverage(const Tile& t) const;                       // must hold for every row and key in t's hulls
//     RADDLE_FN float sink(const Row& r) const;                               // logit of a key without value
//     template <class Vec> RADDLE_FN void output(Vec& o, const Row& r, float lse) const;  // after the last ⊕
//   };
// clang-format on
//
// A variant's file ends with its member list (RADDLE_VARIANT), by which the host finds members by
// name. Members that a mask, its spans or its coverage read are plan members: they are fixed by
// `plan`, so that no plan outlives the mask that it was made for. All others are run members and
// may differ from layer to layer. The list of a shipped variant says which is which; of a user's
// source the library finds out (docs/design/variants.md).
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/core/row.h"
#include "raddle/engine/core/tensor.h"

namespace raddle {

enum class MemberKind : i32 {
  float_scalar,
  int_scalar,
  float_tensor,
  int_tensor,
  uint_tensor,
  byte_tensor
};

/// When a member's value is fixed.
enum class MemberTime : i32 { plan, run };

/// How many elements one dimension of a captured tensor must have.
enum class Extent : i32 {
  any,              ///< whatever is given
  qo_heads,         ///< Hq
  kv_heads,         ///< Hkv
  half_head_dim,    ///< one per rotating pair: at most Dqk / 2
  one_or_requests,  ///< 1, or one per request of the batch
  // Those that follow are arrays of a batch, as lengths are: a reservation has room for them, and
  // each update may bring them anew. Masks read no extent of such an array, which graphs keep.
  request_offsets,  ///< one more than requests
  mask_bytes        ///< bits for every pair of a row and a key, each request's from a whole byte on
};

struct Extents {
  Extent of[max_tensor_rank];
};

/// What a member's C++ type says about it.
struct MemberType {
  MemberKind kind;
  i32 rank;       ///< 0: a scalar
  bool hull;      ///< a SpanTensor: the host adds its minima and maxima (core/span.h)
  i32 bytes = 0;  ///< of the variant's struct; 0: not known
};

/// What a member's value must be, beyond its type; the host checks it wherever a value is given.
enum class Check : i32 {
  any,
  logit,    ///< neither NaN nor +infinity; -infinity is a key that has no weight
  finite,   ///< neither NaN nor infinite
  positive  ///< finite and above 0
};

struct Member {
  const char* name;
  MemberType type;
  MemberTime time;
  i32 offset;  ///< in the variant's struct, in bytes
  Extents extents;
  Check check = Check::any;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

template <class T>
struct element_kind;
template <>
struct element_kind<float> {
  static constexpr MemberKind value = MemberKind::float_tensor;
};
template <>
struct element_kind<i32> {
  static constexpr MemberKind value = MemberKind::int_tensor;
};
template <>
struct element_kind<u32> {
  static constexpr MemberKind value = MemberKind::uint_tensor;
};
template <>
struct element_kind<u8> {
  static constexpr MemberKind value = MemberKind::byte_tensor;
};

/// The types that a variant's members may have.
template <class T>
struct member_type;
template <>
struct member_type<float> {
  static constexpr MemberType value{MemberKind::float_scalar, 0, false, sizeof(float)};
};
template <>
struct member_type<i32> {
  static constexpr MemberType value{MemberKind::int_scalar, 0, false, sizeof(i32)};
};
template <class T, i32 rank>
struct member_type<Tensor<const T, rank>> {
  static constexpr MemberType value{element_kind<T>::value, rank, false,
                                    sizeof(Tensor<const T, rank>)};
};
template <class T, i32 rank>
struct member_type<SpanTensor<const T, rank>> {
  static constexpr MemberType value{element_kind<T>::value, rank, true,
                                    sizeof(SpanTensor<const T, rank>)};
};

#if defined(__CUDACC_RTC__)
// Only the host needs names: device code reads a variant's members at their offsets.
#define RADDLE_VARIANT(V, variant_name, ...) static_assert(sizeof(V) > 0)
#define RADDLE_VARIANT_PLAIN(V, variant_name) static_assert(sizeof(V) > 0)
#else
/// A variant's name and members; specialised by RADDLE_VARIANT at the end of the variant's file.
template <class V>
struct Describe;

template <class T>
constexpr Member make_member(const char* name, MemberTime time, u64 offset, Extents extents) {
  return Member{name, member_type<T>::value, time, static_cast<i32>(offset), extents, Check::any};
}

#define RADDLE_EXTENTS(...)      \
  [] {                           \
    using enum Extent;           \
    return Extents{__VA_ARGS__}; \
  }()
#define RADDLE_MEMBER(V, m, time, ...) \
  make_member<decltype(V::m)>(#m, time, __builtin_offsetof(V, m), RADDLE_EXTENTS(__VA_ARGS__))
/// A scalar, or a captured tensor of any extents.
#define RADDLE_PLAN_MEMBER(V, m) RADDLE_MEMBER(V, m, MemberTime::plan, any)
#define RADDLE_RUN_MEMBER(V, m) RADDLE_MEMBER(V, m, MemberTime::run, any)
/// A captured tensor with an extent stated for each dimension.
#define RADDLE_PLAN_TENSOR(V, m, ...) RADDLE_MEMBER(V, m, MemberTime::plan, __VA_ARGS__)
#define RADDLE_RUN_TENSOR(V, m, ...) RADDLE_MEMBER(V, m, MemberTime::run, __VA_ARGS__)
/// A member with a condition on its values: checked(RADDLE_RUN_MEMBER(…), Check::positive).
constexpr Member checked(Member member, Check check) {
  member.check = check;
  return member;
}
#define RADDLE_VARIANT(V, variant_name, ...)                             \
  template <>                                                            \
  struct Describe<V> {                                                   \
    static constexpr const char* name = variant_name;                    \
    static constexpr const char* type = #V;                              \
    static constexpr Member members[] = {__VA_ARGS__};                   \
    static constexpr i32 num_members = sizeof(members) / sizeof(Member); \
  }
/// For a variant without members.
#define RADDLE_VARIANT_PLAIN(V, variant_name)         \
  template <>                                         \
  struct Describe<V> {                                \
    static constexpr const char* name = variant_name; \
    static constexpr const char* type = #V;           \
    static constexpr const Member* members = nullptr; \
    static constexpr i32 num_members = 0;             \
  }
#endif

/// A head vector in contiguous fp32 memory, as `query`, `key`, `value` and `output` get it on a
/// CPU. Its rotations have equal bits on every backend (SameBits).
class HeadVector : public math::SameBits {
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

  /// Sum of f(x[i]) over all elements, here in index order; other backends may use another order.
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
