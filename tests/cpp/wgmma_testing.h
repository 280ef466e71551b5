// Hopper's kernels on emulated threads, against the fp64 reference. What emulates instructions must
// be named before this is included.
#pragma once

#include <algorithm>
#include <utility>

#include "attention_testing.h"
#include "layout_testing.h"
#include "plan/heuristics.h"
#include "plan/planner.h"
#include "plan_testing.h"
#include "raddle/engine/kernel/wgmma/attention.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/shipped.h"

namespace raddle::testing_wgmma {

using plan_testing::cover;
using testing_attention::Case;
using testing_attention::Owned;

constexpr i32 kv_heads = 2;

/// Calls f(width of Q and K, width of V and O) with each pair of widths that differ in their halves
/// of 64 columns, as constants.
template <class F>
void each_width(const F& f) {
  const auto with = [&]<i32... widths>(auto qk, std::integer_sequence<i32, widths...>) {
    (f(qk, std::integral_constant<i32, widths>{}), ...);
  };
  using Widths = std::integer_sequence<i32, 64, 128, 192, 256>;
  [&]<i32... widths>(std::integer_sequence<i32, widths...>) {
    (with(std::integral_constant<i32, widths>{}, Widths{}), ...);
  }
  (Widths{});
}

/// The map of a pool whose rows are boxed as a kernel with tiles of `tile_keys` asks for.
inline TensorMap map_of(const TensorRef& pool, i32 page_size, i32 dim, i32 tile_keys) {
  const i32 rows = page_size > 0 ? page_size : static_cast<i32>(pool.shape[0]);
  emulated::BoxMap map{};
  map.data = static_cast<std::byte*>(pool.data);
  map.element_bytes = 2, map.swizzled = 1;
  const bool paged = page_size > 0;
  const u64 size[4] = {static_cast<u64>(dim), static_cast<u64>(rows), kv_heads,
                       paged ? static_cast<u64>(pool.shape[0]) : 1};
  const i64 row = pool.stride[paged ? 1 : 0], head = pool.stride[paged ? 2 : 1];
  std::copy_n(size, 4, map.size);
  map.stride[0] = static_cast<u64>(2 * row), map.stride[1] = static_cast<u64>(2 * head);
  map.stride[2] = paged ? static_cast<u64>(2 * pool.stride[0]) : 16;
  map.box[0] = 64, map.box[1] = wgmma::box_rows(paged ? page_size : tile_keys, tile_keys);
  map.box[2] = map.box[3] = 1;
  TensorMap result{};
  std::memcpy(&result, &map, sizeof map);
  return result;
}
/// The map of ragged rows of Q or O, `box_rows` of a group's heads a box.
inline TensorMap map_of_rows(const TensorRef& q, i32 group_size, i32 box_rows) {
  emulated::BoxMap map{};
  map.data = static_cast<std::byte*>(q.data);
  map.element_bytes = 2, map.swizzled = 1;
  const i64 size[4] = {q.shape[2], group_size, q.shape[0], q.shape[1] / group_size};
  const i64 stride[3] = {q.stride[1], q.stride[0], group_size * q.stride[1]};
  for (i32 i = 0; i < 4; ++i) map.size[i] = static_cast<u64>(size[i]);
  for (i32 i = 0; i < 3; ++i) map.stride[i] = static_cast<u64>(2 * stride[i]);
  map.box[0] = 64, map.box[1] = group_size, map.box[2] = box_rows / group_size;
  map.box[3] = 1;
  TensorMap result{};
  std::memcpy(&result, &map, sizeof map);
  return result;
}

/// Slots that hold no key: behind the last one of a request, and pages that no request has. NaN in
/// them.
inline void poison_unused(Owned& pool, const Table& table, i32 page_size) {
  const i64 slots = pool.ref.shape[0] * std::max(page_size, 1);
  std::vector<bool> used(at(slots));
  i64 next = 0;
  for (std::size_t g = 0; g < table.kv_len.size(); ++g)
    for (i32 key = 0; key < table.kv_len[g]; ++key, ++next) {
      const i32 group = static_cast<i32>(g);
      used[at(page_size > 0 ? i64{table.page(group, key)} * page_size + key % page_size : next)] =
          true;
    }
  const std::size_t bytes = pool.bytes.size() / used.size();
  for (std::size_t slot = 0; slot < used.size(); ++slot)
    if (!used[slot])
      std::fill_n(pool.bytes.begin() + static_cast<i64>(slot * bytes), bytes, std::byte{0xff});
}

/// What is unusual about a problem's logits.
struct Logits {
  double scale = 0.0;     ///< 0: the spec's
  float late_keys = 1.0;  ///< factor of the keys from number `late` on; of ragged keys
  i32 late = 0;
};

/// Requests, their pages (0: all keys in one piece), and the workers that share them.
struct Batch {
  Ints qo_len, kv_len;
  i32 page_size, num_workers;
  i32 qo_heads = 4;
  Logits logits = {};
};

/// The kernel for long queries, and those for short ones, whose tiles have `rows` rows.
template <class T, i32 dim_qk, i32 dim_vo, i32 rows, class V, bool clusters>
struct Chosen {
  using Kernel = wgmma::ShortKernel<T, dim_qk, dim_vo, rows, wgmma::Serves{false, true}, V>;
  using Memory = wgmma::ShortMemory<Kernel>;
  static constexpr QueryShape shape = short_queries;
  static void attend(const wgmma::Launch& launch, const V& variant) {
    wgmma::attend_short<Kernel>(launch, variant);
  }
};
template <class T, i32 dim_qk, i32 dim_vo, class V, bool clusters>
struct Chosen<T, dim_qk, dim_vo, 0, V, clusters> {
  using Kernel = wgmma::Kernel<T, dim_qk, dim_vo, wgmma::Serves{true, true, clusters}, V>;
  using Memory = wgmma::Memory<Kernel>;
  static constexpr QueryShape shape = long_queries;
  static void attend(const wgmma::Launch& launch, const V& variant) {
    wgmma::attend_long<Kernel>(launch, variant);
  }
};

/// Plans and computes a batch, and compares rows with the reference. In clusters, the workers are
/// so many blocks, two a cluster.
template <class T, i32 dim_qk, i32 dim_vo, i32 short_rows, bool in_clusters = false, class V>
void check(const Batch& batch, const V& variant, const reference::Parts& parts) {
  using Of = Chosen<T, dim_qk, dim_vo, short_rows, V, in_clusters>;
  constexpr DType dtype = dtype_of<T>::value;
  const auto& [qo_len, kv_len, page_size, num_workers, qo_heads, logits] = batch;
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
  const LayoutPtr layout =
      page_size > 0
          ? paged_kv(table.args())
          : ragged_kv({.qo_indptr = index_of(table.qo_indptr), .kv_indptr = index_of(kv_indptr)});
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
  for (Owned* pool : {&k, &v}) poison_unused(*pool, table, page_size);
  std::fill(out.bytes.begin(), out.bytes.end(), std::byte{0xff});
  std::fill(lse.bytes.begin(), lse.bytes.end(), std::byte{0xff});

  PlanConfig config = gpu_plan_config(spec, 90, KernelFamily::wgmma, short_rows, num_workers,
                                      Schedule::automatic, has_output<V>);
  if (in_clusters) config = cluster_plan_config(spec, config);
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
  launch.in_boxes[0] = page_size == 0 || wgmma::is_boxed(page_size);
  launch.map[0][0] = map_of(k.ref, page_size, dim_qk, Of::Kernel::tile_keys);
  launch.map[0][1] = map_of(v.ref, page_size, dim_vo, Of::Kernel::tile_keys);
  launch.q = RowsView{q.ref.data, q.ref.stride[0], q.ref.stride[1]};
  if (wgmma::group_rows % (qo_heads / kv_heads) == 0) {
    launch.row_boxes = wgmma::RowBoxes::of_groups;
    launch.query_map = map_of_rows(q.ref, qo_heads / kv_heads, wgmma::group_rows);
    launch.out_in_boxes = true;
    launch.out_map = map_of_rows(out.ref, qo_heads / kv_heads, wgmma::long_rows);
  }
  launch.out = RowsView{out.ref.data, out.ref.stride[0], out.ref.stride[1]};
  if (parts.scan == Scan::softmax)
    launch.lse = RowsView{lse.ref.data, lse.ref.stride[0], lse.ref.stride[1]};
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
    ASSERT_EQ(launch.plan.query_tiles[i].shape, Of::shape);

  const i32 size = in_clusters ? 2 : 1;
  for (i32 i = launch.plan.num_workers - 1; i >= 0; --i) {
    emulated::run_cluster(i, size, wgmma::num_threads, sizeof(typename Of::Memory),
                          size * launch.plan.num_workers, 1, [&] { Of::attend(launch, variant); });
  }
  EXPECT_EQ(drawn[0] + drawn[1], 0);
  const reference::Problem problem{
      layout->view(),       qo_heads, kv_heads, dim_qk, dim_vo, dtype, dtype, scale, launch.q,
      {{pool(k), pool(v)}}, parts};
  const i32 step = rows > 40 ? 7 : 1;
  for (i32 row = 0; row < rows; row += step)
    for (i32 head = 0; head < qo_heads; ++head) {
      const reference::Exact e = reference::attend(problem, row, head, false, true);
      const i64 n = row * qo_heads + head;
      if (launch.lse.data && e.lse == -reference::infinity) {
        ASSERT_EQ(reference::element(lse.ref.data, DType::float32, n), e.lse) << row;
      } else if (launch.lse.data) {
        ASSERT_NEAR(reference::element(lse.ref.data, DType::float32, n), e.lse, e.lse_budget)
            << row;
      }
      for (i32 d = 0; d < dim_vo; ++d)
        ASSERT_NEAR(reference::element(out.ref.data, dtype, n * dim_vo + d), e.o[at(d)],
                    e.o_budget[at(d)])
            << "row " << row << ", head " << head << ", element " << d;
    }
}

/// An output part that needs a row whole, and leaves it as it is.
struct Halved {
  template <class Vec>
  RADDLE_FN void output(Vec& o, const Row&, float) const {
    const float ones = o.sum([](float) { return 1.0f; });
    o.map([&](float x, i32) { return x * (ones / static_cast<float>(o.size())); });
  }
};

}  // namespace raddle::testing_wgmma
