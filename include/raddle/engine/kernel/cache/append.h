// Writing new rows of K and V into the pages of a KV pool: as they are, or with the key part of a
// variant (RoPE) applied on the way, or quantised, or both.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/core/row.h"
#include "raddle/engine/core/search.h"
#include "raddle/engine/kernel/cache/bytes.h"

namespace raddle {

/// What new rows are divided by where the pool is quantised.
struct QuantizeView {
  ScaleView scale;
  bool computed;  ///< of each row and head anew, and written
};

/// A slot of the pool for each new row, page * page_size + slot, in place of a layout.
struct SlotsView {
  const void* data;  ///< i32, or i64; below 0: the row goes nowhere. Null: there is a layout
  i64 step;          ///< entries from one row's to the next's
  i32 page_size;
  bool is_64bit;
};

/// What an append moves, for a layout of one level or for slots.
struct AppendView {
  RowBytes k_rows, v_rows;
  PoolBytes k, v;
  QuantizeView k_scale, v_scale;
  SlotsView slots;
};

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

/// Where a new row goes, and which key it becomes.
struct NewRow {
  i32 page;
  i32 slot;
  i32 request;
  i32 kv_index;
  i32 pos;  ///< of the row's token: the layout's qo_pos where it has them
};

/// The request of row `row`: the last one that begins at or before it and isn't empty.
RADDLE_FN i32 find_request(const LayoutView& layout, i32 row) {
  // One row a request, as in decoding, needs no search.
  if (row < layout.num_requests && layout.qo_indptr[row] == row && layout.qo_indptr[row + 1] > row)
    return row;
  return first_where(1, layout.num_requests, [&](i32 i) { return layout.qo_indptr[i] > row; }) - 1;
}

RADDLE_FN NewRow new_row(const LayoutView& layout, const LevelView& level, i32 request, i32 row) {
  const i32 column = first_new_column(level, request) + (row - layout.qo_indptr[request]);
  const Column at = column_at(level, request, column);
  // Trees: a draft's position is its depth, not its place in the cache.
  const i32 pos = layout.qo_pos ? layout.qo_pos[row] : at.kv_pos;
  return NewRow{at.block, at.offset, request, at.kv_index, pos};
}

/// Where the row of a slot goes. Which request's key it becomes is not known, so no key part is
/// applied.
RADDLE_FN NewRow row_of_slot(const SlotsView& slots, i64 row) {
  const i64 slot = slots.is_64bit ? static_cast<const i64*>(slots.data)[row * slots.step]
                                  : i64{static_cast<const i32*>(slots.data)[row * slots.step]};
  const i64 page = slot < 0 ? -1 : slot / slots.page_size;
  const i64 no_pool_has = int_max;  // a page of more bits is in no pool
  return NewRow{static_cast<i32>(min(page, no_pool_has)),
                static_cast<i32>(slot - page * slots.page_size), 0, 0, 0};
}

/// Appends one head of one row of K or V as it is.
template <class Lanes>
RADDLE_FN void append_head(const Lanes& lanes, const RowBytes& rows, const PoolBytes& pool, i64 row,
                           i64 head, const NewRow& at) {
  copy_bytes(lanes, rows.data + row * rows.row_step + head * rows.head_step,
             head_at(pool, at.page, at.slot, head), pool.head_bytes);
}

/// The scale of one head of one row, which `vector` holds. A scale of its own makes the largest
/// finite element the dtype's largest, for which infinities are taken, too; it is never subnormal
/// or 0, so that a row of zeros is one.
template <class P, class Lanes>
RADDLE_FN float row_scale(const Lanes& lanes, const QuantizeView& quantize, const NewRow& at,
                          i32 head, const float* vector, i32 pieces) {
  if (!quantize.computed) return scale_at(quantize.scale, at.page, at.slot, head);
  float most = 0.0f;
  for (i32 p = lanes.index(); p < pieces; p += Lanes::count) {
    RADDLE_UNROLL
    for (i32 i = 0; i < piece_size; ++i) {
      const float size = math::abs(vector[p * piece_size + i]);
      most = size > most && size < math::infinity ? size : most;  // not NaN
    }
  }
  const float scale = max(lanes.largest(most) / P::max_finite, bits_to_float(0x00800000u));
  if (lanes.index() == 0) scale_in(quantize.scale, at.page, at.slot, head) = scale;
  return scale;
}

/// What an append that only quantises does to a row.
struct AsItIs {
  RADDLE_FN void operator()(float*, const Key&) const {}
};

/// Appends one head of one row after `turn(vector, key)` has changed it: in fp32, rounded once from
/// T to the pool's P. `vector` has room for a head; it is the lanes' own.
template <class T, class P, class Lanes, class Turn>
RADDLE_FN void append_turned(const Lanes& lanes, const RowBytes& rows, const PoolBytes& pool,
                             const QuantizeView& quantize, i64 row, i32 head, const NewRow& at,
                             float* vector, Turn turn) {
  const i32 pieces = static_cast<i32>(pool.head_bytes / static_cast<i64>(sizeof(P))) / piece_size;
  const T* from =
      reinterpret_cast<const T*>(rows.data + row * rows.row_step + head * rows.head_step);
  P* to = reinterpret_cast<P*>(head_at(pool, at.page, at.slot, head));
  float x[piece_size];
  for (i32 p = lanes.index(); p < pieces; p += Lanes::count) {
    load_piece(lanes, from + p * piece_size, x);
    RADDLE_UNROLL
    for (i32 i = 0; i < piece_size; ++i) vector[p * piece_size + i] = x[i];
  }
  lanes.sync();
  turn(vector, Key{at.request, at.kv_index, at.pos, head});
  lanes.sync();
  float scale = 1.0f;
  if constexpr (is_quantized<P>) scale = row_scale<P>(lanes, quantize, at, head, vector, pieces);
  for (i32 p = lanes.index(); p < pieces; p += Lanes::count) {
    RADDLE_UNROLL
    for (i32 i = 0; i < piece_size; ++i)
      x[i] = is_quantized<P> ? vector[p * piece_size + i] / scale : vector[p * piece_size + i];
    store_piece(lanes, x, to + p * piece_size);
  }
}

/// All heads of one row of K or V, by one thread.
RADDLE_FN void append_row(const RowBytes& rows, const PoolBytes& pool, i64 row, const NewRow& at) {
  if (rows.head_step == pool.head_bytes && pool.head_step == pool.head_bytes) {
    copy_bytes(Alone{}, rows.data + row * rows.row_step, head_at(pool, at.page, at.slot, 0),
               pool.head_bytes * pool.num_heads);
    return;
  }
  for (i64 head = 0; head < pool.num_heads; ++head) append_head(Alone{}, rows, pool, row, head, at);
}

/// Calls f(row, where it goes) for rows [begin, end) of the ragged tensors, in order.
template <class F>
RADDLE_FN void for_new_rows(const LayoutView& layout, const LevelView& level, i32 begin, i32 end,
                            F f) {
  i32 request = begin < end ? find_request(layout, begin) : 0;
  for (i32 row = begin; row < end; ++row) {
    while (row >= layout.qo_indptr[request + 1]) ++request;
    f(row, new_row(layout, level, request, row));
  }
}

}  // namespace kv

RADDLE_ENGINE_END
