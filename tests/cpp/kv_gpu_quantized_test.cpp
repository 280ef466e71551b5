// The KV cache's kernels on pools of 8 bits, on emulated threads, against the CPU's functions: the
// same bits.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include "kv_gpu_testing.h"

namespace raddle {
namespace {

using namespace testing_kv;

/// Element types of new rows or summaries, and of pools.
template <class Rows, class Pool>
struct Pair {
  using T = Rows;
  using P = Pool;
};

template <class Types>
class KvGpuQuantized : public testing::Test {
 protected:
  static constexpr unsigned num_draws = 12;

  static Batch draw(std::mt19937& random) {
    Batch batch(random, dtype_of<typename Types::P>::value);
    batch.dim = 48, batch.dim_vo = 32;  // rows of 16-byte units
    return batch;
  }
  static Owned rows(const Batch& batch, std::mt19937& random, i32 width) {
    Owned owned(dtype_of<typename Types::T>::value, {batch.rows(), batch.heads, width}, 8);
    owned.draw(random);
    return owned;
  }
};

using Pairs = testing::Types<Pair<float, e4m3>, Pair<f16, e5m2>, Pair<bf16, e4m3>, Pair<bf16, s8>>;
TYPED_TEST_SUITE(KvGpuQuantized, Pairs);

ScaleView token_view(const TensorRef& t, HeadOrder order) {
  const PoolAxes axes = pool_axes(order);
  return {static_cast<float*>(t.data), step(t, 0), step(t, axes.slot), step(t, axes.head), 1.0f};
}

/// Scales that are given (a number, one a head), or computed for each token and head.
struct Kinds {
  std::vector<float> by_head;
  Owned tokens;
  unsigned which;

  Kinds(const Batch& batch, std::mt19937& random)
      : tokens(batch.scales(random)), which(static_cast<unsigned>(random() % 3)) {
    for (i32 h = 0; h < batch.heads; ++h) by_head.push_back(0.25f + static_cast<float>(h) / 3.0f);
  }
  ScaleRef ref() {
    if (which == 0) return 0.37f;
    if (which == 1) return TensorRef::contiguous(by_head.data(), DType::float32, by_head.size());
    return tokens.ref;
  }
  QuantizeView view(HeadOrder order) {
    if (which == 0) return {{nullptr, 0, 0, 0, 0.37f}, false};
    if (which == 1) return {{by_head.data(), 0, 0, 1, 1.0f}, false};
    return {token_view(tokens.ref, order), true};
  }
};

TYPED_TEST(KvGpuQuantized, Append) {
  using T = typename TypeParam::T;
  using P = typename TypeParam::P;
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch = this->draw(random);
    const LayoutPtr layout = batch.layout();
    const Owned k_new = this->rows(batch, random, batch.dim),
                v_new = this->rows(batch, random, batch.dim_vo);
    Owned k = batch.pool(random, batch.dim), v = batch.pool(random, batch.dim_vo);
    Owned k_gpu = k, v_gpu = v;
    Kinds k_scale(batch, random), v_scale(batch, random);
    Kinds k_scale_gpu = k_scale, v_scale_gpu = v_scale;
    RopeArgs rope_args;
    rope_args.rotary_dim = 32;
    const Variant host = rope(rope_args);
    const bool turned = seed % 2 != 0;
    append_kv(*layout, k_new.ref, v_new.ref, {k.ref, v.ref, k_scale.ref(), v_scale.ref()},
              turned ? &host : nullptr);

    auto args = start<AppendLaunch>(*layout, (batch.rows() + 5) * batch.heads);
    args.view = {row_bytes(k_new.ref),
                 row_bytes(v_new.ref),
                 pool_bytes(k_gpu.ref, batch.order),
                 pool_bytes(v_gpu.ref, batch.order),
                 k_scale_gpu.view(batch.order),
                 v_scale_gpu.view(batch.order),
                 {}};
    if (turned) {
      const auto& hi = std::get<Array<std::uint32_t>>(host.members.at("freq_hi"));
      const auto& lo = std::get<Array<std::uint32_t>>(host.members.at("freq_lo"));
      const i32 none = 0;
      Composition<NoMask, Rope> variant{};
      variant.variants.first = {{hi.data(), {16}}, {lo.data(), {16}}, {&none, {1}}, 1.0f};
      launch_units(args.num_units, random, [&] { kv::append<T, P>(args, variant); });
    } else {
      const Composition<NoMask> variant{};
      launch_units(args.num_units, random, [&] { kv::append<T, P>(args, variant); });
    }
    ASSERT_EQ(k.bytes, k_gpu.bytes);
    ASSERT_EQ(v.bytes, v_gpu.bytes);
    ASSERT_EQ(k_scale.tokens.bytes, k_scale_gpu.tokens.bytes);
    ASSERT_EQ(v_scale.tokens.bytes, v_scale_gpu.tokens.bytes);
  }
}

TYPED_TEST(KvGpuQuantized, CopyPagesWithTheirScales) {
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch = this->draw(random);
    Owned k = batch.pool(random, batch.dim), v = batch.pool(random, batch.dim_vo);
    Owned k_scale = batch.scales(random), v_scale = batch.scales(random);
    Owned k_gpu = k, v_gpu = v, k_scale_gpu = k_scale, v_scale_gpu = v_scale;
    const i32 copies = batch.num_pages / 2;
    const std::vector<i32>& pages = batch.pages;
    const KvRef pool{k.ref, v.ref, k_scale.ref, v_scale.ref};
    copy_pages(pool, pool, {pages.data(), copies}, {pages.data() + copies, copies});
    CopyLaunch args{};
    CopyView& view = args.view;
    view.k_from = view.k_to = pool_bytes(k_gpu.ref, HeadOrder::nhd);
    view.v_from = view.v_to = pool_bytes(v_gpu.ref, HeadOrder::nhd);
    view.k_scale_from = view.k_scale_to = token_view(k_scale_gpu.ref, HeadOrder::nhd);
    view.v_scale_from = view.v_scale_to = token_view(v_scale_gpu.ref, HeadOrder::nhd);
    view.from_pages = pages.data();
    view.to_pages = pages.data() + copies;
    view.num_copies = copies;
    view.page_size = static_cast<i32>(k.ref.shape[1]);
    args.num_units = i64{copies} * view.page_size * view.k_from.num_heads;
    launch_units(args.num_units, random, [&] { kv::copy(args); });
    ASSERT_EQ(k.bytes, k_gpu.bytes);
    ASSERT_EQ(v.bytes, v_gpu.bytes);
    ASSERT_EQ(k_scale.bytes, k_scale_gpu.bytes);
    ASSERT_EQ(v_scale.bytes, v_scale_gpu.bytes);
  }
}

