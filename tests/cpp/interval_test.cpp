// Interval arithmetic and the pyramid of captured tensors, against brute force.
#include "raddle/engine/core/interval.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "raddle/engine/core/ordered.h"
#include "test_seed.h"

namespace raddle {
namespace {

class IntervalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const u32 seed = test_seed();
    trace_.emplace(__FILE__, __LINE__, seed_text(seed));
    random_.seed(seed);
  }
  i32 draw(i32 a, i32 b) { return std::uniform_int_distribution<i32>(a, b)(random_); }
  IntInterval draw_interval() {
    const i32 reach = draw(0, 3) == 0 ? 2000000000 : 40;
    const i32 first = draw(-reach, reach);
    return IntInterval{first, first + draw(0, 12)};
  }

  template <class Op, class Over>
  void expect_contains(const char* name, Op op, Over over) {
    for (int repeat = 0; repeat < 400; ++repeat) {
      const IntInterval a = draw_interval(), b = draw_interval();
      const IntInterval r = over(a, b);
      for (i64 x = a.first; x <= a.last; ++x)
        for (i64 y = b.first; y <= b.last; ++y) {
          const i32 value = op(static_cast<i32>(x), static_cast<i32>(y));
          ASSERT_TRUE(r.first <= value && value <= r.last)
              << name << "(" << x << ", " << y << ") = " << value << ", not in [" << r.first << ", "
              << r.last << "]";
        }
    }
  }

  std::mt19937 random_;
  std::optional<testing::ScopedTrace> trace_;
};

#define EXPECT_CONTAINS(op)                               \
  expect_contains(                                        \
      #op, [](i32 a, i32 b) { return traced::op(a, b); }, \
      [](IntInterval a, IntInterval b) { return interval::op(a, b); })

TEST_F(IntervalTest, ContainsEveryIntegerResult) {
  EXPECT_CONTAINS(add);
  EXPECT_CONTAINS(sub);
  EXPECT_CONTAINS(mul);
  EXPECT_CONTAINS(floor_div);
  EXPECT_CONTAINS(floor_mod);
  EXPECT_CONTAINS(shift_left);
  EXPECT_CONTAINS(shift_right);
  EXPECT_CONTAINS(minimum);
  EXPECT_CONTAINS(maximum);
  expect_contains(
      "and", [](i32 a, i32 b) { return a & b; },
      [](IntInterval a, IntInterval b) { return interval::bit_and(a, b); });
  expect_contains(
      "or", [](i32 a, i32 b) { return a | b; },
      [](IntInterval a, IntInterval b) { return interval::bit_or(a, b); });
  expect_contains(
      "xor", [](i32 a, i32 b) { return a ^ b; },
      [](IntInterval a, IntInterval b) { return interval::bit_xor(a, b); });
  expect_contains(
      "abs", [](i32 a, i32) { return traced::abs(a); },
      [](IntInterval a, IntInterval) { return interval::abs(a); });
  expect_contains(
      "square", [](i32 a, i32) { return traced::mul(a, a); },
      [](IntInterval a, IntInterval) { return interval::square(a); });
}

TEST_F(IntervalTest, DividesAsPython) {
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const bool far = draw(0, 1) == 0;
    const i32 a = far ? draw(int_min, int_max) : draw(-50, 50);
    const i32 b = draw(0, 1) == 0 ? draw(int_min, int_max) : draw(-50, 50);
    if (b == 0) {
      EXPECT_EQ(traced::floor_div(a, b), 0);
      EXPECT_EQ(traced::floor_mod(a, b), 0);
      continue;
    }
    const i64 q = interval::floor_quotient(a, b);
    EXPECT_EQ(traced::floor_div(a, b), static_cast<i32>(q)) << a << " // " << b;
    EXPECT_EQ(traced::floor_mod(a, b), static_cast<i32>(a - q * b)) << a << " % " << b;
    EXPECT_EQ(traced::floor_div<7>(a), traced::floor_div(a, 7)) << a;
    EXPECT_EQ(traced::floor_mod<7>(a), traced::floor_mod(a, 7)) << a;
    EXPECT_EQ(traced::floor_div<8>(a), traced::floor_div(a, 8)) << a;
    EXPECT_EQ(traced::floor_mod<8>(a), traced::floor_mod(a, 8)) << a;
  }
  EXPECT_EQ(traced::floor_div(int_min, -1), int_min);
  EXPECT_EQ(traced::to_int(std::nanf("")), 0);
  EXPECT_EQ(traced::to_int(3e9f), int_max);
  EXPECT_EQ(traced::to_int(-3e9f), int_min);
  EXPECT_EQ(traced::to_int(-2.9f), -2);
}

