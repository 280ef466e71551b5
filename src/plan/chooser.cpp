#include "plan/chooser.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace raddle {
namespace {

/// Units a worker that are sorted for what whole ones gain where workers share memory.
constexpr i64 most_sorted = 4;
/// Units a worker that are drawn: of fewer, the last ones are a part of the time that counts.
constexpr i64 fewest_drawn = 8;

}  // namespace

/// When the last of some loads is done, each a squad's. All advance alike until so few are left
/// that each has as much of the memory as it can use.
i64 Chooser::shared_time(const Load* loads, i64 num_loads) {
  const i32 workers = config_->num_workers, squads = workers / squad;
  const i32 few = workers / sharing_ / squad;  // the squad of the last one that is too many
  i64* cost = loads_.grow(squads);
  for (i64 t = 0; t < squads; ++t) cost[t] = t < num_loads ? cost_of(loads[t]) : 0;
  std::nth_element(cost, cost + few, cost + squads, std::greater<>());
  const i64 common = cost[few];
  i64 advanced = (few + 1) * common;
  for (i32 t = few + 1; t < squads; ++t) advanced += cost[t];
  const i64 most =
      std::accumulate(cost, cost + few, common, [](i64 a, i64 b) { return max(a, b); });
  return squad * advanced / workers + (most - common) / sharing_;
}

Outcome Chooser::try_linear() {
  const i32 workers = config_->num_workers;
  cuts.grow(workers + 1);
  const LinearSplit split = cut_evenly(tiling_->units, workers, cuts.data());
  num_cut_chunks = split.num_chunks;
  stats.linear = split.heaviest;
  // Its loads differ little: what is above their mean has the others' share of the memory.
  const i64 share = split.total / workers;
  return Outcome{Method::linear, split.heaviest, split.total,
                 share + (split.heaviest - share) / sharing_};
}

/// Whether all there is to do is tiles of one shape, on a single level.
bool Chooser::only_shape(i32 shape) const {
  const Units& units = tiling_->units;
  if (units.all_partial || units.num_tiles == 0) return false;
  for (i32 g = 0; g < units.num_groups; ++g) {
    const i32 begin = units.group_tile[g];
    if (begin < units.group_tile[g + 1] && units.tiles[begin].shape != shape) return false;
  }
  return true;
}

/// Whether a cut of the linear split parts the KV heads of a query tile.
bool Chooser::parts_heads() const {
  const Cut* begin = cuts.data();
  return std::any_of(begin, begin + config_->num_workers,
                     [](const Cut& cut) { return cut.at.head > 0 || cut.k > 0; });
}

/// Nobody has another's seat until the method says so.
void Chooser::begin_placements(Method method, i64 count) {
  placements.grow(count);
  pieces_of_ = method;
  seated = joins = false;
}

/// A linear split of one KV head's units, of which every worker computes all heads.
Outcome Chooser::try_rows() {
  Units line = tiling_->units;
  const i32 heads = line.num_kv_heads;
  const i32 workers = config_->num_workers;
  line.num_kv_heads = 1;  // so that units are tiles
  squad = 1;
  cuts.grow(workers + 1);
  const i64 most = i64{line.num_tiles} + cut_evenly(line, workers, cuts.data()).num_chunks;
  pieces.grow(most);
  begin_placements(Method::spans, most * heads);
  piece_begin.grow(line.num_tiles + 1);
  num_pieces = 0;
  for (i32 w = 0; w < workers; ++w) {
    const Cut& a = cuts[w];
    const Cut& b = cuts[w + 1];
    for (i32 t = a.unit; t < b.unit + (b.k > 0 ? 1 : 0); ++t) {
      const i32 begin = t == a.unit ? a.k : 0;
      const i32 end = t == b.unit ? b.k : line.kv_tiles[t];
      if (begin == 0) piece_begin[t] = static_cast<i32>(num_pieces);
      if (begin > 0 && begin == end) continue;  // two cuts at one place
      for (i32 h = 0; h < heads; ++h)
        placements[num_pieces * heads + h] = Placement{static_cast<i32>(num_pieces), h, w};
      pieces[num_pieces++] =
          Piece{t, unit_column(line, t, begin), unit_column(line, t, end), end - begin};
    }
  }
  piece_begin[line.num_tiles] = static_cast<i32>(num_pieces);
  Outcome result{Method::spans, 0, 0, 0};
  i64* loads = loads_.grow(workers);
  std::fill_n(loads, workers, 0);
  for (i64 p = 0; p < num_pieces; ++p) {
    const i32 t = pieces[p].tile;
    const i64 cost = heads * piece_cost(line, pieces[p], piece_begin[t + 1] - piece_begin[t]);
    const i32 w = placements[p * heads].worker;
    loads[w] += cost;
    result.heaviest = max(result.heaviest, loads[w]);
    result.total += cost;
  }
  result.time = result.heaviest;
  return result;
}

