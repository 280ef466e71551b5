// The fp64 reference as plain loops over the engine's normal form: the C++ twin of
// tests/python/reference, with the same error budgets. For tests alone; nothing here is fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "raddle/engine/core/dtype.h"
#include "raddle/engine/core/scale.h"
#include "raddle/engine/layout/layout.h"

namespace raddle::reference {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// The parts of a variant in fp64; those unset are absent.
struct Parts {
  std::function<double(double s, const Row&, const Key&)> logits;  ///< slope at most 1
  std::function<bool(const Row&, const Key&)> mask;
  std::function<double(const Row&)> sink;
  Scan scan = Scan::softmax;
};

struct LevelKv {
  PoolView k, v;
  ScaleView k_scale{nullptr, 0, 0, 0, 1.0f}, v_scale{nullptr, 0, 0, 0, 1.0f};
};

struct Problem {
  LayoutView layout;
  i32 num_qo_heads, num_kv_heads;
  i32 head_dim_qk, head_dim_vo;
  DType dtype;
  DType kv_dtype;
  double scale;
  RowsView q;
  std::vector<LevelKv> kv;  ///< one a level
  Parts parts;
};

/// The exact answer of one row and head, and the error that a kernel of the dtype may show.
struct Exact {
  std::vector<double> o, o_budget;
  double lse = -infinity, lse_budget = 0.0;
};

inline double element(const void* data, DType dtype, i64 at) {
  return dispatch_kv_dtype(dtype, [&](auto zero) -> double {
    return static_cast<double>(to_float(static_cast<const decltype(zero)*>(data)[at]));
  });
}

inline double unit_roundoff(DType dtype) {
  return dtype == DType::float32 ? 0x1p-24 : dtype == DType::float16 ? 0x1p-11 : 0x1p-8;
}

/// Roundings of a sum of n products in any order, in units of u32 of the sum of magnitudes.
inline double accumulated(double n) { return std::min(n, 6.0 * std::sqrt(n)) + 4.0; }

inline bool kept_by_bits(const LevelView& level, i32 group, i32 row_in_group, i32 column) {
  if (!level.mask_bits) return true;
  const i64 entry = level.block_begin[group] + column / level.block_size;
  const i64 bit =
      (entry * level.block_rows + row_in_group) * level.block_size + column % level.block_size;
  return (level.mask_bits[bit / 8] >> (bit % 8)) & 1;
}

/// One key that a row keeps: its logit, that logit's error, and its value.
struct Term {
  double s, delta;
  std::vector<double> v;
};

inline Term term(const Problem& p, const Row& row, const Key& key, const LevelKv& kv,
                 const Column& at) {
  constexpr double u32_ = 0x1p-24;
  const i64 q = row.row * p.q.row_stride + row.q_head * p.q.head_stride;
  const auto place = [&](const PoolView& pool) {
    return at.block * pool.block_stride + at.offset * pool.row_stride +
           key.kv_head * pool.head_stride;
  };
  const auto scale = [&](const ScaleView& view) {
    return static_cast<double>(scale_at(view, at.block, at.offset, key.kv_head));
  };
  double dot = 0.0, size = 0.0;
  for (i32 d = 0; d < p.head_dim_qk; ++d) {
    const double product = element(p.q.data, p.dtype, q + d) *
                           element(kv.k.data, p.kv_dtype, place(kv.k) + d) * scale(kv.k_scale);
    dot += product;
    size += std::abs(product);
  }
  Term t;
  t.s = dot * p.scale;
  t.delta = u32_ * (accumulated(p.head_dim_qk) * size * std::abs(p.scale) + 2.0 * std::abs(t.s));
  if (p.parts.logits) {
    t.s = p.parts.logits(t.s, row, key);
    t.delta += 10.0 * u32_ * std::abs(t.s);
  }
  for (i32 d = 0; d < p.head_dim_vo; ++d)
    t.v.push_back(element(kv.v.data, p.kv_dtype, place(kv.v) + d) * scale(kv.v_scale));
  return t;
}

/// All keys that the row of the ragged query tensor keeps under a head, level by level.
inline std::vector<Term> terms(const Problem& p, i32 row, i32 head, Row* found) {
  std::vector<Term> result;
  const i32 group_size = p.num_qo_heads / p.num_kv_heads;
  for (i32 n = 0; n < p.layout.num_levels; ++n) {
    const LevelView& level = p.layout.levels[n];
    for (i32 g = 0; g < level.num_groups; ++g) {
      for (i32 i = 0; i < group_rows(level, g); ++i) {
        if (query_row(level, g, i) != row) continue;
        const i32 fused = i * group_size + head % group_size;
        const Row r = make_row(p.layout, level, g, fused, head / group_size, group_size);
        *found = r;
        for (i32 c = 0; c < level.columns[g]; ++c) {
          const Column at = column_at(level, g, c);
          const i32 request = level.keys_are_shared ? -1 : r.request;
          const Key key{request, at.kv_index, at.kv_pos, r.kv_head};
          if (!at.valid || !kept_by_bits(level, g, i, c)) continue;
          if (p.parts.mask && !p.parts.mask(r, key)) continue;
          result.push_back(term(p, r, key, p.kv[static_cast<std::size_t>(n)], at));
        }
      }
    }
  }
  return result;
}

/// What rounding the weights to the matrix dtype before P·V adds to an element's error: roundings
/// of n weights are independent but for weights that are equal, and small fp16 weights underflow.
inline double weight_rounding(const Problem& p, const std::vector<Term>& keys,
                              const std::vector<double>& weights, std::size_t d, double o) {
  const double u = unit_roundoff(p.dtype);
  double squares = 0.0, largest = p.parts.scan == Scan::sum ? 1.0 : 0.0, v = 0.0;
  for (std::size_t j = 0; j < keys.size(); ++j) {
    squares += weights[j] * weights[j] * keys[j].v[d] * keys[j].v[d];
    largest = std::max(largest, weights[j]);
    v = std::max(v, std::abs(keys[j].v[d]));
  }
  const double underflow = p.dtype == DType::float16 ? 0x1p-25 : 0.0;
  return u * (6.0 * std::sqrt(squares) + std::abs(o)) +
         underflow * largest * v * accumulated(static_cast<double>(keys.size()));
}

/// Attention of one row under one head; with `state`, before the sink and in fp32. Kernels on
/// matrix instructions have `rounded_weights`.
inline Exact attend(const Problem& p, i32 row, i32 head, bool state = false,
                    bool rounded_weights = false) {
  constexpr double u = 0x1p-24;
  const double u_out = state ? u : unit_roundoff(p.dtype);
  // Half of a subnormal fp16's spacing; elsewhere far below what any test draws.
  const double smallest = !state && p.dtype == DType::float16 ? 0x1p-25 : 0x1p-24 * u_out;
  Row r{};
  std::vector<Term> keys = terms(p, row, head, &r);
  const auto dim = static_cast<std::size_t>(p.head_dim_vo);
  const bool sum = p.parts.scan == Scan::sum;
  // A sink is a key without value.
  if (p.parts.sink && !state) keys.push_back({p.parts.sink(r), 0.0, std::vector<double>(dim, 0.0)});
  double top = -infinity;
  for (const Term& t : keys) top = std::max(top, t.s);
  double total = 0.0;
  for (const Term& t : keys) total += std::exp(t.s - top);

  Exact e;
  e.o.assign(dim, 0.0);
  e.o_budget.assign(dim, 0.0);
  if (keys.empty()) return e;
  if (!sum) e.lse = top + std::log(total);
  const double c = accumulated(static_cast<double>(keys.size())) * u;
  std::vector<double> p_of;
  double shrink = 0.0;
  for (Term& t : keys) {
    if (!sum) t.delta += 4.0 * u * (std::abs(t.s) + std::abs(top) + 2.0);
    p_of.push_back(sum ? t.s : std::exp(t.s - e.lse));
    shrink += sum ? 0.0 : p_of.back() * std::exp(-t.delta);
    if (!sum) e.lse_budget += p_of.back() * std::expm1(t.delta);
    for (std::size_t d = 0; d < dim; ++d) e.o[d] += p_of.back() * t.v[d];
  }
  if (sum) shrink = 1.0;
  e.lse_budget += sum ? 0.0 : c + 4.0 * u * std::abs(e.lse);
  for (std::size_t d = 0; d < dim; ++d) {
    double spread = 0.0, size = 0.0;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      // In a sum, a logit's error moves its own weight alone.
      const double moved = sum ? keys[j].v[d] : keys[j].v[d] - e.o[d];
      spread += p_of[j] * std::expm1(keys[j].delta) * std::abs(moved);
      size += p_of[j] * std::abs(keys[j].v[d]);
    }
    double error = spread / shrink + c * (size + std::abs(e.o[d]));
    if (rounded_weights) error += weight_rounding(p, keys, p_of, d, e.o[d]);
    e.o_budget[d] = error + u_out * (std::abs(e.o[d]) + error) + smallest;
  }
  return e;
}

}  // namespace raddle::reference
