// The planner on the GPU: a block computes the plan that the host computes under Schedule::linear,
// byte for byte, batch invariance included, from lengths and page tables in device memory. In every
// step each thread calls the functions of engine/plan for elements of its own, where the host calls
// them for one element after another; where the host carries a running total, the block computes a
// prefix sum.
#pragma once

#include "raddle/engine/kernel/gpu_planner/prefixes.h"
#include "raddle/engine/plan/coverage.h"
#include "raddle/engine/plan/opening.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// Makes a plan by one block. Several blocks may make the plan side by side; each then writes a
/// part of its items and tiles. With `prefixes`, equal leading pages become a level.
/// `Work` divides the units among the workers: LinearSpans or FixedChunks.
template <class Cover, bool prefixes, class Work>
class BlockPlanner {
 public:
  RADDLE_DEVICE BlockPlanner(const Cover& cover, Context& context)
      : cover_(cover), context_(context), scratch_(context.scratch), work_(context) {}

  RADDLE_DEVICE void run() {
    if (context_.thread == 0) context_.shared.report = PlanReport{0, int_max};
    if (!read_lengths()) return publish_nothing();
    if constexpr (prefixes) make_prefixes(context_);
    RADDLE_ROLLED
    for (i32 level = 0; level < num_levels; ++level) make_tiles(level);
    const Units units = make_units();
    work_.divide(units);
    PlanSizes sizes = work_.place_states(units);
    write_items(units);
    if (context_.config.has_openings) write_openings(units);
    write_tiles(units, static_cast<i32>(sizes.splits));
    sizes.query_tiles = units.num_tiles;
    sizes.runs = num_runs();
    sizes.items = scratch_.queue[context_.config.num_workers];
    publish(sizes);
  }

 private:
  static constexpr i32 num_levels = prefixes ? 2 : 1;

  /// Copies and checks the lengths; counts the query tiles of every request (`mine`: a thread's own
  /// numbers, `before`: their sum over earlier requests). False where the batch exceeds the maxima.
  RADDLE_DEVICE bool read_lengths() {
    const Maxima& most = context_.launch.maxima;
    const LayoutArrays to = context_.arrays();
    const i32 requests = context_.num_requests;
    // A count on the device may not exceed the arrays that it counts.
    if (requests < 0 || requests > context_.launch.batch.num_requests) {
      if (context_.thread == 0) {
        context_.note(too_many_requests, -1);
        to.qo_indptr[most.max_requests] = 0;
      }
      return false;
    }
    Sums<3> sums{};  // query tiles, rows, keys
    for (i32 base = 0; base < requests; base += context_.threads) {
      const i32 r = base + context_.thread;
      DeviceRequest q{};
      Sums<3> mine{};
      if (r < requests) {
        q = read_request(context_.launch.batch, most.max_qo_tokens, r);
        if (context_.marked(r, page_outside)) q.keys = q.begin = 0, q.errors |= bad_page;
        if constexpr (Work::keeps_shapes)  // a short kernel's tiles would be others
          if (q.rows > max_group_rows(most)) q.rows = 0, q.errors |= too_long;
        mine = Sums<3>{
            {count_tiles(context_.config, q.rows * context_.config.group_size), q.rows, q.keys}};
      }
      const Sums<3> before = context_.scan.exclusive(mine, sums, requests - base);
      if (r >= requests) continue;
      if (q.errors) context_.note(q.errors, r);  // thread 0 cleared the report before the scan
      scratch_.tile_indptr[r] = static_cast<i32>(before.of[0]);
      scratch_.qo_indptr[r] = to.qo_indptr[r] = q.first;
      scratch_.kv_len[r] = to.kv_len[r] = q.keys;
      to.block_begin[r] = q.begin;
    }
    const i32 end = context_.launch.batch.qo_indptr[requests];
    const bool fits_rows = sums.of[1] <= most.max_qo_tokens && end <= most.max_qo_tokens;
    const bool fits_keys = sums.of[2] <= most.max_kv_tokens;
    if (context_.thread == 0) {
      scratch_.qo_indptr[requests] = to.qo_indptr[requests] = end;
      scratch_.tile_indptr[requests] = static_cast<i32>(sums.of[0]);
      // The last entry is the number of rows in every plan: none, where none is made.
      to.qo_indptr[most.max_requests] = fits_rows && fits_keys ? max(end, 0) : 0;
    }
    ptx::sync_block();
    if (context_.thread == 0 &&
        !(fits_rows && fits_keys))  // replaces errors of requests: nothing is planned
      context_.shared.report =
          PlanReport{(fits_rows ? 0 : too_many_rows) | (fits_keys ? 0 : too_many_keys), int_max};
    return fits_rows && fits_keys;
  }

