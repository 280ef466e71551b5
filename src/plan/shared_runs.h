// Runs of leading pages that requests share, at every depth, and which of them are worth a level of
// a cascade.
//
// Lists that begin alike form a tree: a node is a run of pages and the requests that have it in
// common; its children are what some of those share further on. A node becomes a group of a level,
// read once for all rows of its requests, or is left to its children, which then read its pages
// each for itself. What costs least in the planner's units is found from the leaves up.
#pragma once

#include <vector>

#include "plan/prefixes.h"
#include "raddle/engine/plan/plan.h"

namespace raddle {

/// Pages [begin, end) of the lists of `members`, which are equal up to page `end`.
struct SharedRun {
  i32 parent;  ///< the run that ends where this one begins; -1: it begins the lists
  i32 begin, end;
  std::vector<i32> members;  ///< requests, at least two, in the batch's order
};

/// All runs, parents before their children. Takes time linear in the entries of the lists but for
/// sorting requests where they part.
std::vector<SharedRun> find_shared_runs(const PageLists& lists);

/// A run that becomes a group of a level. The group reads from page `begin` on: with the run's
/// pages those of the runs before it that did not become groups.
struct ChosenRun {
  i32 run;
  i32 level;
  i32 begin;  ///< first page
};

struct ChosenRuns {
  std::vector<ChosenRun> runs;  ///< by level, then by their first request
  std::vector<i32> own_begin;   ///< [requests] first page that a request reads alone
  /// How much cheaper, for one KV head, the cascade must be to be worth it. For each run: what a
  /// cache saves where the run's pages are read more than once, and the cost of a KV tile for each
  /// of its requests, because the cost model is no more exact than that about tiles of many rows,
  /// about starting units and about composing states.
  i64 margin = 0;
};

/// `first_kept` [requests]: the first key that some row of the request sees, as its mask says.
ChosenRuns choose_runs(const std::vector<SharedRun>& runs, const PageLists& lists,
                       const std::vector<i32>& first_kept, const PlanConfig& config);

}  // namespace raddle
