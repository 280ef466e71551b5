// Traced functions over tiles: what is said of indices outside of captured arrays, against every
// pair one by one.
#include "variant/traced_function.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "layout_testing.h"
#include "traced_testing.h"

namespace raddle {

std::ostream& operator<<(std::ostream& out, Outside outside) {
  return out << (outside == Outside::never   ? "never"
                 : outside == Outside::maybe ? "maybe"
                                             : "always");
}

namespace {

Outside outside(const Tracing& tracing, const std::map<std::string, MemberValue>& values,
                const Tile& tile) {
  const TracedFunction function = tracing.function();
  return function.outside(tile, Members(function, values).data());
}

bool may_index_outside(const Tracing& tracing, const std::map<std::string, MemberValue>& values,
                       const Tile& tile) {
  const TracedFunction function = tracing.function();
  return function.may_index_outside(tile, Members(function, values).data());
}

TEST(TracedFunction, ComparesIndicesWithExtents) {
  Tracing f;
  f.load("a", {f.leaf("kv")});
  const std::map<std::string, MemberValue> ten{{"a", array_of({10})}};
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {0, 9})), Outside::never);
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {0, 10})), Outside::maybe);
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {10, 12})), Outside::always);
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {-10, -1})), Outside::never) << "counted from the end";
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {-11, 0})), Outside::maybe);
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {-13, -11})), Outside::always);
}

TEST(TracedFunction, LooksAtEveryDimension) {
  Tracing f;
  const i32 head = f.leaf("h"), key = f.leaf("kv");
  f.load("a", {head, key});
  EXPECT_EQ(outside(f, {{"a", array_of({2, 8})}}, pairs({0, 0}, {0, 7})), Outside::never);
  EXPECT_EQ(outside(f, {{"a", array_of({2, 7})}}, pairs({0, 0}, {0, 7})), Outside::maybe);
  EXPECT_EQ(outside(f, {{"a", array_of({1, 8})}}, pairs({0, 0}, {0, 7})), Outside::maybe);
}

TEST(TracedFunction, KnowsNumbersAndWhatSmallArraysHold) {
  Tracing f;
  const i32 shifted = f.op("add", {f.leaf("kv"), f.param("shift")});
  f.load("a", {f.load("small", {shifted})});
  std::map<std::string, MemberValue> values{
      {"shift", 2.0}, {"small", array_of_values({9, 9, 4, 0})}, {"a", array_of({5})}};
  EXPECT_EQ(outside(f, values, pairs({0, 0}, {0, 1})), Outside::never) << "reads 4 and 0";
  EXPECT_EQ(outside(f, values, pairs({0, 0}, {-2, -1})), Outside::always) << "reads 9 twice";
  EXPECT_EQ(outside(f, values, pairs({0, 0}, {-1, 0})), Outside::maybe) << "reads 9 and 4";
}

TEST(TracedFunction, WhatItDoesNotKnowIsNoEvidence) {
  Tracing f;
  const i32 unknown = f.op("sin", {f.leaf("kv")});
  f.load("a", {unknown});
  EXPECT_EQ(outside(f, {{"a", array_of({1})}}, pairs({0, 0}, {0, 99})), Outside::never);
  Tracing large;  // an array of many elements without a pyramid of their bounds
  large.load("a", {large.load("b", {large.leaf("kv")})});
  EXPECT_EQ(outside(large, {{"a", array_of({1})}, {"b", array_of({1000})}}, pairs({0, 0}, {0, 99})),
            Outside::never);
}

TEST(TracedFunction, ElementsWithoutInfluenceAreNotMissed) {
  const std::map<std::string, MemberValue> ten{{"a", array_of({10})}};
  const auto guarded = [](const char* joins, bool guard_first) {
    Tracing f;
    const i32 key = f.leaf("kv"), end = f.number(10);
    const bool is_and = std::string(joins) == "and";
    const i32 guard = is_and ? f.test("lt", {key, end}) : f.test("le", {end, key});
    const i32 read = f.test("eq", {f.load("a", {key}), f.number(0)});
    guard_first ? f.test(joins, {guard, read}) : f.test(joins, {read, guard});
    return f;
  };
  for (const char* joins : {"and", "or"})
    for (const bool guard_first : {false, true}) {
      const Tracing f = guarded(joins, guard_first);
      EXPECT_EQ(outside(f, ten, pairs({0, 0}, {10, 40})), Outside::never) << joins << guard_first;
      EXPECT_EQ(outside(f, ten, pairs({0, 0}, {0, 9})), Outside::never) << joins << guard_first;
      EXPECT_EQ(outside(f, ten, pairs({0, 0}, {0, 40})), Outside::maybe)
          << "a part decides: the caller looks at halves";
      EXPECT_TRUE(may_index_outside(f, ten, pairs({0, 0}, {10, 40}))) << "used or not";
    }
}

