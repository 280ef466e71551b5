// The planner on the GPU: one block computes the plan that the host computes under
// Schedule::linear, byte for byte, from lengths and tables in device memory. Every step is a loop
// over threads of the functions in engine/plan that the host calls one after another; what the
// host carries along from element to element is a prefix sum here.
#pragma once

#include "raddle/engine/kernel/plan/memory.h"
#include "raddle/engine/kernel/plan/requests.h"
#include "raddle/engine/kernel/plan/scan.h"
#include "raddle/engine/plan/tiling.h"

RADDLE_ENGINE_BEGIN

namespace planner {

/// The last of n ascending numbers that is at most x; the first is.
RADDLE_FN i32 last_at_most(const i32* numbers, i32 n, i32 x) {
  i32 lo = 0;
  i32 hi = n;
  while (lo + 1 < hi) {
    const i32 middle = lo + (hi - lo) / 2;
    if (numbers[middle] <= x) {
      lo = middle;
    } else {
      hi = middle;
    }
  }
  return lo;
}

/// A plan in the making, by one block.
template <class Cover>
class BlockPlanner {
 public:
  /// `marks`: what is known of the requests' pages, or null.
  RADDLE_DEVICE BlockPlanner(const PlanLaunch& launch, const Cover& cover, const i32* marks,
                             PlannerShared& shared, u8* memory)
      : launch_(launch),
        cover_(cover),
        marks_(marks),
        x_(shared),
        s_(scratch_arrays(launch.scratch_at, memory)),
        scan_(shared.scan),
        thread_(ptx::thread_index()),
        threads_(ptx::thread_count()) {}

  RADDLE_DEVICE void run() {
    start();
    if (!read_lengths()) return publish_nothing();
    for (i32 level = 0; level < num_levels(); ++level) make_tiles(level);
    units_ = make_units();
    cut();
    const i32 splits = place_cut_states();
    write_items();
    write_tiles(splits);
    publish();
  }

 private:
  template <class T>
  RADDLE_DEVICE T* out(i64 offset) const {
    return reinterpret_cast<T*>(launch_.plan + offset);
  }

  RADDLE_DEVICE void note(i32 errors, i32 request) {
    ptx::atomic_or(&x_.report.errors, errors);
    if (request >= 0) ptx::atomic_min(&x_.report.request, request);
  }

  RADDLE_DEVICE void start() {
    const DeviceBatch& batch = launch_.batch;
    num_requests_ = batch.num_requests_at ? *batch.num_requests_at : batch.num_requests;
    if (thread_ == 0) x_.report = PlanReport{0, int_max};
    ptx::sync_block();
  }

  /// What planning sees of the layout: the planner's own copies of the lengths. Fields that no
  /// batch on a device has are constants, so that the code for them falls away.
  RADDLE_DEVICE LayoutView layout() const {
    LayoutView view{};
    view.num_requests = num_requests_;
    view.num_rows = launch_.maxima.max_qo_tokens;
    view.num_levels = num_levels();
    view.qo_indptr = s_.qo_indptr;
    view.kv_len = s_.kv_len;
    return view;
  }

  RADDLE_DEVICE LevelView level_view(i32) const {
    LevelView view{};
    view.num_groups = num_requests_;
    view.block_size = launch_.batch.page_size;
    view.groups_are_requests = true;
    view.row_indptr = s_.qo_indptr;
    view.columns = s_.kv_len;
    view.block_begin = layout_arrays(launch_).block_begin;
    view.blocks = launch_.batch.pages;
    return view;
  }

  RADDLE_DEVICE i32 num_levels() const { return 1; }
  RADDLE_DEVICE i32 num_groups(i32) const { return num_requests_; }

