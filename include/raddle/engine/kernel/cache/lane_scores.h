// Scores of pages on fp32 lanes. Queries are parted: [rows, heads, 2, D], max(q, 0) and min(q, 0).
#pragma once

#include "raddle/engine/kernel/cache/page_scores.h"
#include "raddle/engine/simd/vec.h"

RADDLE_ENGINE_BEGIN

namespace cpu {
namespace {

inline i64 parted_bytes(const SelectView& view) {
  return i64{view.num_kv_heads} * view.group_size * 2 * view.summary.dim *
         static_cast<i64>(sizeof(float));
}

template <class T>
void part_row(const SelectView& view, i32 row, u8* to) {
  const i32 dim = view.summary.dim;
  auto* parted = reinterpret_cast<float*>(to);
  for (i32 head = 0; head < view.num_kv_heads * view.group_size; ++head, parted += 2 * dim) {
    const auto* q =
        reinterpret_cast<const T*>(view.q.data + row * view.q.row_step + head * view.q.head_step);
    for (i32 d = 0; d < dim; ++d) {
      const float x = to_float(q[d]);
      parted[d] = x < 0.0f ? 0.0f : x;  // what is no number stays that
      parted[dim + d] = x > 0.0f ? 0.0f : x;
    }
  }
}

/// The vectors of a row's group that share KV head `head`.
inline const float* parted_queries(const ScoreJob& job, i32 row, i32 head) {
  return reinterpret_cast<const float*>(job.queries + row * job.row_bytes) +
         i64{head} * job.view->group_size * 2 * job.view->summary.dim;
}

/// Query vectors and pages that meet: their sums stay in registers.
constexpr i32 queries_at_a_time = 4, pages_at_a_time = 2;

/// A head's minima and maxima of a page.
template <class T>
struct Bounds {
  const T* least;
  const T* most;
};

/// Σ_d max(q_d · min_d, q_d · max_d), as it is defined. `q` is parted.
template <class T>
float defined_bound(const float* q, const Bounds<T>& of, i32 dim) {
  float bound = 0.0f;
  for (i32 d = 0; d < dim; ++d) {
    const float x = q[d] + q[dim + d];
    bound += max(x * to_float(of.least[d]), x * to_float(of.most[d]));
  }
  return bound;
}

/// The bounds of `count` query vectors, which lie parted one after the other, on each of `pages`
/// pages: the largest, or what `best` has. As two products, q⁺ · max + q⁻ · min, they cost half;
/// where a key is infinite these may be NaN, and the bound is computed as it is defined.
template <i32 pages, i32 count, class T>
void largest_bounds(const float* q, const Bounds<T>* of, i32 dim, float* best) {
  simd::Vec sum[pages][count] = {};
  i32 d = 0;
  for (; d + simd::lanes <= dim; d += simd::lanes) {
    simd::Vec least[pages], most[pages];
#pragma GCC unroll 2
    for (i32 p = 0; p < pages; ++p) {
      least[p] = simd::load(of[p].least + d);
      most[p] = simd::load(of[p].most + d);
    }
#pragma GCC unroll 4
    for (i32 i = 0; i < count; ++i) {
      const simd::Vec plus = simd::load(q + 2 * i * dim + d);
      const simd::Vec minus = simd::load(q + (2 * i + 1) * dim + d);
#pragma GCC unroll 2
      for (i32 p = 0; p < pages; ++p)
        sum[p][i] = simd::fma(minus, least[p], simd::fma(plus, most[p], sum[p][i]));
    }
  }
#pragma GCC unroll 2
  for (i32 p = 0; p < pages; ++p) {
#pragma GCC unroll 4
    for (i32 i = 0; i < count; ++i) {
      const float* parted = q + 2 * i * dim;
      float bound = simd::reduce_sum(sum[p][i]);
      for (i32 e = d; e < dim; ++e)
        bound += parted[e] * to_float(of[p].most[e]) + parted[dim + e] * to_float(of[p].least[e]);
      if (!(bound - bound == 0.0f)) bound = defined_bound(parted, of[p], dim);
      best[p] = bound > best[p] ? bound : best[p];  // what is no number counts nothing
    }
  }
}

/// Prefetches a head's minima and maxima of a page: pages lie anywhere.
template <class T>
void prefetch_bounds(const SummaryBytes& summary, i32 page, i32 head) {
  constexpr i32 line = 64 / static_cast<i32>(sizeof(T));
  for (i32 which = 0; which < 2; ++which)
    for (i32 d = 0; d < summary.dim; d += line)
      simd::prefetch(kv::summary_at<T>(summary, page, which, head) + d);
}

/// Scores `pages` of the job's pages, from the nth on.
template <i32 pages, class T>
void score_some(const ScoreJob& job, i32 nth) {
  const SelectView& view = *job.view;
  const i32 dim = view.summary.dim;
  float best[pages];
  for (float& bound : best) bound = -math::infinity;
  for (i32 head = job.head_begin; head < job.head_end; ++head) {
    Bounds<T> of[pages];
    for (i32 p = 0; p < pages; ++p) {
      const i32 page = job.pages[nth + p], next = nth + p + pages;
      of[p] = {kv::summary_at<T>(view.summary, page, 0, head),
               kv::summary_at<T>(view.summary, page, 1, head)};
      if (next < job.count) prefetch_bounds<T>(view.summary, job.pages[next], head);
    }
    for (i32 row = job.row_begin; row < job.row_end; ++row) {
      const float* q = parted_queries(job, row, head);
      i32 g = 0;
      for (; g + queries_at_a_time <= view.group_size; g += queries_at_a_time)
        largest_bounds<pages, queries_at_a_time>(q + 2 * g * dim, of, dim, best);
      for (; g < view.group_size; ++g) largest_bounds<pages, 1>(q + 2 * g * dim, of, dim, best);
    }
  }
  for (i32 p = 0; p < pages; ++p) job.keys[nth + p] = kv::score_key(best[p]);
}

/// Scores pages [begin, end) of the job.
template <class T>
void score_pages(const ScoreJob& job, i32 begin, i32 end) {
  i32 nth = begin;
  for (; nth + pages_at_a_time <= end; nth += pages_at_a_time)
    score_some<pages_at_a_time, T>(job, nth);
  for (; nth < end; ++nth) score_some<1, T>(job, nth);
}

}  // namespace
}  // namespace cpu

RADDLE_ENGINE_END
