// Merging states on emulated threads, against the CPU: the same bits.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include "kv_gpu_testing.h"

namespace raddle {
namespace {

using namespace testing_kv;

/// States of [n, rows, heads, dim], some of them empty.
struct States {
  Owned o, lse;
  States(std::mt19937& random, i64 n, i64 rows, i64 heads, i64 dim)
      : o(DType::float32, {n, rows, heads, dim}, 4), lse(DType::float32, {n, rows, heads}, 1) {
    o.draw(random), lse.draw(random);
    auto* x = reinterpret_cast<float*>(lse.bytes.data());
    for (size_t i = 0; i < lse.bytes.size() / 4; ++i)
      if (random() % 3 == 0) x[i] = -math::infinity;
  }
};

struct Halve {
  template <class Vec>
  RADDLE_FN void output(Vec& o, const Row& r, float lse) const {
    const float factor = lse > 0.0f ? 0.5f : static_cast<float>(r.q_head);
    o.map([=](float x, i32) { return x * factor; });
  }
};

TEST(KvGpuMerge, StatesInOrderWithSinks) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const i64 n = 1 + random() % 6, rows = random() % 8, heads = 4;
    const i64 dim = std::vector<i64>{8, 24, 128, 256, 512}[random() % 5];
    const States states(random, n, rows, heads, dim);
    Owned out(DType::float32, {rows, heads, dim}, 4), lse(DType::float32, {rows, heads}, 1);
    Owned out_gpu = out, lse_gpu = lse;
    AttentionSpec finish;
    finish.num_qo_heads = 4, finish.num_kv_heads = 2;
    finish.head_dim_qk = finish.head_dim_vo = static_cast<i32>(dim);
    finish.variant = {sinks({0.5f, -1.0f, 2.0f, 0.0f})};
    const bool sunk = seed % 2 != 0;
    merge_states(states.o.ref, states.lse.ref, out.ref, lse.ref, sunk ? &finish : nullptr);
    const TensorRef &o = states.o.ref, &l = states.lse.ref;
    const auto from = [&](i64 first) {
      return StatesView{static_cast<const float*>(o.data) + first * o.stride[0],
                        static_cast<const float*>(l.data) + first * l.stride[0],
                        o.stride[0],
                        o.stride[1],
                        o.stride[2],
                        l.stride[0],
                        l.stride[1],
                        l.stride[2]};
    };
    MergeLaunch args{};
    args.view = {from(0),
                 from(1),
                 static_cast<float*>(out_gpu.ref.data),
                 static_cast<float*>(lse_gpu.ref.data),
                 out.ref.stride[0],
                 out.ref.stride[1],
                 lse.ref.stride[0],
                 lse.ref.stride[1],
                 static_cast<i32>(n),
                 static_cast<i32>(rows),
                 4,
                 static_cast<i32>(dim),
                 nullptr};
    args.num_units = rows * heads;
    args.group_size = 2;
    const float logit[] = {0.5f, -1.0f, 2.0f, 0.0f};
    Composition<NoMask, Sinks> sink{};
    sink.variants.first.logit = {logit, {4}};
    launch_units(args.num_units, random, [&] {
      if (sunk)
        kv::merge(args, sink);
      else
        kv::merge(args, Composition<NoMask>{});
    });
    ASSERT_EQ(out.bytes, out_gpu.bytes);
    ASSERT_EQ(lse.bytes, lse_gpu.bytes);
    // An output part sees the composed row.
    Owned halved = out_gpu;
    args.view.out = static_cast<float*>(halved.ref.data);
    if (sunk) continue;
    launch_units(args.num_units, random, [&] { kv::merge(args, Composition<NoMask, Halve>{}); });
    for (i64 r = 0; r < rows; ++r)
      for (i64 h = 0; h < heads; ++h)
        for (i64 d = 0; d < dim; ++d) {
          const i64 at = r * out.ref.stride[0] + h * out.ref.stride[1] + d;
          const float total = static_cast<float*>(lse.ref.data)[r * lse.ref.stride[0] + h];
          const float factor = total > 0.0f ? 0.5f : static_cast<float>(h);
          ASSERT_EQ(static_cast<float*>(halved.ref.data)[at],
                    static_cast<float*>(out.ref.data)[at] * factor);
        }
  }
}

}  // namespace
}  // namespace raddle