TEST(TracedFunction, AConditionChoosesWhatIsMissed) {
  const std::map<std::string, MemberValue> ten{{"a", array_of({10})}};
  Tracing f;
  const i32 key = f.leaf("kv");
  const i32 inside = f.test("lt", {key, f.number(20)});
  const i32 read = f.load("a", {key});
  f.op("where", {inside, read, f.number(7)});
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {20, 30})), Outside::never);
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {10, 19})), Outside::always);
  EXPECT_EQ(outside(f, ten, pairs({0, 0}, {10, 30})), Outside::maybe);
  Tracing both;
  const i32 at = both.leaf("kv");
  const i32 row = both.test("lt", {both.leaf("q"), both.number(3)});
  both.op("where", {row, both.load("a", {at}), both.load("a", {at})});
  EXPECT_EQ(outside(both, ten, pairs({0, 5}, {10, 19})), Outside::always) << "either way";
}

TEST(TracedFunction, NamesTheIndexThatIsFarthestOutside) {
  Tracing f;
  const i32 request = f.leaf("b"), row = f.leaf("q");
  f.load("a", {request, row});
  f.op("add", {2, f.load("c", {f.op("sub", {row, f.leaf("kv")})})});
  const TracedFunction function = f.function();
  EXPECT_EQ(function.members(), (std::vector<std::string>{"a", "c"}));
  const Members members(function, {{"a", array_of({1, 8})}, {"c", array_of({4})}});
  OutsideIndex worst = function.worst_index(pairs({0, 9}, {0, 9}), members.data());
  EXPECT_EQ(worst.member, 1U);
  EXPECT_EQ(worst.dimension, 0);
  EXPECT_EQ(worst.extent, 4);
  EXPECT_EQ(worst.index, 9) << "5 beyond the end; -9 is 4 below the first";
  EXPECT_TRUE(worst.of_q && worst.of_kv && !worst.of_request && !worst.of_head);
  worst = function.worst_index(pairs({0, 20}, {18, 20}), members.data());
  EXPECT_EQ(worst.member, 1U);
  EXPECT_EQ(worst.index, -20);
  Tile many = pairs({0, 3}, {0, 3});
  many.request = {0, 30};
  worst = function.worst_index(many, members.data());
  EXPECT_EQ(worst.member, 0U);
  EXPECT_EQ(worst.dimension, 0);
  EXPECT_EQ(worst.index, 30);
  EXPECT_TRUE(worst.of_request && !worst.of_q);
}

TEST(TracedFunction, WhatCannotBeIsRefused) {
  Tracing later;
  later.op("neg", {0});
  EXPECT_THROW(later.function(), ValueError) << "an operand that is the operation itself";
  Tracing negative;
  negative.op("neg", {-1});
  EXPECT_THROW(negative.function(), ValueError);
  Tracing wide;
  const i32 x = wide.leaf("q");
  wide.load("a", {x, x, x, x, x});
  EXPECT_THROW(wide.function(), ValueError) << "five dimensions";
}

TEST(TracedFunction, NothingIsCheckedOfWhatIndexesNothingOrIsTooLarge) {
  Tracing plain;
  plain.test("le", {plain.leaf("kv"), plain.leaf("q")});
  EXPECT_FALSE(plain.function().has_indices());
  Tracing many;
  i32 x = many.leaf("kv");
  for (std::size_t n = 0; n < max_traced_nodes; ++n) x = many.op("neg", {x});
  many.load("a", {x});
  EXPECT_FALSE(many.function().has_indices());
  Tracing members;
  const i32 key = members.leaf("kv");
  for (std::size_t n = 0; n <= max_traced_members; ++n)
    members.load(("a" + std::to_string(n)).c_str(), {key});
  EXPECT_FALSE(members.function().has_indices());
}

