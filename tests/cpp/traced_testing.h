// Traced functions as the tests write them: an operation at a time.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "variant/traced_function.h"

namespace raddle {

/// A function under construction: each call adds an operation and gives its place in the list. What
/// is added last is the result.
class Tracing {
 public:
  i32 leaf(const char* name) { return add({name, "int", {}, "", 0.0}); }
  i32 number(i32 value) { return add({"const", "int", {}, "", static_cast<double>(value)}); }
  i32 param(const char* member) { return add({"param", "int", {}, member, 0.0}); }
  i32 op(const char* name, std::initializer_list<i32> args, const char* dtype = "int") {
    return add({name, dtype, args, "", 0.0});
  }
  i32 test(const char* name, std::initializer_list<i32> args) { return op(name, args, "bool"); }
  i32 load(const char* member, std::initializer_list<i32> indices) {
    return add({"load", "int", indices, member, 0.0});
  }
  i32 add(TracedNode node) {
    source_.expr.push_back(std::move(node));
    return static_cast<i32>(source_.expr.size()) - 1;
  }

  TracedFunction function() const { return TracedFunction(source_); }

 private:
  VariantSource source_{"traced", "", {}, {}};
};

/// The values of a function's members, in the order in which it reads them.
class Members {
 public:
  Members(const TracedFunction& function, std::map<std::string, MemberValue> values)
      : values_(std::move(values)) {
    for (const std::string& name : function.members())
      list_.push_back({&values_.at(name), nullptr});
  }
  const TracedMember* data() const { return list_.data(); }

 private:
  std::map<std::string, MemberValue> values_;
  std::vector<TracedMember> list_;
};

/// An array [extents] of zeros, or of the given values.
inline MemberValue array_of(std::vector<std::int64_t> extents) {
  std::int64_t size = 1;
  for (const std::int64_t n : extents) size *= n;
  return Array(std::vector<std::int32_t>(static_cast<std::size_t>(size)), std::move(extents));
}
inline MemberValue array_of_values(std::vector<std::int32_t> values) {
  return Array(std::move(values));
}

/// All pairs of rows and keys at these positions, of request 0 and heads 0 and 1.
inline Tile pairs(Range q, Range kv) {
  Tile tile{};
  tile.request = {0, 0};
  tile.q_head = {0, 1};
  tile.q_index = tile.q_pos = q;
  tile.kv_index = tile.kv_pos = kv;
  return tile;
}

}  // namespace raddle
