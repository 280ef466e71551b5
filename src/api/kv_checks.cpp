#include "api/kv_checks.h"

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
        "layout is not a plain page table of requests; expected paged_kv without qo_rows ", why);
  }
  return layout.view().levels[0];
}

void check_pool(const std::string& name, const TensorRef& pool, const Layout& layout) {
  const Level& level = layout.levels()[0];
  const bool nhd = level.order == HeadOrder::nhd;
  if (pool.rank != 4) {
    fail<ValueError>(name, " has ", pool.rank, " dimensions; expected 4 ",
                     nhd ? "[pages, page_size, heads, head_dim] (NHD)"
                         : "[pages, heads, page_size, head_dim] (HND)");
  }
  check_storage(name, pool);
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

void check_page(const LevelView& level, i32 request, i32 nth, i64 pages, const char* why) {
  const i32 page = level.blocks[level.block_begin[request] + nth];
  if (page < 0 || page >= pages) {
    fail<ValueError>("page_indices has ", page, " as page ", nth, " of request ", request,
                     ", which ", why, "; expected 0 to ", pages - 1);
  }
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
