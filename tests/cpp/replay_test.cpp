// The replay's hash and its fp64 verification: what is right passes in every dtype and variant, and
// a fault of one key, one head or one weight does not.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "replay/synthetic.h"
#include "replay/verify.h"

namespace raddle::replay {
namespace {

std::vector<float> row(const LayerSpec& spec, Stream stream, i32 request, i32 position, i32 head) {
  std::vector<float> out;
  dispatch_dtype(spec.dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<T> typed(static_cast<std::size_t>(spec.head_dim));
    const i64 owner = spec.prompts.owner(stream, request, position);
    fill_row({spec.seed, stream, spec.layer, owner, position, head}, spec.head_dim, typed.data());
    for (const T x : typed) out.push_back(to_float(x));
  });
  return out;
}

/// A fault: changes a key's logit (-inf: dropped) or nothing.
using Fault = std::function<float(i32 position, float logit)>;

/// What an engine computes in fp32, in the simplest order, rounded to the dtype.
std::vector<float> attend(
    const LayerSpec& spec, i32 request, i32 position, i32 head,
    const Fault& fault = [](i32, float s) { return s; }) {
  const i32 kv_head = head / (spec.num_qo_heads / spec.num_kv_heads);
  const auto dim = static_cast<std::size_t>(spec.head_dim);
  const std::vector<float> q = row(spec, Stream::query, request, position, head);
  std::vector<float> o(dim, 0.0f);
  const float infinity = std::numeric_limits<float>::infinity();
  float top = spec.sinks ? sink_logit(spec.seed, spec.layer, head) : -infinity;
  float total = spec.sinks ? 1.0f : 0.0f;
  const i32 first = spec.window_left < 0 ? 0 : std::max(0, position - spec.window_left);
  for (i32 c = first; c <= position; ++c) {
    const std::vector<float> k = row(spec, Stream::key, request, c, kv_head);
    const std::vector<float> v = row(spec, Stream::value, request, c, kv_head);
    float s = 0.0f;
    for (std::size_t d = 0; d < dim; ++d) s += q[d] * k[d];
    s *= static_cast<float>(spec.scale);
    const float cap = static_cast<float>(spec.soft_cap);
    s = fault(c, cap > 0.0f ? cap * std::tanh(s / cap) : s);
    if (s == -infinity) continue;
    const float next = std::max(top, s);
    const float keep = std::exp(top - next), p = std::exp(s - next);
    for (std::size_t d = 0; d < dim; ++d) o[d] = o[d] * keep + p * v[d];
    total = total * keep + p;
    top = next;
  }
  for (float& x : o) x /= total;
  dispatch_dtype(spec.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (float& x : o) x = to_float(from_float<T>(x));
  });
  return o;
}

LayerSpec llama() {
  LayerSpec spec;
  spec.seed = 11;
  spec.layer = 1;
  spec.num_qo_heads = 32;
  spec.num_kv_heads = 8;
  spec.scale = 1.0 / std::sqrt(128.0);
  return spec;
}

double ratio(const LayerSpec& spec, i32 request, i32 position, i32 head,
             const std::vector<float>& found) {
  return verify(spec, {{request, position, head, found.data()}})[0].ratio;
}

/// The first flat or peaked (position, head) at or after `position`.
i32 head_of(const LayerSpec& spec, i32 request, i32 position, float amplitude) {
  for (i32 h = 0; h < spec.num_qo_heads; ++h) {
    const RowId id{spec.seed, Stream::query, spec.layer, request, position, h};
    if (row_key(id).amplitude == amplitude) return h;
  }
  ADD_FAILURE() << "no head has amplitude " << amplitude;
  return 0;
}

TEST(ReplayHash, ElementsHaveUnitVarianceAndFieldsMatter) {
  const RowId base{7, Stream::key, 1, 2, 3, 4};
  const std::vector<RowId> others{{8, Stream::key, 1, 2, 3, 4}, {7, Stream::value, 1, 2, 3, 4},
                                  {7, Stream::key, 2, 2, 3, 4}, {7, Stream::key, 1, 3, 3, 4},
                                  {7, Stream::key, 1, 2, 4, 4}, {7, Stream::key, 1, 2, 3, 5},
                                  {7, Stream::key, 1, 3, 2, 4}};
  const auto correlation = [](const RowId& a, const RowId& b) {
    double sum = 0.0;
    for (u32 e = 0; e < 4096; ++e)
      sum += static_cast<double>(element(row_key(a), e) * element(row_key(b), e));
    return sum / 4096;
  };
  EXPECT_NEAR(correlation(base, base), 1.0, 0.1);
  for (const RowId& other : others) EXPECT_NEAR(correlation(base, other), 0.0, 0.07);
}

