// Page tables whose requests share pages, as the levels that the planner finds worth their cost.
#include <algorithm>
#include <sstream>

#include "api/plan.h"
#include "plan/shared_runs.h"
#include "raddle/engine/plan/coverage.h"
#include "raddle/error.h"

namespace raddle {
namespace {

std::size_t at(i64 i) { return static_cast<std::size_t>(i); }

IndexRef whole(const std::vector<i32>& v) {
  static constexpr i32 none = 0;  // an empty list is given all the same
  return {v.empty() ? &none : v.data(), static_cast<i64>(v.size())};
}

/// The first key of each request that some row of it sees.
std::vector<i32> first_kept(const LayoutView& layout, const PlanConfig& config,
                            const CoverFns& cover) {
  std::vector<i32> kept(at(layout.num_requests), 0);
  if (!cover.kv_span) return kept;
  const LevelView& level = layout.levels[0];
  for (i32 r = 0; r < layout.num_requests; ++r) {
    const i32 fused = group_rows(level, r) * config.group_size;
    if (fused == 0 || level.columns[r] == 0) continue;
    QueryTile all{};
    all.group = r;
    all.num_rows = fused;
    Tile tile = query_hull(layout, level, all, config.group_size, config.num_kv_heads);
    tile.kv_index = tile.kv_pos = Range{0, level.columns[r] - 1};
    kept[at(r)] = clip_columns(level, r, cover.kv_span(cover.self, tile)).first;
  }
  return kept;
}

/// The arrays of one level's page table, which lists some pages of a whole one.
struct LevelTable {
  std::vector<i32> row_indptr{0}, rows, page_indptr{0}, pages, kv_len, kv_begin;

