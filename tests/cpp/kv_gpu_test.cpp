// The GPU kernels of the KV cache on emulated threads, against the CPU's functions: the same bits.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "api/kv_checks.h"
#include "raddle/engine/kernel/kv/gpu.h"
#include "raddle/engine/kernel/kv/gpu_select.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/shipped.h"
#include "raddle/kv.h"

namespace raddle {
namespace {

using std::size_t;

/// A tensor that owns its memory, with `gap` unused elements after each index of every dimension
/// but the last. Everything is a NaN at first.
struct Owned {
  std::vector<u8> bytes;
  TensorRef ref;

  Owned(DType dtype, const std::vector<i64>& shape, i64 gap = 0) {
    ref.dtype = dtype;
    ref.rank = static_cast<int>(shape.size());
    i64 step = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      ref.shape[i] = shape[i];
      ref.stride[i] = step;
      step = step * shape[i] + gap;
    }
    bytes.assign(static_cast<size_t>(step * dtype_bytes(dtype)), 0xff);
    ref.data = bytes.data();
  }
  Owned(const Owned& other) : bytes(other.bytes), ref(other.ref) { ref.data = bytes.data(); }

  void draw(std::mt19937& random) {
    std::normal_distribution<float> normal;
    dispatch_dtype(ref.dtype, [&](auto zero) {
      using T = decltype(zero);
      for (size_t i = 0; i < bytes.size() / sizeof(T); ++i)
        reinterpret_cast<T*>(bytes.data())[i] = from_float<T>(normal(random));
    });
  }
};

/// A page table drawn at random, with pools of K and V full of numbers, and its new rows.
struct Batch {
  std::vector<i32> qo_indptr{0}, kv_len, page_indptr{0}, pages;
  i32 page_size, heads, dim = 40, dim_vo = 24, num_pages = 0;
  HeadOrder order;
  DType dtype;

  Batch(std::mt19937& random, DType element) : dtype(element) {
    const auto draw = [&](i32 low, i32 high) {
      return low + static_cast<i32>(random() % static_cast<unsigned>(high - low + 1));
    };
    page_size = std::vector<i32>{1, 3, 16}[random() % 3];
    heads = draw(1, 3);
    order = draw(0, 1) ? HeadOrder::nhd : HeadOrder::hnd;
    const bool decode = draw(0, 1) != 0;
    for (i32 i = draw(1, 5); i > 0; --i) {
      const i32 qo_len = decode ? 1 : draw(0, 9);
      kv_len.push_back(qo_len + draw(0, 70));
      qo_indptr.push_back(qo_indptr.back() + qo_len);
      page_indptr.push_back(page_indptr.back() + ceil_div(kv_len.back(), page_size));
    }
    num_pages = page_indptr.back() + 2;
    pages.resize(static_cast<size_t>(num_pages));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
  }

  i32 requests() const { return static_cast<i32>(kv_len.size()); }
  i64 rows() const { return qo_indptr.back(); }
  i32 longest() const {
    i32 most = 0;
    for (const i32 keys : kv_len) most = std::max(most, ceil_div(keys, page_size));
    return most;
  }

  LayoutPtr layout() const {
    PagedArgs args;
    args.qo_indptr = {qo_indptr.data(), static_cast<i64>(qo_indptr.size())};
    args.page_indptr = {page_indptr.data(), static_cast<i64>(page_indptr.size())};
    args.page_indices = {pages.data(), page_indptr.back()};
    args.kv_len = {kv_len.data(), static_cast<i64>(kv_len.size())};
    args.page_size = page_size;
    args.order = order;
    return paged_kv(args);
  }

  Owned pool(std::mt19937& random, i32 width) const {
    const bool nhd = order == HeadOrder::nhd;
    Owned pool(dtype, {num_pages, nhd ? page_size : heads, nhd ? heads : page_size, width}, 8);
    pool.draw(random);
    return pool;
  }
  Owned rows_of(std::mt19937& random, i32 width) const {
    Owned owned(dtype, {rows(), heads, width}, 8);
    owned.draw(random);
    return owned;
  }
};

/// Runs a kernel on blocks in an order that it may not rely on.
template <class Kernel>
void launch(i64 blocks, i32 threads, i32 shared_bytes, std::mt19937& random, Kernel kernel) {
  std::vector<i32> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const i32 index : order) {
    emulated::Block block(index, threads, shared_bytes);
    block.run(kernel);
  }
}