  /// Copies and checks the lengths; counts the query tiles of every request. False where the batch
  /// exceeds the maxima.
  RADDLE_DEVICE bool read_lengths() {
    const Maxima& most = launch_.maxima;
    const LayoutArrays to = layout_arrays(launch_);
    if (num_requests_ < 0 || num_requests_ > most.max_requests) {
      if (thread_ == 0) note(too_many_requests, -1);
      return false;
    }
    const i32* indptr = launch_.batch.qo_indptr;
    Sums<3> sums{};  // query tiles, rows, keys
    for (i32 base = 0; base < num_requests_; base += threads_) {
      const i32 r = base + thread_;
      const bool here = r < num_requests_;
      DeviceRequest q{};
      Sums<3> mine{};
      if (here) {
        q = read_request(launch_.batch, most.max_qo_tokens, r);
        if (marks_ && marks_[r] & page_outside) q.keys = q.begin = 0, q.errors |= bad_page;
        if (q.errors) note(q.errors, r);
        mine = Sums<3>{
            {count_tiles(launch_.config, q.rows * launch_.config.group_size), q.rows, q.keys}};
      }
      const Sums<3> before = scan_.exclusive(mine, sums);
      if (!here) continue;
      s_.candidates[r] = static_cast<i32>(before.of[0]);
      s_.qo_indptr[r] = to.qo_indptr[r] = q.first;
      s_.kv_len[r] = to.kv_len[r] = q.keys;
      to.block_begin[r] = q.begin;
    }
    const i32 end = indptr[num_requests_];
    if (thread_ == 0) {
      s_.qo_indptr[num_requests_] = to.qo_indptr[num_requests_] = end;
      s_.candidates[num_requests_] = static_cast<i32>(sums.of[0]);
    }
    const bool fits_rows = sums.of[1] <= most.max_qo_tokens && end <= most.max_qo_tokens;
    const bool fits_keys = sums.of[2] <= most.max_kv_tokens;
    if (thread_ == 0 && !(fits_rows && fits_keys))  // says it all: nothing is planned
      x_.report =
          PlanReport{(fits_rows ? 0 : too_many_rows) | (fits_keys ? 0 : too_many_keys), int_max};
    ptx::sync_block();
    return fits_rows && fits_keys;
  }

  RADDLE_DEVICE i32 first_group(i32 level) const { return level == 0 ? 0 : num_groups(0); }

  /// The query tiles of one level, a thread a tile: `candidates` counts them by group. On all
  /// levels but the last those that keep nothing are left out.
  RADDLE_DEVICE void make_tiles(i32 level) {
    const LayoutView layout_view = layout();
    const LevelView view = level_view(level);
    const i32 groups = num_groups(level);
    const i32 total = groups > 0 ? s_.candidates[groups] : 0;
    const bool last = level + 1 == num_levels();
    all_partial_ = !last || num_tiles() > 0;
    i32* group_tile = s_.group_tile + first_group(level);
    Run* spans = reinterpret_cast<Run*>(launch_.scratch + launch_.scratch_at.spans) +
                 i64{max_spans} * thread_;
    for (i32 base = 0; base < total; base += threads_) {
      const i32 c = base + thread_;
      CoveredTile covered{};
      bool kept = false;
      i32 group = 0;
      Sums<2> mine{};
      if (c < total) {
        group = last_at_most(s_.candidates, groups, c);
        covered = cover_nth(cover_, layout_view, view, launch_.config, level, group,
                            group_rows(view, group) * launch_.config.group_size,
                            c - s_.candidates[group], all_partial_, spans);
        const Run* runs = covered.in_spans ? spans : &covered.only;
        if (last && marks_ && marks_[group] & page_missing && !has_pages(view, covered.tile, runs))
          drop_keys(covered, group);
        kept = last || covered.tile.run_end > 0;
        if (kept) mine = Sums<2>{{join_words(covered.tile.run_end, 1), covered.cost}};
      }
      const Sums<2> before = scan_.exclusive(mine, tiles_);
      if (c < total && c == s_.candidates[group])
        group_tile[group] = static_cast<i32>(before.of[0] >> 32);
      if (kept) store_tile(covered, covered.in_spans ? spans : &covered.only, before);
    }
    ptx::sync_block();
    // A group without tiles begins where the next one does.
    for (i32 g = thread_; g < groups; g += threads_) {
      const i32 c = s_.candidates[g];
      if (c == s_.candidates[g + 1])
        group_tile[g] =
            c == total ? num_tiles() : group_tile[last_at_most(s_.candidates, groups, c)];
    }
    if (thread_ == 0) group_tile[groups] = num_tiles();
    if (thread_ == 0 && level == 0) s_.prefix[0] = 0;
    ptx::sync_block();
  }

