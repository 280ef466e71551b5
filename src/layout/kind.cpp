#include "layout/kind.h"

#include <numeric>
#include <string>
#include <utility>

#include "raddle/error.h"

namespace raddle {
namespace {

struct Trait {
  const char* name;
  bool LevelKind::*flag;
};

/// Optional arrays of a level.
constexpr Trait traits[] = {
    {"groups other than the requests", &LevelKind::free_groups},
    {"keys that requests share", &LevelKind::shared_keys},
    {"qo_rows", &LevelKind::rows},
    {"kv_begin", &LevelKind::kv_begin},
    {"block_index", &LevelKind::block_index},
    {"block_pos", &LevelKind::block_pos},
    {"block_first", &LevelKind::block_first},
    {"block_count", &LevelKind::block_count},
    {"mask_bits", &LevelKind::mask_bits},
};

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

const char* name_of(KvStorage storage) {
  switch (storage) {
    case KvStorage::ragged:
      return "ragged";
    case KvStorage::paged:
      return "paged";
    case KvStorage::blocks:
      return "blocks";
  }
  return "";
}

std::string level_name(i32 level, i32 num_levels) {
  return num_levels > 1 ? "level " + std::to_string(level) + "'s " : "its ";
}

template <class T>
void same(const std::string& what, T found, T expected) {
  if (found != expected)
    fail<ValueError>("layout is of another kind than the reservation's first: ", what, " is ",
                     found, "; expected ", expected);
}

/// Empty arrays count as present.
template <class T>
void keep(std::vector<T>& list) {
  if (list.empty()) list.push_back(0);
}

/// Calls write(group, entry, nth) for every block of every group's list.
template <class Write>
void each_entry(const Level& level, const Write& write) {
  for (std::size_t g = 0; g < level.columns.size(); ++g)
    for (i32 nth = 0; nth < ceil_div(level.columns[g], level.block_size); ++nth)
      write(g, at(level.block_begin[g] + nth), nth);
}

void write_out(Level& level, const LevelKind& kind) {
  level.groups_are_requests = !kind.free_groups;
  level.keys_are_shared = kind.shared_keys;
  const std::size_t entries = level.blocks.size();
  if (kind.rows && level.rows.empty()) {
    level.rows.resize(at(level.row_indptr.back()));
    std::iota(level.rows.begin(), level.rows.end(), 0);
    keep(level.rows);
  }
  // Positions count from kv_begin, indices do not.
  if (kind.block_pos && level.block_pos.empty()) {
    level.block_pos.resize(entries);
    each_entry(level, [&](std::size_t g, std::size_t e, i32 nth) {
      level.block_pos[e] =
          (level.kv_begin.empty() ? 0 : level.kv_begin[g]) +
          (level.block_index.empty() ? nth * level.block_size : level.block_index[e]);
    });
    keep(level.block_pos);
  }
  if (kind.block_index && level.block_index.empty()) {
    level.block_index.resize(entries);
    each_entry(level, [&](std::size_t, std::size_t e, i32 nth) {
      level.block_index[e] = nth * level.block_size;
    });
    keep(level.block_index);
  }
  if (kind.kv_begin && level.kv_begin.empty()) {
    level.kv_begin.resize(level.columns.size());
    keep(level.kv_begin);
  }
  if (kind.block_first && level.block_first.empty()) {
    level.block_first.resize(entries);
    keep(level.block_first);
  }
  if (kind.block_count && level.block_count.empty()) {
    level.block_count.assign(entries, level.block_size);
    keep(level.block_count);
  }
  if (kind.mask_bits && level.mask_bits.empty()) {
    const std::size_t bits = entries * at(level.block_rows) * at(level.block_size);
    level.mask_bits.assign((bits + 7) / 8, 0xff);
    keep(level.mask_bits);
  }
}

}  // namespace

LayoutKind kind_of(const Layout& layout) {
  const LayoutView& view = layout.view();
  LayoutKind kind{view.num_levels, {}, view.qo_pos != nullptr, view.row_request != nullptr};
  for (i32 l = 0; l < view.num_levels; ++l) {
    const Level& level = layout.levels()[at(l)];
    const LevelView& arrays = view.levels[l];
    kind.levels[at(l)] = {level.storage,
                          level.order,
                          level.block_size,
                          level.block_rows,
                          level.page_size,
                          !level.groups_are_requests,
                          arrays.keys_are_shared,
                          arrays.rows != nullptr,
                          arrays.kv_begin != nullptr,
                          arrays.block_index != nullptr,
                          arrays.block_pos != nullptr,
                          arrays.block_first != nullptr,
                          arrays.block_count != nullptr,
                          arrays.mask_bits != nullptr};
    if (!level.groups_are_requests) kind.row_request = true;  // a layout without rows has none
  }
  return kind;
}

LayoutKind common_kind(const LayoutKind& first, const LayoutKind& layout) {
  same("its number of levels", layout.num_levels, first.num_levels);
  LayoutKind common = first;
  common.qo_pos |= layout.qo_pos;
  common.row_request |= layout.row_request;
  for (i32 l = 0; l < first.num_levels; ++l) {
    const LevelKind &a = first.levels[at(l)], &b = layout.levels[at(l)];
    const std::string name = level_name(l, first.num_levels);
    same<std::string>(name + "storage", name_of(b.storage), name_of(a.storage));
    same<std::string>(name + "kv_layout", b.order == HeadOrder::hnd ? "HND" : "NHD",
                      a.order == HeadOrder::hnd ? "HND" : "NHD");
    same(name + "page or block size", b.block_size, a.block_size);
    same(name + "rows of a block (a tree's max_nodes)", b.block_rows, a.block_rows);
    same(name + "page size", b.page_size, a.page_size);
    for (const Trait& trait : traits) common.levels[at(l)].*trait.flag |= b.*trait.flag;
  }
  return common;
}

std::string beyond(const LayoutKind& less, const LayoutKind& more) {
  if (more.qo_pos && !less.qo_pos) return "qo_pos";
  for (i32 l = 0; l < more.num_levels; ++l)
    for (const Trait& trait : traits)
      if (more.levels[at(l)].*trait.flag && !(less.levels[at(l)].*trait.flag))
        return trait.name + (more.num_levels > 1 ? " on level " + std::to_string(l) : "");
  return {};
}

LayoutPtr as_kind(const LayoutPtr& layout, const LayoutKind& kind) {
  if (kind_of(*layout) == kind) return layout;
  const LayoutView& view = layout->view();
  const auto copy = [](const i32* from, i64 count) {
    return from ? std::vector<i32>(from, from + count) : std::vector<i32>{};
  };
  std::vector<i32> qo_indptr = copy(view.qo_indptr, i64{view.num_requests} + 1);
  std::vector<i32> kv_len = copy(view.kv_len, view.num_requests);
  std::vector<i32> qo_pos = copy(view.qo_pos, view.num_rows);
  std::vector<i32> row_request = copy(view.row_request, view.num_rows);
  const bool add_pos = kind.qo_pos && !view.qo_pos,
             add_request = kind.row_request && !view.row_request;
  for (i32 i = 0; i < view.num_requests; ++i)
    for (i32 row = qo_indptr[at(i)], end = qo_indptr[at(i) + 1]; row < end; ++row) {
      if (add_pos) qo_pos.push_back(kv_len[at(i)] - (end - row));
      if (add_request) row_request.push_back(i);
    }
  if (kind.qo_pos) keep(qo_pos);
  if (kind.row_request) keep(row_request);
  std::vector<Level> levels = layout->levels();
  for (std::size_t l = 0; l < levels.size(); ++l) write_out(levels[l], kind.levels[l]);
  return std::make_shared<const Layout>(std::move(qo_indptr), std::move(kv_len), std::move(qo_pos),
                                        std::move(row_request), std::move(levels));
}

}  // namespace raddle
