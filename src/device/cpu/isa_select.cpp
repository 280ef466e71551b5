// Compiled once an instruction set, with RADDLE_ISA naming the namespace of everything included
// here.
#include "device/cpu/page_scores.h"
#include "raddle/engine/simd/vec.h"

RADDLE_ENGINE_BEGIN

namespace cpu {
namespace {

/// Query vectors that meet a page's minima and maxima together: their sums stay in registers.
constexpr i32 at_a_time = 4;

/// Σ_d max(q_d · min_d, q_d · max_d) of `count` vectors of queries that lie `dim` floats apart: the
/// largest, or `best`. Whole vectors of lanes, then one element at a time.
template <i32 count, class T>
float largest_bound(float best, const float* q, const T* least, const T* most, i32 dim) {
  simd::Vec sum[count] = {};
  i32 d = 0;
  for (; d + simd::lanes <= dim; d += simd::lanes) {
    const simd::Vec lo = simd::load(least + d), hi = simd::load(most + d);
#pragma GCC unroll 4
    for (i32 i = 0; i < count; ++i) {
      const simd::Vec x = simd::load(q + i * dim + d);
      sum[i] = sum[i] + simd::max(x * lo, x * hi);
    }
  }
#pragma GCC unroll 4
  for (i32 i = 0; i < count; ++i) {
    float bound = simd::reduce_sum(sum[i]);
    for (i32 e = d; e < dim; ++e) {
      const float x = q[i * dim + e];
      bound += max(x * to_float(least[e]), x * to_float(most[e]));
    }
    best = bound > best ? bound : best;  // what is no number counts nothing
  }
  return best;
}

/// Asks for a head's minima and maxima of a page: pages lie anywhere.
template <class T>
void ask_for(const SummaryBytes& summary, i32 page, i32 head) {
  constexpr i32 line = 64 / static_cast<i32>(sizeof(T));
  for (i32 which = 0; which < 2; ++which)
    for (i32 d = 0; d < summary.dim; d += line)
      simd::prefetch(kv::summary_at<T>(summary, page, which, head) + d);
}

template <class T>
void score_pages(const ScoreJob& job) {
  const SelectView& view = *job.view;
  const i32 dim = view.summary.dim;
  for (i32 p = 0; p < job.count; ++p) {
    float best = bits_to_float(0xff800000u);
    for (i32 head = job.head_begin; head < job.head_end; ++head) {
      if (p + 1 < job.count) ask_for<T>(view.summary, job.pages[p + 1], head);
      const T* least = kv::summary_at<T>(view.summary, job.pages[p], 0, head);
      const T* most = kv::summary_at<T>(view.summary, job.pages[p], 1, head);
      for (i32 row = job.row_begin; row < job.row_end; ++row) {
        const auto* q = reinterpret_cast<const float*>(view.q.data + row * view.q.row_step +
                                                       head * view.group_size * view.q.head_step);
        i32 g = 0;
        for (; g + at_a_time <= view.group_size; g += at_a_time)
          best = largest_bound<at_a_time>(best, q + g * dim, least, most, dim);
        for (; g < view.group_size; ++g)
          best = largest_bound<1>(best, q + g * dim, least, most, dim);
      }
    }
    job.keys[p] = kv::score_key(best);
  }
}

constexpr PageScores scores{score_pages<float>, score_pages<f16>, score_pages<bf16>};

}  // namespace
}  // namespace cpu

const PageScores& page_scores();
const PageScores& page_scores() { return cpu::scores; }

RADDLE_ENGINE_END
