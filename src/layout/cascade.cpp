// Composable formats: several levels, merged into one layout.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "raddle/error.h"
#include "raddle/layout.h"

namespace raddle {

namespace {

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

/// Adds levels one after another, with the number of keys that precede the next level's for each
/// row.
class Merge {
 public:
  Merge(const Layout& last, bool allow_gaps)
      : last_(last), allow_gaps_(allow_gaps), seen_(at(last.num_rows()), 0) {}

  void add(const Layout& layout, std::size_t number, bool is_last);
  LayoutPtr finish();

 private:
  void check_rows(const Layout& layout) const;
  i32 first_key(const Level& level, i32 group) const;
  /// All messages start with the level that they are about.
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail<ValueError>("levels[", number_, "]: ", parts...);
  }

  const Layout& last_;
  const bool allow_gaps_;
  std::size_t number_ = 0;
  std::vector<i32> seen_;  ///< [rows] keys of the levels added, and of the gaps between them
  std::vector<Level> levels_;
};

void Merge::check_rows(const Layout& layout) const {
  const Level& level = layout.levels()[0];
  const LevelView view = level.view();
  std::vector<u8> held(seen_.size(), 0);
  for (i32 i = 0; i < level.row_indptr.back(); ++i) {
    const i32 row = view.rows ? view.rows[i] : i;
    if (row >= last_.num_rows()) {
      refuse(view.rows ? "qo_rows[" : "row ", i, view.rows ? "] is " : " of qo_indptr is row ", row,
             "; the last level has ", last_.num_rows(), " rows");
    }
    if (held[at(row)]) refuse("qo_rows[", i, "] is ", row, ", which an earlier entry is too");
    held[at(row)] = 1;
  }
}

/// The kv_index of a group's first key: one past what earlier levels hold of its rows; with gaps,
/// what the level says, where that is more.
i32 Merge::first_key(const Level& level, i32 group) const {
  const LevelView view = level.view();
  const i32 given = view.kv_begin ? view.kv_begin[group] : -1;
  const i32 begin = view.row_indptr[group], end = view.row_indptr[group + 1];
  if (begin == end) return std::max(given, 0);
  const i32 first_row = view.rows ? view.rows[begin] : begin;
  const i32 seen = seen_[at(first_row)];
  for (i32 i = begin; i < end; ++i) {
    const i32 row = view.rows ? view.rows[i] : i;
    if (seen_[at(row)] != seen) {
      refuse("group ", group, " holds rows ", first_row, " and ", row,
             ", of which earlier levels hold ", seen, " and ", seen_[at(row)],
             " keys; expected equal numbers");
    }
  }
  if (allow_gaps_ && given > seen) return given;
  if (given >= 0 && given != seen) {
    refuse("kv_begin[", group, "] is ", given, "; expected ", allow_gaps_ ? "at least " : "", seen,
           ", the keys that earlier levels hold of row ", first_row);
  }
  return seen;
}

void Merge::add(const Layout& layout, std::size_t number, bool is_last) {
  number_ = number;
  check_rows(layout);
  if (layout.view().qo_pos && !is_last) refuse("has qo_pos; expected it with the last level only");
  Level level = layout.levels()[0];
  const LevelView view = layout.view().levels[0];
  std::vector<i32> kv_begin(at(view.num_groups));
  for (i32 g = 0; g < view.num_groups; ++g) {
    const i32 begin = first_key(level, g);
    kv_begin[at(g)] = begin;
    const i32 own_begin = view.kv_begin ? view.kv_begin[g] : 0;
    for (i32 i = view.row_indptr[g]; i < view.row_indptr[g + 1]; ++i) {
      const i32 row = view.rows ? view.rows[i] : i;
      const i32 request = layout.view().row_request ? layout.view().row_request[row] : g;
      const i64 total = static_cast<i64>(begin) + layout.view().kv_len[request] - own_begin;
      if (total > std::numeric_limits<i32>::max()) refuse("row ", row, " has ", total, " keys");
      seen_[at(row)] = static_cast<i32>(total);
    }
  }
  const bool all_zero = std::all_of(kv_begin.begin(), kv_begin.end(), [](i32 k) { return k == 0; });
  level.kv_begin = all_zero ? std::vector<i32>{} : std::move(kv_begin);
  if (is_last && !level.rows.empty()) {
    for (std::size_t i = 0; i < level.rows.size(); ++i) {
      if (level.rows[i] != static_cast<i32>(i)) {
        refuse("qo_rows[", i, "] is ", level.rows[i],
               "; expected every row once and in order, as this is the last level");
      }
    }
    level.rows.clear();
  }
  const std::vector<i32> requests(last_.view().qo_indptr,
                                  last_.view().qo_indptr + last_.num_requests() + 1);
  level.groups_are_requests = level.rows.empty() && level.row_indptr == requests;
  levels_.push_back(std::move(level));
}

LayoutPtr Merge::finish() {
  const LayoutView& view = last_.view();
  std::vector<i32> kv_len(view.kv_len, view.kv_len + view.num_requests);
  std::vector<i32> row_request(seen_.size());
  for (i32 request = 0; request < view.num_requests; ++request) {
    const i32 begin = view.qo_indptr[request], end = view.qo_indptr[request + 1];
    if (begin < end) kv_len[at(request)] = seen_[at(begin)];
    for (i32 row = begin; row < end; ++row) {
      row_request[at(row)] = request;
      if (seen_[at(row)] != seen_[at(begin)]) {
        fail<ValueError>("levels: rows ", begin, " and ", row, " of request ", request, " have ",
                         seen_[at(begin)], " and ", seen_[at(row)],
                         " keys; expected equal numbers");
      }
    }
  }
  const bool plain = std::all_of(levels_.begin(), levels_.end(),
                                 [](const Level& level) { return level.groups_are_requests; });
  if (plain) row_request.clear();
  std::vector<i32> qo_pos;
  if (view.qo_pos) qo_pos.assign(view.qo_pos, view.qo_pos + view.num_rows);
  return std::make_shared<const Layout>(
      std::vector<i32>(view.qo_indptr, view.qo_indptr + view.num_requests + 1), std::move(kv_len),
      std::move(qo_pos), std::move(row_request), std::move(levels_));
}

}  // namespace

LayoutPtr cascade(const std::vector<LayoutPtr>& levels, bool allow_gaps) {
  if (levels.empty()) fail<ValueError>("levels is empty; expected at least one layout");
  if (levels.size() > static_cast<std::size_t>(max_levels))
    fail<ValueError>("levels has ", levels.size(), " layouts; expected at most ", max_levels);
  for (std::size_t i = 0; i < levels.size(); ++i) {
    if (!levels[i]) fail<ValueError>("levels[", i, "] is missing");
    if (levels[i]->levels().size() != 1) {
      fail<ValueError>("levels[", i, "] is itself a cascade; expected a layout of one level");
    }
  }
  Merge merge(*levels.back(), allow_gaps);
  for (std::size_t i = 0; i < levels.size(); ++i) {
    merge.add(*levels[i], i, i + 1 == levels.size());
  }
  return merge.finish();
}

}  // namespace raddle
