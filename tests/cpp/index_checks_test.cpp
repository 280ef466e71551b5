// The search for captured arrays that are too short: against every pair of a batch, one by one, and
// what it says.
#include "variant/index_checks.h"

#include <gtest/gtest.h>

#include "layout_testing.h"
#include "traced_testing.h"

namespace raddle {
namespace {

/// f(q, kv) = a[kv - q + shift], guarded by kv < guard (none where it is 0).
struct Difference {
  i32 extent, shift = 0, guard = 0;

  Tracing tracing() const {
    Tracing f;
    const i32 row = f.leaf("q"), key = f.leaf("kv");
    const i32 index = f.op("add", {f.op("sub", {key, row}), f.number(shift)});
    const i32 read = f.test("eq", {f.load("a", {index}), f.number(0)});
    if (guard > 0) f.test("and", {f.test("lt", {key, f.number(guard)}), read});
    return f;
  }
  bool misses(i32 q, i32 kv) const {
    const i32 index = kv - q + shift;
    return (guard == 0 || kv < guard) && (index >= extent || index < -extent);
  }
};

/// Keeps keys at most `left` positions before their row. Coarse: knows nothing of more than one
/// pair.
struct Window {
  i32 left;
  bool coarse;

  static Coverage coverage(const void* masks, const Tile& pairs) {
    const Window& window = *static_cast<const Window*>(masks);
    const i64 least = i64{pairs.q_pos.first} - pairs.kv_pos.last;
    const i64 most = i64{pairs.q_pos.last} - pairs.kv_pos.first;
    if (window.coarse && least < most) return Coverage::partial;
    if (most < 0 || least > window.left) return Coverage::empty;
    return least >= 0 && most <= window.left ? Coverage::full : Coverage::partial;
  }
};

std::optional<std::string> short_array(const Tracing& tracing, MemberValue a, const Layout& layout,
                                       const Window* window = nullptr) {
  const TracedFunction function = tracing.function();
  const Members members(function, {{"a", std::move(a)}});
  IndexedBatch batch{layout.view(), 2};
  if (window) {
    batch.masks = window;
    batch.coverage = Window::coverage;
  }
  return find_short_array("mask", function, members.data(), batch);
}

class IndexChecks : public LayoutTest {};

TEST_F(IndexChecks, AgreeWithEveryPair) {
  i32 refused = 0, taken = 0;
  for (int repeat = 0; repeat < 400; ++repeat) {
    const bool masked = draw(0, 1) == 1;
    const Window window{draw(0, 15), masked && draw(0, 1) == 1};
    // The search ends after 256 parts, of which coarse masks need more.
    const Ints qo_len = lengths(draw(1, window.coarse ? 2 : 4), 0, window.coarse ? 4 : 9);
    Ints kv_len = qo_len;
    for (i32& n : kv_len) n += draw(0, window.coarse ? 6 : 12);
    const Ints rows = indptr(qo_len), keys = indptr(kv_len);
    const LayoutPtr layout = ragged_kv({.qo_indptr = index_of(rows), .kv_indptr = index_of(keys)});
    const Difference f{draw(1, 24), draw(-4, 4), draw(0, 1) * draw(1, 20)};
    bool misses = false;
    for (std::size_t i = 0; i < qo_len.size(); ++i)
      for (i32 q = kv_len[i] - qo_len[i]; q < kv_len[i]; ++q)
        for (i32 kv = 0; kv < kv_len[i]; ++kv)
          misses |= (!masked || (kv <= q && q - kv <= window.left)) && f.misses(q, kv);
    const auto error =
        short_array(f.tracing(), array_of({f.extent}), *layout, masked ? &window : nullptr);
    ASSERT_EQ(error.has_value(), misses) << error.value_or("taken");
    ++(misses ? refused : taken);
  }
  EXPECT_GT(refused, 30);
  EXPECT_GT(taken, 30);
}

TEST_F(IndexChecks, TheMessageNamesWhatIsShortAndWhere) {
  Tracing f;
  const i32 request = f.leaf("b");
  f.load("a", {request, f.leaf("q")});
  const Ints rows{0, 3, 8}, keys{0, 18, 48};
  const auto error = short_array(
      f, array_of({2, 20}), *ragged_kv({.qo_indptr = index_of(rows), .kv_indptr = index_of(keys)}));
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(
      *error,
      "mask: captured array a, dimension 1, has 20 elements and is indexed with 29 for request "
      "1 (q_idx = 25 to 29); expected at least 30 elements, or an index that is clamped: "
      "raddle.flex.ops.clamp(index, 0, 19)");
  EXPECT_FALSE(short_array(f, array_of({2, 30}),
                           *ragged_kv({.qo_indptr = index_of(rows), .kv_indptr = index_of(keys)})));
}

TEST_F(IndexChecks, ExplicitPositionsAreLookedAtOneByOne) {
  // Rows at positions 0 and 100, and an array that has no elements between: no pair asks for them.
  Tracing f;
  const i32 row = f.leaf("q");
  const i32 low = f.test("lt", {row, f.number(10)}), high = f.test("le", {f.number(90), row});
  const i32 between = f.test("not", {f.test("or", {low, high})});
  f.op("where", {between, f.load("a", {f.number(7)}), f.number(0)});
  const Ints rows{0, 2}, keys{0, 4}, apart{0, 100}, near{0, 50};
  const auto layout = [&](const Ints& positions) {
    return ragged_kv(
        {.qo_indptr = index_of(rows), .kv_indptr = index_of(keys), .qo_pos = index_of(positions)});
  };
  EXPECT_FALSE(short_array(f, array_of({4}), *layout(apart)));
  EXPECT_TRUE(short_array(f, array_of({4}), *layout(near)));
}

TEST_F(IndexChecks, RequestsWithoutRowsOrKeysAskForNothing) {
  Tracing f;
  f.load("a", {f.leaf("kv")});
  const Ints none{0, 0}, three{0, 3}, forty{0, 40};
  EXPECT_FALSE(short_array(
      f, array_of({1}), *ragged_kv({.qo_indptr = index_of(none), .kv_indptr = index_of(forty)})));
  EXPECT_FALSE(short_array(f, array_of({1}),
                           *ragged_kv({.qo_indptr = index_of(none), .kv_indptr = index_of(none)})));
  EXPECT_TRUE(short_array(
      f, array_of({1}), *ragged_kv({.qo_indptr = index_of(three), .kv_indptr = index_of(three)})));
}

TEST_F(IndexChecks, WhatCannotBeDecidedInFewPartsIsTaken) {
  // Of every pair one in a million misses: the search ends, and the kernel clamps.
  Tracing f;
  const i32 row = f.leaf("q"), key = f.leaf("kv");
  const i32 mixed = f.op("xor", {f.op("mul", {row, f.number(7919)}), key});
  const i32 rare = f.test("eq", {f.op("floor_mod", {mixed, f.number(999983)}), f.number(5)});
  f.op("where", {rare, f.load("a", {f.number(3)}), f.number(0)});
  const Ints ends{0, 1 << 20};
  EXPECT_FALSE(short_array(f, array_of({2}),
                           *ragged_kv({.qo_indptr = index_of(ends), .kv_indptr = index_of(ends)})));
}

TEST_F(IndexChecks, BoxesHaveAllPairs) {
  const Difference f{10};
  const Tracing tracing = f.tracing();
  const TracedFunction function = tracing.function();
  const Members members(function, {{"a", array_of({10})}});
  EXPECT_FALSE(find_short_array("mask", function, members.data(), pairs({0, 9}, {0, 9})));
  const auto error = find_short_array("mask", function, members.data(), pairs({0, 9}, {0, 10}));
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->find("request"), std::string::npos) << *error;
  EXPECT_FALSE(find_short_array("mask", function, members.data(), pairs({5, 4}, {0, 99})))
      << "no rows";
}

}  // namespace
}  // namespace raddle
