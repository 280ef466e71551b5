#include "plan/shared_runs.h"

#include <algorithm>

#include "raddle/engine/layout/layout.h"
#include "raddle/engine/plan/units.h"

namespace raddle {
namespace {

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

/// Grows the tree of runs from ranges of requests whose lists begin alike.
class RunTree {
 public:
  explicit RunTree(const PageLists& lists) : lists_(lists) {}
  std::vector<SharedRun> grow();

 private:
  struct Range {
    i32 begin, end;  // in order_
    i32 parent;      // run before; -1: none
    i32 pages;       // that the requests are known to have in common
  };

  /// The page that request r may share at `depth`; -1: none.
  i32 page(i32 r, i32 depth) const {
    return depth < shareable_[at(r)] ? lists_.list(r)[depth] : -1;
  }
  i32 common_pages(const Range& range) const;
  void part(const Range& range, i32 parent, i32 depth);

  const PageLists& lists_;
  std::vector<i32> order_, shareable_;
  std::vector<Range> pending_;
};

i32 RunTree::common_pages(const Range& range) const {
  for (i32 depth = range.pages;; ++depth) {
    const i32 first = page(order_[at(range.begin)], depth);
    if (first < 0) return depth;
    for (i32 i = range.begin + 1; i < range.end; ++i)
      if (page(order_[at(i)], depth) != first) return depth;
  }
}

/// Divides a range by the page at `depth`, and adds the parts with at least two requests to the
/// pending ranges.
void RunTree::part(const Range& range, i32 parent, i32 depth) {
  const auto first = order_.begin() + range.begin;
  std::stable_sort(first, order_.begin() + range.end,
                   [&](i32 a, i32 b) { return page(a, depth) < page(b, depth); });
  const std::size_t before = pending_.size();
  for (i32 i = range.begin, end = i; i < range.end; i = end) {
    const i32 shared = page(order_[at(i)], depth);
    while (end < range.end && page(order_[at(end)], depth) == shared) ++end;
    if (shared >= 0 && end - i > 1) pending_.push_back({i, end, parent, depth});
  }
  std::reverse(pending_.begin() + static_cast<std::ptrdiff_t>(before), pending_.end());
}

std::vector<SharedRun> RunTree::grow() {
  const i32 requests = lists_.num_requests();
  for (i32 r = 0; r < requests; ++r) {
    order_.push_back(r);
    shareable_.push_back(lists_.shareable(r));
  }
  std::vector<SharedRun> runs;
  part({0, requests, -1, 0}, -1, 0);
  while (!pending_.empty()) {
    const Range range = pending_.back();
    pending_.pop_back();
    const i32 end = common_pages(range);
    const i32 run = static_cast<i32>(runs.size());
    runs.push_back({range.parent, range.pages, end,
                    std::vector<i32>(order_.begin() + range.begin, order_.begin() + range.end)});
    part(range, run, end);
  }
  return runs;
}

/// Costs of one KV head on several levels, where every item stores a partial state.
class Costs {
 public:
  Costs(const PageLists& lists, const PlanConfig& config) : lists_(lists), config_(config) {}

  i64 rows(i32 request) const { return lists_.rows(request); }

  /// Tiles of `rows` query rows over `keys` keys. A part of a KV tile counts as a part: how runs
  /// fall on tiles is no reason to share them.
  i64 group(i64 rows, i64 keys) const {
    return over_tiles(rows, [](i32, const UnitCost& unit) { return unit.start; }) +
           keys * per_256(rows) / 256;
  }

  /// What one KV tile costs those rows.
  i64 kv_tile(i64 rows) const {
    return over_tiles(rows, [](i32, const UnitCost& unit) { return unit.tile; });
  }

  /// What 256 keys cost those rows.
  i64 per_256(i64 rows) const {
    return over_tiles(rows, [](i32 keys, const UnitCost& unit) { return unit.tile * 256 / keys; });
  }

  /// What a cache saves where some keys are read more than once.
  i64 cached(i64 many) const { return many * config_.cached_discount / 100; }

 private:
  /// The sum over the tiles of some rows, all of which but the last are alike.
  template <class Cost>
  i64 over_tiles(i64 rows, const Cost& cost) const {
    const i32 fused = static_cast<i32>(rows) * config_.group_size;
    const i32 count = count_tiles(config_, fused);
    const auto of = [&](i32 nth) {
      const QueryTile tile = make_tile(config_, 0, 0, fused, nth);
      return cost(config_.shapes[tile.shape].keys,
                  cost_of(config_.costs[tile.shape], tile.num_rows, true));
    };
    return count == 0 ? 0 : (count - 1) * of(0) + of(count - 1);
  }

  const PageLists& lists_;
  const PlanConfig& config_;
};

/// For each run and each place before it where reading may begin (the beginnings of the runs on the
/// way to it, its own last), whether it is worth a group, and what it and all behind it cost then.
/// A run lies no deeper than its requests have pages, so this is linear in the page tables, too.
class RunChoice {
 public:
  RunChoice(const std::vector<SharedRun>& runs, const PageLists& lists,
            const std::vector<i32>& first_kept, const PlanConfig& config)
      : runs_(runs), lists_(lists), first_kept_(first_kept), costs_(lists, config) {}
  ChosenRuns choose();

