#include "cache/checks.h"

#include "raddle/error.h"

namespace raddle {

const LevelView& check_page_table(const Layout& layout, const char* why) {
  if (layout.levels().size() != 1) {
    fail<ValueError>("layout has ", layout.levels().size(), " levels; expected one page table ",
                     why);
  }
  const Level& level = layout.levels()[0];
  const bool plain = level.storage == KvStorage::paged && level.groups_are_requests &&
                     level.block_index.empty() && level.block_first.empty() &&
                     level.block_count.empty() && level.mask_bits.empty();
  if (!plain) {
    fail<ValueError>(
        "layout is not a plain page table of requests; expected a PagedKV without qo_rows ", why);
  }
  return layout.view().levels[0];
}

void check_pool(const std::string& name, const TensorRef& pool, HeadOrder order) {
  const bool nhd = order == HeadOrder::nhd;
  if (pool.rank != 4) {
    fail<ValueError>(name, " has ", pool.rank, " dimensions; expected 4 ",
                     nhd ? "[pages, page_size, heads, head_dim] (NHD)"
                         : "[pages, heads, page_size, head_dim] (HND)");
  }
  check_storage(name, pool);
}

void check_pool(const std::string& name, const TensorRef& pool, const Layout& layout) {
  const Level& level = layout.levels()[0];
  const bool nhd = level.order == HeadOrder::nhd;
  check_pool(name, pool, level.order);
  const i64 page_size = dim(pool, pool_axes(level.order).slot);
  if (page_size != level.block_size) {
    fail<ValueError>(name, " has shape ", shape_text(pool), ", so page_size ", page_size, " (",
                     nhd ? "NHD" : "HND", "); expected ", level.block_size, ", the layout's");
  }
}

void check_heads(const KvRef& pool, HeadOrder order) {
  const int head = pool_axes(order).head;
  if (dim(pool.v, head) != dim(pool.k, head)) {
    fail<ValueError>("pool.v has ", dim(pool.v, head), " heads; expected ", dim(pool.k, head),
                     ", as pool.k has");
  }
}

bool check_pair_apart(const std::string& name, const KvRef& pool) {
  const TensorRef &k = pool.k, &v = pool.v;
  if (!overlap(k, v)) return false;
  const i64 offset = (static_cast<const u8*>(v.data) - static_cast<const u8*>(k.data));
  bool columns = k.dtype == v.dtype && k.rank == v.rank && offset >= 0 &&
                 offset + dim(v, v.rank - 1) * dtype_bytes(v.dtype) <=
                     dim(k, k.rank - 1) * dtype_bytes(k.dtype);
  for (int i = 0; columns && i + 1 < k.rank; ++i)
    columns = dim(k, i) == dim(v, i) && (dim(k, i) <= 1 || step(k, i) == step(v, i));
  if (!columns) check_apart(name + ".k", k, name + ".v", v);
  return columns;
}

bool check_scales_apart(const std::string& name, const KvRef& pool) {
  const std::string of = name == "pool" ? "" : name + "_";
  const TensorRef &k = pool.k_scale.tensor, &v = pool.v_scale.tensor;
  for (const auto& [which, scale] :
       {std::pair{"k_scale", &pool.k_scale}, {"v_scale", &pool.v_scale}}) {
    if (!is_by_token(*scale)) continue;
    check_apart(of + which, scale->tensor, name + ".k", pool.k);
    check_apart(of + which, scale->tensor, name + ".v", pool.v);
  }
  if (!is_by_token(pool.k_scale) || !is_by_token(pool.v_scale)) return false;
  if (is_same(k, v)) return true;
  check_apart(of + "k_scale", k, of + "v_scale", v);
  return false;
}

void check_page(const LevelView& level, i32 request, i32 nth, i64 pages, const char* why) {
  const i32 page = level.blocks[level.block_begin[request] + nth];
  if (page < 0 || page >= pages) {
    fail<ValueError>("page_indices has ", page, " as page ", nth, " of request ", request,
                     ", which ", why, "; expected 0 to ", pages - 1);
  }
}

void check_head_dim(const std::string& name, i64 head_dim, const char* why) {
  if (head_dim < 1 || head_dim > kv::max_head_dim || head_dim % kv::piece_size != 0)
    fail<ValueError>(name, " has a head_dim of ", head_dim,
                     "; expected a multiple of 8, at most 256", why);
}

ScaleView pool_scale(const std::string& name, const ScaleRef& scale, const std::string& pool_name,
                     const TensorRef& pool, HeadOrder order) {
  // [pages, heads, D] are pages of one slot.
  const PoolAxes axes = pool.rank == 4 ? pool_axes(order) : PoolAxes{-1, pool.rank - 2};
  check_scale(name, scale, pool_name, pool, dim(pool, axes.head));
  if (!is_by_token(scale)) return constant_scale(scale);
  const TensorRef& t = scale.tensor;
  return {static_cast<float*>(t.data), step(t, 0), axes.slot < 0 ? 0 : step(t, axes.slot),
          step(t, axes.head), 1.0f};
}

ScaleView moved_scales(const std::string& name, const ScaleRef& scale, const std::string& pool_name,
                       const TensorRef& pool, HeadOrder order) {
  if (!scale.is_given()) return {};
  const ScaleView view = pool_scale(name, scale, pool_name, pool, order);
  if (!is_by_token(scale))
    fail<ValueError>(name, " is ", scale.value ? "a number" : shape_text(scale.tensor) + " float32",
                     "; expected None, or a scale for each token and head: only those move");
  check_distinct(name, scale.tensor);
  return view;
}

PoolBytes pool_bytes(const TensorRef& pool, HeadOrder order) {
  const i64 bytes = dtype_bytes(pool.dtype);
  const PoolAxes axes = pool_axes(order);
  PoolBytes view{};
  view.data = static_cast<u8*>(pool.data);
  view.page_step = step(pool, 0) * bytes;
  view.slot_step = step(pool, axes.slot) * bytes;
  view.head_step = step(pool, axes.head) * bytes;
  view.head_bytes = dim(pool, 3) * bytes;
  view.num_heads = static_cast<i32>(dim(pool, axes.head));
  view.num_pages = static_cast<i32>(std::min<i64>(dim(pool, 0), 0x7fffffff));
  return view;
}

}  // namespace raddle
