// Conversions of 8-bit numbers, against the definition in fp64.
#include "raddle/engine/core/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace raddle {
namespace {

/// The value of the bits of a number with `mantissa` and 7 - `mantissa` bits.
double value_of(u32 bits, int mantissa, int bias) {
  const int exponent = static_cast<int>((bits & 0x7fu) >> mantissa);
  const double fraction = std::ldexp(bits & ((1u << mantissa) - 1u), -mantissa);
  const double size =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
  return (bits & 0x80u) != 0 ? -size : size;
}

template <class T>
struct Format;
template <>
struct Format<e4m3> {
  static constexpr int mantissa = 3, bias = 7;
  static constexpr u32 largest = 0x7e;
  static bool is_finite(u32 bits) { return (bits & 0x7fu) != 0x7fu; }
};
template <>
struct Format<e5m2> {
  static constexpr int mantissa = 2, bias = 15;
  static constexpr u32 largest = 0x7b;
  static bool is_finite(u32 bits) { return (bits & 0x7cu) != 0x7cu; }
};

template <class T>
class Fp8 : public testing::Test {
 protected:
  using Definition = Format<T>;
  static float widened(u32 bits) { return to_float(T{static_cast<u8>(bits)}); }
  static u32 narrowed(float x) { return from_float<T>(x).bits; }

  /// The nearest finite number; of two the one with an even mantissa.
  static u32 nearest(double x) {
    const double size = std::min(std::abs(x), 1e6);  // beyond, all are equally far in fp64
    u32 best = 0;
    for (u32 bits = 0; bits <= Definition::largest; ++bits) {
      const double off = std::abs(value_of(bits, Definition::mantissa, Definition::bias) - size);
      const double least = std::abs(value_of(best, Definition::mantissa, Definition::bias) - size);
      if (off < least || (off == least && bits % 2 == 0)) best = bits;
    }
    return best | (std::signbit(x) ? 0x80u : 0u);
  }
};

using Types = testing::Types<e4m3, e5m2>;
TYPED_TEST_SUITE(Fp8, Types);

TYPED_TEST(Fp8, EveryNumberHasItsValueAndComesBack) {
  using F = typename TestFixture::Definition;
  for (u32 bits = 0; bits < 256; ++bits) {
    if (!F::is_finite(bits)) continue;
    const double value = value_of(bits, F::mantissa, F::bias);
    EXPECT_EQ(static_cast<double>(this->widened(bits)), value) << bits;
    EXPECT_EQ(this->narrowed(static_cast<float>(value)), bits) << value;
  }
  EXPECT_EQ(static_cast<double>(TypeParam::max_finite), value_of(F::largest, F::mantissa, F::bias));
}

TYPED_TEST(Fp8, RoundsToTheNearestEvenOne) {
  using F = typename TestFixture::Definition;
  std::mt19937 random(7);
  for (u32 bits = 0; bits < F::largest; ++bits) {
    const float low = this->widened(bits), high = this->widened(bits + 1);
    const float middle = low + (high - low) / 2.0f;
    for (const float x : {middle, std::nextafter(middle, low), std::nextafter(middle, high)})
      for (const float y : {x, -x})
        ASSERT_EQ(this->narrowed(y), this->nearest(static_cast<double>(y))) << y;
  }
  for (int i = 0; i < 100'000; ++i) {
    const float x = bits_to_float(static_cast<u32>(random()));
    if (!std::isfinite(x)) continue;
    ASSERT_EQ(this->narrowed(x), this->nearest(static_cast<double>(x))) << x;
  }
}

TYPED_TEST(Fp8, SaturatesAndKeepsNaN) {
  using F = typename TestFixture::Definition;
  const float infinity = INFINITY;
  EXPECT_EQ(this->narrowed(infinity), F::largest);
  EXPECT_EQ(this->narrowed(-infinity), F::largest | 0x80u);
  EXPECT_EQ(this->narrowed(3e38f), F::largest);
  EXPECT_EQ(this->narrowed(-0.0f), 0x80u);
  EXPECT_TRUE(std::isnan(this->widened(0x7f)) && std::isnan(this->widened(0xff)));
  EXPECT_TRUE(std::isnan(this->widened(this->narrowed(NAN))));
  EXPECT_TRUE(std::isnan(this->widened(this->narrowed(-NAN))));
  // e5m2 has infinities, which K and V may hold though nothing here makes them.
  EXPECT_EQ(to_float(e5m2{0x7c}), infinity);
}

TEST(Int8, EveryIntegerComesBack) {
  for (int i = -127; i <= 127; ++i) {
    EXPECT_EQ(from_float<s8>(static_cast<float>(i)).value, i);
    EXPECT_EQ(to_float(s8{static_cast<signed char>(i)}), static_cast<float>(i));
  }
  EXPECT_EQ(to_float(s8{-128}), -128.0f);
}

TEST(Int8, RoundsToTheNearestEvenOneAndSaturates) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> near(-140.0f, 140.0f);
  for (int i = 0; i < 100'000; ++i) {
    const float x = i < 600 ? static_cast<float>(i - 300) / 2.0f : near(random);
    const double nearest = std::nearbyint(static_cast<double>(x));
    ASSERT_EQ(from_float<s8>(x).value, std::clamp(nearest, -127.0, 127.0)) << x;
  }
  EXPECT_EQ(from_float<s8>(INFINITY).value, 127);
  EXPECT_EQ(from_float<s8>(-INFINITY).value, -127);
  EXPECT_EQ(from_float<s8>(-3e38f).value, -127);
  EXPECT_EQ(from_float<s8>(NAN).value, 0);
  EXPECT_EQ(from_float<s8>(-NAN).value, 0);
}

}  // namespace
}  // namespace raddle
