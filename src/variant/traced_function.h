// A traced function over tiles of pairs: whether its result can depend on an index that lies
// outside of a captured array. A kernel clamps such an index, and the result would be wrong without
// a word.
#pragma once

#include <string>
#include <vector>

#include "raddle/engine/core/interval.h"
#include "raddle/variant.h"

namespace raddle {

/// Whether a value comes from an index outside of its array, over all pairs of a tile.
enum class Outside : i32 { never, maybe, always };

/// A member's value, and its pyramid of minima and maxima (engine/core/span.h) where it has one.
struct TracedMember {
  const MemberValue* value = nullptr;
  const void* hull = nullptr;
};

/// The most members of a function that is checked, and the most operations.
constexpr std::size_t max_traced_members = 32;
constexpr std::size_t max_traced_nodes = 512;

/// An index outside of an array, for an error message.
struct OutsideIndex {
  std::size_t member;
  i32 dimension;
  i64 extent;
  i64 index;
  bool of_request, of_head, of_q, of_kv;  ///< which arguments of the function it depends on
};

class TracedFunction {
 public:
  /// Nothing is checked of a function that indexes no array, or is too large.
  explicit TracedFunction(const VariantSource& source);

  bool has_indices() const { return !loads_.empty(); }
  /// Names of the members that the function reads, in the order of `members` below.
  const std::vector<std::string>& members() const { return members_; }

  /// Whether some index can lie outside, used or not. Evaluates what indices are computed from.
  bool may_index_outside(const Tile& tile, const TracedMember* members) const;
  /// Whether the result depends on such an index.
  Outside outside(const Tile& tile, const TracedMember* members) const;
  /// The index that lies farthest outside over the tile. Call it where some index can.
  OutsideIndex worst_index(const Tile& tile, const TracedMember* members) const;

 private:
  /// Those in front have their place in the list of names (traced_function.cpp).
  enum class Op : i32 {
    request,
    head,
    q,
    kv,
    score,
    constant,
    param,
    load,
    cast,
    where,
    bit_and,
    bit_or,
    bit_xor,
    bit_not,
    lt,
    le,
    eq,
    other
  };
  enum class Kind : i32 { boolean, integer, real };
  struct Arithmetic;
  struct Node {
    Op op;
    Kind kind;
    const Arithmetic* arithmetic;
    i32 args[max_tensor_rank];
    i32 num_args;
    i32 member;
    double value;
    bool in_index;   ///< an index is computed from it
    i32 depends_on;  ///< bits: request, head, q, kv
  };
  struct Value {
    IntInterval number;
    FloatInterval real;
    Truth truth;
    Outside outside;
  };
  static constexpr Value unknown{
      interval::any_int, interval::any_float, {true, true}, Outside::never};

  static Op parse(const std::string& op);
  static const Arithmetic* find_arithmetic(const std::string& op);
  static Value constant(const Node& node, double x);
  static Value load(const Node& node, const TracedMember& member, const Value* values);
  static Value choose(const Value& c, const Value& a, const Value& b);
  static Truth compare(Op op, Kind kind, const Value& a, const Value& b);
  static void join(Op op, const Value& a, const Value& b, Value& v);
  void mark_indices();
  void evaluate(const Tile& tile, const TracedMember* members, bool only_indices,
                Value* values) const;
  Value compute(const Node& node, const Tile& tile, const TracedMember* members,
                const Value* values) const;

  std::vector<Node> nodes_;
  std::vector<std::string> members_;
  std::vector<std::size_t> loads_;
};

}  // namespace raddle