TYPED_TEST(KvGpuQuantized, AcceptTreeWithItsScales) {
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch = this->draw(random);
    const LayoutPtr layout = batch.layout();
    const DrawnTrees trees(batch, random);
    Owned k = batch.pool(random, batch.dim), v = batch.pool(random, batch.dim_vo);
    Owned k_scale = batch.scales(random), v_scale = batch.scales(random);
    Owned k_gpu = k, v_gpu = v, k_scale_gpu = k_scale, v_scale_gpu = v_scale;
    accept_tree(*layout, {k.ref, v.ref, k_scale.ref, v_scale.ref},
                {trees.parents.data(), batch.rows()}, {trees.accepted.data(), batch.requests()});
    auto args = start<AcceptLaunch>(*layout, i64{batch.requests()} * batch.heads);
    args.view = {pool_bytes(k_gpu.ref, batch.order),
                 pool_bytes(v_gpu.ref, batch.order),
                 token_view(k_scale_gpu.ref, batch.order),
                 token_view(v_scale_gpu.ref, batch.order),
                 trees.path.data(),
                 trees.path_begin.data(),
                 nullptr};
    launch_units(args.num_units, random, [&] { kv::accept(args); });
    ASSERT_EQ(k.bytes, k_gpu.bytes);
    ASSERT_EQ(v.bytes, v_gpu.bytes);
    ASSERT_EQ(k_scale.bytes, k_scale_gpu.bytes);
    ASSERT_EQ(v_scale.bytes, v_scale_gpu.bytes);
  }
}

TYPED_TEST(KvGpuQuantized, SummariesAreOfValues) {
  using T = typename TypeParam::T;
  using P = typename TypeParam::P;
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch = this->draw(random);
    const LayoutPtr layout = batch.layout();
    const Owned k = batch.pool(random, batch.dim);
    Kinds scale(batch, random);
    Owned summary(dtype_of<T>::value, {batch.num_pages, 2, batch.heads, batch.dim}, 8);
    Owned summary_gpu = summary;
    summarize_pages(*layout, k.ref, summary.ref, false, nullptr, scale.ref());
    auto args =
        start<SummarizeLaunch>(*layout, i64{batch.requests()} * batch.longest() * batch.heads);
    args.view = {pool_bytes(k.ref, batch.order), summary_bytes(summary_gpu.ref),
                 scale.view(batch.order).scale, false};
    args.max_pages = batch.longest();
    launch_units(args.num_units, random, [&] { kv::summarize<T, P>(args); });
    ASSERT_EQ(summary.bytes, summary_gpu.bytes);
  }
}

}  // namespace
}  // namespace raddle
