// Block-sparse row matrices (BSR) over the rows of Q and the slots of K and V.
#include <algorithm>
#include <limits>
#include <utility>

#include "layout/normal_form.h"
#include "raddle/error.h"
#include "raddle/layout.h"

namespace raddle {

namespace {

constexpr i64 i32_max = std::numeric_limits<i32>::max();

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

/// The requests of the rows, and how many keys each request has.
struct Requests {
  std::vector<i32> qo_indptr;
  std::vector<i32> kv_len;  ///< empty until it is known
  std::vector<i32> row_request;

  i32 num_rows() const { return qo_indptr.back(); }
};

Requests read_requests(const BlockSparseArgs& args) {
  Requests requests;
  if (args.qo_indptr.empty()) {
    if (args.num_rows < 0) fail<ValueError>("num_rows is missing; expected it or qo_indptr");
    if (args.num_rows > i32_max) {
      fail<ValueError>("num_rows is ", args.num_rows, "; expected at most ", i32_max);
    }
    requests.qo_indptr = {0, static_cast<i32>(args.num_rows)};
  } else {
    requests.qo_indptr = copy_indptr("qo_indptr", args.qo_indptr);
    if (args.num_rows >= 0 && args.num_rows != requests.num_rows()) {
      fail<ValueError>("num_rows is ", args.num_rows, "; expected ", requests.num_rows(),
                       ", the last of qo_indptr");
    }
  }
  if (args.num_cols < -1 || args.num_cols > i32_max) {
    fail<ValueError>("num_cols is ", args.num_cols, "; expected 0 to ", i32_max,
                     ", or -1 for no bound");
  }
  const std::size_t count = requests.qo_indptr.size() - 1;
  if (!args.kv_len.empty()) {
    requests.kv_len = copy_lengths("kv_len", args.kv_len, count, "one a request");
    for (std::size_t i = 0; args.num_cols >= 0 && i < count; ++i) {
      if (requests.kv_len[i] > args.num_cols) {
        fail<ValueError>("kv_len[", i, "] is ", requests.kv_len[i], "; expected at most num_cols, ",
                         args.num_cols);
      }
    }
  }
  requests.row_request.reserve(at(requests.num_rows()));
  for (std::size_t i = 0; i < count; ++i) {
    requests.row_request.resize(at(requests.qo_indptr[i + 1]), static_cast<i32>(i));
  }
  return requests;
}

/// The matrix as listed: row blocks and their entries.
struct Lists {
  std::vector<i32> indptr;
  std::vector<i32> indices;

