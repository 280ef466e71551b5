// The GPU kernels of the KV cache on emulated threads, against the CPU's functions: the same bits.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include "kv_gpu_testing.h"
#include "raddle/engine/kernel/cache/gpu_select.h"

namespace raddle {
namespace {

using namespace testing_kv;

template <class T>
class KvGpu : public testing::Test {
 protected:
  static constexpr DType dtype = dtype_of<T>::value;
  static constexpr unsigned num_draws = 10;

  template <class V>
  void check_append(const Batch& batch, const V& variant, const Variant* rope,
                    std::mt19937& random) {
    const LayoutPtr layout = batch.layout();
    const Owned k_new = batch.rows_of(random, batch.dim),
                v_new = batch.rows_of(random, batch.dim_vo);
    Owned k = batch.pool(random, batch.dim), v = batch.pool(random, batch.dim_vo);
    Owned k_gpu = k, v_gpu = v;
    append_kv(*layout, k_new.ref, v_new.ref, {k.ref, v.ref}, rope);
    auto args =
        start<AppendLaunch>(*layout, (batch.rows() + 5) * batch.heads);  // rows that are not
    args.view = {row_bytes(k_new.ref),
                 row_bytes(v_new.ref),
                 pool_bytes(k_gpu.ref, batch.order),
                 pool_bytes(v_gpu.ref, batch.order),
                 {},
                 {},
                 {}};
    launch_units(args.num_units, random, [&] { kv::append<T, T>(args, variant); });
    ASSERT_EQ(k.bytes, k_gpu.bytes);
    ASSERT_EQ(v.bytes, v_gpu.bytes);
  }
};

using Elements = testing::Types<float, f16, bf16>;
TYPED_TEST_SUITE(KvGpu, Elements);

TYPED_TEST(KvGpu, Append) {
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch(random, this->dtype);
    this->check_append(batch, Composition<NoMask>{}, nullptr, random);
  }
}

TYPED_TEST(KvGpu, AppendWithRope) {
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch(random, this->dtype);
    RopeArgs args;
    args.rotary_dim = 32;
    args.interleaved = seed % 2 != 0;
    const Variant host = rope(args);
    const auto& hi = std::get<Array<std::uint32_t>>(host.members.at("freq_hi"));
    const auto& lo = std::get<Array<std::uint32_t>>(host.members.at("freq_lo"));
    const i32 none = 0;
    const auto check = [&](auto rotation) {
      Composition<NoMask, decltype(rotation)> variant{};
      variant.variants.first = {{hi.data(), {16}}, {lo.data(), {16}}, {&none, {1}}, 1.0f};
      this->check_append(batch, variant, &host, random);
    };
    if (args.interleaved)
      check(RopeOf<Pairs::interleaved>{});
    else
      check(Rope{});
  }
}

TYPED_TEST(KvGpu, CopyPages) {
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch(random, this->dtype);
    Owned k = batch.pool(random, batch.dim), v = batch.pool(random, batch.dim_vo);
    Owned k_gpu = k, v_gpu = v;
    const i32 copies = batch.num_pages / 2;
    const std::vector<i32>& pages = batch.pages;
    const KvRef pool{k.ref, v.ref};
    copy_pages(pool, pool, {pages.data(), copies}, {pages.data() + copies, copies});
    CopyLaunch args{};
    const PoolBytes k_pool = pool_bytes(k_gpu.ref, HeadOrder::nhd);
    const PoolBytes v_pool = pool_bytes(v_gpu.ref, HeadOrder::nhd);
    const i32 slots = static_cast<i32>(k.ref.shape[1]);
    args.view = {k_pool, k_pool, v_pool, v_pool,       {},
                 {},     {},     {},     pages.data(), pages.data() + copies,
                 copies, slots};
    args.num_units = i64{copies} * slots * k_pool.num_heads;
    launch_units(args.num_units, random, [&] { kv::copy(args); });
    ASSERT_EQ(k.bytes, k_gpu.bytes);
    ASSERT_EQ(v.bytes, v_gpu.bytes);
  }
}

