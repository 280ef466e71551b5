// Copying whole pages: of one pool, or from one pool to another of the same page shape.
#pragma once

#include "raddle/engine/kernel/cache/bytes.h"

namespace raddle {

/// Copy i takes page from_pages[i] of each `from` to page to_pages[i] of its `to`.
struct CopyView {
  PoolBytes k_from, k_to, v_from, v_to;
  ScaleView k_scale_from, k_scale_to, v_scale_from, v_scale_to;  ///< of tokens; data null: none
  const i32* from_pages;
  const i32* to_pages;
  i32 num_copies;
  i32 page_size;  ///< slots of a page
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

/// One head of one slot.
template <class Lanes>
RADDLE_FN void copy_head(const Lanes& lanes, const PoolBytes& from, const PoolBytes& to,
                         i64 from_page, i64 to_page, i64 slot, i64 head) {
  copy_bytes(lanes, head_at(from, from_page, slot, head), head_at(to, to_page, slot, head),
             from.head_bytes);
}

/// Whether the rows of a page lie one after another, in the same order in both pools.
RADDLE_FN bool same_dense_pages(const PoolBytes& a, const PoolBytes& b, i64 slots) {
  const bool nhd = a.head_step == a.head_bytes && a.slot_step == a.head_bytes * a.num_heads;
  const bool hnd = a.slot_step == a.head_bytes && a.head_step == a.head_bytes * slots;
  return (nhd || hnd) && a.slot_step == b.slot_step && a.head_step == b.head_step;
}

/// A whole page of K or V, by one thread.
RADDLE_FN void copy_page(const PoolBytes& from, const PoolBytes& to, i64 from_page, i64 to_page,
                         i64 slots) {
  if (same_dense_pages(from, to, slots)) {
    copy_bytes(Alone{}, head_at(from, from_page, 0, 0), head_at(to, to_page, 0, 0),
               from.head_bytes * from.num_heads * slots);
    return;
  }
  for (i64 slot = 0; slot < slots; ++slot)
    for (i64 head = 0; head < from.num_heads; ++head)
      copy_head(Alone{}, from, to, from_page, to_page, slot, head);
}

/// The scales of a page, by one thread.
RADDLE_FN void copy_page_scales(const ScaleView& from, const ScaleView& to, i64 from_page,
                                i64 to_page, i64 slots, i64 heads) {
  for (i64 slot = 0; slot < slots; ++slot)
    for (i64 head = 0; head < heads; ++head)
      copy_scale(Alone{}, from, to, {from_page, slot}, {to_page, slot}, head);
}

}  // namespace kv

RADDLE_ENGINE_END