  i64 num_groups() const { return static_cast<i64>(indptr.size()) - 1; }
};

Lists read_lists(const BlockSparseArgs& args, i32 num_rows) {
  if (args.block_rows < 1) fail<ValueError>("Br is ", args.block_rows, "; expected at least 1");
  if (args.block_cols < 1) fail<ValueError>("Bc is ", args.block_cols, "; expected at least 1");
  Lists lists{copy_indptr("indptr", args.indptr), copy_index("indices", args.indices)};
  const i64 expected = (static_cast<i64>(num_rows) + args.block_rows - 1) / args.block_rows;
  if (lists.num_groups() != expected) {
    fail<ValueError>("indptr has ", lists.indptr.size(), " entries; expected ", expected + 1, ": ",
                     num_rows, " rows in blocks of ", args.block_rows, ", plus 1");
  }
  if (lists.indptr.back() != static_cast<i64>(lists.indices.size())) {
    fail<ValueError>("indices has ", lists.indices.size(), " entries; expected ",
                     lists.indptr.back(), ", the last of indptr");
  }
  return lists;
}

/// kv_lens among the requests of a row block.
Extremes lengths_in(const Requests& requests, const Level& level, i64 g) {
  Extremes found;
  for (i32 row = level.row_indptr[at(g)]; row < level.row_indptr[at(g + 1)]; ++row) {
    const i32 kv_len = requests.kv_len[at(requests.row_request[at(row)])];
    found.min = std::min(found.min, kv_len);
    found.max = std::max(found.max, kv_len);
  }
  return found;
}

void check_columns(i64 g, i64 columns) {
  if (columns > longest_request) {
    fail<ValueError>("indptr[", g, "]..[", g + 1, "] lists blocks of ", columns,
                     " keys; expected at most ", longest_request);
  }
}

/// A key listed twice would count twice.
void check_distinct(const Lists& lists, i64 g) {
  const auto begin = lists.indices.begin() + lists.indptr[at(g)];
  const auto end = lists.indices.begin() + lists.indptr[at(g + 1)];
  if (std::adjacent_find(begin, end, std::greater_equal<>{}) == end) return;
  std::vector<i32> sorted(begin, end);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    fail<ValueError>("indices lists block ", *twice, " twice in row block ", g);
  }
}

/// Key (column) c has index and position c. A block at the edge of the matrix is cut short.
void place_columns(const BlockSparseArgs& args, const Requests& requests, const Lists& lists,
                   Level& level) {
  const i64 bc = args.block_cols;
  bool has_holes = false;
  level.block_index.resize(lists.indices.size());
  level.block_count.assign(lists.indices.size(), args.block_cols);
  for (i64 g = 0; g < lists.num_groups(); ++g) {
    check_distinct(lists, g);
    const Extremes lengths = lengths_in(requests, level, g);
    const i64 first = lists.indptr[at(g)], last = lists.indptr[at(g + 1)];
    i64 columns = (last - first) * bc;
    check_columns(g, columns);
    for (i64 e = first; e < last; ++e) {
      const i64 begin = lists.indices[at(e)] * bc;
      const i64 limit = args.num_cols < 0 ? lengths.max : std::min<i64>(args.num_cols, lengths.max);
      if (begin < 0 || begin >= limit) {
        fail<ValueError>("indices[", e, "] is ", lists.indices[at(e)], "; row block ", g, " has ",
                         limit, " columns in blocks of ", bc);
      }
      if (lengths.min < lengths.max && begin + bc > lengths.min) {
        fail<ValueError>("row block ", g, " holds requests with kv_len ", lengths.min, " and ",
                         lengths.max, ", and indices[", e, "] = ", lists.indices[at(e)],
                         " lists keys past the shorter; expected row blocks of one request there");
      }
      const i64 keys = std::min(bc, limit - begin);
      level.block_index[at(e)] = static_cast<i32>(begin);
      level.block_count[at(e)] = static_cast<i32>(keys);
      if (keys == bc) continue;
      if (e + 1 == last) {
        columns -= bc - keys;
      } else {
        has_holes = true;
      }
    }
    level.columns[at(g)] = static_cast<i32>(columns);
  }
  if (!has_holes) level.block_count.clear();
}

void default_kv_len(const BlockSparseArgs& args, const Lists& lists, Requests& requests) {
  if (!requests.kv_len.empty()) return;
  i64 columns = args.num_cols;
  if (columns < 0) {
    columns = (static_cast<i64>(std::max(extremes(lists.indices).max, -1)) + 1) * args.block_cols;
    if (columns > i32_max) {
      fail<ValueError>("indices reaches column ", columns, "; expected at most ", i32_max);
    }
  }
  requests.kv_len.assign(requests.qo_indptr.size() - 1, static_cast<i32>(columns));
}

void check_explicit(const BlockSparseArgs& args, const Level& level) {
  for (std::size_t e = 0; e < level.blocks.size(); ++e) {
    const i32 first = level.block_first[e], count = level.block_count[e];
    if (level.blocks[e] < -1) {
      fail<ValueError>("indices[", e, "] is ", level.blocks[e], "; expected at least -1");
    }
    if (first < 0 || count < 0 || static_cast<i64>(first) + count > args.block_cols) {
      fail<ValueError>("block_first[", e, "] = ", first, " and block_count[", e, "] = ", count,
                       " leave a block of ", args.block_cols, " rows");
    }
    if (level.block_pos[e] > i32_max - args.block_cols) {
      fail<ValueError>("block_pos[", e, "] is ", level.block_pos[e], "; expected less");
    }
    const i64 slot = static_cast<i64>(level.blocks[e]) * args.block_cols + first + count;
    if (args.num_cols >= 0 && slot > args.num_cols) {
      fail<ValueError>("indices[", e, "] = ", level.blocks[e], " reaches slot ", slot,
                       "; expected at most num_cols, ", args.num_cols);
    }
  }
}

/// Keys count in the order of the list; blocks say which rows of K and V they are.
void place_explicit(const BlockSparseArgs& args, const Lists& lists, Requests& requests,
                    Level& level) {
  const std::size_t entries = lists.indices.size();
  const char* why = "one an entry of indices";
  level.block_pos = copy_index("block_pos", args.block_pos, entries, why);
  level.block_first = copy_index("block_first", args.block_first, entries, why);
  level.block_count = copy_index("block_count", args.block_count, entries, why);
  check_explicit(args, level);
  level.block_index.resize(entries);
  const bool count_keys = requests.kv_len.empty();
  if (count_keys) requests.kv_len.assign(requests.qo_indptr.size() - 1, 0);
  for (i64 g = 0; g < lists.num_groups(); ++g) {
    const i64 first = lists.indptr[at(g)], last = lists.indptr[at(g + 1)];
    i64 keys = 0;
    for (i64 e = first; e < last; ++e) {
      level.block_index[at(e)] = static_cast<i32>(keys);
      keys += level.block_count[at(e)];
    }
    const i64 tail = last > first ? args.block_cols - level.block_count[at(last - 1)] : 0;
    check_columns(g, (last - first) * args.block_cols);
    level.columns[at(g)] = static_cast<i32>((last - first) * args.block_cols - tail);
    for (i32 row = level.row_indptr[at(g)]; row < level.row_indptr[at(g + 1)]; ++row) {
      i32& kv_len = requests.kv_len[at(requests.row_request[at(row)])];
      if (count_keys) kv_len = std::max(kv_len, static_cast<i32>(keys));
      if (keys > kv_len) {
        fail<ValueError>("block_count adds up to ", keys, " keys in row block ", g, "; kv_len[",
                         requests.row_request[at(row)], "] is ", kv_len);
      }
    }
  }
}

void copy_mask_bits(const BlockSparseArgs& args, Level& level) {
  if (!args.mask_bits) return;
  const i64 entries = static_cast<i64>(level.blocks.size());
  const i64 expected = (entries * args.block_rows * args.block_cols + 7) / 8;
  if (args.mask_bytes != expected) {
    fail<ValueError>("mask_bits has ", args.mask_bytes, " bytes; expected ", expected, ": ",
                     entries, " blocks of ", args.block_rows, " × ", args.block_cols, " bits");
  }
  level.mask_bits.assign(args.mask_bits, args.mask_bits + args.mask_bytes);
}

/// A request's keys start at the kv_begin of its row blocks, which must agree.
void add_kv_begin(const BlockSparseArgs& args, Requests& requests, Level& level) {
  if (args.kv_begin.empty()) return;
  level.kv_begin = copy_lengths("kv_begin", args.kv_begin, level.columns.size(), "one a row block");
  std::vector<i32> begin(requests.kv_len.size(), -1);
  for (std::size_t g = 0; g < level.columns.size(); ++g) {
    for (i32 row = level.row_indptr[g]; row < level.row_indptr[g + 1]; ++row) {
      i32& known = begin[at(requests.row_request[at(row)])];
      if (known >= 0 && known != level.kv_begin[g]) {
        fail<ValueError>("kv_begin[", g, "] is ", level.kv_begin[g], "; expected ", known,
                         ", as in the other row blocks of request ", requests.row_request[at(row)]);
      }
      known = level.kv_begin[g];
    }
  }
  for (std::size_t i = 0; i < begin.size(); ++i) {
    const i64 total = static_cast<i64>(requests.kv_len[i]) + std::max(begin[i], 0);
    if (total > longest_request)
      fail<ValueError>("kv_begin and kv_len[", i, "] add up to ", total, "; expected at most ",
                       longest_request);
    requests.kv_len[i] = static_cast<i32>(total);
  }
}

}  // namespace