  RADDLE_DEVICE void store_tile(CoveredTile& covered, const Run* runs, const Sums<2>& before) {
    const i32 t = static_cast<i32>(before.of[0] >> 32);
    const i32 begin = static_cast<i32>(before.of[0]);
    const i32 count = covered.tile.run_end;
    covered.tile.run_begin = begin;
    covered.tile.run_end = begin + count;
    s_.tiles[t] = covered.tile;
    s_.kv_tiles[t] = covered.kv_tiles;
    s_.prefix[t + 1] = before.of[1] + covered.cost;
    Run* to = out<Run>(launch_.at.runs) + begin;
    for (i32 i = 0; i < count; ++i) to[i] = runs[i];
  }

  /// Whether every page is there of which a tile keeps keys.
  RADDLE_DEVICE bool has_pages(const LevelView& view, const QueryTile& tile,
                               const Run* runs) const {
    for (i32 i = 0; i < tile.run_end; ++i) {
      const i32 begin = max(runs[i].begin, tile.col_begin);
      const i32 end = min(runs[i].end, tile.col_end);
      for (i32 c = begin / view.block_size * view.block_size; c < end; c += view.block_size)
        if (column_at(view, tile.group, c).block < 0) return false;
    }
    return true;
  }

  RADDLE_DEVICE void drop_keys(CoveredTile& covered, i32 group) {
    note(bad_page, group);
    QueryTile& t = covered.tile;
    t.col_begin = t.col_end = t.run_end = covered.kv_tiles = 0;
    covered.cost = cost_of(launch_.config.costs[t.shape], t.num_rows, all_partial_).start;
  }

  RADDLE_DEVICE i32 num_tiles() const { return static_cast<i32>(tiles_.of[0] >> 32); }
  RADDLE_DEVICE i32 num_runs() const { return static_cast<i32>(tiles_.of[0]); }

  RADDLE_DEVICE Units make_units() const {
    const PlanConfig& config = launch_.config;
    Units units{};
    units.tiles = s_.tiles;
    units.runs = out<Run>(launch_.at.runs);
    units.kv_tiles = s_.kv_tiles;
    units.prefix = s_.prefix;
    units.group_tile = s_.group_tile;
    units.num_tiles = num_tiles();
    units.num_groups = first_group(num_levels() - 1) + num_groups(num_levels() - 1);
    units.num_kv_heads = config.num_kv_heads;
    units.all_partial = all_partial_;
    for (i32 i = 0; i < 2; ++i) {
      units.shapes[i] = config.shapes[i];
      units.costs[i] = config.costs[i];
    }
    return units;
  }

  /// Every worker's span, and where its queue begins.
  RADDLE_DEVICE void cut() {
    const i32 workers = launch_.config.num_workers;
    const Shares shares = shares_of(units_, workers);
    for (i32 w = thread_; w <= workers; w += threads_) s_.cuts[w] = even_cut(units_, shares, w, 0);
    ptx::sync_block();
    i32* queue_indptr = out<i32>(launch_.at.queue_indptr);
    cuts_ = Sums<2>{};
    for (i32 base = 0; base < workers; base += threads_) {
      const i32 w = base + thread_;
      Sums<2> mine{};
      bool chunk = false;
      if (w < workers) {
        mine.of[0] = span_items(s_.cuts[w], s_.cuts[w + 1]);
        chunk = w > 0 && cut_adds(s_.cuts, w).chunk;
        mine.of[1] = join_words(w > 0 ? cut_rows(units_, s_.cuts, w) : 0, chunk ? 1 : 0);
      }
      const Sums<2> before = scan_.exclusive(mine, cuts_);
      if (w >= workers) continue;
      s_.queue[w] = queue_indptr[w] = static_cast<i32>(before.of[0]);
      s_.row_at[w] = static_cast<i32>(before.of[1]);
      s_.rank[w] = static_cast<i32>(before.of[1] >> 32) + (chunk ? 1 : 0);
      if (chunk && !units_.all_partial) s_.tiles[s_.cuts[w].at.tile].split = 0;
    }
    if (thread_ == 0) s_.queue[workers] = queue_indptr[workers] = static_cast<i32>(cuts_.of[0]);
    ptx::sync_block();
    for (i32 w = 1 + thread_; w < workers; w += threads_) {
      Cut& c = s_.cuts[w];
      if (c.k > 0) c.chunk = s_.rank[w] - s_.rank[first_cut_behind(s_.cuts, workers, c.unit)] + 1;
    }
  }

