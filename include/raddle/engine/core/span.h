// The pyramid of minima and maxima over a captured tensor, by which the hull of any span of its
// elements is found in O(log n): every level has one (minimum, maximum) pair for 16 entries of the
// level below, from the pairs over 16 elements up to a level of at most 16 pairs. Levels follow one
// another in memory, the finest first. A NaN makes the pairs above it NaN.
#pragma once

#include "raddle/engine/core/interval.h"

RADDLE_ENGINE_BEGIN

constexpr i64 hull_branch = 16;

/// How many elements the pyramid over n elements takes.
RADDLE_FN constexpr i64 hull_size(i64 n) {
  i64 size = 0;
  while (n > hull_branch) {
    n = ceil_div(n, hull_branch);
    size += 2 * n;
  }
  return size;
}

/// Writes one level: `width` is 1 over elements, 2 over pairs.
template <class T>
RADDLE_FN void build_level(const T* from, i64 n, i64 width, T* out) {
  for (i64 i = 0; i * hull_branch < n; ++i) {
    T least = from[i * hull_branch * width];
    T most = from[i * hull_branch * width + width - 1];
    for (i64 j = i * hull_branch; j < min(n, (i + 1) * hull_branch); ++j) {
      const T lo = from[j * width], hi = from[j * width + width - 1];
      least = lo < least || lo != lo ? lo : least;  // NaN stays: no number is less than it
      most = hi > most || hi != hi ? hi : most;
    }
    out[2 * i] = least;
    out[2 * i + 1] = most;
  }
}

/// Builds the pyramid over n elements into `out`, of hull_size(n) elements.
template <class T>
RADDLE_FN void build_hull(const T* data, i64 n, T* out) {
  const T* from = data;
  for (i64 width = 1; n > hull_branch; width = 2) {
    build_level(from, n, width, out);
    n = ceil_div(n, hull_branch);
    from = out;
    out += 2 * n;
  }
}

namespace interval {

/// Grows while it sees elements.
struct IntGather {
  IntInterval seen{int_max, int_min};
  RADDLE_FN void add(i64 first, i64 last) { seen = hull(seen, IntInterval{first, last}); }
};
struct FloatGather {
  FloatInterval seen{math::infinity, -math::infinity, false};
  RADDLE_FN void add(float first, float last) {
    seen = first != first ? any_float : hull(seen, FloatInterval{first, last, false});
  }
};
template <class T>
struct Gather : IntGather {};
template <>
struct Gather<float> : FloatGather {};

/// Adds the elements [first, last] of a flattened tensor of n: at most 30 reads a level.
template <class T>
RADDLE_FN void gather(const T* data, const T* pyramid, i64 n, i64 first, i64 last, Gather<T>& all) {
  if (first % hull_branch == 0 && last - first == hull_branch - 1 && n > hull_branch) {
    const T* pair = pyramid + 2 * (first / hull_branch);  // as kernels ask for parts of tiles
    return all.add(pair[0], pair[1]);
  }
  const T* level = data;
  RADDLE_ROLLED
  for (i64 width = 1; first <= last; width = 2) {
    const bool top = n <= hull_branch;
    RADDLE_ROLLED
    while (first <= last && (top || first % hull_branch != 0)) {
      all.add(level[first * width], level[first * width + width - 1]);
      ++first;
    }
    RADDLE_ROLLED
    while (first <= last && (last + 1) % hull_branch != 0) {
      all.add(level[last * width], level[last * width + width - 1]);
      --last;
    }
    if (first > last) return;
    first /= hull_branch;
    last = (last + 1) / hull_branch - 1;
    level = width == 1 ? pyramid : level + 2 * n;
    n = ceil_div(n, hull_branch);
  }
}

/// Where clamped indices of one dimension can point: a negative index counts from the end.
RADDLE_FN constexpr IntInterval index_span(IntInterval i, i32 n) {
  if (i.last < 0) i = IntInterval{i.first + n, i.last + n};
  const i64 end = i64{n} - 1;
  if (i.first < 0 && i.last >= 0) return IntInterval{0, end};
  return IntInterval{max(i64{0}, min(i.first, end)), max(i64{0}, min(i.last, end))};
}

/// Up to this many values of leading indices are visited one by one; for more, the span between
/// the corners is taken.
constexpr i64 max_walk = 16;

/// The hull of the elements that indices in the given intervals can select.
template <class T, i32 rank, class... Index>
RADDLE_FN auto at(const SpanTensor<const T, rank>& t, Index... index) {
  static_assert(sizeof...(Index) == rank);
  IntInterval span[rank] = {index...};
  i64 n = 1, walk = 1, base_first = 0, base_last = 0;
  for (i32 d = 0; d < rank; ++d) {
    span[d] = index_span(span[d], t.extent[d]);
    n *= t.extent[d];
    base_first = base_first * t.extent[d] + span[d].first;
    base_last = base_last * t.extent[d] + span[d].last;
    const i64 count = span[d].last - span[d].first + 1;
    if (d + 1 < rank) walk = walk > max_walk ? walk : walk * count;
  }
  Gather<T> all;
  if (walk > max_walk) {
    gather(t.data, t.hull, n, base_first, base_last, all);
    return all.seen;
  }
  const i64 length = span[rank - 1].last - span[rank - 1].first;
  const auto add = [&](i64 first) {
    const i64 last = first + length;
    if (t.order == 0) return gather(t.data, t.hull, n, first, last, all);
    all.add(t.data[first], t.data[first]);
    all.add(t.data[last], t.data[last]);
  };
  for (i64 w = 0; w < walk; ++w) {
    i64 offset = span[rank - 1].first, stride = t.extent[rank - 1], rest = w;
    for (i32 d = rank - 2; d >= 0; --d) {
      const i64 count = span[d].last - span[d].first + 1;
      offset += (span[d].first + rest % count) * stride;
      rest /= count;
      stride *= t.extent[d];
    }
    add(offset);
  }
  return all.seen;
}

}  // namespace interval

RADDLE_ENGINE_END
