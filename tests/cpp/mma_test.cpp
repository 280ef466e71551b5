// The GPU kernel on emulated threads, against the fp64 reference: the same plans, layouts and
// variants as the CPU kernel's test.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include <algorithm>

#include "attention_testing.h"
#include "layout_testing.h"
#include "plan/heuristics.h"
#include "plan/planner.h"
#include "plan_testing.h"
#include "raddle/engine/kernel/mma/attention.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/shipped.h"

namespace raddle {
namespace {

using namespace testing_attention;
using plan_testing::cover;

/// Transforms of every kind that leave attention as it is.
struct ThereAndBack {
  template <class Vec>
  RADDLE_FN void query(Vec& q, const Row&) const {
    q.map([](float x, i32) { return 2.0f * x; });
  }
  template <class Vec>
  RADDLE_FN void key(Vec& k, const Key&) const {
    k.half_pairs(dim_qk, [](float& a, float& b, i32) { a *= 0.5f, b *= 0.5f; });
  }
  template <class Vec>
  RADDLE_FN void value(Vec& v, const Key&) const {
    v.interleaved_pairs(dim_vo, [](float& a, float& b, i32) { a *= 2.0f, b *= 2.0f; });
  }
  template <class Vec>
  RADDLE_FN void output(Vec& o, const Row&, float) const {
    const float ones = o.sum([](float) { return 1.0f; });
    o.map([&](float x, i32) { return x * (0.5f * ones / static_cast<float>(dim_vo)); });
  }
};

/// The same of keys alone: K's rows are widened, V's stay bytes.
struct KeysThereAndBack {
  template <class Vec>
  RADDLE_FN void query(Vec& q, const Row&) const {
    q.map([](float x, i32) { return 2.0f * x; });
  }
  template <class Vec>
  RADDLE_FN void key(Vec& k, const Key&) const {
    k.map([](float x, i32) { return 0.5f * x; });
  }
};

/// Powers of two, by which multiplying what a part will change is exact.
void round_scales(Tensors& t) {
  for (Owned* scale : {&t.k_scale, &t.v_scale}) {
    auto* x = reinterpret_cast<float*>(scale->bytes.data());
    for (std::size_t i = 0; i < scale->bytes.size() / 4; ++i)
      x[i] = std::copysign(std::exp2(std::round(std::log2(std::abs(x[i])))), x[i]);
  }
}

/// Runs a kernel on blocks of emulated threads, one after another, in an order that no kernel may
/// rely on.
template <class Kernel, class V>
void run_blocks(const GpuLaunch& launch, const V& variant, std::mt19937& random) {
  const i32 blocks = ceil_div(launch.plan.num_workers, Kernel::teams);
  std::vector<i32> order;
  for (i32 i = 0; i < blocks; ++i) order.push_back(i);
  std::shuffle(order.begin(), order.end(), random);
  for (const i32 index : order) {
    emulated::Block block(index, mma::num_threads, Kernel::teams * Kernel::config.shared_bytes,
                          blocks, Kernel::teams);
    block.run([&] {
      if constexpr (Kernel::short_only)
        mma::attend_short<Kernel>(launch, variant);
      else
        mma::attend<Kernel>(launch, variant);
    });
  }
}

/// Runs a layout on blocks of emulated threads and compares.
template <class T, class S, i32 arch = 80, bool short_only = false, class V>
void check(const LayoutPtr& layout, const V& variant, const reference::Parts& parts,
           i32 num_workers, std::mt19937& random) {
  constexpr DType dtype = dtype_of<T>::value;
  AttentionSpec spec;
  spec.num_qo_heads = qo_heads;
  spec.num_kv_heads = kv_heads;
  spec.head_dim_qk = dim_qk;
  spec.head_dim_vo = dim_vo;
  spec.dtype = dtype;
  if (is_quantized<S>) spec.kv_dtype = dtype_of<S>::value;
  const bool has_lse = parts.scan == Scan::softmax;
  Tensors t(random, dtype, dtype_of<S>::value, layout->num_rows());
  if (has_key<V> || has_value<V>) round_scales(t);
  std::fill(t.out.bytes.begin(), t.out.bytes.end(), std::byte{0xff});
  std::fill(t.lse.bytes.begin(), t.lse.bytes.end(), std::byte{0xff});
  const PlanArrays plan =
      make_plan(layout->view(),
                gpu_plan_config(spec, arch, KernelFamily::mma, 0, num_workers,
                                short_only ? Schedule::algorithm1 : Schedule::automatic),
                cover(variant));

  GpuLaunch launch{};
  launch.layout = layout->view();
  std::copy_n(launch.layout.levels, launch.layout.num_levels, launch.levels);
  launch.plan = plan.view();
  const KvView kv{pool_of(t.k.ref), pool_of(t.v.ref)};
  std::fill_n(launch.kv, layout->levels().size(), kv);
  const reference::Problem problem = problem_of(*layout, t, dtype, Case{"", {}, parts});
  const KvScales scales{problem.kv[0].k_scale, problem.kv[0].v_scale};
  std::fill_n(launch.kv_scales, layout->levels().size(), scales);
  launch.q = RowsView{t.q.ref.data, t.q.ref.stride[0], t.q.ref.stride[1]};
  launch.out = RowsView{t.out.ref.data, t.out.ref.stride[0], t.out.ref.stride[1]};
  if (has_lse) launch.lse = RowsView{t.lse.ref.data, t.lse.ref.stride[0], t.lse.ref.stride[1]};
  const auto rows = static_cast<std::size_t>(launch.plan.num_partial_rows);
  std::vector<float> partial_o(rows * dim_vo, NAN), partial_lse(rows, NAN);
  std::vector<i32> arrived(static_cast<std::size_t>(launch.plan.num_contractions * kv_heads));
  launch.partial_o = partial_o.data();
  launch.partial_lse = partial_lse.data();
  launch.arrived = arrived.data();
  i32 drawn[2] = {};
  launch.drawn = drawn;
  launch.scale = spec.softmax_scale();
  if (short_only && layout->view().levels[0].num_groups == 2 && num_workers == 4 * kv_heads) {
    for (i32 i = 0; i < launch.plan.num_items; ++i) EXPECT_EQ(launch.plan.items[i].paired_half, 1);
  }
  run_blocks<mma::Kernel<T, S, dim_qk, dim_vo, arch, V, short_only>>(launch, variant, random);
  if (short_only) {  // the other kernel has no teams that compose halves, and the same bits
    const auto out = t.out.bytes, lse = t.lse.bytes;
    run_blocks<mma::Kernel<T, S, dim_qk, dim_vo, arch, V>>(launch, variant, random);
    EXPECT_TRUE(out == t.out.bytes);
    EXPECT_TRUE(lse == t.lse.bytes);
  }
  expect_within(problem, t, dtype, has_lse, true);
  EXPECT_EQ(std::count(arrived.begin(), arrived.end(), 0), static_cast<i64>(arrived.size()));
  EXPECT_EQ(drawn[0] + drawn[1], 0);
}

/// Dtypes of Q and O, and of K and V.
template <class Element, class StoredElement>
struct Pair {
  using T = Element;
  using S = StoredElement;
};

template <class Types>
class MmaTest : public testing::Test {
 protected:
  /// The variants of attention_testing.h as compositions.
  void check_all(const LayoutPtr& layout, i32 num_workers) {
    const std::vector<Case> all = cases();
    check<typename Types::T, typename Types::S>(layout, Composition<NoMask>{}, all[0].parts,
                                                num_workers, random);
    check<typename Types::T, typename Types::S>(layout, Composition<Leaf<0>, Causal>{},
                                                all[1].parts, num_workers, random);
    Composition<AllOf<Leaf<1>, Leaf<2>>, SoftCap, SlidingWindow, Causal> gemma{};
    gemma.variants.first.cap = 2.0f;
    gemma.variants.rest.first = SlidingWindow{9, -1};
    check<typename Types::T, typename Types::S>(layout, gemma, all[2].parts, num_workers, random);
    const float logit[] = {0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -3.0f};
    Composition<AllOf<Leaf<1>, Leaf<2>>, Sinks, SlidingWindow, Causal> oss{};
    oss.variants.first.logit = {logit, {6}};
    oss.variants.rest.first = SlidingWindow{9, -1};
    check<typename Types::T, typename Types::S>(layout, oss, all[3].parts, num_workers, random);
    Composition<NoMask, Sigmoid> sigmoid_only{};
    sigmoid_only.variants.first.bias = -1.0f;
    check<typename Types::T, typename Types::S>(layout, sigmoid_only, all[4].parts, num_workers,
                                                random);
    check<typename Types::T, typename Types::S>(layout, Composition<NoMask, ThereAndBack>{},
                                                all[0].parts, num_workers, random);
  }
  std::mt19937 random{7};
};

#if defined(__SANITIZE_ADDRESS__)
// Which bytes a kernel touches depends on their number alone; every pair takes the sanitizers
// minutes.
using Pairs = testing::Types<Pair<f16, f16>, Pair<bf16, bf16>, Pair<f16, e5m2>, Pair<bf16, s8>>;
#else
using Pairs = testing::Types<Pair<f16, f16>, Pair<bf16, bf16>, Pair<f16, e5m2>, Pair<bf16, e4m3>,
                             Pair<f16, e4m3>, Pair<bf16, e5m2>, Pair<f16, s8>, Pair<bf16, s8>>;
#endif
TYPED_TEST_SUITE(MmaTest, Pairs);

TYPED_TEST(MmaTest, Pages) { this->check_all(pages(), 1); }
TYPED_TEST(MmaTest, PagesOnManyBlocks) { this->check_all(pages(), 9); }
TYPED_TEST(MmaTest, BlocksWithMaskBits) { this->check_all(blocks(this->random), 3); }
/// Two teams a block. Of equal requests every tile is cut in two, whose halves end jointly.
TYPED_TEST(MmaTest, TwoTeams) {
  using T = typename TypeParam::T;
  using S = typename TypeParam::S;
  const auto decode = [this](const Ints& kv_len) {
    Table t{4, {0}, kv_len, {0}, {}};
    for (const i32 length : kv_len) {
      t.qo_indptr.push_back(t.qo_indptr.back() + 1);
      for (i32 i = 0; i < ceil_div(length, t.page_size); ++i)
        t.pages.push_back(static_cast<i32>(this->random() % 40));
      t.page_indptr.push_back(static_cast<i32>(t.pages.size()));
    }
    return paged_kv(t.args());
  };
  static_assert(mma::Kernel<T, S, dim_qk, dim_vo, 80, Composition<NoMask>, true>::teams == 2);
  const std::vector<Case> all = cases();
  Composition<Leaf<0>, Causal> causal{};
  Composition<NoMask, Sigmoid> sigmoid{};
  sigmoid.variants.first.bias = -1.0f;
  for (const i32 workers : {4 * kv_heads, 3, 7}) {
    const LayoutPtr equal = decode({400, 400}), uneven = decode({300, 1, 0, 140});
    check<T, S, 80, true>(equal, causal, all[1].parts, workers, this->random);
    check<T, S, 80, true>(uneven, causal, all[1].parts, workers, this->random);
    check<T, S, 80, true>(equal, sigmoid, all[4].parts, workers, this->random);
  }
}
/// An odd number of slots puts K where V was, whose rows are shorter.
TYPED_TEST(MmaTest, OddSlots) {
  using T = typename TypeParam::T;
  using S = typename TypeParam::S;
  using V = Composition<NoMask, KeysThereAndBack>;
  using Kernel = mma::Kernel<T, S, dim_qk, dim_vo, 86, V>;
  static_assert(Kernel::short_slots == 3 && Kernel::KeyRows::pitch != Kernel::ValueRows::pitch);
  const Case plain = cases()[0];
  check<T, S, 86>(pages(), V{}, plain.parts, 2, this->random);
}
/// Tiles of sm_75, which has no bf16.
TYPED_TEST(MmaTest, LittleSharedMemory) {
  using T = typename TypeParam::T;
  using S = typename TypeParam::S;
  if constexpr (dtype_of<T>::value == DType::float16) {
    const Case plain = cases()[0];
    check<T, S, 75>(pages(), Composition<NoMask>{}, plain.parts, 2, this->random);
    check<T, S, 75>(pages(), Composition<NoMask, ThereAndBack>{}, plain.parts, 2, this->random);
  }
}
TYPED_TEST(MmaTest, TwoLevels) { this->check_all(two_levels(), 5); }

/// A prefix of many decodes, whose chunks deal their contractions: all to one chunk, more than a
/// warp's lanes look up at a time to few, and one or two to many.
TEST(MmaQueueEnd, APrefixOfManyDecodes) {
  std::mt19937 random(5);
  constexpr i32 requests = 30, prefix = 80;
  Table shared{4, {0, requests}, {prefix}, {0, prefix / 4}, {}};
  Table own{4, {0}, {}, {0}, {}};
  for (i32 i = 0; i < prefix / 4; ++i) shared.pages.push_back(static_cast<i32>(random() % 40));
  for (i32 i = 0; i < requests; ++i) {
    own.qo_indptr.push_back(i + 1);
    own.kv_len.push_back(static_cast<i32>(random() % 9));
    for (i32 j = 0; j < ceil_div(own.kv_len.back(), 4); ++j)
      own.pages.push_back(static_cast<i32>(random() % 40));
    own.page_indptr.push_back(static_cast<i32>(own.pages.size()));
  }
  const Ints begin(requests, prefix);
  PagedArgs suffixes = own.args();
  suffixes.kv_begin = index_of(begin);
  const LayoutPtr layout = cascade({paged_kv(shared.args()), paged_kv(suffixes)});
  for (const i32 workers : {1, 3, 40})
    check<f16, f16>(layout, Composition<Leaf<0>, Causal>{}, cases()[1].parts, workers, random);
}

/// The conversions of a register's bytes, against those of a number.
template <class S>
void check_bytes(u32 x, void (*widen)(u32 (&)[2], u32, S), const i32 (&order)[4]) {
  u32 y[2];
  widen(y, x, S{});
  for (i32 i = 0; i < 4; ++i) {
    const f16 got{static_cast<u16>(y[i / 2] >> (16 * (i % 2)))};
    const float expected = to_float(__builtin_bit_cast(S, static_cast<u8>(x >> (8 * order[i]))));
    if (std::isnan(expected))
      EXPECT_TRUE(std::isnan(to_float(got))) << std::hex << x;
    else
      EXPECT_EQ(to_float(got), expected) << std::hex << x;
  }
}

TEST(MmaQuantized, FourNumbersAtATime) {
  for (u32 i = 0; i < 256; ++i) {
    const u32 x = i | (i ^ 0xa5) << 8 | (i * 7 & 0xff) << 16 | (255 - i) << 24;
    check_bytes<e4m3>(x, mma::widen_in_order, {0, 1, 2, 3});
    check_bytes<e5m2>(x, mma::widen_in_order, {0, 1, 2, 3});
    check_bytes<s8>(x, mma::widen_in_order, {0, 1, 2, 3});
    check_bytes<e4m3>(x, mma::widen_in_turns, {0, 2, 1, 3});
    check_bytes<e5m2>(x, mma::widen_in_turns, {0, 2, 1, 3});
    check_bytes<s8>(x, mma::widen_in_turns, {0, 2, 1, 3});
    const auto by_bits = [](u32(&y)[2], u32 bytes, e4m3) {
      y[0] = mma::e4m3_bits_to_f16(bytes << 8), y[1] = mma::e4m3_bits_to_f16(bytes);
    };
    check_bytes<e4m3>(x, by_bits, {0, 2, 1, 3});
  }
}

}  // namespace
}  // namespace raddle