Outcome Chooser::try_open() {
  const Units& units = tiling_->units;
  RankedPiece* groups = groups_.grow(units.num_groups);
  i32 num_groups = 0;
  for (i32 g = 0; g < units.num_groups; ++g) {
    i64 dearest = 0;
    for (i32 t = units.group_tile[g]; t < units.group_tile[g + 1]; ++t)
      dearest = max(dearest, units.prefix[t + 1] - units.prefix[t]);
    if (dearest > 0) groups[num_groups++] = RankedPiece{dearest, g};
  }
  const i64 most = num_units();
  RankedPiece* spare = spare_.grow(max(most, i64{num_groups}));
  sort_dearest_first(groups, num_groups, spare);
  const i32 count = order_in_waves(units, groups, num_groups, config_->open_columns,
                                   ranked_.grow(most), spare, open.grow(most));
  const i32 workers = config_->num_workers;
  stats.open = draw_all(units, open.data(), count, workers, heap_.grow(workers));
  return Outcome{Method::open, stats.open, stats.uncut, stats.open};
}

/// Cuts every tile and returns the cost of all pieces.
i64 Chooser::cut_pieces(Cutting cutting) {
  const Units& units = tiling_->units;
  const i64 limit = cutting == Cutting::limit ? chunk_limit(units, config_->num_workers) : 0;
  piece_begin.grow(units.num_tiles + 1)[0] = 0;
  num_pieces = 0;
  i64 total = 0;
  for (i32 g = 0; g < units.num_groups; ++g) {
    const i32 begin = units.group_tile[g];
    const i32 end = units.group_tile[g + 1];
    for (i32 t = begin; t < end; ++t) {
      const i64 length =
          cutting == Cutting::absolute
              ? absolute_chunk(config_->invariant_chunk, tile_keys(units, t), end - begin)
          : cutting == Cutting::limit ? limit_tiles(units, t, limit)
                                      : 0;
      const i32 count = cut_tile(units, t, cutting, length, nullptr);
      Piece* cut = pieces.grow(num_pieces + count, num_pieces) + num_pieces;
      cut_tile(units, t, cutting, length, cut);
      const UnitCost cost = unit_cost(units, t);
      for (i32 i = 0; i < count; ++i) total += piece_cost(cost, cut[i], count);
      num_pieces += count;
      piece_begin[t + 1] = static_cast<i32>(num_pieces);
    }
  }
  return total * config_->num_kv_heads;
}

