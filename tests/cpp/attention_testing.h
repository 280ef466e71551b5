// Small problems for tests of attention kernels: tensors, variants with their reference, layouts.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "raddle/attention.h"
#include "reference.h"

namespace raddle::testing_attention {

constexpr i32 qo_heads = 6, kv_heads = 2, dim_qk = 24, dim_vo = 16;

/// A tensor of random numbers that owns its memory.
struct Owned {
  TensorRef ref;
  std::vector<std::byte> bytes;

  template <class... N>
  Owned(std::mt19937& random, DType dtype, N... shape) {
    const i64 count = (i64{1} * ... * shape);
    bytes.resize(static_cast<std::size_t>(count * dtype_bytes(dtype)));
    ref = TensorRef::contiguous(bytes.data(), dtype, shape...);
    std::normal_distribution<float> normal;
    dispatch_kv_dtype(dtype, [&](auto zero) {
      using T = decltype(zero);
      for (i64 i = 0; i < count; ++i)
        reinterpret_cast<T*>(bytes.data())[i] = from_float<T>(normal(random));
    });
  }
};

/// Query rows, a pool of 40 pages of 4 slots with scales, and outputs.
struct Tensors {
  DType kv_dtype;
  Owned q, k, v, k_scale, v_scale, out, lse;

