#include "layout/normal_form.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "layout/copies.h"
#include "raddle/error.h"
#include "raddle/layout.h"

namespace raddle {

// --- Arrays on their way in ------------------------------------------------------------------

namespace {

constexpr i64 i32_min = std::numeric_limits<i32>::min();
constexpr i64 i32_max = std::numeric_limits<i32>::max();

void check_rank(const char* name, const IndexRef& ref) {
  if (ref.empty()) fail<TypeError>(name, " is missing; expected an array of int32 or int64");
  if (ref.rank != 1) {
    fail<ValueError>(name, " has ", ref.rank, " dimensions; expected 1");
  }
}

template <class T>
void narrow(const char* name, const T* data, i64 first, i64 step, i64 count, i32* to) {
  const T* from = data + first;
  // The range check runs over the whole array without a branch and is looked into only if it fails.
  u64 overflow = 0;
  for (i64 i = 0; i < count; ++i) {
    const i64 value = from[i * step];
    overflow |= static_cast<u64>(value - i32_min) >> 32;
    to[i] = static_cast<i32>(value);
  }
  if (overflow == 0) return;
  for (i64 i = 0; i < count; ++i) {
    const i64 value = from[i * step];
    const i64 at = (step == 0 ? 0 : first / step) + i;
    if (value < i32_min || value > i32_max) {
      fail<ValueError>(name, "[", at, "] is ", value, "; expected at most ", i32_max);
    }
  }
}

// A serving engine's page tables are the largest arrays that a plan reads, so the scan is written
// in lanes of a vector type: -O2 does not vectorise loops of unknown length by itself.
[[gnu::always_inline]] inline Extremes scan_extremes(const i32* values, std::size_t count) {
  using Lanes = i32 __attribute__((vector_size(32), aligned(4), may_alias));
  constexpr std::size_t width = 8;
  Extremes found;
  Lanes least = Lanes{} + found.min;
  Lanes most = Lanes{} + found.max;
  std::size_t i = 0;
  for (; i + width <= count; i += width) {
    const Lanes v = *reinterpret_cast<const Lanes*>(values + i);
    least = v < least ? v : least;
    most = v > most ? v : most;
  }
  for (std::size_t lane = 0; lane < width; ++lane) {
    found.min = std::min<i32>(found.min, least[lane]);
    found.max = std::max<i32>(found.max, most[lane]);
  }
  for (; i < count; ++i) {
    found.min = std::min(found.min, values[i]);
    found.max = std::max(found.max, values[i]);
  }
  return found;
}

#if defined(__x86_64__)
// SSE2 has no minimum of 32-bit integers: 10 µs for 25,000 pages against 1.5 µs.
[[gnu::target("avx2")]] Extremes extremes_avx2(const i32* values, std::size_t count) {
  return scan_extremes(values, count);
}
#endif

}  // namespace

Extremes extremes(const std::vector<i32>& values) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return extremes_avx2(values.data(), values.size());
#endif
  return scan_extremes(values.data(), values.size());
}

void append_index(const char* name, const IndexRef& ref, i64 first, i64 step, i64 count,
                  std::vector<i32>& to) {
  if (!ref.is_64bit && step == 1) {
    const i32* from = static_cast<const i32*>(ref.data) + first;
    to.insert(to.end(), from, from + count);
    return;
  }
  const std::size_t at = to.size();
  to.resize(at + static_cast<std::size_t>(count));
  if (ref.is_64bit) {
    narrow(name, static_cast<const i64*>(ref.data), first, step, count, to.data() + at);
  } else {
    narrow(name, static_cast<const i32*>(ref.data), first, step, count, to.data() + at);
  }
}

std::vector<i32> copy_index(const char* name, const IndexRef& ref) {
  check_rank(name, ref);
  if (ref.shape[0] > i32_max) {
    fail<ValueError>(name, " has ", ref.shape[0], " entries; expected at most ", i32_max);
  }
  std::vector<i32> to;
  append_index(name, ref, 0, ref.stride[0], ref.shape[0], to);
  return to;
}

std::vector<i32> copy_index(const char* name, const IndexRef& ref, std::size_t count,
                            const char* why) {
  check_rank(name, ref);
  if (ref.shape[0] != static_cast<i64>(count)) {
    fail<ValueError>(name, " has ", ref.shape[0], " entries; expected ", count, ", ", why);
  }
  return copy_index(name, ref);
}

std::vector<i32> copy_lengths(const char* name, const IndexRef& ref, std::size_t count,
                              const char* why) {
  std::vector<i32> lengths = copy_index(name, ref, count, why);
  if (extremes(lengths).min < 0) {
    std::size_t i = 0;
    while (lengths[i] >= 0) ++i;
    fail<ValueError>(name, "[", i, "] is ", lengths[i], "; expected at least 0");
  }
  for (std::size_t i = 0; extremes(lengths).max > longest_request && i < lengths.size(); ++i)
    if (lengths[i] > longest_request)
      fail<ValueError>(name, "[", i, "] is ", lengths[i], "; expected at most ", longest_request);
  return lengths;
}

std::vector<i32> copy_indptr(const char* name, const IndexRef& ref) {
  std::vector<i32> indptr = copy_index(name, ref);
  if (indptr.empty()) fail<ValueError>(name, " has 0 entries; expected at least 1");
  if (indptr[0] != 0) fail<ValueError>(name, "[0] is ", indptr[0], "; expected 0");
  for (std::size_t i = 1; i < indptr.size(); ++i) {
    if (indptr[i] < indptr[i - 1]) {
      fail<ValueError>(name, "[", i, "] is ", indptr[i], " after ", indptr[i - 1],
                       "; expected entries that never fall");
    }
  }
  return indptr;
}

// --- Views of them ---------------------------------------------------------------------------

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

void check_num_rows(i32 num_rows) {
  if (num_rows < -1) fail<ValueError>("num_rows is ", num_rows, "; expected at least 0");
}

}  // namespace raddle
