// Summaries of pages, by which Quest (Tang et al. 2024, arXiv 2406.10774, section 3.3) bounds the
// logits that a page can have: the elementwise minimum and maximum of its keys, a KV head each.
#pragma once

#include "raddle/engine/kernel/cache/bytes.h"

namespace raddle {

/// Element (page, which, head, 0) at page * page_step + which * which_step + head * head_step
/// bytes; which: 0 the minimum, 1 the maximum.
struct SummaryBytes {
  u8* data;
  i64 page_step;
  i64 which_step;
  i64 head_step;
  i32 dim;
  i32 num_pages;
};

struct SummarizeView {
  PoolBytes k;
  SummaryBytes summary;
  ScaleView scale;  ///< of keys that are quantised
  bool new_only;    ///< only pages that hold rows of the batch
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

template <class T>
RADDLE_FN T* summary_at(const SummaryBytes& summary, i64 page, i64 which, i64 head) {
  return reinterpret_cast<T*>(summary.data + page * summary.page_step + which * summary.which_step +
                              head * summary.head_step);
}

/// The first page of a group's list that is summarised; the last is the group's last.
RADDLE_FN i32 first_summarized(const SummarizeView& view, const LevelView& level, i32 group) {
  if (!view.new_only) return 0;
  if (group_rows(level, group) == 0) return pages_of_group(level, group);
  return max(first_new_column(level, group), 0) / level.block_size;
}

/// One head of one page with `keys` keys. Minimum and maximum are exact in the keys' dtype; of keys
/// that are quantised (P) they are of values, rounded once to T.
template <class T, class P, class Lanes>
RADDLE_FN void summarize_page(const Lanes& lanes, const SummarizeView& view, i32 page, i32 keys,
                              i32 head) {
  if (!has_page(view.k, page) || page >= view.summary.num_pages) return;
  for (i32 p = lanes.index(); p < view.summary.dim / piece_size; p += Lanes::count) {
    float least[piece_size], most[piece_size], x[piece_size];
    for (i32 slot = 0; slot < keys; ++slot) {
      load_piece(lanes,
                 reinterpret_cast<const P*>(head_at(view.k, page, slot, head)) + p * piece_size, x);
      if constexpr (is_quantized<P>) {
        const float scale = scale_at(view.scale, page, slot, head);
        RADDLE_UNROLL
        for (i32 i = 0; i < piece_size; ++i) x[i] *= scale;
      }
      RADDLE_UNROLL
      for (i32 i = 0; i < piece_size; ++i) {
        least[i] = slot == 0 || x[i] < least[i] ? x[i] : least[i];
        most[i] = slot == 0 || x[i] > most[i] ? x[i] : most[i];
      }
    }
    store_piece(lanes, least, summary_at<T>(view.summary, page, 0, head) + p * piece_size);
    store_piece(lanes, most, summary_at<T>(view.summary, page, 1, head) + p * piece_size);
  }
}

}  // namespace kv

RADDLE_ENGINE_END