  /// The layout as the planning functions see it, with the planner's own copies of the lengths.
  /// Fields that no batch on a device has are constants, so that the compiler drops the code for
  /// them.
  RADDLE_DEVICE LayoutView layout() const {
    LayoutView view{};
    view.num_requests = context_.num_requests;
    view.num_rows = context_.launch.maxima.max_qo_tokens;
    view.num_levels = num_levels;
    view.qo_indptr = scratch_.qo_indptr;
    view.kv_len = scratch_.kv_len;
    return view;
  }

  RADDLE_DEVICE LevelView level_view(bool last) const {
    const LayoutArrays a = context_.arrays();
    LevelView view{};
    view.block_size = context_.launch.batch.page_size;
    view.groups_are_requests = true;
    view.row_indptr = last ? scratch_.qo_indptr : a.prefix_indptr;
    view.columns = !prefixes ? scratch_.kv_len : last ? a.suffix : a.prefix_len;
    view.kv_begin = prefixes && last ? a.kv_begin : nullptr;
    view.block_begin = last ? a.block_begin : a.prefix_begin;
    view.blocks = context_.launch.batch.pages;
    return view;
  }

  /// Makes the query tiles of one level, one thread per tile. Tiles that keep nothing have a number
  /// c, too; on the level of the prefixes they are then left out.
  RADDLE_DEVICE void make_tiles(i32 level) {
    const bool last = !prefixes || level == 1;
    const LayoutView of_layout = layout();
    const LevelView view = level_view(last);
    const i32 groups = last ? context_.num_requests : context_.num_prefixes;
    const i32* first_tile = last ? scratch_.tile_indptr : scratch_.prefix_tile_indptr;
    const i32 total = groups > 0 ? first_tile[groups] : 0;
    all_partial_ = !last || num_tiles() > 0;
    i32* group_tile = scratch_.group_tile + (last ? context_.num_prefixes : 0);
    Run* spans =
        reinterpret_cast<Run*>(context_.launch.scratch + context_.launch.scratch_at.spans) +
        i64{max_spans} * context_.first_of_all();
    for (i32 base = 0; base < total; base += context_.threads) {
      const i32 c = base + context_.thread;
      CoveredTile covered{};
      bool kept = false;
      i32 group = 0;
      Sums<2> mine{};
      if (c < total) {
        // Where every group has one tile, no search is needed.
        const bool is_own = c < groups && first_tile[c] == c && first_tile[c + 1] == c + 1;
        group = is_own ? c : last_at_most(first_tile, groups, c);
        const auto hull = [&](const QueryTile& tile) {
          if (last)
            return query_hull(of_layout, view, tile, context_.config.group_size,
                              context_.config.num_kv_heads);
          Tile t = open_hull(context_.config.num_kv_heads * context_.config.group_size);
          t.request = scratch_.hulls[c].request;
          t.q_index = t.q_pos = scratch_.hulls[c].q_index;
          return t;
        };
        const QueryTile tile =
            make_tile(context_.config, level, group,
                      group_rows(view, group) * context_.config.group_size, c - first_tile[group]);
        covered = make_covered(cover_, hull, view, context_.config, tile, all_partial_, spans);
        if (last && context_.marked(group, page_missing) && !has_pages(view, covered, spans))
          drop_keys(covered, group);
        kept = last || covered.tile.run_end > 0;
        if (kept) mine = Sums<2>{{join_words(covered.tile.run_end, 1), covered.cost}};
      }
      const Sums<2> before = context_.scan.exclusive(mine, tiles_, total - base);
      if (c < total && c == first_tile[group])
        group_tile[group] = static_cast<i32>(before.of[0] >> 32);
      if (kept) store_tile(covered, spans, before);
    }
    ptx::sync_block();
    // A group without tiles begins where the next one does.
    for (i32 g = context_.thread; g < groups; g += context_.threads) {
      const i32 c = first_tile[g];
      if (c == first_tile[g + 1])
        group_tile[g] = c == total ? num_tiles() : group_tile[last_at_most(first_tile, groups, c)];
    }
    if (context_.thread == 0) {
      group_tile[groups] = num_tiles();
      scratch_.cost_before[0] = 0;
    }
    ptx::sync_block();
  }

