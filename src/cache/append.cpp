// Appending rows of K and V to a page table.
#include "raddle/engine/kernel/cache/append.h"

#include <optional>
#include <tuple>
#include <utility>

#include "cache/checks.h"
#include "cache/on_device.h"
#include "device/name.h"
#include "raddle/error.h"
#include "raddle/kv.h"
#include "variant/bound_variant.h"

namespace raddle {
namespace {

/// New rows with the pool's heads in a dimension of their own.
TensorRef rows_for(const TensorRef& rows, const TensorRef& pool, HeadOrder order) {
  if (pool.rank != 4) return rows;
  return with_heads(rows, dim(pool, pool_axes(order).head), dim(pool, 3));
}

/// For K or V: raises unless the new rows fit the pool, of which pages are checked.
void check_rows(const std::string& letter, HeadOrder order, const TensorRef& rows,
                const TensorRef& pool) {
  const PoolAxes axes = pool_axes(order);
  const std::string rows_name = letter + "_new";
  const std::string pool_name = "pool." + letter;
  if (rows.rank != 3) {
    fail<ValueError>(rows_name, " has ", rows.rank,
                     " dimensions; expected 3 [rows, heads, head_dim]");
  }
  check_storage(rows_name, rows);
  if (rows.dtype != pool.dtype && (!has_8_bits(pool.dtype) || has_8_bits(rows.dtype))) {
    fail<TypeError>(rows_name, " is ", name_of(rows.dtype), "; expected ", name_of(pool.dtype),
                    ", as ", pool_name, " is");
  }
  if (dim(pool, axes.head) != rows.shape[1] || pool.shape[3] != rows.shape[2]) {
    fail<ValueError>(pool_name, " has ", dim(pool, axes.head), " heads of ", pool.shape[3],
                     "; expected ", rows.shape[1], " heads of ", rows.shape[2], ", as ", rows_name,
                     " has");
  }
  check_distinct(pool_name, pool);
}

void check_pair(const std::string& letter, const Layout& layout, const TensorRef& rows,
                const TensorRef& pool) {
  check_pool("pool." + letter, pool, layout);
  check_rows(letter, layout.levels()[0].order, rows, pool);
  if (rows.shape[0] != layout.num_rows()) {
    fail<ValueError>(letter, "_new has ", rows.shape[0], " rows; expected ", layout.num_rows(),
                     ", the last of qo_indptr");
  }
}

void check_same_heads(const TensorRef& k_new, const TensorRef& v_new) {
  if (k_new.shape[1] != v_new.shape[1]) {
    fail<ValueError>("v_new has ", v_new.shape[1], " heads; expected ", k_new.shape[1],
                     ", as k_new has");
  }
}

bool quantizes(const TensorRef& rows, const TensorRef& pool) { return rows.dtype != pool.dtype; }

/// Raises unless K and V are quantised alike, or neither is.
void check_quantized(const TensorRef& k_new, const TensorRef& v_new, const KvRef& pool,
                     const Variant* rope) {
  if (!has_8_bits(pool.k.dtype) && !has_8_bits(pool.v.dtype)) return;
  if (pool.v.dtype != pool.k.dtype)
    fail<TypeError>("pool.v is ", name_of(pool.v.dtype), "; expected ", name_of(pool.k.dtype),
                    ", as pool.k is");
  if (v_new.dtype != k_new.dtype)
    fail<TypeError>("v_new is ", name_of(v_new.dtype), "; expected ", name_of(k_new.dtype),
                    ", as k_new is");
  if (!quantizes(k_new, pool.k)) {
    if (rope)
      fail<TypeError>("k_new is ", name_of(k_new.dtype),
                      "; expected float32, float16 or bfloat16 where rope is given");
    if (pool.k_scale.is_given() || pool.v_scale.is_given())
      fail<ValueError>(pool.k_scale.is_given() ? "k_scale" : "v_scale", " is given, and k_new is ",
                       name_of(k_new.dtype),
                       " already; expected no scale: such rows are moved as they are");
    return;
  }
  check_head_dim("k_new", k_new.shape[2], ", where rows are quantised");
  check_head_dim("v_new", v_new.shape[2], ", where rows are quantised");
}

/// The scales of heads that lie on the host.
void check_divisors(const std::string& name, const TensorRef& scales) {
  const i64 count = scales.rank == 0 ? 1 : scales.shape[0];
  for (i64 i = 0; i < count; ++i)
    if (const float x = static_cast<const float*>(scales.data)[i * step(scales, 0)];
        !(x < 0.0f || x > 0.0f))
      fail<ValueError>(name, "[", i, "] is ", x,
                       "; expected another number than 0: rows are divided by it");
}

/// How rows are quantised on their way to `pool`.
QuantizeView quantize_view(const std::string& name, const ScaleRef& scale,
                           const std::string& pool_name, const TensorRef& pool, HeadOrder order) {
  const ScaleView view = pool_scale(name, scale, pool_name, pool, order);
  if (scale.value && *scale.value == 0.0f)
    fail<ValueError>(name, " is 0; expected another number: rows are divided by it");
  if (is_by_token(scale))
    check_distinct(name, scale.tensor);
  else if (scale.tensor.data && !is_gpu(scale.tensor.device))
    check_divisors(name, scale.tensor);
  return {view, is_by_token(scale)};
}

/// The slots of one page that one request's new rows go to.
struct NewSlots {
  i32 page, request, begin, end;
};

/// Refuses two requests, or two places of one request's list, that write to one slot. A hash table
/// with room for every page that is written, because sorting would cost every decode step.
class SlotTable {
 public:
  explicit SlotTable(i64 pages) {
    std::size_t size = 16;
    while (size < static_cast<std::size_t>(2 * pages)) size *= 2;
    slots_.assign(size, NewSlots{-1, 0, 0, 0});
  }