template <class Kernel>
void launch_units(i64 units, std::mt19937& random, Kernel kernel) {
  launch(ceil_div<i64>(units, kv::num_warps) + 1, kv::num_threads, kv::shared_bytes, random,
         kernel);
}

template <class Launch>
Launch start(const Layout& layout, i64 units) {
  Launch launch{};
  launch.layout = layout.view();
  launch.level = layout.view().levels[0];
  launch.num_units = units;
  return launch;
}

RowBytes row_bytes(const TensorRef& rows) {
  const i64 bytes = dtype_bytes(rows.dtype);
  return {static_cast<const u8*>(rows.data), rows.stride[0] * bytes, rows.stride[1] * bytes};
}

SummaryBytes summary_bytes(const TensorRef& t) {
  const i64 bytes = dtype_bytes(t.dtype);
  return {static_cast<u8*>(t.data), t.stride[0] * bytes,          t.stride[1] * bytes,
          t.stride[2] * bytes,      static_cast<i32>(t.shape[3]), static_cast<i32>(t.shape[0])};
}

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
    args.view = {row_bytes(k_new.ref), row_bytes(v_new.ref), pool_bytes(k_gpu.ref, batch.order),
                 pool_bytes(v_gpu.ref, batch.order)};
    launch_units(args.num_units, random, [&] { kv::append<T>(args, variant); });
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
      variant.parts.first = {{hi.data(), {16}}, {lo.data(), {16}}, {&none, {1}}, 1.0f};
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
    args.view = {k_pool, k_pool, v_pool, v_pool, pages.data(), pages.data() + copies,
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
    std::vector<i32> parents, accepted, kv_len(batch.kv_len.size(), -9), kv_len_gpu = kv_len;
    for (i32 i = 0; i < batch.requests(); ++i) {
      const auto r = static_cast<size_t>(i);
      const i32 nodes = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
      for (i32 n = 0; n < nodes; ++n)
        parents.push_back(static_cast<i32>(random() % static_cast<unsigned>(n + 1)) - 1);
      accepted.push_back(static_cast<i32>(random() % static_cast<unsigned>(nodes + 1)) - 1);
    }
    parents.push_back(0);  // no tree is empty storage
    Owned k = batch.pool(random, batch.dim), v = batch.pool(random, batch.dim_vo);
    Owned k_gpu = k, v_gpu = v;
    accept_tree(*layout, {k.ref, v.ref}, {parents.data(), batch.rows()},
                {accepted.data(), batch.requests()}, kv_len.data());
    auto args = start<AcceptLaunch>(*layout, i64{batch.requests()} * batch.heads);
    args.view = {pool_bytes(k_gpu.ref, batch.order), pool_bytes(v_gpu.ref, batch.order),
                 parents.data(), accepted.data(), kv_len_gpu.data()};
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
    args.view = {pool_bytes(k.ref, batch.order), summary_bytes(summary_gpu.ref), new_only};
    args.max_pages = batch.longest();
    launch_units(args.num_units, random, [&] { kv::summarize<TypeParam>(args); });
    ASSERT_EQ(summary.bytes, summary_gpu.bytes);
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
    check_select<TypeParam>(batch, q.ref, summary.ref, 1 + static_cast<i32>(random() % 20),
                            random() % 2 != 0, random() % 2 != 0, random);
  }
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
    const i64 dim = std::vector<i64>{8, 24, 128, 256}[random() % 4];
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
                 static_cast<i32>(dim)};
    args.num_units = rows * heads;
    args.group_size = 2;
    const float logit[] = {0.5f, -1.0f, 2.0f, 0.0f};
    Composition<NoMask, Sinks> sink{};
    sink.parts.first.logit = {logit, {4}};
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