TEST(ReplayHash, AQuarterOfTheQueriesIsPeaked) {
  i32 peaked = 0;
  for (i32 h = 0; h < 4000; ++h) peaked += row_key({1, Stream::query, 0, 0, 0, h}).amplitude > 1.0f;
  EXPECT_NEAR(peaked, 1000, 100);
  EXPECT_EQ(row_key({1, Stream::key, 0, 0, 0, 0}).amplitude, 1.0f);
}

TEST(ReplayFill, WritesStridedRows) {
  const i32 request[] = {5, 5, 9}, position[] = {0, 1, 70};
  std::vector<bf16> pool(3 * 400, bf16{0x7fc0});
  TensorRef out = TensorRef::contiguous(pool.data(), DType::bfloat16, 3, 2, 104);
  out.stride[0] = 400;
  out.stride[1] = 200;
  fill(Stream::value, {3, 1, request, position}, out);
  std::vector<bf16> expected(104);
  for (i32 r = 0; r < 3; ++r) {
    for (i32 h = 0; h < 2; ++h) {
      fill_row({3, Stream::value, 1, request[r], position[r], h}, 104, expected.data());
      for (i32 e = 0; e < 104; ++e) {
        EXPECT_EQ(pool[static_cast<std::size_t>(r * 400 + h * 200 + e)].bits,
                  expected[static_cast<std::size_t>(e)].bits);
      }
    }
  }
  EXPECT_EQ(pool[104].bits, 0x7fc0) << "written past a row";
}

TEST(ReplayFill, KeysBelongToBlocksRequestsAndSamples) {
  // Request 0 has blocks 7 and 3 of four tokens, request 1 has 7 alone, request 2 none; 4 is the
  // second sample of request 1.
  const i64 indptr[] = {0, 2, 3, 3}, ids[] = {7, 3, 7}, tokens[] = {9, 6, 5};
  const SharedPrompts prompts{4, 3, indptr, ids, tokens};
  const auto filled = [&](Stream stream, i32 request, i32 position) {
    std::vector<float> out(16);
    fill(stream, {3, 1, &request, &position, prompts},
         TensorRef::contiguous(out.data(), DType::float32, 1, 1, 16));
    return out;
  };
  for (const Stream stream : {Stream::key, Stream::value}) {
    for (i32 position = 0; position < 4; ++position) {
      EXPECT_EQ(filled(stream, 0, position), filled(stream, 1, position));
      EXPECT_NE(filled(stream, 0, position), filled(stream, 2, position));
    }
    EXPECT_NE(filled(stream, 0, 0), filled(stream, 0, 1));
    for (i32 position : {4, 7, 8}) {
      EXPECT_NE(filled(stream, 0, position), filled(stream, 1, position)) << position;
    }
  }
  for (i32 position = 0; position < 6; ++position)
    EXPECT_EQ(filled(Stream::key, 4, position), filled(Stream::key, 1, position)) << position;
  EXPECT_NE(filled(Stream::key, 4, 6), filled(Stream::key, 1, 6)) << "generated";
  EXPECT_NE(filled(Stream::query, 4, 2), filled(Stream::query, 1, 2));
  EXPECT_NE(filled(Stream::query, 0, 2), filled(Stream::query, 1, 2));
  EXPECT_NE(filled(Stream::key, 0, 0), filled(Stream::value, 0, 0));
}

TEST(ReplayVerify, PassesWhatIsRight) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (i32 parts = 0; parts < 8; ++parts) {
      LayerSpec spec = llama();
      spec.dtype = dtype;
      spec.window_left = parts & 1 ? 127 : -1;
      spec.soft_cap = parts & 2 ? 50.0 : 0.0;
      spec.sinks = parts & 4;
      for (const i32 position : {0, 1, 127, 128, 700}) {
        for (const i32 head : {0, 9, 31}) {
          const double worst = ratio(spec, 3, position, head, attend(spec, 3, position, head));
          EXPECT_LT(worst, 0.8) << "dtype " << static_cast<i32>(dtype) << " parts " << parts;
        }
      }
    }
  }
}

TEST(ReplayVerify, OneKeyMissingShows) {
  const LayerSpec spec = llama();
  for (const i32 position : {999, 4095}) {
    const i32 head = head_of(spec, 0, position, flat_amplitude);
    for (const i32 dropped : {0, 17, position / 2, position}) {
      const auto found = attend(spec, 0, position, head, [&](i32 c, float s) {
        return c == dropped ? -std::numeric_limits<float>::infinity() : s;
      });
      EXPECT_GT(ratio(spec, 0, position, head, found), 1.0)
          << "key " << dropped << " of " << position;
    }
  }
}

