// The errors that core/math.h states, over the ranges that it names.
#include "raddle/engine/core/math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "raddle/engine/variant/native.h"

namespace raddle {
namespace {

/// Of the largest error over random x in [first, last], and over x / 2, x / 4 …: as it is, or in
/// ulp of the exact result.
struct Errors {
  double absolute = 0.0, ulp = 0.0;
};

template <class Function, class Exact>
Errors errors_of(Function function, Exact exact, double first, double last) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> draw(first, last);
  Errors worst;
  for (int repeat = 0; repeat < 200000; ++repeat) {
    const auto x = static_cast<float>(std::ldexp(draw(random), -(repeat % 8)));
    const double expected = exact(double{x}), error = std::abs(double{function(x)} - expected);
    const auto nearest = static_cast<float>(expected);
    const double spacing = std::nextafter(std::abs(nearest), INFINITY) - std::abs(nearest);
    worst.absolute = std::max(worst.absolute, error);
    worst.ulp = std::max(worst.ulp, error / spacing);
  }
  return worst;
}

/// A function of math, which is always inlined, as something to pass on.
#define MATH(name) [](float x) { return math::name(x); }

constexpr float nan = __builtin_nanf("");

TEST(Math, Exponentials) {
  EXPECT_LE(errors_of(
                MATH(exp2), [](double x) { return std::exp2(x); }, -126.0, 127.9)
                .ulp,
            2.0);
  EXPECT_LE(errors_of(
                MATH(exp), [](double x) { return std::exp(x); }, -87.0, 88.6)
                .ulp,
            2.0);
  for (const auto function : {+MATH(exp2), +MATH(exp)}) {
    EXPECT_EQ(function(-math::infinity), 0.0f);
    EXPECT_EQ(function(-200.0f), 0.0f);
    EXPECT_EQ(function(200.0f), math::infinity);
    EXPECT_TRUE(std::isnan(function(nan)));
  }
}

TEST(Math, Logarithms) {
  const auto exact = [](double x) { return std::log2(x); };
  EXPECT_LE(errors_of(MATH(log2), exact, 2.0, 1e30).ulp, 1.5);
  EXPECT_LE(errors_of(MATH(log2), exact, 0.5, 2.0).absolute, 4e-7);
  EXPECT_EQ(math::log2(0.0f), -math::infinity);
  EXPECT_TRUE(std::isnan(math::log2(nan)));
}

TEST(Math, TangentsAndSigmoid) {
  const auto tanh = [](double x) { return std::tanh(x); };
  EXPECT_LE(errors_of(MATH(tanh), tanh, -20.0, 20.0).absolute, 0x1p-22);
  EXPECT_LE(errors_of(MATH(tanh_approx), tanh, -20.0, 20.0).absolute, 1e-4);
  EXPECT_LE(errors_of([](float x) { return native::tanh(x); }, tanh, -20.0, 20.0).absolute,
            0x1p-21);
  const auto capped = [](double x) { return std::tanh(x / 30.0); };
  EXPECT_LE(errors_of([](float x) { return native::tanh_ratio(x, 30.0f); }, capped, -400.0, 400.0)
                .absolute,
            0x1p-21);
  for (const float scale : {1.0f, -0.088f, 0.25f}) {
    const float limit = native::near_soft_cap_limit(scale, 30.0f);
    EXPECT_NEAR(limit, 0.55 * 30.0 / std::abs(scale), 1e-3);
    const auto near = [=](float s) { return native::near_soft_cap(s, scale, 30.0f) / 30.0f; };
    const auto exact = [=](double s) { return std::tanh(s * double{scale} / 30.0); };
    EXPECT_LE(errors_of(near, exact, -limit, limit).absolute, 0x1p-21);
    EXPECT_TRUE(std::isnan(near(nan)));
  }
  for (const float scale : {0.0f, 1e-6f, 1e6f, nan})
    EXPECT_LT(native::near_soft_cap_limit(scale, 30.0f), 0.0f);
  EXPECT_LT(native::near_soft_cap_limit(0.088f, 1e7f), 0.0f);
  const auto sigmoid = [](double x) { return 1.0 / (1.0 + std::exp(-x)); };
  EXPECT_LE(errors_of(MATH(sigmoid), sigmoid, -80.0, 80.0).ulp, 4.0);
  for (const auto function :
       {+MATH(tanh), +MATH(tanh_approx), +[](float x) { return native::tanh(x); }}) {
    EXPECT_NEAR(function(1e30f), 1.0f, 1e-4f);
    EXPECT_NEAR(function(-math::infinity), -1.0f, 1e-4f);
    EXPECT_TRUE(std::isnan(function(nan)));
  }
}

TEST(Math, SineAndCosine) {
  const double million = 1 << 20;
  EXPECT_LE(errors_of(
                MATH(sin), [](double x) { return std::sin(x); }, -million, million)
                .absolute,
            1e-7);
  EXPECT_LE(errors_of(
                MATH(cos), [](double x) { return std::cos(x); }, -million, million)
                .absolute,
            1e-7);
  EXPECT_TRUE(std::isnan(math::sin(math::infinity)));
  EXPECT_LE(std::abs(math::sin(1e30f)), 1.0f);
}

}  // namespace
}  // namespace raddle