TYPED_TEST(KvGpu, AcceptTree) {
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch(random, this->dtype);
    const LayoutPtr layout = batch.layout();
    const DrawnTrees trees(batch, random);
    std::vector<i32> kv_len(batch.kv_len.size(), -9), kv_len_gpu = kv_len;
    Owned k = batch.pool(random, batch.dim), v = batch.pool(random, batch.dim_vo);
    Owned k_gpu = k, v_gpu = v;
    accept_tree(*layout, {k.ref, v.ref}, {trees.parents.data(), batch.rows()},
                {trees.accepted.data(), batch.requests()}, kv_len.data());
    auto args = start<AcceptLaunch>(*layout, i64{batch.requests()} * batch.heads);
    args.view = {pool_bytes(k_gpu.ref, batch.order),
                 pool_bytes(v_gpu.ref, batch.order),
                 {},
                 {},
                 trees.path.data(),
                 trees.path_begin.data(),
                 kv_len_gpu.data()};
    launch_units(args.num_units, random, [&] { kv::accept(args); });
    ASSERT_EQ(k.bytes, k_gpu.bytes);
    ASSERT_EQ(v.bytes, v_gpu.bytes);
    ASSERT_EQ(kv_len, kv_len_gpu);
  }
}

TYPED_TEST(KvGpu, Summaries) {
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const Batch batch(random, this->dtype);
    const LayoutPtr layout = batch.layout();
    const Owned k = batch.pool(random, batch.dim);
    Owned summary(this->dtype, {batch.num_pages, 2, batch.heads, batch.dim}, 8);
    Owned summary_gpu = summary;
    const bool new_only = seed % 2 != 0;
    summarize_pages(*layout, k.ref, summary.ref, new_only);
    auto args =
        start<SummarizeLaunch>(*layout, i64{batch.requests()} * batch.longest() * batch.heads);
    args.view = {pool_bytes(k.ref, batch.order), summary_bytes(summary_gpu.ref), {}, new_only};
    args.max_pages = batch.longest();
    launch_units(args.num_units, random, [&] { kv::summarize<TypeParam, TypeParam>(args); });
    ASSERT_EQ(summary.bytes, summary_gpu.bytes);
  }
}

/// Small whole numbers, of which any order gives the same sums.
template <class T>
void round_all(Owned& t) {
  for (size_t i = 0; i < t.bytes.size() / sizeof(T); ++i) {
    T& x = reinterpret_cast<T*>(t.bytes.data())[i];
    x = from_float<T>(std::round(4.0f * to_float(x)));
  }
}

/// Minima and maxima, of [pages, 2, heads, dim] of any numbers.
template <class T>
void order_minima(const TensorRef& t) {
  for (i64 page = 0; page < t.shape[0]; ++page)
    for (i64 head = 0; head < t.shape[2]; ++head)
      for (i64 d = 0; d < t.shape[3]; ++d) {
        T* least = static_cast<T*>(t.data) + page * t.stride[0] + head * t.stride[2] + d;
        T& most = least[t.stride[1]];
        if (to_float(*least) > to_float(most)) std::swap(*least, most);
      }
}