  void add(const NewSlots& more) {
    const std::size_t mask = slots_.size() - 1;
    std::size_t i = first_of(more.page);
    for (; slots_[i].page >= 0; i = (i + 1) & mask) {
      const NewSlots& other = slots_[i];
      if (other.page != more.page || other.end <= more.begin || more.end <= other.begin) continue;
      fail<ValueError>("page_indices has page ", more.page, " where new rows of requests ",
                       other.request, " and ", more.request, " go to slot ",
                       std::max(other.begin, more.begin), " of it; expected a slot for each row");
    }
    slots_[i] = more;
  }

  /// Raises where a page that one of the request's earlier keys lies on is written by its new rows.
  void check_kept(i32 page, i32 request, i32 nth) const {
    const std::size_t mask = slots_.size() - 1;
    for (std::size_t i = first_of(page); slots_[i].page >= 0; i = (i + 1) & mask)
      if (slots_[i].page == page && slots_[i].request == request)
        fail<ValueError>("page_indices has page ", page, " as page ", nth, " of request ", request,
                         ", and again where its new rows go; expected each page once");
  }

 private:
  std::size_t first_of(i32 page) const {
    return (static_cast<std::size_t>(page) * 0x9e3779b97f4a7c15u >> 32) & (slots_.size() - 1);
  }