  void add(const Level& from, i32 request, i32 first_page, i32 num_keys) {
    const i32* list = from.blocks.data() + from.block_begin[at(request)] + first_page;
    pages.insert(pages.end(), list, list + ceil_div(num_keys, from.block_size));
    page_indptr.push_back(static_cast<i32>(pages.size()));
    kv_len.push_back(num_keys);
    kv_begin.push_back(first_page * from.block_size);
  }
  /// Without the rows, which are shared levels' alone.
  PagedArgs args(const PagedArgs& like) const {
    PagedArgs made;
    made.page_indptr = whole(page_indptr);
    made.page_indices = whole(pages);
    made.kv_len = whole(kv_len);
    made.kv_begin = whole(kv_begin);
    made.page_size = like.page_size;
    made.order = like.order;
    return made;
  }
};

/// The levels as one would make them by hand.
LayoutPtr build(const PagedArgs& args, const Layout& single, const std::vector<SharedRun>& runs,
                const ChosenRuns& chosen) {
  const Level& all = single.levels()[0];
  const LayoutView& view = single.view();
  std::vector<LevelTable> tables(at(chosen.runs.back().level + 1));
  for (const ChosenRun& each : chosen.runs) {
    const SharedRun& run = runs[at(each.run)];
    LevelTable& table = tables[at(each.level)];
    for (const i32 r : run.members)
      for (i32 row = view.qo_indptr[r]; row < view.qo_indptr[r + 1]; ++row)
        table.rows.push_back(row);
    table.row_indptr.push_back(static_cast<i32>(table.rows.size()));
    table.add(all, run.members[0], each.begin, (run.end - each.begin) * all.block_size);
  }
  std::vector<LayoutPtr> levels;
  for (const LevelTable& table : tables) {
    PagedArgs level = table.args(args);
    level.qo_indptr = whole(table.row_indptr);
    level.qo_rows = whole(table.rows);
    levels.push_back(paged_kv(level));
  }
  LevelTable own;
  for (i32 r = 0; r < view.num_requests; ++r) {
    const i32 first = chosen.own_begin[at(r)];
    own.add(all, r, first, all.columns[at(r)] - first * all.block_size);
  }
  PagedArgs last = own.args(args);
  last.qo_indptr = args.qo_indptr;
  last.qo_pos = args.qo_pos;
  levels.push_back(paged_kv(last));
  return cascade(levels);
}

/// Why a spec cannot have keys that requests share; empty where it can.
std::string refusal(const AttentionSpec& spec, const BoundVariant& variant, const Layout& single) {
  if (spec.batch_invariant)
    return "batch_invariant is True, and which keys are shared depends on the batch";
  try {
    const auto positions =
        variant.needs_positions() ? positions_by_request(single.view()) : std::vector<Range>{};
    for (const MemberTime time : {MemberTime::plan, MemberTime::run})
      variant.check_batch(Batch{single.view(), true, positions}, time);
  } catch (const ValueError& error) {
    return error.what();
  }
  return {};
}

i64 heaviest(const Layout& layout, const PlanConfig& config, const CoverFns& cover) {
  return make_plan(layout.view(), config, cover).stats().heaviest;
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

std::string describe(const std::vector<SharedRun>& runs, const ChosenRuns& chosen, i32 page_size) {
  std::ostringstream out;
  for (std::size_t i = 0; i < chosen.runs.size();) {
    const i32 level = chosen.runs[i].level;
    i64 groups = 0, requests = 0, keys = 0;
    for (; i < chosen.runs.size() && chosen.runs[i].level == level; ++i, ++groups) {
      const SharedRun& run = runs[at(chosen.runs[i].run)];
      requests += static_cast<i64>(run.members.size());
      keys += i64{run.end - chosen.runs[i].begin} * page_size;
    }
    out << "; level " << level << " reads " << keys << " keys of " << groups
        << (groups == 1 ? " group" : " groups") << " once for " << requests << " requests";
  }
  return out.str();
}

}  // namespace

SharedPrefixes Attention::share_prefixes(const PagedArgs& args, const PlanOptions& options) const {
  check_options(options);
  for (const auto& [name, given] : {std::pair{"kv_begin", !args.kv_begin.empty()},
                                    {"qo_rows", !args.qo_rows.empty()},
                                    {"min_prefix", args.min_prefix != 0}})
    if (given)
      fail<ValueError>(name, " is given; expected a page table of requests, with all their keys");
  const LayoutPtr single = paged_kv(args);
  const Level& all = single->levels()[0];
  const LayoutView& view = single->view();
  const std::vector<i32> qo_indptr(view.qo_indptr, view.qo_indptr + view.num_requests + 1);
  const PageLists lists{qo_indptr, all.columns, all.block_begin, all.blocks.data(), all.block_size};
  const std::vector<SharedRun> runs = find_shared_runs(lists);
  if (runs.empty()) return {single, "single level: no requests share a full leading page"};

  const auto variant =
      options.params.empty() ? variant_ : variant_->with(options.params, ParamScope::plan);
  const std::string refused = refusal(spec_, *variant, *single);
  if (!refused.empty()) return {single, "single level: " + refused};

  const PlanConfig config =
      backend_->planning_of(*single, options.num_workers, options.schedule).config;
  const CoverFns cover = cover_fns(*variant);
  const ChosenRuns chosen = choose_runs(runs, lists, first_kept(view, config, cover), config);
  if (chosen.runs.empty())
    return {single, text("single level: none of ", runs.size(),
                         " shared runs of pages is worth a state for each of its rows")};
  const LayoutPtr shared = build(args, *single, runs, chosen);
  const i64 alone = heaviest(*single, config, cover), together = heaviest(*shared, config, cover);
  const i64 margin = chosen.margin * config.num_kv_heads / config.num_workers;
  const std::string costs =
      text("heaviest queue ", together, " with shared levels and ", alone, " without");
  if (together + margin >= alone)
    return {single, text("single level: ", costs, ", a gain below the margin of ", margin)};
  return {shared, text(shared->levels().size(), " levels: ", costs,
                       describe(runs, chosen, all.block_size))};
}

}  // namespace raddle