  /// The nth run of a tile; returned by value, so that a single one stays in registers.
  RADDLE_DEVICE static Run run_of(const CoveredTile& covered, const Run* spans, i32 n) {
    if (covered.in_spans) return spans[n];
    return covered.only;
  }

  RADDLE_DEVICE void store_tile(CoveredTile& covered, const Run* spans, const Sums<2>& before) {
    const i32 t = static_cast<i32>(before.of[0] >> 32);
    const i32 begin = static_cast<i32>(before.of[0]);
    const i32 count = covered.tile.run_end;
    covered.tile.run_begin = begin;
    covered.tile.run_end = begin + count;
    scratch_.tiles[t] = covered.tile;
    scratch_.kv_tiles[t] = covered.kv_tiles;
    scratch_.cost_before[t + 1] = before.of[1] + covered.cost;
    Run* to = context_.template out<Run>(context_.launch.at.runs) + begin;
    RADDLE_ROLLED
    for (i32 i = 0; i < count; ++i) to[i] = run_of(covered, spans, i);
  }

  /// Whether the tile has a page for every key that it keeps.
  RADDLE_DEVICE bool has_pages(const LevelView& view, const CoveredTile& covered,
                               const Run* spans) const {
    const QueryTile& tile = covered.tile;
    RADDLE_ROLLED
    for (i32 i = 0; i < tile.run_end; ++i) {
      const Run run = run_of(covered, spans, i);
      const i32 begin = max(run.begin, tile.col_begin);
      const i32 end = min(run.end, tile.col_end);
      for (i32 c = begin / view.block_size * view.block_size; c < end; c += view.block_size)
        if (column_at(view, tile.group, c).block < 0) return false;
    }
    return true;
  }

  /// Plans a tile without keys, because pages are missing, and reports its request.
  RADDLE_DEVICE void drop_keys(CoveredTile& covered, i32 group) {
    context_.note(bad_page, group);
    QueryTile& t = covered.tile;
    t.col_begin = t.col_end = t.run_end = covered.kv_tiles = 0;
    covered.cost = cost_of(context_.config.costs[t.shape], t.num_rows, all_partial_).start;
  }

  RADDLE_DEVICE i32 num_tiles() const { return static_cast<i32>(tiles_.of[0] >> 32); }
  RADDLE_DEVICE i32 num_runs() const { return static_cast<i32>(tiles_.of[0]); }

  RADDLE_DEVICE Units make_units() const {
    Units units{};
    units.tiles = scratch_.tiles;
    units.runs = context_.template out<Run>(context_.launch.at.runs);
    units.kv_tiles = scratch_.kv_tiles;
    units.cost_before = scratch_.cost_before;
    units.group_tile = scratch_.group_tile;
    units.num_tiles = num_tiles();
    units.num_groups = context_.num_prefixes + context_.num_requests;
    units.num_kv_heads = context_.config.num_kv_heads;
    units.all_partial = all_partial_;
    for (i32 i = 0; i < 2; ++i) {
      units.shapes[i] = context_.config.shapes[i];
      units.costs[i] = context_.config.costs[i];
    }
    return units;
  }

