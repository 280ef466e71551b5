#include "plan_testing.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace raddle::plan_testing {
namespace {

template <class T>
const T* pointer(const std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}

/// Appends a group of contiguous keys; pages are numbered from 0, for no test reads them.
void add_group(OwnedLevel& level, const std::vector<i32>& rows, i32 columns) {
  level.rows.insert(level.rows.end(), rows.begin(), rows.end());
  level.row_indptr.push_back(static_cast<i32>(level.rows.size()));
  level.columns.push_back(columns);
  level.block_begin.push_back(static_cast<i32>(level.blocks.size()));
  level.blocks.resize(level.blocks.size() +
                      static_cast<std::size_t>(ceil_div(columns, level.block_size)));
}

}  // namespace

LevelView OwnedLevel::view() const {
  LevelView v{};
  v.num_groups = static_cast<i32>(columns.size());
  v.block_size = block_size;
  v.block_rows = block_rows;
  v.groups_are_requests = groups_are_requests;
  v.keys_are_shared = !groups_are_requests;
  v.row_indptr = row_indptr.data();
  v.rows = pointer(rows);
  v.columns = columns.data();
  v.kv_begin = pointer(kv_begin);
  v.block_begin = block_begin.data();
  v.blocks = pointer(blocks);
  v.block_index = pointer(block_index);
  v.block_pos = pointer(block_pos);
  v.block_count = pointer(block_count);
  v.mask_bits = pointer(mask_bits);
  return v;
}

LayoutView OwnedLayout::view() {
  views.clear();
  for (const OwnedLevel& level : levels) views.push_back(level.view());
  return LayoutView{static_cast<i32>(kv_len.size()),
                    qo_indptr.back(),
                    static_cast<i32>(views.size()),
                    qo_indptr.data(),
                    kv_len.data(),
                    pointer(qo_pos),
                    pointer(row_request),
                    views.data()};
}

OwnedLayout paged(const std::vector<i32>& qo_len, const std::vector<i32>& kv_len, i32 page_size) {
  OwnedLayout layout;
  layout.kv_len = kv_len;
  OwnedLevel level;
  level.block_size = page_size;
  for (std::size_t i = 0; i < kv_len.size(); ++i) {
    layout.qo_indptr.push_back(layout.qo_indptr.back() + qo_len[i]);
    level.columns.push_back(kv_len[i]);
    level.block_begin.push_back(static_cast<i32>(level.blocks.size()));
    level.blocks.resize(level.blocks.size() +
                        static_cast<std::size_t>(ceil_div(kv_len[i], page_size)) + 1);
  }
  level.row_indptr = layout.qo_indptr;
  layout.levels.push_back(level);
  return layout;
}

OwnedLayout random_cascade(std::mt19937& random, i32 num_levels) {
  const i32 requests = between(random, 1, 12);
  OwnedLayout layout;
  for (i32 i = 0; i < requests; ++i)
    layout.qo_indptr.push_back(layout.qo_indptr.back() + between(random, 0, 9));
  std::vector<i32> covered(static_cast<std::size_t>(requests), 0);
  for (i32 l = 0; l + 1 < num_levels; ++l) {
    OwnedLevel level;
    level.groups_are_requests = false;
    std::map<i32, std::vector<i32>> sets;  // requests by group; group 0 is none at this level
    for (i32 i = 0; i < requests; ++i) sets[between(random, 0, 3)].push_back(i);
    for (const auto& [set, members] : sets) {
      if (set == 0) continue;
      // A shared prefix begins where all its requests have as many keys before it.
      const auto longest = std::max_element(members.begin(), members.end(), [&](i32 a, i32 b) {
        return covered[static_cast<std::size_t>(a)] < covered[static_cast<std::size_t>(b)];
      });
      const i32 begin = covered[static_cast<std::size_t>(*longest)];
      const i32 columns = between(random, 0, 3) == 0 ? 0 : between(random, 1, 700);
      std::vector<i32> rows;
      for (i32 i : members) {
        covered[static_cast<std::size_t>(i)] = begin + columns;
        for (i32 r = layout.qo_indptr[static_cast<std::size_t>(i)];
             r < layout.qo_indptr[static_cast<std::size_t>(i) + 1]; ++r)
          rows.push_back(r);
      }
      add_group(level, rows, columns);
      level.kv_begin.push_back(begin);
    }
    layout.levels.push_back(level);
  }
  OwnedLevel last;
  for (i32 i = 0; i < requests; ++i) {
    const std::size_t at = static_cast<std::size_t>(i);
    std::vector<i32> rows(
        static_cast<std::size_t>(layout.qo_indptr[at + 1] - layout.qo_indptr[at]));
    std::iota(rows.begin(), rows.end(), layout.qo_indptr[at]);
    const i32 columns = between(random, 0, 2) == 0 ? 0 : between(random, 1, 300);
    add_group(last, rows, columns);
    last.kv_begin.push_back(covered[at]);
    layout.kv_len.push_back(covered[at] + columns);
    layout.row_request.resize(layout.row_request.size() + rows.size(), i);
  }
  layout.levels.push_back(last);
  return layout;
}

