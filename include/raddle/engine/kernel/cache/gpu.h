// The cache kernels of GPUs: each warp does one unit of work, independently of all others. The
// files that CPUs share define what a unit is.
#pragma once

#include "raddle/engine/kernel/cache/accept.h"
#include "raddle/engine/kernel/cache/append.h"
#include "raddle/engine/kernel/cache/copy.h"
#include "raddle/engine/kernel/cache/launch.h"
#include "raddle/engine/kernel/cache/merge.h"
#include "raddle/engine/kernel/cache/select.h"
#include "raddle/engine/kernel/cache/warp.h"
#include "raddle/engine/tile/warp_vector.h"
#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

namespace kv {

/// The unit of this warp.
RADDLE_DEVICE i64 warp_unit() {
  return i64{ptx::block_index()} * num_warps + ptx::thread_index() / 32;
}
/// This warp's memory for a head in fp32, in shared memory.
RADDLE_DEVICE float* warp_vector() {
  return static_cast<float*>(ptx::shared_memory()) + ptx::thread_index() / 32 * max_state_dim;
}

/// Where a layout's row goes; to page -1 where there is no such row.
RADDLE_DEVICE NewRow row_of_layout(const AppendLaunch& launch, i32 row) {
  // The launch has units for the largest number of rows; the actual number is in device memory.
  if (row >= launch.layout.qo_indptr[launch.layout.num_requests]) return NewRow{-1, 0, 0, 0, 0};
  const i32 request = find_request(launch.layout, row);
  if (first_new_column(launch.level, request) < 0) return NewRow{-1, 0, 0, 0, 0};
  return new_row(launch.layout, launch.level, request, row);
}

/// Unit: one head of one new row, K and V. T is the element type of the rows, P that of the pool.
template <class T, class P, class Variant>
RADDLE_DEVICE void append(const AppendLaunch& launch, const Variant& variant) {
  // Attention over these rows follows; it begins meanwhile, and waits where it needs them.
  ptx::let_next_kernel_begin();
  ptx::wait_for_earlier_work();
  const AppendView& view = launch.view;
  const i64 unit = warp_unit();
  if (unit >= launch.num_units) return;
  const i32 row = static_cast<i32>(unit / view.k.num_heads);
  const i32 head = static_cast<i32>(unit % view.k.num_heads);
  const NewRow at = view.slots.data ? row_of_slot(view.slots, row) : row_of_layout(launch, row);
  if (has_page(view.v, at.page)) {
    if constexpr (is_quantized<P>)
      append_turned<T, P>(Warp{}, view.v_rows, view.v, view.v_scale, row, head, at, warp_vector(),
                          AsItIs{});
    else
      append_head(Warp{}, view.v_rows, view.v, row, head, at);
  }
  if (!has_page(view.k, at.page)) return;
  if constexpr (has_key<Variant>)
    append_turned<T, P>(Warp{}, view.k_rows, view.k, view.k_scale, row, head, at, warp_vector(),
                        [&](float* vector, const Key& key) {
                          const i64 dim = view.k.head_bytes / static_cast<i64>(sizeof(P));
                          WarpVector x(vector, static_cast<i32>(dim));
                          variant.key(x, key);
                        });
  else if constexpr (is_quantized<P>)
    append_turned<T, P>(Warp{}, view.k_rows, view.k, view.k_scale, row, head, at, warp_vector(),
                        AsItIs{});
  else
    append_head(Warp{}, view.k_rows, view.k, row, head, at);
}

/// Unit: one head of one slot of one copy, K and V.
RADDLE_DEVICE void copy(const CopyLaunch& launch) {
  const CopyView& view = launch.view;
  const i64 unit = warp_unit();
  if (unit >= launch.num_units) return;
  const i32 head = static_cast<i32>(unit % view.k_from.num_heads);
  const i32 slot = static_cast<i32>(unit / view.k_from.num_heads % view.page_size);
  const i64 i = unit / view.k_from.num_heads / view.page_size;
  const i32 from = view.from_pages[i], to = view.to_pages[i];
  if (has_page(view.k_from, from) && has_page(view.k_to, to)) {
    copy_head(Warp{}, view.k_from, view.k_to, from, to, slot, head);
    copy_scale(Warp{}, view.k_scale_from, view.k_scale_to, {from, slot}, {to, slot}, head);
  }
  if (has_page(view.v_from, from) && has_page(view.v_to, to)) {
    copy_head(Warp{}, view.v_from, view.v_to, from, to, slot, head);
    copy_scale(Warp{}, view.v_scale_from, view.v_scale_to, {from, slot}, {to, slot}, head);
  }
}

/// Unit: one head of one request.
RADDLE_DEVICE void accept(const AcceptLaunch& launch) {
  const i64 unit = warp_unit();
  if (unit >= launch.num_units) return;
  accept_head(Warp{}, launch.view, launch.level, static_cast<i32>(unit / launch.view.k.num_heads),
              unit % launch.view.k.num_heads);
}

/// Unit: one head of one page of a request's list. Launched for the longest list. T is the element
/// type of the summary, P that of the pool.
template <class T, class P>
RADDLE_DEVICE void summarize(const SummarizeLaunch& launch) {
  const SummarizeView& view = launch.view;
  const LevelView& level = launch.level;
  const i64 unit = warp_unit();
  if (unit >= launch.num_units) return;
  const i32 head = static_cast<i32>(unit % view.k.num_heads);
  const i32 nth = static_cast<i32>(unit / view.k.num_heads % launch.max_pages);
  const i32 group = static_cast<i32>(unit / view.k.num_heads / launch.max_pages);
  if (nth < first_summarized(view, level, group) || nth >= pages_of_group(level, group)) return;
  summarize_page<T, P>(Warp{}, view, level.blocks[level.block_begin[group] + nth],
                       keys_in_page(level, group, nth), head);
}

/// Unit: as many neighbouring pages of a request's list as a warp scores at a time.
template <class T>
RADDLE_DEVICE void score(const SelectLaunch& launch) {
  const SelectView& view = launch.view;
  const LevelView& level = launch.level;
  const i64 unit = warp_unit();
  if (unit >= launch.num_units) return;
  const Part part = part_for(view.summary.dim / piece_size);
  const i32 at_a_time = 32 / part.width;
  const i32 runs = ceil_div(view.max_pages, at_a_time);
  const i64 list = unit / runs;
  const i32 lists = lists_of_request(view);
  const i32 request = static_cast<i32>(list / lists);
  const i32 pages = pages_of_group(level, request);
  const i32 first = static_cast<i32>(unit % runs) * at_a_time;
  if (first >= pages) return;
  const i32 mine = first + ptx::thread_index() % 32 / part.width;
  const i32 nth = min(mine, pages - 1);  // all lanes of the warp take part
  const i32 page = level.blocks[level.block_begin[request] + nth];
  const bool there = page >= 0 && page < view.summary.num_pages;
  const i32 head = static_cast<i32>(list % lists);
  const float best = page_score<T, T>(part, view, launch.layout.qo_indptr[request],
                                      launch.layout.qo_indptr[request + 1], there ? page : 0, head,
                                      head + heads_of_list(view));
  const bool kept = view.keep_last && nth == pages - 1;
  if (part.index() == 0 && mine < pages)
    view.scores[list * view.max_pages + nth] = !there ? 0u : kept ? kept_key : score_key(best);
}

/// Unit: one head of one row.
template <class Variant>
RADDLE_DEVICE void merge(const MergeLaunch& launch, const Variant& variant) {
  const MergeView& view = launch.view;
  const i64 unit = warp_unit();
  if (unit >= launch.num_units) return;
  const i32 row = static_cast<i32>(unit / view.num_heads);
  const i32 head = static_cast<i32>(unit % view.num_heads);
  float sum[max_state_dim / Warp::count];
  float lse = compose_row(Warp{}, view, row, head, sum);
  const Row finished{
      0, row, row, row, head, head / launch.group_size, view.num_rows, view.num_rows};
  if constexpr (has_sink<Variant>) {
    // ⊕ with the state (0, sink) of a key without value.
    const Mix mix = compose(lse, variant.sink(finished));
    RADDLE_UNROLL
    for (i32 i = 0; i < max_state_dim / Warp::count; ++i) sum[i] *= mix.first;
    lse = mix.lse;
  }
  if constexpr (has_output<Variant>) {
    float* vector = warp_vector();
    RADDLE_UNROLL
    for (i32 i = 0; i < max_state_dim / Warp::count; ++i)
      vector[i * Warp::count + Warp{}.index()] = sum[i];
    ptx::sync_warp();
    WarpVector o(vector, view.dim);
    variant.output(o, finished, lse);
    ptx::sync_warp();
    RADDLE_UNROLL
    for (i32 i = 0; i < max_state_dim / Warp::count; ++i)
      sum[i] = vector[i * Warp::count + Warp{}.index()];
  }
  // An output may be one of the inputs: no lane may write before all lanes have read the LSEs.
  ptx::sync_warp();
  float* out = view.out + row * view.out_row + head * view.out_head;
  RADDLE_UNROLL
  for (i32 i = 0; i < max_state_dim / Warp::count; ++i) {
    const i32 d = i * Warp::count + Warp{}.index();
    if (d < view.dim) out[d] = sum[i];
  }
  if (Warp{}.index() == 0) view.lse_out[row * view.lse_out_row + head * view.lse_out_head] = lse;
}

}  // namespace kv

RADDLE_ENGINE_END
