#include "plan/planner.h"

#include <cstring>
#include <memory>
#include <utility>

#include "raddle/engine/plan/assign.h"
#include "raddle/engine/plan/contraction.h"
#include "raddle/engine/plan/coverage.h"
#include "raddle/engine/plan/linear_split.h"

namespace raddle {
namespace {

/// Grow-only memory, kept between plans: a plan of a familiar size allocates nothing but its result.
template <class T>
class Buffer {
 public:
  T* data() const { return data_.get(); }
  T& operator[](i64 i) { return data_[static_cast<std::size_t>(i)]; }

  /// Room for `count` entries, of which the first `used` are kept.
  T* grow(i64 count, i64 used = 0) {
    if (count > capacity_) {
      const i64 capacity = max(count, 2 * capacity_);
      auto data = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(capacity));
      if (data_ && used > 0) std::memcpy(data.get(), data_.get(), static_cast<std::size_t>(used) * sizeof(T));
      data_ = std::move(data);
      capacity_ = capacity;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<T[]> data_;
  i64 capacity_ = 0;
};

struct HostCover {
  CoverFns fns;
  KvSpan kv_span(const Tile& t) const {
    return fns.kv_span ? fns.kv_span(fns.self, t) : KvSpan{everything, everything};
  }
  Coverage coverage(const Tile& t) const {
    return fns.coverage ? fns.coverage(fns.self, t) : Coverage::full;
  }
};

/// What hands the work out.
enum class Method { linear, spans, longest_first, algorithm1, by_group };

struct Outcome {
  Method method;
  i64 heaviest;
  i64 total;
};

/// One plan in the making. Lives in thread-local memory; `make` starts afresh.
class Planner {
 public:
  PlanArrays make(const LayoutView& layout, const PlanConfig& config, const CoverFns& cover);

 private:
  template <class Cover>
  void make_tiles(const Cover& cover);
  void reserve_tiles(i64 more);
  void summarise();
  Outcome choose();
  Outcome choose_fixed_chunks();
  Outcome try_linear();
  Outcome try_fixed(Method method, Cutting cutting);
  i64 cut_pieces(Cutting cutting);
  i64 least_unsplit() const;
  i64 least_algorithm1() const;
  PlanArrays pack(const Outcome& outcome);
  i32 fill_splits(const Outcome& outcome, i32 num_splits, Split* splits);
  void contract(const Split* splits, ContractionMap& map);
  void write_items(const Outcome& outcome, const Split* splits, WorkItem* items, i32* queue_indptr);
  i32 count_splits(const Outcome& outcome);
  i64 count_items(const Outcome& outcome) const;
  i64 mean() const { return ceil_div(stats_.uncut, i64{config_.num_workers}); }
  bool balanced(i64 heaviest) const { return heaviest * 100 <= mean() * 103; }
  bool several_levels() const { return layout_.num_levels > 1; }

  LayoutView layout_{};
  PlanConfig config_{};
  PlanStats stats_;
  Units units_{};
  i64 num_runs_ = 0;
  i64 longest_unit_ = 0;
  i32 longest_tile_ = 0;
  i64 shortest_unit_ = 0;
  i64 num_pieces_ = 0;
  Method pieces_of_ = Method::linear;  // whose pieces and placements lie in the buffers