  /// Writes the items; the threads of all planning blocks divide them.
  RADDLE_DEVICE void write_items(const Units& units) {
    const i32 count = scratch_.queue[context_.config.num_workers];
    const Divider heads(units.num_kv_heads);
    WorkItem* items = context_.template out<WorkItem>(context_.launch.at.items);
    RADDLE_ROLLED
    for (i32 i = context_.first_of_all(); i < count; i += context_.step_of_all())
      work_.write(units, heads, i, work_.owner_of(i), items[i]);
  }

  /// Writes the workers' openings; the threads of all planning blocks divide them.
  RADDLE_DEVICE void write_openings(const Units& units) {
    const Divider heads(units.num_kv_heads);
    Opening* openings = context_.template out<Opening>(context_.launch.at.openings);
    RADDLE_ROLLED
    for (i32 w = context_.first_of_all(); w < context_.config.num_workers;
         w += context_.step_of_all()) {
      const i32 begin = scratch_.queue[w], end = scratch_.queue[w + 1];
      if (begin == end) {
        openings[w] = no_opening(end);
        continue;
      }
      WorkItem item;
      work_.write(units, heads, begin, w, item);
      const QueryTile& tile = units.tiles[item.query_tile];
      openings[w] = make_opening(item, tile, level_view(!prefixes || tile.level == 1), units.runs,
                                 context_.config.shapes[tile.shape].keys, begin, end);
    }
  }

  RADDLE_DEVICE void write_tiles(const Units& units, i32 num_splits) {
    Split* splits = context_.template out<Split>(context_.launch.at.splits);
    for (i32 i = context_.first_of_all(); i < num_splits; i += context_.step_of_all())
      splits[i] = scratch_.splits[i];
    // Word by word, so that neighbouring threads write neighbouring addresses.
    const i32* from = reinterpret_cast<const i32*>(scratch_.tiles);
    i32* to = context_.template out<i32>(context_.launch.at.query_tiles);
    const i32 words = units.num_tiles * static_cast<i32>(sizeof(QueryTile) / sizeof(i32));
    for (i32 i = context_.first_of_all(); i < words; i += context_.step_of_all()) to[i] = from[i];
  }

  /// Publishes a plan with empty queues.
  RADDLE_DEVICE void publish_nothing() {
    i32* queue_indptr = context_.template out<i32>(context_.launch.at.queue_indptr);
    for (i32 w = context_.thread; w < context_.config.num_workers + 2; w += context_.threads)
      queue_indptr[w] = 0;
    if (context_.config.has_openings) {
      Opening* openings = context_.template out<Opening>(context_.launch.at.openings);
      for (i32 w = context_.thread; w < context_.config.num_workers; w += context_.threads)
        openings[w] = no_opening(0);
    }
    publish(PlanSizes{});
  }

  RADDLE_DEVICE void publish(PlanSizes sizes) {
    ptx::sync_block();
    if (context_.part != 0 || context_.thread != 0) return;
    sizes.queue_indptr = context_.config.num_workers + 2;
    sizes.openings = context_.config.has_openings ? context_.config.num_workers : 0;
    *context_.launch.sizes = sizes;
    const PlanReport& report = context_.shared.report;
    if (report.errors == 0) return;
    context_.launch.report->errors |= report.errors;
    context_.launch.report->request = report.request == int_max ? -1 : report.request;
  }

  const Cover& cover_;
  Context& context_;
  const ScratchArrays& scratch_;
  Work work_;
  bool all_partial_ = false;
  Sums<2> tiles_{};  // tiles and runs, joined in one word, and costs so far
};

}  // namespace planner

RADDLE_ENGINE_END