OwnedLayout behind_prefixes(const std::vector<SharedBy>& prefixes, i32 own) {
  OwnedLayout layout;
  OwnedLevel shared, last;
  shared.groups_are_requests = false;
  i32 request = 0;
  for (const SharedBy& prefix : prefixes) {
    std::vector<i32> rows(static_cast<std::size_t>(prefix.requests));
    std::iota(rows.begin(), rows.end(), request);
    add_group(shared, rows, prefix.columns);
    shared.kv_begin.push_back(0);
    for (const i32 row : rows) {
      add_group(last, {row}, own);
      last.kv_begin.push_back(prefix.columns);
      layout.kv_len.push_back(prefix.columns + own);
      layout.qo_indptr.push_back(row + 1);
      layout.row_request.push_back(row);
    }
    request += prefix.requests;
  }
  layout.levels = {shared, last};
  return layout;
}

OwnedLayout random_blocks(std::mt19937& random, bool masked) {
  const i32 requests = between(random, 1, 5);
  OwnedLayout layout;
  OwnedLevel level;
  level.block_size = between(random, 0, 1) ? 16 : 24;  // 24: KV tiles do not end where blocks do
  level.block_rows = masked ? 8 : 0;
  for (i32 i = 0; i < requests; ++i) {
    const i32 qo_len = between(random, 0, masked ? 8 : 40);
    layout.qo_indptr.push_back(layout.qo_indptr.back() + qo_len);
    const i32 blocks = between(random, 0, 30);
    level.block_begin.push_back(static_cast<i32>(level.blocks.size()));
    level.columns.push_back(blocks * level.block_size);
    i32 index = 0;
    for (i32 b = 0; b < blocks; ++b) {
      index += between(random, 0, 3) * level.block_size;  // left-out blocks
      level.blocks.push_back(b);
      level.block_index.push_back(index);
      level.block_pos.push_back(index + 1000 * between(random, 0, 1));
      level.block_count.push_back(between(random, 0, level.block_size));
      index += level.block_size;
    }
    layout.kv_len.push_back(index);
  }
  level.row_indptr = layout.qo_indptr;
  level.blocks.push_back(-1);
  if (masked) {
    level.mask_bits.resize(static_cast<std::size_t>(
        ceil_div(static_cast<i32>(level.blocks.size()) * 8 * level.block_size, 8)));
    for (u8& bits : level.mask_bits) bits = static_cast<u8>(between(random, 0, 255));
  }
  layout.levels.push_back(level);
  return layout;
}

PlanConfig config_for(i32 num_workers, i32 num_kv_heads, i32 group_size) {
  PlanConfig config{};
  config.num_workers = num_workers;
  config.num_kv_heads = num_kv_heads;
  config.group_size = group_size;
  config.shapes[short_queries] = TileShape{16, 64};
  config.shapes[long_queries] = TileShape{64, 32};
  config.costs[short_queries] = CostModel{8000, 100, 14000, 20, 200, 1000, 9000, 300, 14000, 20, 0};
  config.costs[long_queries] = CostModel{8000, 100, 7000, 50, 200, 1000, 9000, 300, 7000, 50, 0};
  config.schedule = Schedule::automatic;
  config.invariant_chunk = 256;
  return config;
}

}  // namespace raddle::plan_testing