  Buffer<QueryTile> tiles_;
  Buffer<Run> runs_;
  Buffer<i32> kv_tiles_, group_tile_, piece_begin_, cursor_, seen_, row_group_, row_index_;
  Buffer<i64> prefix_, loads_;
  Buffer<Cut> cuts_;
  Buffer<Piece> pieces_;
  Buffer<RankedPiece> ranked_, spare_;
  Buffer<Load> heap_;
  Buffer<Placement> placements_;
  Buffer<RowMap> row_maps_;
  Buffer<Contraction> contractions_;
  Buffer<Source> sources_;
  Buffer<i32> expected_, dependents_;
};

void Planner::reserve_tiles(i64 more) {
  const i64 used = units_.num_tiles;
  tiles_.grow(used + more, used);
  kv_tiles_.grow(used + more, used);
  prefix_.grow(used + more + 1, used + 1);
}

template <class Cover>
void Planner::make_tiles(const Cover& cover) {
  const i32 max_runs = runs_limit(config_.max_runs);
  i64 groups = 0;
  for (i32 l = 0; l < layout_.num_levels; ++l) groups += layout_.levels[l].num_groups;
  group_tile_.grow(groups + 1);
  reserve_tiles(groups);
  prefix_[0] = 0;
  group_tile_[0] = 0;
  units_.num_tiles = 0;
  units_.num_groups = 0;
  num_runs_ = 0;
  i64 longest = 0;
  i64 shortest = -1;
  for (i32 l = 0; l < layout_.num_levels; ++l) {
    const LevelView& level = layout_.levels[l];
    const bool last_level = l + 1 == layout_.num_levels;
    for (i32 g = 0; g < level.num_groups; ++g) {
      const i32 fused = group_rows(level, g) * config_.group_size;
      const i32 count = count_tiles(config_, fused);
      reserve_tiles(count);
      for (i32 i = 0; i < count; ++i) {
        QueryTile tile = make_tile(config_, l, g, fused, i);
        const i32 keys = config_.shapes[tile.shape].keys;
        Run* runs = runs_.grow(num_runs_ + max_runs, num_runs_);
        tile.run_begin = static_cast<i32>(num_runs_);
        tile.run_end = tile.run_begin + cover_tile(cover, layout_, level, tile, keys, config_.group_size,
                                                   config_.num_kv_heads, max_runs, runs + num_runs_);
        if (!last_level && tile.run_end == tile.run_begin) continue;  // nothing to do, nothing to contract
        const i32 n = count_kv_tiles(runs, tile.run_begin, tile.run_end, keys);
        const UnitCost unit = cost_of(config_.costs[tile.shape], tile.num_rows, several_levels());
        const i64 cost = unit.start + n * unit.tile;
        const i32 t = units_.num_tiles++;
        if (cost > longest) {
          longest = cost;
          longest_tile_ = t;
        }
        shortest = shortest < 0 ? cost : min(shortest, cost);
        tiles_[t] = tile;
        kv_tiles_[t] = n;
        prefix_[t + 1] = prefix_[t] + cost;
        num_runs_ = tile.run_end;
      }
      group_tile_[++units_.num_groups] = units_.num_tiles;
    }
  }
  longest_unit_ = longest;
  shortest_unit_ = max(shortest, i64{0});
}

void Planner::summarise() {
  units_.tiles = tiles_.data();
  units_.runs = runs_.data();
  units_.kv_tiles = kv_tiles_.data();
  units_.prefix = prefix_.data();
  units_.group_tile = group_tile_.data();
  units_.num_kv_heads = config_.num_kv_heads;
  units_.all_partial = several_levels();
  for (i32 s = 0; s < 2; ++s) {
    units_.shapes[s] = config_.shapes[s];
    units_.costs[s] = config_.costs[s];
  }
  stats_ = PlanStats{};
  stats_.num_workers = config_.num_workers;
  stats_.uncut = total_cost(units_);
}

Outcome Planner::try_linear() {
  const i32 workers = config_.num_workers;
  cuts_.grow(workers + 1);
  cut_evenly(units_, workers, cuts_.data());
  const Balance best = balance_of(units_, cuts_.data(), workers);
  number_chunks(cuts_.data(), workers);
  stats_.linear = best.heaviest;
  return Outcome{Method::linear, best.heaviest, best.total};
}

/// Cuts every tile and returns the cost of all pieces.
i64 Planner::cut_pieces(Cutting cutting) {
  piece_begin_.grow(units_.num_tiles + 1);
  piece_begin_[0] = 0;
  const i64 limit = cutting == Cutting::limit ? chunk_limit(units_, config_.num_workers) : 0;
  num_pieces_ = 0;
  i64 total = 0;
  for (i32 g = 0; g < units_.num_groups; ++g) {
    const i32 begin = units_.group_tile[g];
    const i32 end = units_.group_tile[g + 1];
    for (i32 t = begin; t < end; ++t) {
      const i64 length = cutting == Cutting::absolute
                             ? absolute_chunk(config_.invariant_chunk, tile_keys(units_, t), end - begin)
                             : limit;
      const i32 count = cut_tile(units_, t, cutting, length, nullptr);
      Piece* pieces = pieces_.grow(num_pieces_ + count, num_pieces_);
      cut_tile(units_, t, cutting, length, pieces + num_pieces_);
      for (i32 i = 0; i < count; ++i) total += piece_cost(units_, pieces[num_pieces_ + i], count);
      num_pieces_ += count;
      piece_begin_[t + 1] = static_cast<i32>(num_pieces_);
    }
  }
  return total * config_.num_kv_heads;
}

Outcome Planner::try_fixed(Method method, Cutting cutting) {
  const i64 total = cut_pieces(cutting);
  const i32 heads = config_.num_kv_heads;
  const i32 workers = config_.num_workers;
  const i32 count = static_cast<i32>(num_pieces_);
  placements_.grow(num_pieces_ * heads);
  loads_.grow(workers);
  pieces_of_ = method;
  Outcome result{method, 0, total};
  if (method == Method::spans) {
    result.heaviest = assign_spans(units_, pieces_.data(), piece_begin_.data(), total, workers, loads_.data(),
                                   placements_.data());
  } else if (method == Method::by_group) {
    result.heaviest = assign_by_group(units_, pieces_.data(), piece_begin_.data(), workers, loads_.data(),
                                      placements_.data());
  } else {
    ranked_.grow(count);
    for (i32 p = 0; p < count; ++p) {
      const i32 t = pieces_[p].tile;
      ranked_[p] = RankedPiece{piece_cost(units_, pieces_[p], piece_begin_[t + 1] - piece_begin_[t]), p};
    }
    sort_dearest_first(ranked_.data(), count, spare_.grow(count));
    result.heaviest = assign_longest_first(ranked_.data(), count, heads, workers, heap_.grow(workers),
                                           placements_.data());
    (method == Method::algorithm1 ? stats_.algorithm1 : stats_.longest_first) = result.heaviest;
  }
  return result;
}

/// No assignment of whole units has a lighter heaviest queue than this.
i64 Planner::least_unsplit() const {
  const i64 units = i64{units_.num_tiles} * config_.num_kv_heads;
  return max(max(mean(), longest_unit_), ceil_div(units, i64{config_.num_workers}) * shortest_unit_);
}

/// Nor has Algorithm 1, whose own cuts cost too; without any cut it is the schedule above.
i64 Planner::least_algorithm1() const {
  const i64 limit = chunk_limit(units_, config_.num_workers);
  i64 added = 0;
  for (i32 t = 0; t < units_.num_tiles; ++t) {
    const i32 step = limit_tiles(units_, t, limit);
    if (units_.kv_tiles[t] <= step) continue;
    const UnitCost cost = unit_cost(units_, t);
    added += cost.store + (ceil_div(units_.kv_tiles[t], step) - 1) * cost.resume;
  }
  if (added == 0) return least_unsplit();
  return mean() + added * config_.num_kv_heads / config_.num_workers;
}

/// Batch invariance: chunks are given, only their order and places are free.
Outcome Planner::choose_fixed_chunks() {
  if (config_.schedule == Schedule::one_per_request) return try_fixed(Method::by_group, Cutting::absolute);
  if (config_.schedule == Schedule::algorithm1) return try_fixed(Method::longest_first, Cutting::absolute);
  Outcome best = try_fixed(Method::spans, Cutting::absolute);
  stats_.reason = "chunks of fixed boundaries in equal spans";
  stats_.linear = best.heaviest;
  if (config_.schedule == Schedule::linear || balanced(best.heaviest)) return best;
  const Outcome sorted = try_fixed(Method::longest_first, Cutting::absolute);
  if (sorted.heaviest < best.heaviest) {
    stats_.reason = "chunks of fixed boundaries, longest first";
    return sorted;
  }
  return try_fixed(Method::spans, Cutting::absolute);
}

Outcome Planner::choose() {
  stats_.reason = "asked for";
  if (config_.batch_invariant) return choose_fixed_chunks();
  if (config_.schedule == Schedule::one_per_request) return try_fixed(Method::by_group, Cutting::none);
  if (config_.schedule == Schedule::algorithm1) return try_fixed(Method::algorithm1, Cutting::limit);
  // A worker for every unit, and a cut would cost more than the longest unit exceeds a fair share by.
  const i64 units = i64{units_.num_tiles} * config_.num_kv_heads;
  if (config_.schedule == Schedule::automatic && units > 0 && units <= config_.num_workers &&
      longest_unit_ - mean() <= unit_cost(units_, longest_tile_).resume) {
    stats_.reason = "splitting gains nothing: a worker for every tile";
    return try_fixed(Method::longest_first, Cutting::none);
  }
  Outcome best = try_linear();
  if (config_.schedule == Schedule::linear) return best;
  stats_.reason = "equal spans are balanced";
  if (balanced(best.heaviest)) return best;
  stats_.reason = "nothing else is lighter than equal spans";
  if (least_unsplit() < best.heaviest) {
    const Outcome unsplit = try_fixed(Method::longest_first, Cutting::none);
    if (unsplit.heaviest < best.heaviest) {
      best = unsplit;
      stats_.reason = "splitting gains nothing: whole tiles, longest first";
    }
  }
  // Sorting takes longer than cutting: a gain below one percent does not pay for it.
  if (least_algorithm1() * 101 < best.heaviest * 100) {
    const Outcome listed = try_fixed(Method::algorithm1, Cutting::limit);
    if (listed.heaviest < best.heaviest) {
      best = listed;
      stats_.reason = "Algorithm 1's chunks balance better than equal spans";
    }
  }
  if (best.method == Method::longest_first && pieces_of_ != best.method) try_fixed(best.method, Cutting::none);
  return best;
}

i32 Planner::count_splits(const Outcome& outcome) {
  QueryTile* tiles = tiles_.data();
  if (several_levels()) {
    for (i32 t = 0; t < units_.num_tiles; ++t) tiles[t].split = 0;
  } else if (outcome.method == Method::linear) {
    mark_cut_tiles(cuts_.data(), config_.num_workers, tiles);
  } else {
    for (i32 t = 0; t < units_.num_tiles; ++t) {
      if (piece_begin_[t + 1] - piece_begin_[t] > 1) tiles[t].split = 0;
    }
  }
  return config_.num_kv_heads * number_splits(tiles, units_.num_tiles, config_.num_kv_heads);
}

i64 Planner::count_items(const Outcome& outcome) const {
  if (outcome.method != Method::linear) return num_pieces_ * config_.num_kv_heads;
  i64 items = 0;
  const Cut* cuts = cuts_.data();
  for (i32 w = 0; w < config_.num_workers; ++w) items += span_items(cuts[w], cuts[w + 1]);
  return items;
}

i32 Planner::fill_splits(const Outcome& outcome, i32 num_splits, Split* splits) {
  const i32 workers = config_.num_workers;
  if (outcome.method != Method::linear) {
    return fill_piece_splits(tiles_.data(), units_.num_tiles, config_.num_kv_heads, piece_begin_.data(), splits);
  }
  if (several_levels()) return fill_all_splits(units_, cuts_.data(), workers, splits);
  return fill_cut_splits(cuts_.data(), workers, tiles_.data(), num_splits, splits);
}

void Planner::contract(const Split* splits, ContractionMap& map) {
  const i32 levels = layout_.num_levels;
  if (levels == 1) {
    contract_tiles(tiles_.data(), units_.num_tiles, config_.num_kv_heads, splits, map);
    return;
  }
  const i64 rows = layout_.num_rows;
  row_group_.grow(rows * (levels - 1));
  row_index_.grow(rows * (levels - 1));
  row_maps_.grow(levels - 1);
  for (i32 l = 0; l + 1 < levels; ++l) {
    row_maps_[l] = RowMap{row_group_.data() + rows * l, row_index_.data() + rows * l};
    map_rows(layout_.levels[l], layout_.num_rows, row_maps_[l]);
  }
  contract_levels(layout_, tiles_.data(), units_.num_tiles, group_tile_.data(), config_.num_kv_heads,
                  config_.group_size, row_maps_.data(), splits, seen_.grow(units_.num_tiles), map);
}

void Planner::write_items(const Outcome& outcome, const Split* splits, WorkItem* items, i32* queue_indptr) {
  const i32 workers = config_.num_workers;
  queue_indptr[0] = 0;
  if (outcome.method == Method::linear) {
    for (i32 w = 0; w < workers; ++w) {
      queue_indptr[w + 1] =
          queue_indptr[w] + write_span(units_, splits, cuts_[w], cuts_[w + 1], items + queue_indptr[w]);
    }
    return;
  }
  const i64 count = num_pieces_ * config_.num_kv_heads;
  i32* cursor = cursor_.grow(workers + 1);
  for (i32 w = 0; w <= workers; ++w) cursor[w] = 0;
  for (i64 i = 0; i < count; ++i) ++cursor[placements_[i].worker + 1];
  for (i32 w = 0; w < workers; ++w) {
    cursor[w + 1] += cursor[w];
    queue_indptr[w + 1] = cursor[w + 1];
  }
  for (i64 i = 0; i < count; ++i) {
    const Placement& p = placements_[i];
    const Piece& piece = pieces_[p.piece];
    const QueryTile& tile = tiles_[piece.tile];
    i32 partial = -1;
    if (tile.split >= 0) {
      partial = splits[tile.split + p.kv_head].partial_row + (p.piece - piece_begin_[piece.tile]) * tile.num_rows;
    }
    items[cursor[p.worker]++] = WorkItem{piece.tile, p.kv_head, piece.col_begin, piece.col_end, partial};
  }
}

PlanArrays Planner::pack(const Outcome& outcome) {
  const i64 heads = config_.num_kv_heads;
  const i32 num_splits = count_splits(outcome);
  const i64 level_tiles = units_.num_tiles;
  PlanSizes n{};
  n.query_tiles = level_tiles;
  n.runs = num_runs_;
  n.items = count_items(outcome);
  n.queue_indptr = config_.num_workers + 1;
  n.splits = num_splits;

  // Splits and the contraction map come first: how large they are shows only when they are there.
  static thread_local Buffer<Split> splits;
  splits.grow(num_splits);
  const i64 most_sources =
      several_levels() ? level_tiles + (layout_.num_levels - 1) * (layout_.num_rows + 2 * level_tiles) : num_splits / heads;
  ContractionMap map{contractions_.grow(level_tiles), expected_.grow(num_splits), sources_.grow(most_sources),
                     dependents_.grow(most_sources), 0, 0, 0};
  n.partial_rows = fill_splits(outcome, num_splits, splits.data());
  contract(splits.data(), map);
  n.contractions = map.num_contractions;
  n.expected = map.num_contractions * heads;
  n.sources = map.num_sources;
  n.dependents = map.num_dependents;

  const PlanOffsets at = plan_offsets(n);
  std::shared_ptr<std::byte[]> block(new std::byte[static_cast<std::size_t>(at.bytes)]);
  std::byte* base = block.get();
  const auto copy = [base](i64 offset, const void* from, i64 bytes) {
    if (bytes > 0) std::memcpy(base + offset, from, static_cast<std::size_t>(bytes));
    // Equal plans are equal bytes, the gaps between the arrays included.
    std::memset(base + offset + bytes, 0, static_cast<std::size_t>(round_up(bytes, i64{16}) - bytes));
  };
  copy(at.query_tiles, tiles_.data(), n.query_tiles * i64{sizeof(QueryTile)});
  copy(at.runs, runs_.data(), n.runs * i64{sizeof(Run)});
  copy(at.splits, splits.data(), n.splits * i64{sizeof(Split)});
  copy(at.contractions, map.contractions, n.contractions * i64{sizeof(Contraction)});
  copy(at.expected, map.expected, n.expected * i64{sizeof(i32)});
  copy(at.sources, map.sources, n.sources * i64{sizeof(Source)});
  copy(at.dependents, map.dependents, n.dependents * i64{sizeof(i32)});
  auto* items = reinterpret_cast<WorkItem*>(base + at.items);
  auto* queue = reinterpret_cast<i32*>(base + at.queue_indptr);
  write_items(outcome, splits.data(), items, queue);
  const i64 items_end = at.items + n.items * i64{sizeof(WorkItem)};
  const i64 queue_end = at.queue_indptr + n.queue_indptr * i64{sizeof(i32)};
  std::memset(base + items_end, 0, static_cast<std::size_t>(at.queue_indptr - items_end));
  std::memset(base + queue_end, 0, static_cast<std::size_t>(at.splits - queue_end));
  return PlanArrays(std::move(block), n, config_, stats_);
}

PlanArrays Planner::make(const LayoutView& layout, const PlanConfig& config, const CoverFns& cover) {
  layout_ = layout;
  config_ = config;
  units_.num_tiles = 0;
  if (cover.kv_span || cover.coverage) {
    make_tiles(HostCover{cover});
  } else {
    make_tiles(CoverAll{});
  }
  summarise();
  const Outcome outcome = choose();
  stats_.heaviest = outcome.heaviest;
  stats_.total = outcome.total;
  switch (outcome.method) {
    case Method::linear:
    case Method::spans:
      stats_.used = Schedule::linear;
      break;
    case Method::longest_first:
    case Method::algorithm1:
      stats_.used = Schedule::algorithm1;
      break;
    case Method::by_group:
      stats_.used = Schedule::one_per_request;
      break;
  }
  return pack(outcome);
}

}  // namespace

std::string PlanStats::explain() const {
  static constexpr const char* names[] = {"automatic", "linear", "algorithm1", "one_per_request"};
  std::string text = std::string("schedule ") + names[static_cast<i32>(used)] + ": " + reason + "; heaviest queue " +
                     std::to_string(heaviest) + ", " + std::to_string(heaviest_over_mean()) +
                     " of the mean of " + std::to_string(num_workers) + " workers";
  const auto tried = [&text](const char* name, i64 cost) {
    if (cost >= 0) text += std::string("; ") + name + " " + std::to_string(cost);
  };
  tried("linear", linear);
  tried("algorithm1", algorithm1);
  tried("longest first", longest_first);
  return text;
}

PlanArrays make_plan(const LayoutView& layout, const PlanConfig& config, const CoverFns& cover) {
  static thread_local Planner planner;
  return planner.make(layout, config, cover);
}

}  // namespace raddle
