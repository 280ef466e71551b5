// Choosing pages by their summaries (Quest, arXiv 2406.10774, section 3.3): no key of a page has a
// larger q·k than Σ_d max(q_d·min_d, q_d·max_d).
#pragma once

#include "raddle/engine/kernel/cache/summary.h"

namespace raddle {

/// A list is a request's, or with `per_head` a request's and KV head's.
struct SelectView {
  SummaryBytes summary;
  RowBytes q;
  i32 num_kv_heads;
  i32 group_size;
  bool per_head;
  bool keep_last;
  i32 num_selected;  ///< entries of a list
  i32 max_pages;     ///< of a request: the pitch of `scores`
  u32* scores;       ///< [lists, max_pages] scratch; see score_key
  i32* pages;        ///< [lists, num_selected] ascending in the request's order, then -1
  i32* pos;          ///< [lists, num_selected] position of the page's first key; 0 where none
  i32* count;        ///< [lists, num_selected] keys of the page; 0 where none
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

/// Orders scores as integers: larger scores have larger keys, and both zeros the same one.
RADDLE_FN u32 score_key(float score) {
  const u32 bits = float_to_bits(score + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
/// The page being written is kept whatever its score.
constexpr u32 kept_key = 0xffffffffu;

RADDLE_FN i32 heads_of_list(const SelectView& view) {
  return view.per_head ? 1 : view.num_kv_heads;
}
RADDLE_FN i32 lists_of_request(const SelectView& view) {
  return view.per_head ? view.num_kv_heads : 1;
}

/// Σ over one piece of max(q·min, q·max), as a tree over neighbours.
RADDLE_FN float piece_bound(const float (&q)[piece_size], const float (&least)[piece_size],
                            const float (&most)[piece_size]) {
  float x[piece_size];
  RADDLE_UNROLL
  for (i32 i = 0; i < piece_size; ++i) x[i] = max(q[i] * least[i], q[i] * most[i]);
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/// A page's score for KV heads [head_begin, head_end) of a request: the largest bound over its rows
/// and query heads. -inf without rows. All lanes have it. Q and K are the elements of q and of the
/// summary.
template <class Q, class K, class Lanes>
RADDLE_FN float page_score(const Lanes& lanes, const SelectView& view, i32 row_begin, i32 row_end,
                           i32 page, i32 head_begin, i32 head_end) {
  const i32 pieces = view.summary.dim / piece_size;
  float best = bits_to_float(0xff800000u);
  for (i32 head = head_begin; head < head_end; ++head) {
    const K* least = summary_at<K>(view.summary, page, 0, head);
    const K* most = summary_at<K>(view.summary, page, 1, head);
    // All query heads meet the same minima and maxima.
    float lo[Lanes::held][piece_size], hi[Lanes::held][piece_size];
    for (i32 i = 0; i < Lanes::held && lanes.piece(i) < pieces; ++i) {
      load_piece(lanes, least + lanes.piece(i) * piece_size, lo[i]);
      load_piece(lanes, most + lanes.piece(i) * piece_size, hi[i]);
    }
    for (i32 row = row_begin; row < row_end; ++row)
      for (i32 g = 0; g < view.group_size; ++g) {
        const Q* q = reinterpret_cast<const Q*>(view.q.data + row * view.q.row_step +
                                                (head * view.group_size + g) * view.q.head_step);
        const float score = lanes.sum_pieces(pieces, [&](i32 i) {
          float x[piece_size];
          load_piece(lanes, q + lanes.piece(i) * piece_size, x);
          return piece_bound(x, lo[i], hi[i]);
        });
        best = score > best ? score : best;
      }
  }
  return best;
}

/// Entry `rank` of list `list`: the `nth` page of the request.
RADDLE_FN void write_selected(const SelectView& view, const LevelView& level, i32 request, i64 list,
                              i32 rank, i32 nth) {
  const i64 at = list * view.num_selected + rank;
  const i32 page = level.blocks[level.block_begin[request] + nth];
  const bool there = page >= 0 && page < view.summary.num_pages;
  view.pages[at] = there ? page : -1;
  view.pos[at] =
      there ? (level.kv_begin ? level.kv_begin[request] : 0) + nth * level.block_size : 0;
  view.count[at] = there ? keys_in_page(level, request, nth) : 0;
}

RADDLE_FN void write_none(const SelectView& view, i64 list, i32 rank) {
  const i64 at = list * view.num_selected + rank;
  view.pages[at] = -1;
  view.pos[at] = 0;
  view.count[at] = 0;
}

}  // namespace kv

RADDLE_ENGINE_END
