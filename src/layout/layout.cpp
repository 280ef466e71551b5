#include "raddle/layout.h"

#include <utility>

#include "layout/copies.h"

namespace raddle {

namespace {

/// An optional array: null when it holds nothing.
template <class T>
const T* optional(const std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}

/// An array that is always there, if only to hold nothing.
const i32* always(const std::vector<i32>& v) {
  static constexpr i32 nothing = 0;
  return v.empty() ? &nothing : v.data();
}

i32 size(const std::vector<i32>& v) { return static_cast<i32>(v.size()); }

/// Whether rows of several requests share a group's keys.
bool keys_are_shared(const Level& level, const std::vector<i32>& row_request) {
  // Without row_request the layout is a level that only a cascade can use.
  if (level.groups_are_requests || row_request.empty()) return false;
  const auto request = [&](i32 i) {
    const auto at = static_cast<std::size_t>(i);
    return row_request[static_cast<std::size_t>(level.rows.empty() ? i : level.rows[at])];
  };
  for (std::size_t g = 0; g + 1 < level.row_indptr.size(); ++g)
    for (i32 i = level.row_indptr[g] + 1; i < level.row_indptr[g + 1]; ++i)
      if (request(i) != request(i - 1)) return true;
  return false;
}

/// The largest slot of any key of a level of blocks.
i64 max_slot(const Level& level) {
  i64 largest = -1;
  for (std::size_t g = 0; g < level.columns.size(); ++g) {
    for (i32 c = 0; c < level.columns[g]; c += min(level.block_size, level.columns[g] - c)) {
      const auto e = static_cast<std::size_t>(level.block_begin[g] + c / level.block_size);
      const i64 first = level.block_first.empty() ? 0 : level.block_first[e];
      const i64 count = min(level.block_count.empty() ? level.block_size : level.block_count[e],
                            level.columns[g] - c);
      if (level.blocks[e] >= 0 && count > 0)
        largest = max(largest, i64{level.blocks[e]} * level.block_size + first + count - 1);
    }
  }
  return largest;
}

}  // namespace

LevelView Level::view() const {
  // A null block list means contiguous keys; a level of blocks without any still has a list.
  static constexpr i32 no_blocks = -1;
  LevelView v{};
  v.num_groups = size(columns);
  v.block_size = block_size;
  v.block_rows = block_rows;
  v.groups_are_requests = groups_are_requests;
  v.row_indptr = row_indptr.data();
  v.rows = optional(rows);
  v.columns = always(columns);
  v.kv_begin = optional(kv_begin);
  v.block_begin = always(block_begin);
  v.blocks = storage == KvStorage::ragged ? nullptr : blocks.empty() ? &no_blocks : blocks.data();
  v.block_index = optional(block_index);
  v.block_pos = optional(block_pos);
  v.block_first = optional(block_first);
  v.block_count = optional(block_count);
  v.mask_bits = optional(mask_bits);
  return v;
}

Layout::Layout(std::vector<i32> qo_indptr, std::vector<i32> kv_len, std::vector<i32> qo_pos,
               std::vector<i32> row_request, std::vector<Level> levels)
    : qo_indptr_(std::move(qo_indptr)),
      kv_len_(std::move(kv_len)),
      qo_pos_(std::move(qo_pos)),
      row_request_(std::move(row_request)),
      levels_(std::move(levels)),
      copies_(make_layout_copies()) {
  level_views_.reserve(levels_.size());
  for (Level& level : levels_) {
    if (level.storage == KvStorage::blocks) level.max_slot = max_slot(level);
    level_views_.push_back(level.view());
    level_views_.back().keys_are_shared =
        level.keys_are_shared || keys_are_shared(level, row_request_);
  }
  view_.num_requests = size(kv_len_);
  view_.num_rows = qo_indptr_.back();
  view_.num_levels = static_cast<i32>(levels_.size());
  view_.qo_indptr = qo_indptr_.data();
  view_.kv_len = always(kv_len_);
  view_.qo_pos = optional(qo_pos_);
  view_.row_request = optional(row_request_);
  view_.levels = level_views_.data();
}

Layout::~Layout() = default;

}  // namespace raddle
