// Captured tensors of integers that are in order along their last dimension, as the numbers of
// documents, the lengths of prefixes and the flags of padding are: which of their elements lie
// between two values is an interval of indices, which a binary search finds.
#pragma once

#include "raddle/engine/core/span.h"

RADDLE_ENGINE_BEGIN

/// SpanTensor::order of n elements, `row` in each row. Rows of equal elements are in both orders,
/// and count as rising. Elements that cannot be compared, NaN, are in none.
template <class T>
RADDLE_FN i32 find_order(const T* data, i64 n, i64 row) {
  bool rises = true, falls = true;
  for (i64 begin = 0; begin < n && (rises || falls); begin += row)
    for (i64 i = begin + 1; i < begin + row; ++i) {
      rises = rises && data[i - 1] <= data[i];
      falls = falls && data[i - 1] >= data[i];
    }
  return rises ? 1 : falls ? -1 : 0;
}

/// Which of n elements in an order (SpanTensor::order) lie in `value`, of the indices in `over`,
/// which begin at 0 or above. Those beyond the end select the last element. Three elements are
/// read if the first that lies in `value` is at `guess` and the last of `over` lies in it, too.
template <class T>
RADDLE_FN Range search(const T* elements, i32 n, i32 order, IntInterval value, Range over,
                       i32 guess) {
  if (over.last < over.first) return over;
  const i32 begin = min(over.first, n - 1), end = min(over.last, n - 1) + 1;
  const auto is_before = [&](i64 x) { return order > 0 ? x < value.first : x > value.last; };
  const auto is_behind = [&](i64 x) { return order > 0 ? x > value.last : x < value.first; };
  guess = min(max(guess, begin), end - 1);
  i32 before = guess - 1, last = end - 1;
  // All three are read at once, because a GPU waits hundreds of cycles for each.
  const i64 ahead = elements[max(before, begin)], guessed = elements[guess],
            end_most = elements[last];
  if ((guess > begin && !is_before(ahead)) | is_before(guessed) | is_behind(end_most)) {
    // The last index before the interval, and the last one not behind it, grow by halved steps.
    i32 step = 1;
    RADDLE_ROLLED
    while (step <= (end - begin) / 2) step *= 2;
    before = last = begin - 1;
    RADDLE_ROLLED
    for (; step > 0; step /= 2) {
      const i32 i = min(before + step, end - 1), j = min(last + step, end - 1);
      const i64 x = elements[i], y = elements[j];
      if (is_before(x)) before = i;
      if (!is_behind(y)) last = j;
    }
  }
  if (before >= last) return Range{over.last, over.first - 1};  // none
  return Range{before + 1, last == n - 1 ? over.last : last};
}

namespace interval {

/// Which indices of the last dimension, of those in `over`, may select elements in `value`;
/// `leading` are the other dimensions' indices. Everything where elements are in no order, or where
/// a leading index is not known.
template <class T, i32 rank, class... Index>
RADDLE_FN Range indices_of(const SpanTensor<const T, rank>& t, IntInterval value, Range over,
                           Index... leading) {
  static_assert(sizeof...(Index) + 1 == rank);
  const IntInterval given[rank] = {leading..., of(0)};
  i64 row = 0;
  bool known = t.order != 0 && over.first >= 0;
  RADDLE_UNROLL
  for (i32 d = 0; d + 1 < rank; ++d) {
    const IntInterval index = index_span(given[d], t.extent[d]);
    known = known && is_point(index);
    row = row * t.extent[d] + index.first;
  }
  if (!known) return everything;
  const i32 n = t.extent[rank - 1];
  return search(t.data + row * n, n, t.order, value, over, over.first);
}

}  // namespace interval

namespace traced {

/// The same where every index is known, and elements are in an order.
template <class T, i32 rank, class... Index>
RADDLE_FN Range indices_of(const SpanTensor<const T, rank>& t, IntInterval value, RowKeys over,
                           Index... leading) {
  static_assert(sizeof...(Index) + 1 == rank);
  const i32 n = t.extent[rank - 1];
  const T* elements = t.data;
  if constexpr (rank > 1) elements = &at(t, leading..., 0);
  return search(elements, n, t.order, value, over, over.guess);
}

}  // namespace traced

RADDLE_ENGINE_END