/// An index of drawn arithmetic, and its value for one pair.
struct DrawnIndex {
  Tracing tracing;
  std::function<i32(i32 q, i32 kv)> value;
  i32 place = 0;
};

class DrawnFunctions : public LayoutTest {
 protected:
  DrawnIndex draw_index() {
    DrawnIndex drawn;
    std::vector<std::pair<i32, std::function<i32(i32, i32)>>> made;
    made.push_back({drawn.tracing.leaf("q"), [](i32 q, i32) { return q; }});
    made.push_back({drawn.tracing.leaf("kv"), [](i32, i32 kv) { return kv; }});
    for (i32 step = draw(1, 5); step > 0; --step) {
      const i32 n = draw(1, 6);
      made.push_back({drawn.tracing.number(n), [n](i32, i32) { return n; }});
      const auto [a, of_a] = made[at(draw(0, static_cast<i32>(made.size()) - 1))];
      const auto [b, of_b] = made[at(draw(0, static_cast<i32>(made.size()) - 1))];
      const auto number = made.back();
      switch (draw(0, 5)) {
        case 0:
          made.push_back({drawn.tracing.op("add", {a, b}),
                          [=](i32 q, i32 kv) { return of_a(q, kv) + of_b(q, kv); }});
          break;
        case 1:
          made.push_back({drawn.tracing.op("sub", {a, b}),
                          [=](i32 q, i32 kv) { return of_a(q, kv) - of_b(q, kv); }});
          break;
        case 2:
          made.push_back({drawn.tracing.op("minimum", {a, b}),
                          [=](i32 q, i32 kv) { return std::min(of_a(q, kv), of_b(q, kv)); }});
          break;
        case 3:
          made.push_back({drawn.tracing.op("maximum", {a, b}),
                          [=](i32 q, i32 kv) { return std::max(of_a(q, kv), of_b(q, kv)); }});
          break;
        case 4:
          made.push_back({drawn.tracing.op("floor_div", {a, number.first}), [=](i32 q, i32 kv) {
                            const i32 x = of_a(q, kv);
                            return (x - ((x % n) + n) % n) / n;
                          }});
          break;
        default:
          made.push_back({drawn.tracing.op("floor_mod", {a, number.first}),
                          [=](i32 q, i32 kv) { return ((of_a(q, kv) % n) + n) % n; }});
      }
    }
    drawn.place = made.back().first;
    drawn.value = made.back().second;
    return drawn;
  }
};

TEST_F(DrawnFunctions, NoMissedElementIsOverlooked) {
  i32 found[3] = {};
  for (int repeat = 0; repeat < 3000; ++repeat) {
    DrawnIndex drawn = draw_index();
    drawn.tracing.load("a", {drawn.place});
    const i32 extent = draw(1, 12), q = draw(0, 20), kv = draw(0, 20);
    const Tile tile = pairs({q, q + draw(0, 5)}, {kv, kv + draw(0, 5)});
    i32 missed = 0, all = 0;
    for (i32 row = tile.q_pos.first; row <= tile.q_pos.last; ++row)
      for (i32 key = tile.kv_pos.first; key <= tile.kv_pos.last; ++key, ++all) {
        const i32 index = drawn.value(row, key);
        missed += index >= extent || index < -extent;
      }
    const Outside said = outside(drawn.tracing, {{"a", array_of({extent})}}, tile);
    ++found[static_cast<i32>(said)];
    ASSERT_TRUE(missed == 0 || said != Outside::never) << missed << " of " << all << " pairs";
    ASSERT_TRUE(said != Outside::always || missed == all) << missed << " of " << all << " pairs";
    ASSERT_TRUE(all > 1 || said != Outside::maybe) << "of one pair everything is known";
    ASSERT_EQ(may_index_outside(drawn.tracing, {{"a", array_of({extent})}}, tile),
              said != Outside::never);
  }
  for (const i32 times : found) EXPECT_GT(times, 20);
}

}  // namespace
}  // namespace raddle