TEST_F(IntervalTest, ModuloIsExactWithinOneQuotient) {
  const IntInterval r = interval::floor_mod(IntInterval{-3, -1}, interval::of(8));
  EXPECT_EQ(r.first, 5);
  EXPECT_EQ(r.last, 7);
}

TEST_F(IntervalTest, FloatsThatCannotBeTrustedAreUnknown) {
  const FloatInterval infinite{0.0f, math::infinity, false}, one = interval::of(1.0f);
  EXPECT_TRUE(interval::sub(infinite, infinite).nan);
  EXPECT_TRUE(interval::div(one, FloatInterval{-1.0f, 1.0f, false}).nan);
  EXPECT_TRUE(interval::sqrt(FloatInterval{-1.0f, 1.0f, false}).nan);
  EXPECT_TRUE(interval::less(interval::of(std::nanf("")), one).may_fail);
  const Truth sure = interval::less(interval::add(one, one), interval::of(2.5f));
  EXPECT_TRUE(sure.may_hold && !sure.may_fail);
}

template <class T>
std::vector<T> pyramid_over(const std::vector<T>& data) {
  const i64 n = static_cast<i64>(data.size());
  std::vector<T> pyramid(static_cast<std::size_t>(hull_size(n)) + 1, T{77});
  build_hull(data.data(), n, pyramid.data());
  EXPECT_EQ(pyramid.back(), T{77}) << "written past hull_size";
  return pyramid;
}

TEST_F(IntervalTest, PyramidFindsEverySpan) {
  for (const i32 n : {1, 2, 15, 16, 17, 255, 256, 257, 4095, 4097, 70000}) {
    std::vector<i32> data(static_cast<std::size_t>(n));
    for (i32& x : data) x = draw(-1000000, 1000000);
    const std::vector<i32> pyramid = pyramid_over(data);
    const SpanTensor<const i32, 1> t{data.data(), pyramid.data(), 0, {n}};
    for (int repeat = 0; repeat < 300; ++repeat) {
      const i32 first = draw(0, n - 1), last = draw(first, n - 1);
      const auto [least, most] = std::minmax_element(data.begin() + first, data.begin() + last + 1);
      const IntInterval r = interval::at(t, IntInterval{first, last});
      ASSERT_EQ(r.first, *least) << n << ": " << first << " … " << last;
      ASSERT_EQ(r.last, *most) << n << ": " << first << " … " << last;
    }
  }
}

TEST_F(IntervalTest, NanMakesASpanUnknown) {
  std::vector<float> data(5000, 1.0f);
  data[1234] = std::nanf("");
  const std::vector<float> pyramid = pyramid_over(data);
  const SpanTensor<const float, 1> t{data.data(), pyramid.data(), 0, {5000}};
  EXPECT_TRUE(interval::at(t, IntInterval{0, 4999}).nan);
  EXPECT_TRUE(interval::at(t, IntInterval{1234, 1234}).nan);
  EXPECT_FALSE(interval::at(t, IntInterval{1235, 4999}).nan);
  EXPECT_FALSE(interval::at(t, IntInterval{0, 1233}).nan);
}