  /// Splits and contractions of a single level; returns the number of splits.
  RADDLE_DEVICE i32 place_cut_states() {
    const i32 heads = launch_.config.num_kv_heads;
    const i32 workers = launch_.config.num_workers;
    const ContractionMap map{out<Contraction>(launch_.at.contractions),
                             out<i32>(launch_.at.expected),
                             out<Source>(launch_.at.sources),
                             out<i32>(launch_.at.dependents),
                             0,
                             0,
                             0};
    Sums<1> splits{};
    for (i32 base = 0; base < units_.num_tiles; base += threads_) {
      const i32 t = base + thread_;
      const bool split = t < units_.num_tiles && s_.tiles[t].split >= 0;
      const i32 c = static_cast<i32>(scan_.exclusive(Sums<1>{{split ? 1 : 0}}, splits).of[0]);
      if (!split) continue;
      s_.tiles[t].split = heads * c;
      for (i32 h = 0; h < heads; ++h) s_.splits[heads * c + h] = Split{-1, 0};
      contract_tile(s_.tiles, t, c, map);
    }
    ptx::sync_block();
    for (i32 w = 1 + thread_; w < workers; w += threads_) {
      const Cut& c = s_.cuts[w];
      if (c.k == 0) continue;
      Split& s = s_.splits[s_.tiles[c.at.tile].split + c.at.head];
      if (cut_adds(s_.cuts, w).unit) s.partial_row = s_.row_at[w];
      if (s_.cuts[w + 1].unit != c.unit) s.num_chunks = c.chunk + 1;
    }
    ptx::sync_block();
    const i32 num = static_cast<i32>(splits.of[0]);
    if (thread_ == 0)
      *launch_.sizes = PlanSizes{units_.num_tiles,
                                 num_runs(),
                                 cuts_.of[0],
                                 workers + 1,
                                 heads * num,
                                 num,
                                 heads * num,
                                 num,
                                 num,
                                 static_cast<i32>(cuts_.of[1])};
    return heads * num;
  }

  /// A thread an item.
  RADDLE_DEVICE void write_items() {
    const i32 workers = launch_.config.num_workers;
    const i32 count = s_.queue[workers];
    WorkItem* items = out<WorkItem>(launch_.at.items);
    for (i32 i = thread_; i < count; i += threads_) {
      const i32 w = last_at_most(s_.queue, workers, i);
      const i32 unit = s_.cuts[w].unit + i - s_.queue[w];
      items[i] =
          make_item(units_, s_.splits, s_.cuts[w], s_.cuts[w + 1], unit, unit_at(units_, unit));
    }
  }

  RADDLE_DEVICE void write_tiles(i32 num_splits) {
    Split* splits = out<Split>(launch_.at.splits);
    i32* expected = out<i32>(launch_.at.expected);
    for (i32 i = thread_; i < num_splits; i += threads_) {
      splits[i] = s_.splits[i];
      expected[i] = s_.splits[i].num_chunks;
    }
    // Word by word: neighbours write neighbouring addresses.
    const i32* from = reinterpret_cast<const i32*>(s_.tiles);
    i32* to = out<i32>(launch_.at.query_tiles);
    const i32 words = units_.num_tiles * static_cast<i32>(sizeof(QueryTile) / sizeof(i32));
    for (i32 i = thread_; i < words; i += threads_) to[i] = from[i];
  }

  /// Every queue empty.
  RADDLE_DEVICE void publish_nothing() {
    i32* queue_indptr = out<i32>(launch_.at.queue_indptr);
    for (i32 w = thread_; w <= launch_.config.num_workers; w += threads_) queue_indptr[w] = 0;
    if (thread_ == 0)
      *launch_.sizes = PlanSizes{0, 0, 0, launch_.config.num_workers + 1, 0, 0, 0, 0, 0, 0};
    publish();
  }

  RADDLE_DEVICE void publish() {
    ptx::sync_block();
    if (thread_ != 0 || x_.report.errors == 0) return;
    launch_.report->errors |= x_.report.errors;
    launch_.report->request = x_.report.request == int_max ? -1 : x_.report.request;
  }

  const PlanLaunch& launch_;
  const Cover& cover_;
  const i32* const marks_;
  PlannerShared& x_;
  const ScratchArrays s_;
  BlockScan scan_;
  const i32 thread_, threads_;
  i32 num_requests_ = 0;
  bool all_partial_ = false;
  Sums<2> tiles_{};  // (tiles, runs) and costs so far
  Sums<2> cuts_{};   // items, (chunks, rows)
  Units units_{};
};

}  // namespace planner

RADDLE_ENGINE_END
