// Hopper's kernel for long queries on emulated threads, against the fp64 reference.
#define RADDLE_EMULATED_PTX "emulated_ptx.h"
#include <algorithm>

#include "attention_testing.h"
#include "layout_testing.h"
#include "plan/heuristics.h"
#include "plan/planner.h"
#include "raddle/engine/kernel/wgmma/attention.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/shipped.h"

namespace raddle {
namespace {

using testing_attention::Case;
using testing_attention::Owned;

constexpr i32 qo_heads = 4, kv_heads = 2;

struct Shape {
  i32 page_size;  ///< 0: all keys in one piece
  i32 dim_qk, dim_vo;
};

template <class V>
CoverFns cover(const V& variant) {
  CoverFns fns;
  fns.self = &variant;
  if constexpr (has_mask<V>) {
    fns.kv_span = [](const void* v, const Tile& t) { return static_cast<const V*>(v)->kv_span(t); };
    fns.coverage = [](const void* v, const Tile& t) {
      return static_cast<const V*>(v)->coverage(t);
    };
  }
  return fns;
}

/// The map of a pool whose rows are boxed as the kernel asks for.
TensorMap map_of(const TensorRef& pool, i32 page_size, i32 dim) {
  const i32 rows = page_size > 0 ? page_size : static_cast<i32>(pool.shape[0]);
  emulated::BoxMap map{};
  map.data = static_cast<const std::byte*>(pool.data);
  map.element_bytes = 2, map.swizzled = 1;
  const bool paged = page_size > 0;
  const u64 size[4] = {static_cast<u64>(dim), static_cast<u64>(rows), kv_heads,
                       paged ? static_cast<u64>(pool.shape[0]) : 1};
  const i64 row = pool.stride[paged ? 1 : 0], head = pool.stride[paged ? 2 : 1];
  std::copy_n(size, 4, map.size);
  map.stride[0] = static_cast<u64>(2 * row), map.stride[1] = static_cast<u64>(2 * head);
  map.stride[2] = paged ? static_cast<u64>(2 * pool.stride[0]) : 16;
  map.box[0] = 64, map.box[1] = wgmma::box_rows(paged ? page_size : 128, 128);
  map.box[2] = map.box[3] = 1;
  TensorMap result{};
  std::memcpy(&result, &map, sizeof map);
  return result;
}

/// What is unusual about a problem's logits.
struct Logits {
  double scale = 0.0;     ///< 0: the spec's
  float late_keys = 1.0;  ///< factor of the keys from number `late` on; of ragged keys
  i32 late = 0;
};

/// Requests of a few hundred rows and keys: tiles that masks cut, tails, requests without keys.
template <class T, i32 dim_qk, i32 dim_vo, class V>
void check(const Ints& qo_len, const Ints& kv_len, i32 page_size, const V& variant,
           const reference::Parts& parts, i32 num_workers, const Logits& logits = {}) {
  constexpr DType dtype = dtype_of<T>::value;
  std::mt19937 random(3);
  Table table;
  table.page_size = std::max(page_size, 1);
  table.qo_indptr = indptr(qo_len);
  table.kv_len = kv_len;
  Ints counts;
  for (const i32 n : kv_len) counts.push_back(ceil_div(n, table.page_size));
  table.page_indptr = indptr(counts);
  const i32 num_pages = table.page_indptr.back() + 3;
  for (i32 i = 0; i < num_pages; ++i) table.pages.push_back(i);
  std::shuffle(table.pages.begin(), table.pages.end(), random);
  table.pages.resize(at(table.page_indptr.back()));
  const Ints kv_indptr = indptr(kv_len);
  const LayoutPtr layout = page_size > 0
                               ? paged_kv(table.args())
                               : ragged_kv(index_of(table.qo_indptr), index_of(kv_indptr));
  AttentionSpec spec;
  spec.num_qo_heads = qo_heads, spec.num_kv_heads = kv_heads;
  spec.head_dim_qk = dim_qk, spec.head_dim_vo = dim_vo;
  spec.dtype = dtype;
  const i32 rows = layout->num_rows(), slots = page_size > 0 ? num_pages : kv_indptr.back() + 5;
  Owned q(random, dtype, rows, qo_heads, dim_qk), out(random, dtype, rows, qo_heads, dim_vo),
      lse(random, DType::float32, rows, qo_heads);
  Owned k = page_size > 0 ? Owned(random, dtype, slots, page_size, kv_heads, dim_qk)
                          : Owned(random, dtype, slots, kv_heads, dim_qk);
  Owned v = page_size > 0 ? Owned(random, dtype, slots, page_size, kv_heads, dim_vo)
                          : Owned(random, dtype, slots, kv_heads, dim_vo);
  auto* keys = reinterpret_cast<T*>(k.bytes.data());
  for (i64 i = i64{logits.late} * kv_heads * dim_qk; i < slots * kv_heads * dim_qk; ++i)
    if (logits.late > 0) keys[i] = from_float<T>(to_float(keys[i]) * logits.late_keys);
  std::fill(out.bytes.begin(), out.bytes.end(), std::byte{0xff});
  std::fill(lse.bytes.begin(), lse.bytes.end(), std::byte{0xff});

  const PlanConfig config =
      gpu_plan_config(spec, 90, KernelFamily::wgmma, num_workers, Schedule::automatic);
  const PlanArrays plan = make_plan(layout->view(), config, cover(variant));

  wgmma::Launch launch{};
  launch.layout = layout->view();
  std::copy_n(launch.layout.levels, launch.layout.num_levels, launch.levels);
  launch.plan = plan.view();
  const auto pool = [&](const Owned& x) {
    const auto& s = x.ref.stride;
    return page_size > 0 ? PoolView{x.ref.data, s[0], s[1], s[2]}
                         : PoolView{x.ref.data, s[0], s[0], s[1]};
  };
  launch.kv[0] = KvView{pool(k), pool(v)};
  launch.map[0][0] = map_of(k.ref, page_size, dim_qk);
  launch.map[0][1] = map_of(v.ref, page_size, dim_vo);
  launch.q = RowsView{q.ref.data, q.ref.stride[0], q.ref.stride[1]};
  launch.out = RowsView{out.ref.data, out.ref.stride[0], out.ref.stride[1]};
  if (parts.scan == Scan::softmax) launch.lse = static_cast<float*>(lse.ref.data);
  launch.lse_row_stride = lse.ref.stride[0], launch.lse_head_stride = lse.ref.stride[1];
  const auto partial = static_cast<std::size_t>(launch.plan.num_partial_rows);
  std::vector<float> partial_o(partial * at(dim_vo), NAN), partial_lse(partial, NAN);
  std::vector<i32> arrived(at(launch.plan.num_contractions * kv_heads + 1));
  launch.partial_o = partial_o.data(), launch.partial_lse = partial_lse.data();
  launch.arrived = arrived.data();
  i32 drawn[2] = {};
  launch.drawn = drawn;
  const double scale = logits.scale == 0.0 ? 1.0 / std::sqrt(dim_qk) : logits.scale;
  launch.scale = static_cast<float>(scale);
  for (i32 i = 0; i < launch.plan.num_query_tiles; ++i)
    ASSERT_EQ(launch.plan.query_tiles[i].shape, long_queries);

  using Kernel = wgmma::Kernel<T, dim_qk, dim_vo, V>;
  for (i32 i = launch.plan.num_workers - 1; i >= 0; --i) {
    emulated::Block block(i, wgmma::num_threads, sizeof(wgmma::Memory<Kernel>),
                          launch.plan.num_workers);
    block.run([&] { wgmma::attend_long<Kernel>(launch, variant); });
  }
  EXPECT_EQ(drawn[0] + drawn[1], 0);
  const reference::Problem problem{
      layout->view(),       qo_heads, kv_heads, dim_qk, dim_vo, dtype, dtype, scale, launch.q,
      {{pool(k), pool(v)}}, parts};
  for (i32 row = 0; row < rows; row += 7)
    for (i32 head = 0; head < qo_heads; ++head) {
      const reference::Exact e = reference::attend(problem, row, head, false, true);
      const i64 n = row * qo_heads + head;
      if (launch.lse && e.lse == -reference::infinity) {
        ASSERT_EQ(reference::element(lse.ref.data, DType::float32, n), e.lse) << row;
      } else if (launch.lse) {
        ASSERT_NEAR(reference::element(lse.ref.data, DType::float32, n), e.lse, e.lse_budget)
            << row;
      }
      for (i32 d = 0; d < dim_vo; ++d)
        ASSERT_NEAR(reference::element(out.ref.data, dtype, n * dim_vo + d), e.o[at(d)],
                    e.o_budget[at(d)])
            << "row " << row << ", head " << head << ", element " << d;
    }
}

/// Logits that exceed those of the rows' first tiles by so much that weights overflow, and ones too
/// large for a single multiply-add.
TEST(Wgmma, LogitsThatGrow) {
  const Case plain = testing_attention::cases()[0], causal = testing_attention::cases()[1];
  const Ints few{9, 70}, many{140, 420};
  for (const float grows : {12.0f, 60.0f, 400.0f}) {
    const Logits logits{0.0, grows, 300};
    check<f16, 64, 64>(few, many, 0, Composition<NoMask>{}, plain.parts, 1, logits);
    check<bf16, 128, 64>(few, many, 0, Composition<Leaf<0>, Causal>{}, causal.parts, 3, logits);
  }
}
TEST(Wgmma, ScalesThatAreNotPositive) {
  const Case causal = testing_attention::cases()[1];
  for (const double scale : {-0.3, -1e-30})
    check<bf16, 64, 64>({70}, {300}, 16, Composition<Leaf<0>, Causal>{}, causal.parts, 1,
                        Logits{scale});
}

/// An output part that needs a row whole, and leaves it as it is.
struct Halved {
  template <class Vec>
  RADDLE_FN void output(Vec& o, const Row&, float) const {
    const float ones = o.sum([](float) { return 1.0f; });
    o.map([&](float x, i32) { return x * (ones / static_cast<float>(o.size())); });
  }
};

const Ints rows{70, 130, 3}, keys{200, 130, 0};

TEST(Wgmma, CausalPages) {
  const Case causal = testing_attention::cases()[1];
  for (const i32 workers : {1, 3, 13})
    check<bf16, 64, 64>(rows, keys, 16, Composition<Leaf<0>, Causal>{}, causal.parts, workers);
}
TEST(Wgmma, LargeAndSmallPages) {
  const Case causal = testing_attention::cases()[1];
  for (const i32 page_size : {8, 64, 256})
    check<f16, 64, 64>(rows, keys, page_size, Composition<Leaf<0>, Causal>{}, causal.parts, 2);
}
TEST(Wgmma, KeysInOnePiece) {
  const Case plain = testing_attention::cases()[0];
  check<f16, 96, 64>({90, 1}, {140, 259}, 0, Composition<NoMask>{}, plain.parts, 1);
}
TEST(Wgmma, WideHeads) {
  const Case causal = testing_attention::cases()[1];
  check<bf16, 128, 128>({40}, {300}, 32, Composition<Leaf<0>, Causal>{}, causal.parts, 4);
  check<bf16, 192, 128>({40}, {150}, 32, Composition<Leaf<0>, Causal>{}, causal.parts, 1);
}
TEST(Wgmma, ScoresAndWindows) {
  const Case gemma_case = testing_attention::cases()[2];
  Composition<AllOf<Leaf<1>, Leaf<2>>, SoftCap, SlidingWindow, Causal> gemma{};
  gemma.variants.first.cap = 2.0f;
  gemma.variants.rest.first = SlidingWindow{9, -1};
  check<bf16, 64, 64>(rows, {500, 130, 0}, 16, gemma, gemma_case.parts, 3);
}
TEST(Wgmma, SinksOfSplitTiles) {
  Case oss_case = testing_attention::cases()[3];
  const float logit[] = {0.5f, -1.0f, 2.0f, 0.0f};
  Composition<AllOf<Leaf<1>, Leaf<2>>, Sinks, SlidingWindow, Causal> oss{};
  oss.variants.first.logit = {logit, {4}};
  oss.variants.rest.first = SlidingWindow{9, -1};
  check<f16, 64, 64>({9}, {1000}, 16, oss, oss_case.parts, 8);
}
TEST(Wgmma, Sums) {
  const Case sigmoid_case = testing_attention::cases()[4];
  Composition<NoMask, Sigmoid> sigmoid_only{};
  sigmoid_only.variants.first.bias = -1.0f;
  for (const i32 workers : {1, 6})
    check<bf16, 64, 64>({70}, {600}, 16, sigmoid_only, sigmoid_case.parts, workers);
}
TEST(Wgmma, OutputParts) {
  const Case plain = testing_attention::cases()[0];
  check<f16, 64, 32>({70}, {300}, 16, Composition<NoMask, Halved>{}, plain.parts, 1);
}

}  // namespace
}  // namespace raddle
