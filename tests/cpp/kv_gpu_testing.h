// What tests of the KV cache's GPU kernels share: tensors, batches, launches on emulated threads.
// Included after RADDLE_EMULATED_PTX is defined.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cache/checks.h"
#include "owned_tensor.h"
#include "raddle/engine/kernel/cache/gpu.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/shipped.h"
#include "raddle/kv.h"

namespace raddle::testing_kv {

using std::size_t;

struct Owned : testing_tensors::OwnedTensor {
  using OwnedTensor::OwnedTensor;
  void draw(std::mt19937& random) {
    std::normal_distribution<float> normal;
    dispatch_kv_dtype(ref.dtype, [&](auto zero) {
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

  /// Of a pool's tokens: its shape without the last dimension.
  Owned scales(std::mt19937& random) const {
    const bool nhd = order == HeadOrder::nhd;
    Owned all(DType::float32, {num_pages, nhd ? page_size : heads, nhd ? heads : page_size}, 1);
    all.draw(random);
    return all;
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
    Owned pool(dtype, {num_pages, nhd ? page_size : heads, nhd ? heads : page_size, width},
               16 / dtype_bytes(dtype));
    pool.draw(random);
    return pool;
  }
  Owned rows_of(std::mt19937& random, i32 width) const {
    Owned owned(dtype, {rows(), heads, width}, 8);
    owned.draw(random);
    return owned;
  }
};

/// A tree for each request's rows, the node that is accepted of it, and the paths to those nodes,
/// as the kernel takes them.
struct DrawnTrees {
  std::vector<i32> parents, accepted, path, path_begin{0};

  DrawnTrees(const Batch& batch, std::mt19937& random) {
    const auto below = [&](i32 n) { return static_cast<i32>(random() % static_cast<unsigned>(n)); };
    for (i32 i = 0; i < batch.requests(); ++i) {
      const i32 row = batch.qo_indptr[static_cast<size_t>(i)];
      const i32 nodes = batch.qo_indptr[static_cast<size_t>(i) + 1] - row;
      for (i32 n = 0; n < nodes; ++n) parents.push_back(below(n + 1) - 1);
      accepted.push_back(below(nodes + 1) - 1);
      std::vector<i32> backwards;
      for (i32 n = accepted.back(); n >= 0; n = parents[static_cast<size_t>(row + n)])
        backwards.push_back(n);
      path.insert(path.end(), backwards.rbegin(), backwards.rend());
      path_begin.push_back(static_cast<i32>(path.size()));
    }
    parents.push_back(0), path.push_back(0);  // none is empty storage
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

inline RowBytes row_bytes(const TensorRef& rows) {
  const i64 bytes = dtype_bytes(rows.dtype);
  return {static_cast<const u8*>(rows.data), rows.stride[0] * bytes, rows.stride[1] * bytes};
}

inline SummaryBytes summary_bytes(const TensorRef& t) {
  const i64 bytes = dtype_bytes(t.dtype);
  return {static_cast<u8*>(t.data), t.stride[0] * bytes,          t.stride[1] * bytes,
          t.stride[2] * bytes,      static_cast<i32>(t.shape[3]), static_cast<i32>(t.shape[0])};
}

}  // namespace raddle::testing_kv