TEST(ReplayVerify, FaultsShow) {
  LayerSpec spec = llama();
  spec.window_left = 127;
  spec.soft_cap = 50.0;
  spec.sinks = true;
  const i32 position = 500;
  const auto worst = [&](const LayerSpec& wrong, i32 head) {
    return ratio(spec, 2, position, head, attend(wrong, 2, position, head));
  };
  const i32 flat = head_of(spec, 2, position, flat_amplitude);
  const i32 peaked = head_of(spec, 2, position, peaked_amplitude);
  LayerSpec wrong = spec;
  wrong.window_left = 126;
  EXPECT_GT(worst(wrong, flat), 1.0) << "window";
  wrong = spec;
  wrong.sinks = false;
  EXPECT_GT(worst(wrong, flat), 1.0) << "sinks";
  wrong = spec;
  wrong.scale *= 1.05;
  EXPECT_GT(worst(wrong, peaked), 1.0) << "scale";
  wrong = spec;
  wrong.soft_cap = 0.0;
  EXPECT_GT(worst(wrong, peaked), 1.0) << "soft cap";
  for (const i32 head : {flat, peaked}) {
    const auto heavier =
        attend(spec, 2, position, head, [](i32 c, float s) { return c < 440 ? s + 0.1f : s; });
    EXPECT_GT(ratio(spec, 2, position, head, heavier), 1.0) << "merge weight";
    const auto swapped = attend(spec, 2, position, head ^ 1);
    EXPECT_GT(ratio(spec, 2, position, head, swapped), 1.0) << "head";
    auto broken = attend(spec, 2, position, head);
    broken[77] = std::nanf("");
    EXPECT_EQ(ratio(spec, 2, position, head, broken), std::numeric_limits<double>::infinity());
  }
}

TEST(ReplayVerify, KnowsWhatRequestsShare) {
  LayerSpec spec = llama();
  const i32 position = 600, head = head_of(spec, 0, position, flat_amplitude);
  const std::vector<float> unshared = attend(spec, 0, position, head);
  const i64 indptr[] = {0, 1}, ids[] = {5}, tokens[] = {560};
  spec.prompts = {512, 1, indptr, ids, tokens};
  EXPECT_GT(ratio(spec, 0, position, head, unshared), 1.0);
  EXPECT_LT(ratio(spec, 0, position, head, attend(spec, 0, position, head)), 0.8);
}

TEST(ReplayVerify, RotatesAsLlamaDoes) {
  // With one key, any rotation leaves o = v; with two, the weights must be those of the rotated
  // logits.
  LayerSpec spec = llama();
  spec.dtype = DType::float32;
  spec.rope.rotary_dim = 128;
  spec.rope.theta = 500000.0;
  spec.rope.scaling = RopeScaling{};
  const i32 head = head_of(spec, 0, 1, flat_amplitude), kv_head = head / 4;
  const std::vector<float> q = row(spec, Stream::query, 0, 1, head);
  std::vector<double> weight;
  for (i32 c = 0; c < 2; ++c) {
    const std::vector<float> k = row(spec, Stream::key, 0, c, kv_head);
    double s = 0.0;
    for (std::size_t i = 0; i < 64; ++i) {
      double f = std::pow(500000.0, -static_cast<double>(i) / 64.0);
      const double wavelength = 2.0 * 3.14159265358979323846 / f;
      if (wavelength > 8192.0) {
        f /= 8.0;
      } else if (wavelength > 8192.0 / 4.0) {
        const double smooth = (8192.0 / wavelength - 1.0) / 3.0;
        f = (1.0 - smooth) * f / 8.0 + smooth * f;
      }
      // Only the distance counts: q turned by it, k left.
      const double angle = (1 - c) * f;
      const double a = static_cast<double>(q[i]), b = static_cast<double>(q[i + 64]);
      s += (a * std::cos(angle) - b * std::sin(angle)) * static_cast<double>(k[i]) +
           (b * std::cos(angle) + a * std::sin(angle)) * static_cast<double>(k[i + 64]);
    }
    weight.push_back(std::exp(s * spec.scale));
  }
  std::vector<float> o(128);
  const std::vector<float> v0 = row(spec, Stream::value, 0, 0, kv_head);
  const std::vector<float> v1 = row(spec, Stream::value, 0, 1, kv_head);
  for (std::size_t d = 0; d < 128; ++d) {
    o[d] = static_cast<float>(
        (weight[0] * static_cast<double>(v0[d]) + weight[1] * static_cast<double>(v1[d])) /
        (weight[0] + weight[1]));
  }
  EXPECT_LT(ratio(spec, 0, 1, head, o), 0.8);
  spec.rope = {};
  EXPECT_GT(ratio(spec, 0, 1, head, o), 1.0);
}

}  // namespace
}  // namespace raddle::replay