Outcome Chooser::try_fixed(Method method, Cutting cutting, i64 earlier_than) {
  const Units& units = tiling_->units;
  const i32 heads = config_->num_kv_heads;
  const i32 workers = config_->num_workers;
  Outcome result{method, 0, cut_pieces(cutting), 0};
  const i32 count = static_cast<i32>(num_pieces);
  const bool sorts = method == Method::longest_first || method == Method::algorithm1;
  // Workers that the longest-first assignment gives the same pieces, each another KV head: so many
  // neighbours begin with the heads of one piece, and equal loads go from the lowest worker on, so
  // that they stay together. Assigning heads and workers by such squads is the same assignment.
  squad = sorts ? std::gcd(heads, workers) : 1;
  const i32 places = heads / squad;  // of a piece
  begin_placements(method, num_pieces * places);
  if (method == Method::spans) {
    result.heaviest = assign_spans(units, pieces.data(), piece_begin.data(), result.total, workers,
                                   loads_.grow(workers), placements.data());
    stats.linear = result.heaviest;
  } else if (method == Method::by_group) {
    result.heaviest = assign_by_group(units, pieces.data(), piece_begin.data(), workers,
                                      loads_.grow(workers), placements.data());
  } else {
    RankedPiece* ranked = ranked_.grow(count);
    for (i32 t = 0; t < units.num_tiles; ++t) {
      const UnitCost cost = unit_cost(units, t);
      const i32 chunks = piece_begin[t + 1] - piece_begin[t];
      for (i32 p = piece_begin[t]; p < piece_begin[t + 1]; ++p)
        ranked[p] = RankedPiece{piece_cost(cost, pieces[p], chunks), p};
    }
    sort_dearest_first(ranked, count, spare_.grow(count));
    result.heaviest = least_of_ranked(ranked, count, heads, workers);
    result.time = result.heaviest / sharing_;
    if (result.time >= earlier_than) return result;
    const i32 squads = workers / squad;
    result.heaviest =
        assign_longest_first(ranked, count, places, squads, heap_.grow(squads), placements.data());
    if (config_->sharing == 2 && workers % 2 == 0 && only_shape(0)) {
      take_seats(ranked, count, pieces.data(), piece_begin.data(), heads, workers, nth_.grow(count),
                 seats.grow(workers));
      seated = true;
      joins = num_pieces * heads <= workers;
    }
    (method == Method::algorithm1 ? stats.algorithm1 : stats.longest_first) = result.heaviest;
  }
  result.time =
      sharing_ > 1 && sorts ? shared_time(heap_.data(), num_pieces * places) : result.heaviest;
  return result;
}

/// No assignment of whole units is done earlier than this.
i64 Chooser::least_unsplit() const {
  const i64 longest = max(tiling_->longest_unit, ceil_div(num_units(), i64{config_->num_workers}) *
                                                     tiling_->shortest_unit);
  return max(mean(), longest / sharing_);
}

/// Whether Algorithm 1 may be lighter than that by more than its sorting costs.
bool Chooser::may_gain_by_algorithm1(i64 time) const {
  const Units& units = tiling_->units;
  const i64 limit = chunk_limit(units, config_->num_workers);
  i64 chunks = 0;
  i64 added = 0;
  i64 longest = 0;
  for (i32 t = 0; t < units.num_tiles; ++t) {
    const i32 step = limit_tiles(units, t, limit);
    const i32 count = count_chunks(units.kv_tiles[t], step);
    const UnitCost cost = unit_cost(units, t);
    const bool is_cut = count > 1;
    chunks += count;
    added += is_cut ? cost.store + (count - 1) * cost.resume : 0;
    longest = max(longest, is_cut ? cost.resume + step * cost.tile
                                  : cost.start + units.kv_tiles[t] * cost.tile);
  }
  if (added == 0) return false;  // without any cut it is longest first
  // Where everybody has one chunk at most, there is nothing to sort.
  if (chunks * config_->num_kv_heads <= config_->num_workers) return longest < sharing_ * time;
  const i64 least = mean() + added * config_->num_kv_heads / config_->num_workers;
  return max(least, longest / sharing_) * 101 < time * 100;
}

/// Batch invariance: the chunks are given, only their order and places are free.
Outcome Chooser::choose_fixed_chunks() {
  if (config_->schedule == Schedule::one_per_request)
    return try_fixed(Method::by_group, Cutting::absolute);
  if (config_->schedule == Schedule::algorithm1)
    return try_fixed(Method::longest_first, Cutting::absolute);
  const Outcome spans = try_fixed(Method::spans, Cutting::absolute);
  if (config_->schedule == Schedule::linear) return spans;
  stats.reason = "chunks of fixed boundaries in equal spans";
  if (balanced(spans.heaviest)) return spans;
  const Outcome sorted = try_fixed(Method::longest_first, Cutting::absolute);
  if (sorted.heaviest >= spans.heaviest) return try_fixed(Method::spans, Cutting::absolute);
  stats.reason = "chunks of fixed boundaries, longest first";
  return sorted;
}