 private:
  struct Node {
    i64 rows = 0;
    i64 kv_tile = 0;  // what one costs its requests, each for itself
    i32 first_kept = int_max;
    std::vector<i32> begins;  // where reading may begin: one more than runs before it
    std::vector<i64> behind;  // cost of all behind those, and last behind the run's end
    std::vector<i64> margin;  // what a group must gain at each beginning; -1: it is not worth one
  };

  i64 keys(i32 begin_page, i64 end, i32 first_kept) const {
    return max(i64{0}, end - max(i64{begin_page} * lists_.page_size, i64{first_kept}));
  }
  void describe();
  void weigh();

  const std::vector<SharedRun>& runs_;
  const PageLists& lists_;
  const std::vector<i32>& first_kept_;
  Costs costs_;
  std::vector<Node> nodes_;
};

void RunChoice::describe() {
  std::vector<i32> deepest(lists_.kv_len.size(), -1);
  nodes_.resize(runs_.size());
  for (std::size_t n = 0; n < runs_.size(); ++n) {
    Node& node = nodes_[n];
    if (runs_[n].parent >= 0) node.begins = nodes_[at(runs_[n].parent)].begins;
    node.begins.push_back(runs_[n].begin);
    node.behind.assign(node.begins.size() + 1, 0);
    node.margin.assign(node.begins.size(), -1);
    for (const i32 r : runs_[n].members) {
      deepest[at(r)] = static_cast<i32>(n);
      node.rows += costs_.rows(r);
      node.kv_tile += costs_.kv_tile(costs_.rows(r));
      node.first_kept = min(node.first_kept, first_kept_[at(r)]);
    }
  }
  for (std::size_t r = 0; r < deepest.size(); ++r) {
    if (deepest[r] < 0) continue;
    Node& node = nodes_[at(deepest[r])];
    for (std::size_t j = 0; j < node.behind.size(); ++j) {
      const i32 begin = j < node.begins.size() ? node.begins[j] : runs_[at(deepest[r])].end;
      node.behind[j] += costs_.group(costs_.rows(static_cast<i32>(r)),
                                     keys(begin, lists_.kv_len[r], first_kept_[r]));
    }
  }
}

void RunChoice::weigh() {
  for (std::size_t n = runs_.size(); n-- > 0;) {
    Node& node = nodes_[n];
    const SharedRun& run = runs_[n];
    const i64 end = i64{run.end} * lists_.page_size;
    for (std::size_t j = 0; j < node.begins.size(); ++j) {
      const i64 once = costs_.group(node.rows, keys(node.begins[j], end, node.first_kept));
      const i64 many = node.behind[j] - node.behind.back();  // as its children, or each, read it
      const i64 margin = costs_.cached(many) + node.kv_tile;
      const bool is_worth = once + margin < many;
      if (is_worth) node.margin[j] = margin;
      if (run.parent >= 0)
        nodes_[at(run.parent)].behind[j] += node.behind.back() + (is_worth ? once : many);
    }
  }
}

ChosenRuns RunChoice::choose() {
  describe();
  weigh();
  ChosenRuns chosen;
  chosen.own_begin.assign(lists_.kv_len.size(), 0);
  struct Before {
    std::size_t begin;  // which of a node's beginnings
    i32 levels;
  };
  std::vector<Before> behind(runs_.size());  // for a run's children
  for (std::size_t n = 0; n < runs_.size(); ++n) {
    const SharedRun& run = runs_[n];
    const Node& node = nodes_[n];
    const Before before = run.parent < 0 ? Before{0, 0} : behind[at(run.parent)];
    behind[n] = before;
    if (node.margin[before.begin] < 0 || before.levels + 1 >= max_levels) continue;
    const i32 begin = node.begins[before.begin];
    behind[n] = {node.begins.size(), before.levels + 1};
    chosen.runs.push_back({static_cast<i32>(n), before.levels, begin});
    chosen.margin += node.margin[before.begin];
    for (const i32 r : run.members) chosen.own_begin[at(r)] = run.end;
  }
  std::sort(chosen.runs.begin(), chosen.runs.end(), [&](const ChosenRun& a, const ChosenRun& b) {
    if (a.level != b.level) return a.level < b.level;
    return runs_[at(a.run)].members[0] < runs_[at(b.run)].members[0];
  });
  return chosen;
}

}  // namespace

std::vector<SharedRun> find_shared_runs(const PageLists& lists) { return RunTree(lists).grow(); }

ChosenRuns choose_runs(const std::vector<SharedRun>& runs, const PageLists& lists,
                       const std::vector<i32>& first_kept, const PlanConfig& config) {
  return RunChoice(runs, lists, first_kept, config).choose();
}

}  // namespace raddle