TEST_F(IntervalTest, SpansOfSeveralDimensionsAreClampedAndWrapped) {
  const i32 rows = 5, cols = 40;
  std::vector<i32> data(static_cast<std::size_t>(rows * cols));
  for (i32& x : data) x = draw(-1000, 1000);
  const std::vector<i32> pyramid = pyramid_over(data);
  const SpanTensor<const i32, 2> t{data.data(), pyramid.data(), 0, {rows, cols}};
  for (int repeat = 0; repeat < 500; ++repeat) {
    const i32 i = draw(-8, 8), j = draw(-60, 60);
    const IntInterval a{i, i + draw(0, 3)}, b{j, j + draw(0, 30)};
    i32 least = int_max, most = int_min;
    for (i64 x = a.first; x <= a.last; ++x)
      for (i64 y = b.first; y <= b.last; ++y) {
        const i32 value = traced::at(t, traced::wrap(static_cast<i32>(x), rows),
                                     traced::wrap(static_cast<i32>(y), cols));
        least = std::min(least, value);
        most = std::max(most, value);
      }
    const IntInterval r = interval::at(t, a, b);
    ASSERT_TRUE(r.first <= least && most <= r.last);
    if (a.first >= 0 && b.first >= 0) {  // no wrapping: exact
      EXPECT_EQ(r.first, least);
      EXPECT_EQ(r.last, most);
    }
  }
}

TEST_F(IntervalTest, OrderIsThatOfEveryRow) {
  const std::vector<i32> rising{0, 0, 3, /**/ 1, 2, 2}, falling{5, 4, 4, /**/ 9, 9, 1};
  EXPECT_EQ(find_order(rising.data(), 6, 3), 1);
  EXPECT_EQ(find_order(rising.data(), 6, 6), 0);
  EXPECT_EQ(find_order(falling.data(), 6, 3), -1);
  EXPECT_EQ(find_order(rising.data(), 2, 2), 1);
  const float nan = std::nanf("");
  const std::vector<float> unknown{1.0f, nan, 2.0f};
  EXPECT_EQ(find_order(unknown.data(), 3, 3), 0);
}

bool is_everything(Range r) { return r.first == int_min && r.last == int_max; }

TEST_F(IntervalTest, ElementsBetweenTwoValuesAreAnIntervalOfIndices) {
  for (int repeat = 0; repeat < 500; ++repeat) {
    const i32 rows = draw(1, 3), cols = draw(1, 40);
    const bool rises = draw(0, 1) == 1;
    std::vector<i32> data(static_cast<std::size_t>(rows * cols));
    for (i32& x : data) x = draw(-9, 9);
    for (i32 row = 0; row < rows; ++row) {
      const auto begin = data.begin() + row * cols, end = begin + cols;
      std::sort(begin, end);
      if (!rises) std::reverse(begin, end);
    }
    const std::vector<i32> pyramid = pyramid_over(data);
    SpanTensor<const i32, 2> t{data.data(), pyramid.data(), rises ? 1 : -1, {rows, cols}};
    const i32 row = draw(0, rows - 1);
    const IntInterval value{draw(-10, 10), draw(-10, 10)};
    const i32 from = draw(0, cols + 3);
    const Range over{from, from + draw(0, cols + 3)};
    const Range found = interval::indices_of(t, value, over, interval::of(row));
    for (i32 i = over.first; i <= over.last; ++i) {
      const i32 x = traced::at(t, row, i);
      ASSERT_EQ(value.first <= x && x <= value.last, found.first <= i && i <= found.last)
          << i << " of " << over.first << " … " << over.last << ", " << cols << " columns";
    }
    if (rows > 1) {
      EXPECT_TRUE(is_everything(interval::indices_of(t, value, over, IntInterval{0, 1})));
    }
    t.order = 0;
    EXPECT_TRUE(is_everything(interval::indices_of(t, value, over, interval::of(row))));
  }
}

}  // namespace
}  // namespace raddle