LayoutPtr block_sparse(const BlockSparseArgs& args) {
  Requests requests = read_requests(args);
  Lists lists = read_lists(args, requests.num_rows());
  Level level;
  level.storage = KvStorage::blocks;
  level.order = args.order;
  level.block_size = args.block_cols;
  level.block_rows = args.block_rows;
  level.row_indptr.resize(lists.indptr.size());
  for (std::size_t g = 0; g < lists.indptr.size(); ++g) {
    level.row_indptr[g] =
        static_cast<i32>(std::min<i64>(static_cast<i64>(g) * args.block_rows, requests.num_rows()));
  }
  level.groups_are_requests = level.row_indptr == requests.qo_indptr;
  level.columns.resize(lists.indptr.size() - 1);
  level.block_begin.assign(lists.indptr.begin(), lists.indptr.end() - 1);
  level.blocks = lists.indices;
  const int given = !args.block_pos.empty() + !args.block_first.empty() + !args.block_count.empty();
  if (given == 3) {
    place_explicit(args, lists, requests, level);
  } else if (given == 0) {
    default_kv_len(args, lists, requests);
    place_columns(args, requests, lists, level);
  } else {
    fail<ValueError>("block_pos, block_first and block_count: ", given,
                     " of them are given; expected all three or none");
  }
  copy_mask_bits(args, level);
  add_kv_begin(args, requests, level);
  if (!level.blocks.empty()) {
    const Extremes used = extremes(level.blocks);
    level.min_block = used.min;
    level.max_block = used.max;
  }
  std::vector<i32> qo_pos;
  if (!args.qo_pos.empty()) {
    qo_pos = copy_index("qo_pos", args.qo_pos, at(requests.num_rows()), "one a query row");
  }
  if (level.groups_are_requests) requests.row_request.clear();
  std::vector<Level> levels;
  levels.push_back(std::move(level));
  return std::make_shared<const Layout>(std::move(requests.qo_indptr), std::move(requests.kv_len),
                                        std::move(qo_pos), std::move(requests.row_request),
                                        std::move(levels));
}

}  // namespace raddle