  Tensors(std::mt19937& random, DType dtype, i32 rows) : Tensors(random, dtype, dtype, rows) {}
  Tensors(std::mt19937& random, DType dtype, DType stored, i32 rows)
      : kv_dtype(stored),
        q(random, dtype, rows, qo_heads, dim_qk),
        k(random, stored, 40, 4, kv_heads, has_8_bits(stored) ? round_up(dim_qk, 16) : dim_qk),
        v(random, stored, 40, 4, kv_heads, dim_vo),
        k_scale(random, DType::float32, 40, 4, kv_heads),
        v_scale(random, DType::float32, kv_heads),
        out(random, dtype, rows, qo_heads, dim_vo),
        lse(random, DType::float32, rows, qo_heads) {
    k.ref.shape[3] = dim_qk;  // GPUs ask for rows of 16-byte units, not for heads of them
  }
};

struct Case {
  std::string name;
  std::vector<Variant> variant;
  reference::Parts parts;
};

inline bool is_causal(const Row& r, const Key& c) { return c.kv_index <= r.q_index; }
inline bool in_window(const Row& r, const Key& c) { return r.q_pos - c.kv_pos <= 9; }
inline double capped(double s, const Row&, const Key&) { return 2.0 * std::tanh(s / 2.0); }

inline std::vector<Case> cases() {
  reference::Parts plain, causal_parts, gemma, oss, sigmoid_parts;
  causal_parts.mask = is_causal;
  gemma.logits = capped;
  gemma.mask =
      oss.mask = [](const Row& r, const Key& c) { return is_causal(r, c) && in_window(r, c); };
  const std::vector<float> logit{0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -3.0f};
  oss.sink = [=](const Row& r) {
    return static_cast<double>(logit[static_cast<std::size_t>(r.q_head)]);
  };
  sigmoid_parts.logits = [](double s, const Row&, const Key&) {
    return 1.0 / (1.0 + std::exp(1.0 - s));
  };
  sigmoid_parts.scan = Scan::sum;
  return {{"plain", {}, plain},
          {"causal", {causal()}, causal_parts},
          {"Gemma 2", {soft_cap(2.0f), sliding_window(9), causal()}, gemma},
          {"gpt-oss", {sinks(logit), sliding_window(9), causal()}, oss},
          {"sigmoid", {sigmoid(-1.0f)}, sigmoid_parts}};
}

/// Requests of 1, 5 and 12 rows; 61, 2 and 30 keys in scattered pages.
inline LayoutPtr pages() {
  static const i32 qo[] = {0, 1, 6, 18}, len[] = {61, 2, 30}, indptr[] = {0, 16, 17, 25};
  static const i32 list[] = {7,  3, 39, 1, 20, 21, 4,  0,  9,  10, 13, 12, 30,
                             31, 2, 5,  8, 16, 15, 14, 33, 35, 34, 36, 38};
  PagedArgs args;
  args.qo_indptr = IndexRef(qo, 4);
  args.page_indptr = IndexRef(indptr, 4);
  args.page_indices = IndexRef(list, 25);
  args.kv_len = IndexRef(len, 3);
  args.page_size = 4;
  return paged_kv(args);
}

/// Rows in blocks of 5, columns in blocks of 4, random bits; no row block reaches all columns.
inline LayoutPtr blocks(std::mt19937& random) {
  std::vector<u8> mask(18 * 60);
  for (i32 r = 0; r < 18; ++r)
    for (i32 c = 0; c < 60; ++c)
      mask[static_cast<std::size_t>(r * 60 + c)] = (c / 4 + r / 5) % 3 != 0 && random() % 4 != 0;
  const Bsr bsr = dense_mask_to_bsr(mask.data(), 18, 60, 5, 4);
  BlockSparseArgs args;
  args.block_rows = 5;
  args.block_cols = 4;
  args.indptr = IndexRef(bsr.indptr.data(), static_cast<i64>(bsr.indptr.size()));
  args.indices = IndexRef(bsr.indices.data(), static_cast<i64>(bsr.indices.size()));
  args.num_rows = 18;
  args.num_cols = 60;
  args.mask_bits = bsr.mask_bits.data();
  args.mask_bytes = static_cast<i64>(bsr.mask_bits.size());
  return block_sparse(args);
}

/// Rows 0 … 5 and 17 share 12 keys; the others belong to requests of their own.
inline LayoutPtr two_levels() {
  static const i32 shared_qo[] = {0, 7}, shared_rows[] = {0, 17, 2, 1, 4, 3, 5},
                   shared_indptr[] = {0, 3};
  static const i32 shared_list[] = {6, 11, 17}, shared_len[] = {12};
  static const i32 qo[] = {0, 1, 6, 17, 18}, len[] = {61, 2, 30, 0}, indptr[] = {0, 16, 17, 25, 25};
  static const i32 list[] = {7,  3, 39, 1, 20, 21, 4,  0,  9,  10, 13, 12, 30,
                             31, 2, 5,  8, 16, 15, 14, 33, 35, 34, 36, 38};
  static const i32 begin[] = {12, 12, 0, 12};
  PagedArgs shared, own;
  shared.qo_indptr = IndexRef(shared_qo, 2);
  shared.qo_rows = IndexRef(shared_rows, 7);
  shared.page_indptr = IndexRef(shared_indptr, 2);
  shared.page_indices = IndexRef(shared_list, 3);
  shared.kv_len = IndexRef(shared_len, 1);
  own.qo_indptr = IndexRef(qo, 5);
  own.page_indptr = IndexRef(indptr, 5);
  own.page_indices = IndexRef(list, 25);
  own.kv_len = IndexRef(len, 4);
  own.kv_begin = IndexRef(begin, 4);
  shared.page_size = own.page_size = 4;
  return cascade({paged_kv(shared), paged_kv(own)});
}

inline PoolView pool_of(const TensorRef& t) {
  return {t.data, t.stride[0], t.stride[1], t.stride[2]};
}

inline reference::Problem problem_of(const Layout& layout, const Tensors& t, DType dtype,
                                     const Case& c) {
  reference::LevelKv kv{pool_of(t.k.ref), pool_of(t.v.ref)};
  if (has_8_bits(t.kv_dtype)) {
    const auto& s = t.k_scale.ref.stride;
    kv.k_scale = {static_cast<float*>(t.k_scale.ref.data), s[0], s[1], s[2], 1.0f};
    kv.v_scale = {static_cast<float*>(t.v_scale.ref.data), 0, 0, 1, 1.0f};
  }
  reference::Problem p{layout.view(),
                       qo_heads,
                       kv_heads,
                       dim_qk,
                       dim_vo,
                       dtype,
                       t.kv_dtype,
                       1.0 / std::sqrt(dim_qk),
                       RowsView{t.q.ref.data, t.q.ref.stride[0], t.q.ref.stride[1]},
                       {},
                       c.parts};
  p.kv.assign(layout.levels().size(), kv);
  return p;
}

inline void expect_within(const reference::Problem& p, const Tensors& t, DType dtype, bool has_lse,
                          bool rounded_weights = false) {
  for (i32 row = 0; row < p.layout.num_rows; ++row)
    for (i32 head = 0; head < qo_heads; ++head) {
      const reference::Exact e = reference::attend(p, row, head, false, rounded_weights);
      const i64 at = (row * qo_heads + head);
      if (has_lse && e.lse == -reference::infinity) {
        ASSERT_EQ(reference::element(t.lse.ref.data, DType::float32, at), e.lse)
            << row << ", " << head;
      } else if (has_lse) {
        ASSERT_NEAR(reference::element(t.lse.ref.data, DType::float32, at), e.lse, e.lse_budget)
            << row << ", " << head;
      }
      for (i32 d = 0; d < dim_vo; ++d)
        ASSERT_NEAR(reference::element(t.out.ref.data, dtype, at * dim_vo + d),
                    e.o[static_cast<std::size_t>(d)], e.o_budget[static_cast<std::size_t>(d)])
            << "row " << row << ", head " << head << ", element " << d;
    }
}

}  // namespace raddle::testing_attention
