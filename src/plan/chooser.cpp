#include "plan/chooser.h"

#include <iterator>

namespace raddle {
namespace {

/// Units per worker from which the shared queue is a candidate, and how much more than their share
/// its busiest worker may have, in percent. Keys that tiles share cost less than they are estimated
/// at: heads of 256 columns, read tile by tile, took 1.6 times as long as memory allowed.
constexpr i64 fewest_drawn = 4, most_excess_drawn = 5;

/// What is known when a candidate is considered.
struct Situation {
  const Candidates& of;
  const Tiling& tiling;
  const PlanConfig& config;
  const Assignment* best;  ///< the earliest done of the candidates before; null: there is none
};

/// A schedule that may be taken.
struct Candidate {
  const char* name = "";
  bool batch_invariant = false;  ///< it cuts at absolute columns: for batch-invariant configs alone
  Schedule asked = Schedule::automatic;  ///< what a caller asks for to get it; automatic: nothing
  /// Sorting costs more than small gains: considered only where the best one before does not
  /// suffice.
  bool sorts = false;
  /// The reason that `raddle explain` prints where it settles the choice or suffices.
  const char* why_settled = nullptr;
  /// The reason that is printed where it is done earliest of all. Null: it is taken only if it
  /// settles the choice.
  const char* why_best = nullptr;
  /// No assignment of it is done earlier. `never`: the schedule does not apply. Null: the bound is
  /// 0.
  i64 (*lower_bound)(const Situation&) = nullptr;
  void (*make)(Candidates&, Assignment& to, i64 earlier_than) = nullptr;
  /// Whether it is taken at once, whatever candidates come after it. Null: it is not.
  bool (*settles)(const Situation&, const Assignment& made) = nullptr;
  /// Whether the best so far is taken without considering candidates that sort. Null: it is not.
  bool (*suffices)(const Situation&, const Assignment& made) = nullptr;
};

bool is_balanced(const Situation& s, const Assignment& made) { return s.of.balanced(made); }

/// The table, in the order in which candidates are considered.
constexpr Candidate table[] = {
    // A worker for every unit, and a cut would cost more than the longest unit has beyond its
    // share.
    {.name = "whole tiles",
     .why_settled = "splitting gains nothing: there is a worker for every tile",
     .lower_bound =
         [](const Situation& s) {
           const i64 units = s.of.num_units();
           const bool applies = units > 0 && units <= s.config.num_workers &&
                                s.tiling.longest_unit - s.of.mean() <=
                                    unit_cost(s.tiling.units, s.tiling.longest_tile).resume;
           return applies ? 0 : Candidates::never;
         },
     .make = [](Candidates& c, Assignment& to, i64) { c.make_whole_tiles(to); },
     .settles = [](const Situation&, const Assignment&) { return true; }},
    {.name = "shared queue",
     .why_settled =
         "workers draw the next tile when they are free, and share the keys of a KV head",
     .lower_bound =
         [](const Situation& s) {
           const bool applies = s.config.cached_columns > 0 &&
                                s.of.num_units() >= fewest_drawn * s.config.num_workers &&
                                s.of.has_only(long_queries);
           return applies ? 0 : Candidates::never;
         },
     .make = [](Candidates& c, Assignment& to, i64) { c.make_drawn(to); },
     .settles =
         [](const Situation& s, const Assignment& made) {
           return 100 * made.heaviest <= (100 + most_excess_drawn) * s.of.mean();
         }},
    {.name = "linear",
     .asked = Schedule::linear,
     .why_settled = "equal spans are balanced",
     .why_best = "nothing else is done earlier than equal spans",
     .make = [](Candidates& c, Assignment& to, i64) { c.make_linear(to); },
     .suffices =
         [](const Situation& s, const Assignment& made) {
           return s.of.balanced(made) && (!s.of.shares_bandwidth() ||
                                          100 * made.time <= 102 * s.of.least_of_whole_tiles());
         }},
    {.name = "whole rows",
     .why_settled = "equal spans of whole rows of K, all KV heads together",
     .lower_bound =
         [](const Situation& s) {  // the best one before is linear
           const bool applies = s.config.reads_whole_rows && s.of.has_only(short_queries) &&
                                s.of.parts_heads(*s.best);
           return applies ? 0 : Candidates::never;
         },
     .make = [](Candidates& c, Assignment& to, i64) { c.make_whole_rows(to); },
     .settles =
         [](const Situation& s, const Assignment& made) {
           return s.of.balanced(made) || made.heaviest <= s.best->heaviest;
         }},
    {.name = "whole tiles",
     .sorts = true,
     .why_best = "uncut tiles, longest first, are done earlier than equal spans",
     .lower_bound = [](const Situation& s) { return s.of.least_of_whole_tiles(); },
     .make = [](Candidates& c, Assignment& to, i64) { c.make_whole_tiles(to); }},
    {.name = "algorithm1",
     .asked = Schedule::algorithm1,
     .sorts = true,
     .why_best = "Algorithm 1's chunks are done earlier than equal spans",
     .lower_bound = [](const Situation& s) { return s.of.least_of_algorithm1(); },
     .make = [](Candidates& c, Assignment& to,
                i64 earlier_than) { c.make_algorithm1(to, earlier_than); }},
    {.name = "one-per-request",
     .asked = Schedule::one_per_request,
     .lower_bound = [](const Situation&) { return Candidates::never; },
     .make = [](Candidates& c, Assignment& to, i64) { c.make_one_per_request(to); }},
    // Batch invariance fixes the chunks; only their order and their workers are free.
    {.name = "linear over fixed chunks",
     .batch_invariant = true,
     .asked = Schedule::linear,
     .why_settled = "equal spans of whole chunks are balanced",
     .why_best = "nothing else is done earlier than equal spans of whole chunks",
     .make = [](Candidates& c, Assignment& to, i64) { c.make_chunks_in_spans(to); },
     .suffices = is_balanced},
    {.name = "longest first over fixed chunks",
     .batch_invariant = true,
     .asked = Schedule::algorithm1,
     .sorts = true,
     .why_best = "chunks, longest first, are done earlier than in equal spans",
     .make = [](Candidates& c, Assignment& to, i64) { c.make_chunks_longest_first(to); }},
    {.name = "one-per-request over fixed chunks",
     .batch_invariant = true,
     .asked = Schedule::one_per_request,
     .lower_bound = [](const Situation&) { return Candidates::never; },
     .make = [](Candidates& c, Assignment& to, i64) { c.make_one_per_request(to); }},
};

void note(PlanStats& stats, const Candidate& candidate, const Assignment& made) {
  if (made.form != Assignment::Form::none)
    stats.tried[stats.num_tried++] = PlanStats::Tried{candidate.name, made.time};
}

const Assignment& take(PlanStats& stats, const Candidate& candidate, const char* reason,
                       const Assignment& made) {
  stats.schedule = candidate.name;
  stats.reason = reason;
  stats.heaviest = made.heaviest;
  stats.time = made.time;
  stats.total = made.total;
  return made;
}

}  // namespace

const Assignment& Chooser::choose(const Tiling& tiling, const PlanConfig& config,
                                  PlanStats& stats) {
  static_assert(std::size(table) == num_candidates && num_candidates <= PlanStats::most_tried);
  candidates_.begin(tiling, config);
  stats = PlanStats{};
  stats.num_workers = config.num_workers;
  stats.uncut = candidates_.uncut();
  Situation situation{candidates_, tiling, config, nullptr};
  const Candidate* chosen = nullptr;
  for (i32 i = 0; i < num_candidates; ++i) {
    const Candidate& candidate = table[i];
    Assignment& made = made_[i];
    if (candidate.batch_invariant != config.batch_invariant) continue;
    if (config.schedule != Schedule::automatic) {
      if (candidate.asked != config.schedule) continue;
      candidate.make(candidates_, made, Candidates::never);
      note(stats, candidate, made);
      return take(stats, candidate, "asked for", made);
    }
    const i64 best_time = situation.best ? situation.best->time : Candidates::never;
    if (candidate.sorts && chosen->suffices && chosen->suffices(situation, *situation.best))
      return take(stats, *chosen, chosen->why_settled, *situation.best);
    if (candidate.lower_bound && candidate.lower_bound(situation) >= best_time) continue;
    candidate.make(candidates_, made, best_time);
    note(stats, candidate, made);
    if (candidate.settles && candidate.settles(situation, made))
      return take(stats, candidate, candidate.why_settled, made);
    if (!candidate.why_best || made.time >= best_time) continue;
    situation.best = &made;
    chosen = &candidate;
  }
  return take(stats, *chosen, chosen->why_best, *situation.best);
}

}  // namespace raddle
