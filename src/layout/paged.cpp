// Ragged tensors and page tables.
#include <algorithm>
#include <limits>
#include <utility>

#include "layout/normal_form.h"
#include "plan/prefixes.h"
#include "raddle/error.h"
#include "raddle/layout.h"

namespace raddle {

namespace {

constexpr i64 i32_max = std::numeric_limits<i32>::max();

i64 pages_of(i32 keys, i32 page_size) {
  return (static_cast<i64>(keys) + page_size - 1) / page_size;
}

std::vector<i32> copy_positions(const IndexRef& qo_pos, i32 num_rows) {
  if (qo_pos.empty()) return {};
  return copy_index("qo_pos", qo_pos, static_cast<std::size_t>(num_rows), "one a query row");
}

/// Room for every used page.
void reserve_blocks(const std::vector<i32>& kv_len, i32 page_size, Level& level) {
  i64 used = 0;
  for (const i32 keys : kv_len) used += pages_of(keys, page_size);
  if (used > i32_max) fail<ValueError>("kv_len needs ", used, " pages; expected at most ", i32_max);
  level.blocks.reserve(static_cast<std::size_t>(used));
  level.block_begin.resize(kv_len.size());
}

/// Only pages that hold keys are kept: what a table lists beyond them may be stale.
void copy_page_lists(const PagedArgs& args, const std::vector<i32>& kv_len, Level& level) {
  const IndexRef& pages = args.page_indices;
  if (pages.rank != 1) {
    fail<ValueError>("page_indices has ", pages.rank,
                     " dimensions; expected 1, as page_indptr is given");
  }
  const std::vector<i32> indptr = copy_indptr("page_indptr", args.page_indptr);
  if (indptr.size() != kv_len.size() + 1) {
    fail<ValueError>("page_indptr has ", indptr.size(), " entries; expected ", kv_len.size() + 1,
                     ", as qo_indptr has");
  }
  if (indptr.back() > pages.shape[0]) {
    fail<ValueError>("page_indices has ", pages.shape[0], " entries; expected at least ",
                     indptr.back(), ", the last of page_indptr");
  }
  for (std::size_t g = 0; g < kv_len.size(); ++g) {
    const i64 need = pages_of(kv_len[g], args.page_size);
    const i64 listed = indptr[g + 1] - indptr[g];
    if (need > listed) {
      fail<ValueError>("page_indptr[", g, "]..[", g + 1, "] lists ", listed, " pages; kv_len[", g,
                       "] = ", kv_len[g], " at page_size ", args.page_size, " needs ", need);
    }
    level.block_begin[g] = static_cast<i32>(level.blocks.size());
    append_index("page_indices", pages, indptr[g] * pages.stride[0], pages.stride[0], need,
                 level.blocks);
  }
}

/// Copies the used pages from the padded rows of a block table.
void copy_block_table(const PagedArgs& args, const std::vector<i32>& kv_len, Level& level) {
  const IndexRef& table = args.page_indices;
  if (table.rank != 2) {
    fail<ValueError>("page_indices has ", table.rank,
                     " dimensions; expected 2 [requests, pages], as page_indptr is not given");
  }
  if (table.shape[0] != static_cast<i64>(kv_len.size())) {
    fail<ValueError>("page_indices has ", table.shape[0], " rows; expected ", kv_len.size(),
                     ", one a request");
  }
  for (std::size_t g = 0; g < kv_len.size(); ++g) {
    const i64 need = pages_of(kv_len[g], args.page_size);
    if (need > table.shape[1]) {
      fail<ValueError>("page_indices has ", table.shape[1], " columns; kv_len[", g,
                       "] = ", kv_len[g], " at page_size ", args.page_size, " needs ", need);
    }
    level.block_begin[g] = static_cast<i32>(level.blocks.size());
    append_index("page_indices", table, static_cast<i64>(g) * table.stride[0], table.stride[1],
                 need, level.blocks);
  }
}

void check_pages(Level& level) {
  if (level.blocks.empty()) return;
  const Extremes used = extremes(level.blocks);
  if (used.min < -1) {
    fail<ValueError>("page_indices holds ", used.min, "; expected a page, or -1 where it has none");
  }
  level.min_block = used.min;
  level.max_block = used.max;
}

/// Where the other arrays agree on another number of requests, qo_indptr is the one that is wrong.
void check_requests(const PagedArgs& args, std::size_t groups) {
  const bool is_table = args.page_indptr.empty();
  const IndexRef& pages = is_table ? args.page_indices : args.page_indptr;
  if (args.kv_len.rank != 1 || pages.rank != (is_table ? 2 : 1)) return;
  const i64 requests = args.kv_len.shape[0];
  if (requests == static_cast<i64>(groups) || pages.shape[0] != requests + (is_table ? 0 : 1))
    return;
  fail<ValueError>("qo_indptr has ", groups + 1, " entries; expected ", requests + 1,
                   ", one more than requests: kv_len and ",
                   is_table ? "page_indices" : "page_indptr", " have ", requests);
}

/// A single level alone still counts its keys from kv_begin, so that q_index and kv_index agree.
std::vector<i32> index_lengths(const std::vector<i32>& columns, const std::vector<i32>& kv_begin) {
  std::vector<i32> kv_len = columns;
  for (std::size_t g = 0; g < kv_begin.size(); ++g) {
    const i64 total = static_cast<i64>(kv_begin[g]) + columns[g];
    if (total > longest_request) {
      fail<ValueError>("kv_begin[", g, "] + kv_len[", g, "] is ", total, "; expected at most ",
                       longest_request);
    }
    kv_len[g] = static_cast<i32>(total);
  }
  return kv_len;
}

LayoutPtr single_level(std::vector<i32> qo_indptr, std::vector<i32> qo_pos, Level level) {
  level.row_indptr = qo_indptr;
  std::vector<i32> kv_len = index_lengths(level.columns, level.kv_begin);
  std::vector<Level> levels;
  levels.push_back(std::move(level));
  return std::make_shared<const Layout>(std::move(qo_indptr), std::move(kv_len), std::move(qo_pos),
                                        std::vector<i32>{}, std::move(levels));
}

void check_rows(i32 most, i32 rows) {
  check_num_rows(most);
  if (most >= 0 && rows > most)
    fail<ValueError>("qo_indptr has ", rows, " rows; expected at most num_rows = ", most);
}

void check_prefix_args(const PagedArgs& args) {
  if (args.min_prefix < 0)
    fail<ValueError>("discover_prefixes is ", args.min_prefix,
                     "; expected the least number of tokens that makes a level, or 0");
  if (args.min_prefix == 0) return;
  for (const auto& [name, ref] : {std::pair{"kv_begin", args.kv_begin}, {"qo_rows", args.qo_rows}})
    if (!ref.empty())
      fail<ValueError>(name,
                       " is given with discover_prefixes; expected a page table of requests, "
                       "with all their keys");
}

/// The blocks of a level whose lists begin and end as `begin` and `columns` say, and no others.
void take_blocks(const Level& from, const std::vector<i32>& begin, Level& to) {
  for (std::size_t g = 0; g < to.columns.size(); ++g) {
    const i32* list = from.blocks.data() + begin[g];
    to.block_begin.push_back(static_cast<i32>(to.blocks.size()));
    to.blocks.insert(to.blocks.end(), list, list + pages_of(to.columns[g], to.block_size));
  }
}

/// A page table as two levels: the leading pages that requests share, and the rest.
LayoutPtr two_levels(std::vector<i32> qo_indptr, std::vector<i32> qo_pos, const Level& level,
                     i32 min_prefix) {
  PrefixCascade found = discover_prefixes(
      PageLists{qo_indptr, level.columns, level.block_begin, level.blocks.data(), level.block_size},
      min_prefix);
  std::vector<Level> levels(2);
  for (Level& each : levels) {
    each.storage = level.storage;
    each.order = level.order;
    each.block_size = level.block_size;
  }
  Level &prefixes = levels[0], &requests = levels[1];
  prefixes.groups_are_requests = false;
  // A reservation fixes which arrays a layout has and what its variants may read, so these do not
  // depend on whether anything is shared.
  prefixes.keys_are_shared = true;
  for (std::vector<i32>* list : {&found.rows, &found.kv_begin, &found.row_request})
    if (list->empty()) list->push_back(0);
  prefixes.row_indptr = std::move(found.row_indptr);
  prefixes.rows = std::move(found.rows);
  prefixes.columns = std::move(found.columns);
  take_blocks(level, found.block_begin, prefixes);
  requests.row_indptr = qo_indptr;
  requests.columns = std::move(found.suffix);
  requests.kv_begin = std::move(found.kv_begin);
  take_blocks(level, found.suffix_begin, requests);
  for (Level& each : levels) check_pages(each);
  return std::make_shared<const Layout>(std::move(qo_indptr), level.columns, std::move(qo_pos),
                                        std::move(found.row_request), std::move(levels));
}

/// The keys of a ragged level by kv_indptr.
void take_key_offsets(const RaggedArgs& args, std::size_t requests, Level& level) {
  if (!args.kv_first.empty() || !args.kv_len.empty())
    fail<ValueError>(
        "kv_indptr is given with kv_first or kv_len; expected kv_indptr alone, or these two");
  const std::vector<i32> keys = copy_indptr("kv_indptr", args.kv_indptr);
  if (keys.size() != requests + 1) {
    fail<ValueError>("kv_indptr has ", keys.size(), " entries; expected ", requests + 1,
                     ", as qo_indptr has");
  }
  level.columns.resize(requests);
  level.block_begin.assign(keys.begin(), keys.end() - 1);
  for (std::size_t g = 0; g < requests; ++g) {
    level.columns[g] = keys[g + 1] - keys[g];
    if (level.columns[g] > longest_request)
      fail<ValueError>("kv_indptr gives request ", g, " ", level.columns[g],
                       " keys; expected at most ", longest_request);
  }
  level.max_block = keys.back() - 1;
}

/// The same by kv_first and kv_len.
void take_key_rows(const RaggedArgs& args, std::size_t requests, Level& level) {
  if (args.kv_first.empty() || args.kv_len.empty())
    fail<TypeError>("kv_indptr is missing; expected it, or kv_first and kv_len");
  level.block_begin = copy_index("kv_first", args.kv_first, requests, "one a request");
  level.columns = copy_lengths("kv_len", args.kv_len, requests, "one a request");
  i64 end = 0;
  for (std::size_t g = 0; g < requests; ++g) {
    if (level.block_begin[g] < 0)
      fail<ValueError>("kv_first[", g, "] is ", level.block_begin[g], "; expected at least 0");
    if (level.columns[g] > 0) end = std::max(end, i64{level.block_begin[g]} + level.columns[g]);
  }
  if (end > i32_max)
    fail<ValueError>("the last key by kv_first and kv_len is row ", end - 1,
                     "; expected less than ", i32_max);
  level.max_block = static_cast<i32>(end - 1);
}

}  // namespace

LayoutPtr ragged_kv(const RaggedArgs& args) {
  std::vector<i32> rows = copy_indptr("qo_indptr", args.qo_indptr);
  const std::size_t requests = rows.size() - 1;
  Level level;
  level.storage = KvStorage::ragged;
  if (args.kv_indptr.empty())
    take_key_rows(args, requests, level);
  else
    take_key_offsets(args, requests, level);
  if (!args.kv_begin.empty())
    level.kv_begin = copy_lengths("kv_begin", args.kv_begin, requests, "one a request");
  std::vector<i32> positions = copy_positions(args.qo_pos, rows.back());
  return single_level(std::move(rows), std::move(positions), std::move(level));
}

LayoutPtr paged_kv(const PagedArgs& args) {
  if (args.page_size < 1)
    fail<ValueError>("page_size is ", args.page_size, "; expected at least 1");
  check_prefix_args(args);
  std::vector<i32> qo_indptr = copy_indptr("qo_indptr", args.qo_indptr);
  const std::size_t groups = qo_indptr.size() - 1;
  check_requests(args, groups);
  check_rows(args.num_rows, qo_indptr.back());
  Level level;
  level.storage = KvStorage::paged;
  level.order = args.order;
  level.block_size = args.page_size;
  level.columns = copy_lengths("kv_len", args.kv_len, groups, "one a request");
  if (args.page_indices.empty()) fail<TypeError>("page_indices is missing");
  reserve_blocks(level.columns, args.page_size, level);
  if (args.page_indptr.empty()) {
    copy_block_table(args, level.columns, level);
  } else {
    copy_page_lists(args, level.columns, level);
  }
  check_pages(level);
  if (!args.kv_begin.empty()) {
    level.kv_begin = copy_lengths("kv_begin", args.kv_begin, groups, "one a request");
  }
  if (!args.qo_rows.empty()) {
    level.rows = copy_lengths("qo_rows", args.qo_rows, static_cast<std::size_t>(qo_indptr.back()),
                              "the last of qo_indptr");
    level.groups_are_requests = false;
  }
  std::vector<i32> positions = copy_positions(args.qo_pos, qo_indptr.back());
  if (args.min_prefix > 0)
    return two_levels(std::move(qo_indptr), std::move(positions), level, args.min_prefix);
  return single_level(std::move(qo_indptr), std::move(positions), std::move(level));
}

}  // namespace raddle
