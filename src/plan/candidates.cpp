#include "plan/candidates.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "raddle/engine/plan/pairing.h"

namespace raddle {
namespace {

/// Units per worker up to which shared bandwidth counts, and sorting for it pays.
constexpr i64 most_sorted = 4;

Shares host_shares(const PlanConfig& config, const Units& line, i32 num_workers) {
  return shares_of(config, line, num_workers, [](i32 begin, i32 end, const auto& holds) {
    while (begin < end && !holds(begin)) ++begin;
    return begin;
  });
}

}  // namespace

using Form = Assignment::Form;

void Candidates::begin(const Tiling& tiling, const PlanConfig& config) {
  tiling_ = &tiling;
  config_ = &config;
  uncut_ = total_cost(tiling.units);
  // With fewer units than workers, whole ones leave multiprocessors half empty, and one block alone
  // does not compute as fast as two. With many units per worker, cuts are few, and sorting takes
  // longer.
  const i64 workers = config.num_workers;
  const bool shares = config.schedule == Schedule::automatic && !config.batch_invariant &&
                      config.bandwidth_sharers > 1 && num_units() >= workers &&
                      num_units() <= most_sorted * workers && has_only(short_queries);
  sharers_ = shares ? config.bandwidth_sharers : 1;
}

bool Candidates::has_only(i32 shape) const {
  const Units& units = tiling_->units;
  if (units.all_partial || units.num_tiles == 0) return false;
  for (i32 g = 0; g < units.num_groups; ++g) {
    const i32 begin = units.group_tile[g];
    if (begin < units.group_tile[g + 1] && units.tiles[begin].shape != shape) return false;
  }
  return true;
}

bool Candidates::parts_heads(const Assignment& linear) const {
  const Cut* begin = linear.cuts.data();
  return std::any_of(begin, begin + linear.num_spans,
                     [](const Cut& cut) { return cut.at.head > 0 || cut.k > 0; });
}

void Candidates::make_linear(Assignment& to) {
  const i32 workers = config_->num_workers;
  const i32 each = workers_of_span(*config_, tiling_->units);
  to.form = Form::cuts;
  to.workers_of_span = each;
  const Units line = line_of(tiling_->units, each);
  const Shares shares = host_shares(*config_, line, workers / each);
  to.num_spans = shares.num_spans;
  to.num_in_step = shares.in_step.spans;
  const LinearSplit split = cut_line(line, shares, to.cuts.grow(to.num_spans + 1));
  to.num_cut_chunks = each * split.num_chunks;
  to.heaviest = split.heaviest;
  to.total = each * split.total;
  // Its loads differ little. What the heaviest has above their mean is read with the bandwidth that
  // the other workers leave.
  const i64 share = to.total / workers;
  to.time = share + (split.heaviest - share) / sharers_;
}

void Candidates::make_whole_rows(Assignment& to) {
  Units line = tiling_->units;
  const i32 heads = line.num_kv_heads;
  const i32 workers = config_->num_workers;
  line.num_kv_heads = 1;  // so that units are tiles
  Cut* cuts = to.cuts.grow(workers + 1);
  const i64 most =
      i64{line.num_tiles} + cut_evenly(line, host_shares(*config_, line, workers), cuts).num_chunks;
  to.pieces.grow(most);
  to.begin_pieces(most * heads, 1);
  to.piece_begin.grow(line.num_tiles + 1);
  to.num_pieces = 0;
  for (i32 w = 0; w < workers; ++w) {
    const Cut& a = cuts[w];
    const Cut& b = cuts[w + 1];
    for (i32 t = a.unit; t < b.unit + (b.k > 0 ? 1 : 0); ++t) {
      const i32 begin = t == a.unit ? a.k : 0;
      const i32 end = t == b.unit ? b.k : line.kv_tiles[t];
      const i32 piece = static_cast<i32>(to.num_pieces);
      if (begin == 0) to.piece_begin[t] = piece;
      if (begin > 0 && begin == end) continue;  // two cuts at one place
      for (i32 h = 0; h < heads; ++h)
        to.placements[to.num_pieces * heads + h] = Placement{piece, h, w};
      to.pieces[to.num_pieces++] =
          Piece{t, unit_column(line, t, begin), unit_column(line, t, end), end - begin};
    }
  }
  to.piece_begin[line.num_tiles] = static_cast<i32>(to.num_pieces);
  to.heaviest = to.total = 0;
  i64* loads = loads_.grow(workers);
  std::fill_n(loads, workers, 0);
  for (i64 p = 0; p < to.num_pieces; ++p) {
    const i32 t = to.pieces[p].tile;
    const i64 cost =
        heads * piece_cost(line, to.pieces[p], to.piece_begin[t + 1] - to.piece_begin[t]);
    const i32 w = to.placements[p * heads].worker;
    loads[w] += cost;
    to.heaviest = max(to.heaviest, loads[w]);
    to.total += cost;
  }
  to.time = to.heaviest;
}

void Candidates::make_drawn(Assignment& to) {
  const Units& units = tiling_->units;
  Ranked* groups = groups_.grow(units.num_groups);
  i32 num_groups = 0;
  for (i32 g = 0; g < units.num_groups; ++g) {
    i64 most_expensive = 0;
    for (i32 t = units.group_tile[g]; t < units.group_tile[g + 1]; ++t)
      most_expensive = max(most_expensive, units.cost_before[t + 1] - units.cost_before[t]);
    if (most_expensive > 0) groups[num_groups++] = Ranked{most_expensive, g};
  }
  const i64 most = num_units();
  Ranked* spare = spare_.grow(max(most, i64{num_groups}));
  sort_most_expensive_first(groups, num_groups, spare);
  const i32 count = order_in_waves(units, groups, num_groups, config_->cached_columns,
                                   ranked_.grow(most), spare, to.queue.grow(most));
  const i32 workers = config_->num_workers;
  to.form = Form::queue;
  to.heaviest = draw_all(units, to.queue.data(), count, workers, heap_.grow(workers));
  to.total = uncut_;
  to.time = to.heaviest;
}

/// Cuts every tile by `cut_tile(tile, tiles of its group, pieces)`, which counts only where
/// `pieces` is null. Returns the cost of all pieces.
template <class CutTile>
i64 Candidates::cut_tiles(Assignment& to, const CutTile& cut_tile) const {
  const Units& units = tiling_->units;
  to.piece_begin.grow(units.num_tiles + 1)[0] = 0;
  to.num_pieces = 0;
  i64 total = 0;
  for (i32 g = 0; g < units.num_groups; ++g) {
    const i32 begin = units.group_tile[g];
    const i32 end = units.group_tile[g + 1];
    for (i32 t = begin; t < end; ++t) {
      const i32 count = cut_tile(t, end - begin, static_cast<Piece*>(nullptr));
      Piece* pieces = to.pieces.grow(to.num_pieces + count, to.num_pieces) + to.num_pieces;
      cut_tile(t, end - begin, pieces);
      const UnitCost cost = unit_cost(units, t);
      for (i32 i = 0; i < count; ++i) total += piece_cost(cost, pieces[i], count);
      to.num_pieces += count;
      to.piece_begin[t + 1] = static_cast<i32>(to.num_pieces);
    }
  }
  return total * config_->num_kv_heads;
}

i64 Candidates::cut_nowhere(Assignment& to) const {
  const Units& units = tiling_->units;
  return cut_tiles(to, [&units](i32 tile, i32, Piece* pieces) {
    return cut_in_steps(units, tile, max(units.kv_tiles[tile], 1), pieces);
  });
}

i64 Candidates::cut_at_limit(Assignment& to) const {
  const Units& units = tiling_->units;
  const i64 limit = chunk_limit(units, config_->num_workers);
  return cut_tiles(to, [&units, limit](i32 tile, i32, Piece* pieces) {
    return cut_in_steps(units, tile, limit_tiles(units, tile, limit), pieces);
  });
}

i64 Candidates::cut_at_columns(Assignment& to) const {
  const Units& units = tiling_->units;
  const i32 chunk = config_->invariant_chunk;
  return cut_tiles(to, [&units, chunk](i32 tile, i32 num_tiles, Piece* pieces) {
    return cut_at_absolute_columns(
        units, tile, absolute_chunk(chunk, tile_keys(units, tile), num_tiles), pieces);
  });
}

/// When the last of the loads on the heap is done, each a worker group's. All advance alike until
/// so few are left that each has as much of the bandwidth as it can use.
i64 Candidates::shared_time(i64 num_loads, i32 group) {
  const i32 workers = config_->num_workers, groups = workers / group;
  const i32 few = workers / sharers_ / group;  // the group of the last one that is too many
  i64* cost = loads_.grow(groups);
  for (i64 t = 0; t < groups; ++t) cost[t] = t < num_loads ? cost_of(heap_[t]) : 0;
  std::nth_element(cost, cost + few, cost + groups, std::greater<>());
  const i64 common = cost[few];
  i64 advanced = (few + 1) * common;
  for (i32 t = few + 1; t < groups; ++t) advanced += cost[t];
  const i64 most =
      std::accumulate(cost, cost + few, common, [](i64 a, i64 b) { return max(a, b); });
  return group * advanced / workers + (most - common) / sharers_;
}

void Candidates::assign_sorted(Assignment& to, i64 earlier_than) {
  const Units& units = tiling_->units;
  const i32 heads = config_->num_kv_heads;
  const i32 workers = config_->num_workers;
  const i32 count = static_cast<i32>(to.num_pieces);
  // Let `group` be the greatest common divisor of heads and workers. The longest-first assignment
  // gives each group of so many neighbouring workers the same pieces, each worker another KV head:
  // the group begins with the heads of one piece, and equal loads are served from the lowest worker
  // on, so that the group stays together. So it can assign groups of heads to groups of workers.
  const i32 group = std::gcd(heads, workers);
  const i32 places = heads / group;  // of a piece
  to.begin_pieces(to.num_pieces * places, group);
  Ranked* ranked = ranked_.grow(count);
  for (i32 t = 0; t < units.num_tiles; ++t) {
    const UnitCost cost = unit_cost(units, t);
    const i32 chunks = to.piece_begin[t + 1] - to.piece_begin[t];
    for (i32 p = to.piece_begin[t]; p < to.piece_begin[t + 1]; ++p)
      ranked[p] = Ranked{piece_cost(cost, to.pieces[p], chunks), p};
  }
  sort_most_expensive_first(ranked, count, spare_.grow(count));
  to.heaviest = least_of_ranked(ranked, count, heads, workers);
  to.time = to.heaviest / sharers_;
  if (to.time >= earlier_than) {
    to.form = Form::none;
    return;
  }
  const i32 groups = workers / group;
  to.heaviest =
      assign_longest_first(ranked, count, places, groups, heap_.grow(groups), to.placements.data());
  to.time = sharers_ > 1 ? shared_time(to.num_pieces * places, group) : to.heaviest;
  if (config_->bandwidth_sharers == 2 && workers % 2 == 0 && has_only(short_queries)) {
    pair_workers(ranked, count, to.pieces.data(), to.piece_begin.data(), heads, workers,
                 rank_of_.grow(count), to.numbered.grow(workers));
    to.is_paired = true;
    to.pairs_halves = to.num_pieces * heads <= workers;
  }
}

void Candidates::make_whole_tiles(Assignment& to) {
  to.total = cut_nowhere(to);
  assign_sorted(to);
}

void Candidates::make_algorithm1(Assignment& to, i64 earlier_than) {
  to.total = cut_at_limit(to);
  assign_sorted(to, earlier_than);
}

void Candidates::make_chunks_longest_first(Assignment& to) {
  to.total = cut_at_columns(to);
  assign_sorted(to);
}

void Candidates::make_chunks_in_spans(Assignment& to) {
  to.total = cut_at_columns(to);
  to.begin_pieces(to.num_pieces * config_->num_kv_heads, 1);
  to.heaviest =
      assign_spans(tiling_->units, to.pieces.data(), to.piece_begin.data(), to.total,
                   config_->num_workers, loads_.grow(config_->num_workers), to.placements.data());
  to.time = to.heaviest;
}

void Candidates::make_one_per_request(Assignment& to) {
  to.total = config_->batch_invariant ? cut_at_columns(to) : cut_nowhere(to);
  to.begin_pieces(to.num_pieces * config_->num_kv_heads, 1);
  to.heaviest =
      assign_by_group(tiling_->units, to.pieces.data(), to.piece_begin.data(), config_->num_workers,
                      loads_.grow(config_->num_workers), to.placements.data());
  to.time = to.heaviest;
}

i64 Candidates::least_of_whole_tiles() const {
  const i64 longest = max(tiling_->longest_unit, ceil_div(num_units(), i64{config_->num_workers}) *
                                                     tiling_->shortest_unit);
  return max(mean(), longest / sharers_);
}

i64 Candidates::least_of_algorithm1() const {
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
  if (added == 0) return never;  // without any cut it is whole tiles
  // Where every worker has one chunk at most, there is nothing to sort.
  if (chunks * config_->num_kv_heads <= config_->num_workers) return longest / sharers_;
  const i64 least = mean() + added * config_->num_kv_heads / config_->num_workers;
  return max(least, longest / sharers_) * 101 / 100;  // sorting costs the other percent
}

}  // namespace raddle