  std::vector<NewSlots> slots_;
};

/// Earlier keys of a request must not lie on pages that its new rows go to, but for the first of
/// those, which they share.
void check_kept_pages(const SlotTable& table, const LevelView& level, i32 request) {
  const i32* pages = level.blocks + level.block_begin[request];
  const i32 first = kv::first_new_column(level, request) / level.block_size;
  const i32 last = (level.columns[request] - 1) / level.block_size;
  // Of a decode step one page is written: to compare it costs a tenth of looking all others up.
  if (first == last) {
    const i32* found = std::find(pages, pages + first, pages[first]);
    if (found != pages + first)
      table.check_kept(pages[first], request, static_cast<i32>(found - pages));
    return;
  }
  for (i32 nth = 0; nth < first; ++nth) table.check_kept(pages[nth], request, nth);
  for (i32 nth = first + 1; nth <= last; ++nth)
    if (pages[nth] == pages[first]) table.check_kept(pages[first], request, nth);
}

/// Raises unless every page that gets a new row exists and every slot gets one row at most. Other
/// pages are not touched and may be anything.
void check_slots(const Layout& layout, const LevelView& level, i64 pages) {
  i64 written = 0;
  for (i32 i = 0; i < layout.num_requests(); ++i) {
    const i32 rows = group_rows(level, i);
    const i32 first = kv::first_new_column(level, i);
    if (first < 0) {
      fail<ValueError>("kv_len[", i, "] is ", level.columns[i], "; expected at least ", rows,
                       ", the new rows of that request");
    }
    if (rows > 0)
      written += (level.columns[i] - 1) / level.block_size - first / level.block_size + 1;
  }
  SlotTable table(written);
  for (i32 i = 0; i < layout.num_requests(); ++i) {
    if (group_rows(level, i) == 0) continue;
    const i32 first = kv::first_new_column(level, i);
    const i32 last = (level.columns[i] - 1) / level.block_size;
    for (i32 nth = first / level.block_size; nth <= last; ++nth) {
      check_page(level, i, nth, pages, "new rows go to");
      const i32 begin = nth * level.block_size;
      table.add({level.blocks[level.block_begin[i] + nth], i, std::max(first - begin, 0),
                 kv::keys_in_page(level, i, nth)});
    }
  }
  for (i32 i = 0; i < layout.num_requests(); ++i)
    if (group_rows(level, i) > 0) check_kept_pages(table, level, i);
}

/// Hull of the positions of each request's new rows.
std::vector<Range> new_positions(const LayoutView& layout, const LevelView& level) {
  std::vector<Range> all(static_cast<std::size_t>(layout.num_requests), Range{int_max, int_min});
  kv::for_new_rows(layout, level, 0, layout.num_rows, [&](i32, const kv::NewRow& at) {
    Range& one = all[static_cast<std::size_t>(at.request)];
    one = hull(one, Range{at.pos, at.pos});
  });
  return all;
}

/// The key part of `rope`, bound to the pool's sizes and checked against the batch.
BoundVariant bind_rope(const Variant& rope, const Layout& layout, const LevelView& level,
                       const TensorRef& k_new, const TensorRef& v_new) {
  check_head_dim("k_new", k_new.shape[2], ", where rope is given");
  AttentionSpec spec;
  spec.num_qo_heads = spec.num_kv_heads = static_cast<i32>(k_new.shape[1]);
  spec.head_dim_qk = static_cast<i32>(k_new.shape[2]);
  spec.head_dim_vo = static_cast<i32>(v_new.shape[2]);
  spec.dtype = k_new.dtype;
  spec.variant = {rope};
  BoundVariant bound(spec);
  const Stages& s = bound.stages();
  if (s.num_key == 0 || s.num_value + s.num_logits + s.num_mask + s.num_output > 0 || s.sink.ops ||
      s.scan != Scan::softmax)
    fail<ValueError>("rope is '", rope.name,
                     "'; expected a variant with a key part and at most a query part beside it");
  const std::vector<Range> positions =
      bound.needs_positions() ? new_positions(layout.view(), level) : std::vector<Range>{};
  bound.check_batch(Batch{layout.view(), false, positions}, MemberTime::run);
  return bound;
}

/// All heads of one row of K or V, which `turn` changes.
template <class Turn>
void append_turned_row(const RowBytes& rows, DType dtype, const PoolBytes& pool, DType kv_dtype,
                       const QuantizeView& quantize, i64 row, const kv::NewRow& at, Turn turn) {
  float vector[kv::max_head_dim];
  const auto append = [&](auto t, auto p) {
    for (i32 head = 0; head < pool.num_heads; ++head)
      kv::append_turned<decltype(t), decltype(p)>(kv::Alone{}, rows, pool, quantize, row, head, at,
                                                  vector, turn);
  };
  dispatch_dtype(dtype, [&](auto t) {
    if (!has_8_bits(kv_dtype)) return append(t, t);
    dispatch_kv_dtype(kv_dtype, [&](auto p) {
      if constexpr (is_quantized<decltype(p)>) append(t, p);
    });
  });
}

/// One row, all heads of K and V, on the host.
void append_row(const AppendView& view, DType dtype, DType kv_dtype, const Stages* turned, i64 row,
                const kv::NewRow& at) {
  const bool quantized = dtype != kv_dtype;
  if (quantized)
    append_turned_row(view.v_rows, dtype, view.v, kv_dtype, view.v_scale, row, at, kv::AsItIs{});
  else
    kv::append_row(view.v_rows, view.v, row, at);
  if (turned) {
    const i32 size = static_cast<i32>(view.k.head_bytes) / dtype_bytes(kv_dtype);
    append_turned_row(view.k_rows, dtype, view.k, kv_dtype, view.k_scale, row, at,
                      [&](float* x, const Key& key) {
                        for (i32 i = 0; i < turned->num_key; ++i)
                          turned->key[i].ops->key(turned->key[i].self, x, size, key);
                      });
  } else if (quantized) {
    append_turned_row(view.k_rows, dtype, view.k, kv_dtype, view.k_scale, row, at, kv::AsItIs{});
  } else {
    kv::append_row(view.k_rows, view.k, row, at);
  }
}

RowBytes row_bytes(const TensorRef& rows) {
  const i64 bytes = dtype_bytes(rows.dtype);
  return RowBytes{static_cast<const u8*>(rows.data), step(rows, 0) * bytes, step(rows, 1) * bytes};
}

AppendView append_view(const TensorRef& k_new, const TensorRef& v_new, const KvRef& pool,
                       HeadOrder order) {
  check_apart("pool.k", pool.k, "pool.v", pool.v);
  if (check_scales_apart("pool", pool))
    fail<ValueError>("k_scale is v_scale; expected a tensor each: both get scales of their own");
  for (const auto& [name, rows] : {std::pair{"k_new", &k_new}, {"v_new", &v_new}}) {
    check_apart("pool.k", pool.k, name, *rows);
    check_apart("pool.v", pool.v, name, *rows);
    for (const ScaleRef* scale : {&pool.k_scale, &pool.v_scale})
      if (is_by_token(*scale)) check_apart("k_scale or v_scale", scale->tensor, name, *rows);
  }
  AppendView view{};
  view.k_rows = row_bytes(k_new);
  view.v_rows = row_bytes(v_new);
  view.k = pool_bytes(pool.k, order);
  view.v = pool_bytes(pool.v, order);
  view.k_scale = quantize_view("k_scale", pool.k_scale, "pool.k", pool.k, order);
  view.v_scale = quantize_view("v_scale", pool.v_scale, "pool.v", pool.v, order);
  return view;
}

/// Raises unless rows, pools and slots suit each other.
void check_slot_mapping(const IndexRef& slots, HeadOrder order, const TensorRef& k_new,
                        const TensorRef& v_new, const KvRef& pool) {
  if (slots.empty()) fail<TypeError>("slots is missing");
  if (slots.rank != 1) fail<ValueError>("slots has ", slots.rank, " dimensions; expected 1 [rows]");
  const PoolAxes axes = pool_axes(order);
  for (const auto& [letter, rows, pages] :
       {std::tuple{"k", &k_new, &pool.k}, {"v", &v_new, &pool.v}}) {
    check_pool(std::string("pool.") + letter, *pages, order);
    check_rows(letter, order, *rows, *pages);
    if (rows->shape[0] < slots.shape[0])
      fail<ValueError>(letter, "_new has ", rows->shape[0], " rows; expected at least ",
                       slots.shape[0], ", one a slot");
  }
  if (dim(pool.v, axes.slot) != dim(pool.k, axes.slot))
    fail<ValueError>("pool.v has pages of ", dim(pool.v, axes.slot), "; expected ",
                     dim(pool.k, axes.slot), ", as pool.k has");
  check_same_heads(k_new, v_new);
  check_quantized(k_new, v_new, pool, nullptr);
}

/// Slots on the host must be in the pools.
void check_host_slots(const AppendView& view, i64 rows) {
  const i64 pages = std::min(view.k.num_pages, view.v.num_pages);
  for (i64 row = 0; row < rows; ++row)
    if (const kv::NewRow at = kv::row_of_slot(view.slots, row); at.page >= pages)
      fail<ValueError>("slots[", row, "] is on page ", at.page, "; expected one of the pool's ",
                       pages, " pages, or below 0 for none");
}

}  // namespace

void append_kv(const Layout& layout, const TensorRef& k_given, const TensorRef& v_given,
               const KvRef& pool_given, const Variant* rope, void* stream) {
  const LevelView& level = check_page_table(layout, "to append to");
  const HeadOrder order = layout.levels()[0].order;
  const KvRef pool = level.block_size == 1 ? with_pages(pool_given, order) : pool_given;
  const TensorRef k_new = rows_for(k_given, pool.k, order);
  const TensorRef v_new = rows_for(v_given, pool.v, order);
  check_pair("k", layout, k_new, pool.k);
  check_pair("v", layout, v_new, pool.v);
  check_same_heads(k_new, v_new);
  check_quantized(k_new, v_new, pool, rope);
  const AppendView view = append_view(k_new, v_new, pool, layout.levels()[0].order);
  check_slots(layout, level, std::min(pool.k.shape[0], pool.v.shape[0]));
  std::optional<BoundVariant> bound;
  if (rope) bound.emplace(bind_rope(*rope, layout, level, k_new, v_new));

  const i64 bytes = (view.k.head_bytes + view.v.head_bytes) * view.k.num_heads;
  if (bytes == 0) return;
  const DeviceId device =
      common_device({{"k_new", k_new}, {"v_new", v_new}, {"pool.k", pool.k}, {"pool.v", pool.v}});
  if (is_gpu(device))
    return cuda::append({device, stream}, layout, view, k_new.dtype, pool.k.dtype,
                        bound ? &*bound : nullptr);
  share_units(layout.num_rows(), bytes, [&](i64 begin, i64 end) {
    kv::for_new_rows(layout.view(), level, static_cast<i32>(begin), static_cast<i32>(end),
                     [&](i32 row, const kv::NewRow& at) {
                       append_row(view, k_new.dtype, pool.k.dtype,
                                  bound ? &bound->stages() : nullptr, row, at);
                     });
  });
}

void append_kv(const IndexRef& slots, HeadOrder order, const TensorRef& k_given,
               const TensorRef& v_given, const KvRef& pool_given, void* stream) {
  const KvRef pool = with_pages(pool_given, order);
  const TensorRef k_new = rows_for(k_given, pool.k, order);
  const TensorRef v_new = rows_for(v_given, pool.v, order);
  check_slot_mapping(slots, order, k_new, v_new, pool);
  AppendView view = append_view(k_new, v_new, pool, order);
  const auto page_size = static_cast<i32>(dim(pool.k, pool_axes(order).slot));
  view.slots = {slots.data, slots.stride[0], page_size, slots.is_64bit};
  const i64 rows = slots.shape[0];
  const i64 bytes = (view.k.head_bytes + view.v.head_bytes) * view.k.num_heads;
  if (bytes == 0 || rows == 0 || page_size == 0) return;
  const DeviceId device =
      common_device({{"k_new", k_new}, {"v_new", v_new}, {"pool.k", pool.k}, {"pool.v", pool.v}});
  if (slots.device != device)
    fail<ValueError>("slots lies on '", name_of(slots.device), "'; expected '", name_of(device),
                     "', as k_new does");
  if (is_gpu(device)) return cuda::append({device, stream}, rows, view, k_new.dtype, pool.k.dtype);
  check_host_slots(view, rows);
  share_units(rows, bytes, [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row)
      if (const kv::NewRow at = kv::row_of_slot(view.slots, row); at.page >= 0)
        append_row(view, k_new.dtype, pool.k.dtype, nullptr, row, at);
  });
}

}  // namespace raddle