/// The choices of one batch, by both.
template <class T>
void check_select(const Batch& batch, const TensorRef& q, const TensorRef& summary, i32 num_pages,
                  bool per_head, bool keep_last, std::mt19937& random) {
  const LayoutPtr layout = batch.layout();
  const i64 lists = i64{batch.requests()} * (per_head ? batch.heads : 1);
  std::vector<i32> pages(static_cast<size_t>(lists * num_pages), -9);
  std::vector<i32> pos = pages, count = pages, pages_gpu = pages, pos_gpu = pages,
                   count_gpu = pages;
  SelectArgs select;
  select.q = q;
  select.summary = summary;
  select.num_selected = num_pages;
  select.per_head = per_head;
  select.keep_last = keep_last;
  select.pages = pages.data();
  select.pos = pos.data();
  select.count = count.data();
  select_pages(*layout, select);

  std::vector<u32> scores(static_cast<size_t>(lists * batch.longest()), 0x12345678u);
  auto args = start<SelectLaunch>(*layout, 0);
  SelectView& view = args.view;
  view.summary = summary_bytes(summary);
  view.q = row_bytes(q);
  view.num_kv_heads = batch.heads;
  view.group_size = static_cast<i32>(q.shape[1]) / batch.heads;
  view.per_head = per_head;
  view.keep_last = keep_last;
  view.num_selected = num_pages;
  view.max_pages = batch.longest();
  view.scores = scores.data();
  view.pages = pages_gpu.data();
  view.pos = pos_gpu.data();
  view.count = count_gpu.data();
  args.num_units = kv::score_units(view, batch.requests());
  launch_units(args.num_units, random, [&] { kv::score<T>(args); });
  launch(lists, kv::num_select_threads, kv::select_shared_bytes, random, [&] { kv::select(args); });
  ASSERT_EQ(pages, pages_gpu);
  ASSERT_EQ(pos, pos_gpu);
  ASSERT_EQ(count, count_gpu);
}

TYPED_TEST(KvGpu, SelectedPages) {
  for (unsigned seed = 0; seed < this->num_draws; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    Batch batch(random, this->dtype);
    batch.dim = std::vector<i32>{8, 40, 64, 128, 256}[random() % 5];
    const i32 group = 1 + static_cast<i32>(random() % 3);
    Owned q(this->dtype, {batch.rows(), batch.heads * group, batch.dim}, 8);
    Owned summary(this->dtype, {batch.num_pages, 2, batch.heads, batch.dim}, 8);
    q.draw(random), summary.draw(random);
    round_all<TypeParam>(q), round_all<TypeParam>(summary);
    order_minima<TypeParam>(summary.ref);
    check_select<TypeParam>(batch, q.ref, summary.ref, 1 + static_cast<i32>(random() % 20),
                            random() % 2 != 0, random() % 2 != 0, random);
  }
}

TEST(KvGpuSelect, BothZerosAreOneScore) {
  EXPECT_EQ(kv::score_key(-0.0f), kv::score_key(0.0f));
  EXPECT_LT(kv::score_key(-1e-38f), kv::score_key(0.0f));
  EXPECT_LT(kv::score_key(0.0f), kv::score_key(1e-38f));
}

TEST(KvGpuSelect, LongListsWithManyTies) {
  std::mt19937 random(5);
  Batch batch(random, DType::float32);
  batch.page_size = 1, batch.heads = 1, batch.dim = 8, batch.order = HeadOrder::nhd;
  batch.qo_indptr = {0, 1, 2}, batch.kv_len = {700, 513}, batch.page_indptr = {0, 700, 1213};
  batch.num_pages = 1213;
  batch.pages.resize(1213);
  std::iota(batch.pages.rbegin(), batch.pages.rend(), 0);
  const Owned q = [] {
    Owned ones(DType::float32, {2, 1, 8});
    std::fill_n(reinterpret_cast<float*>(ones.bytes.data()), 16, 1.0f);
    return ones;
  }();
  Owned summary(DType::float32, {1213, 2, 1, 8});
  for (size_t i = 0; i < 1213 * 16; ++i)  // few different scores
    reinterpret_cast<float*>(summary.bytes.data())[i] = static_cast<float>(i / 16 * 7919 % 5);
  for (const i32 k : {1, 2, 100, 256, 257, 511, 600, 800})
    check_select<float>(batch, q.ref, summary.ref, k, false, k % 2 == 0, random);
}

}  // namespace
}  // namespace raddle