Outcome Chooser::choose_automatic() {
  // A worker for every unit, and a cut would cost more than the longest unit has beyond its share.
  if (num_units() > 0 && num_units() <= config_->num_workers &&
      tiling_->longest_unit - mean() <= unit_cost(tiling_->units, tiling_->longest_tile).resume) {
    stats.reason = "splitting gains nothing: a worker for every tile";
    return try_fixed(Method::longest_first, Cutting::none);
  }
  if (config_->open_columns > 0 && num_units() >= fewest_drawn * config_->num_workers &&
      only_shape(1)) {
    const Outcome outcome = try_open();
    stats.reason = "drawn by who is free: tiles of one KV head at one time share its keys";
    if (balanced(outcome.heaviest)) return outcome;
  }
  // Of fewer units than workers, whole ones leave multiprocessors half empty, and a block alone
  // does not compute as fast as two. Of many a worker, cuts are few, and sorting takes longer.
  const i64 workers = config_->num_workers;
  const bool shares =
      only_shape(0) && num_units() >= workers && num_units() <= most_sorted * workers;
  sharing_ = shares ? max(1, config_->sharing) : 1;
  Outcome best = try_linear();
  if (config_->heads_together && only_shape(0) && parts_heads()) {
    const Outcome rows = try_rows();
    stats.reason = "equal spans of whole rows of K, all KV heads together";
    if (balanced(rows.heaviest) || rows.heaviest <= best.heaviest) return rows;
    best = try_linear();
  }
  // Sorting costs more than what is less than this would gain.
  const bool is_near = 100 * best.time <= 102 * least_unsplit();
  stats.reason = "equal spans are balanced";
  if (balanced(best.heaviest) && (sharing_ == 1 || is_near)) return best;
  stats.reason = "nothing else is lighter than equal spans";
  if (least_unsplit() < best.time) {
    const Outcome unsplit = try_fixed(Method::longest_first, Cutting::none);
    if (unsplit.time < best.time) {
      best = unsplit;
      stats.reason =
          sharing_ == 1
              ? "splitting gains nothing: whole tiles, longest first"
              : "whole tiles, longest first: who is done leaves the others its share of the memory";
    }
  }
  if (may_gain_by_algorithm1(best.time)) {
    const Outcome listed = try_fixed(Method::algorithm1, Cutting::limit, best.time);
    if (listed.time < best.time) {
      best = listed;
      stats.reason = "Algorithm 1's chunks balance better than equal spans";
    }
  }
  if (best.method == Method::longest_first && pieces_of_ != best.method)
    try_fixed(best.method, Cutting::none);
  return best;
}

Outcome Chooser::choose(const Tiling& tiling, const PlanConfig& config) {
  tiling_ = &tiling;
  config_ = &config;
  stats = PlanStats{};
  stats.num_workers = config.num_workers;
  stats.uncut = total_cost(tiling.units);
  stats.reason = "asked for";
  sharing_ = 1;
  Outcome outcome{};
  if (config.batch_invariant) {
    outcome = choose_fixed_chunks();
  } else if (config.schedule == Schedule::one_per_request) {
    outcome = try_fixed(Method::by_group, Cutting::none);
  } else if (config.schedule == Schedule::algorithm1) {
    outcome = try_fixed(Method::algorithm1, Cutting::limit);
  } else if (config.schedule == Schedule::linear) {
    outcome = try_linear();
  } else {
    outcome = choose_automatic();
  }
  const bool spans = outcome.method == Method::linear || outcome.method == Method::open ||
                     outcome.method == Method::spans;
  stats.heaviest = outcome.heaviest;
  stats.total = outcome.total;
  stats.used = spans                                ? Schedule::linear
               : outcome.method == Method::by_group ? Schedule::one_per_request
                                                    : Schedule::algorithm1;
  return outcome;
}

}  // namespace raddle
