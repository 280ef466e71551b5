// When a contraction runs, and which worker runs it. Every item that stored a state adds 1 to the
// counter of each contraction that waits for it. The worker that stores the last state of a tile
// with few rows composes that tile at once. Tiles with many rows, and all tiles of a cascade, are
// composed in shares, by the workers that computed states of them, when the queues of these workers
// are done (queue_end.h): in a cascade, the last state to arrive may belong to a prefix that
// hundreds of contractions wait for.
#pragma once

#include "raddle/engine/kernel/gpu/contract.h"

RADDLE_ENGINE_BEGIN

namespace gpu_kernel {

/// A contraction's word in `arrived`: how many items have arrived, how many shares of its rows are
/// taken, and how many workers gave up waiting without taking one.
struct Arrivals {
  i32 word;
  static constexpr i32 one_taken = 1 << 16, one_left = 1 << 24;
  RADDLE_DEVICE i32 count() const { return word & 0xffff; }
  RADDLE_DEVICE i32 taken() const { return word >> 16 & 0xff; }
  RADDLE_DEVICE i32 left() const { return word >> 24; }
};

/// The most rows that a single worker composes at once: two a warp. Composing them takes no longer
/// than it would take to wait for other workers. More rows, and the rows of a layout of several
/// levels, are composed in shares at the ends of queues.
template <class Team>
constexpr i32 rows_at_once = 2 * Team::num_warps;
template <class Team>
RADDLE_DEVICE bool composed_at_once(const GpuLaunch& launch, i32 num_rows) {
  return launch.layout.num_levels == 1 && num_rows <= rows_at_once<Team>;
}

/// The index of a contraction's counter in `arrived` and `expected`.
RADDLE_DEVICE i32 counter_of(const PlanView& plan, i32 which, i32 kv_head) {
  return which * plan.num_kv_heads + kv_head;
}

/// The number of shares in which `workers` workers compose `num_rows` rows.
template <class Team>
RADDLE_DEVICE i32 count_shares(i32 num_rows, i32 workers) {
  constexpr i32 most = 32;
  if (num_rows <= rows_at_once<Team>) return 1;
  return min(min(workers, most), ceil_div(num_rows, Team::num_warps));
}

/// How the rows of a contraction are divided into shares. Few rows are one share, and two workers
/// look for it: the one with the first chunk of the tile itself, and one of those that computed a
/// chunk of the shared prefix. Many rows are one share a worker: first the workers with the tile's
/// own chunks, in their order, then the workers with chunks of a prefix that few tiles share.
struct ContractionShares {
  bool few;     ///< rows
  i32 count;    ///< number of shares
  i32 workers;  ///< workers that look for a share
  i32 own;      ///< chunks of the tile
  i32 helper;   ///< the query tile whose chunks' workers help; -1: none
};

/// Where more contractions than these wait for a tile, its workers take no shares of many rows:
/// each of those contractions has workers of its own.
constexpr i32 most_dependents = 4;

template <class Team>
RADDLE_DEVICE ContractionShares look_up_shares(const PlanView& plan, i32 which, i32 kv_head) {
  const Contraction& contraction = plan.contractions[which];
  const QueryTile& tile = plan.query_tiles[contraction.query_tile];
  const i32 first = plan.sources[contraction.source_begin].query_tile;
  const QueryTile& shared = plan.query_tiles[first];
  const bool few = tile.num_rows <= rows_at_once<Team>;
  const bool helps = first != contraction.query_tile &&
                     (few || shared.dependents_end - shared.dependents_begin <= most_dependents);
  const i32 own = plan.splits[tile.split + kv_head].num_chunks;
  const i32 others = helps ? plan.splits[shared.split + kv_head].num_chunks : 0;
  const i32 count = count_shares<Team>(tile.num_rows, own + others);
  return ContractionShares{few, count, few ? 1 + min(others, 1) : count, own, helps ? first : -1};
}

/// Takes the next share of a contraction whose states are all stored, and returns its number; a
/// number from `count` on means that none was left. Workers keep taking shares until then, so that
/// a late worker finds less to do. The last worker that asks resets the word for the next launch.
/// The thread sees the states afterwards, and so do those that it synchronizes with.
RADDLE_DEVICE i32 take_share(i32* word, i32 count, i32 workers) {
  const i32 last = count == 1 ? workers - 1 : count + workers - 1;
  i32 nth = 0;
  if (last > 0)
    nth = Arrivals{ptx::atomic_add_acquire(word, Arrivals::one_taken)}.taken();
  else
    ptx::fence_device();
  if (nth == last) *word = 0;
  return nth;
}

/// What a thread needs to count an item at one of the contractions that wait for it. The thread
/// reads it in two steps, long before that, and so never waits for it.
struct ArrivalTicket {
  i32 at = -1;        ///< index of the contraction's word in `arrived`; -1: none
  i32 expected = 0;   ///< number of items that arrive there
  Split split{0, 0};  ///< of the item's tile

  /// First step: finds contraction number `nth` of those that wait for the item.
  RADDLE_DEVICE void find(const GpuLaunch& launch, const WorkItem& item, const QueryTile& tile,
                          i32 nth) {
    at = -1;
    if (item.partial_row < 0) return;
    split = launch.plan.splits[tile.split + item.kv_head];
    if (tile.dependents_begin + nth < tile.dependents_end)
      at = counter_of(launch.plan, launch.plan.dependents[tile.dependents_begin + nth],
                      item.kv_head);
  }
  RADDLE_DEVICE void expect(const GpuLaunch& launch) {
    if (at >= 0) expected = launch.plan.expected[at];
  }
};

/// Runs both steps at once.
RADDLE_DEVICE ArrivalTicket look_up_ticket(const GpuLaunch& launch, const WorkItem& item, i32 nth) {
  ArrivalTicket found;
  found.find(launch, item, launch.plan.query_tiles[item.query_tile], nth);
  found.expect(launch);
  return found;
}

/// Composes share number `nth` of `count` of a tile's rows, if `nth` is below `count`; then goes on
/// with shares that no other worker has taken. The thread with `takes` asks for these. One function
/// serves all contractions, and it is not inlined: a copy for each use took a fifth of the compile
/// time, and made the loop of long queries spill.
template <class Kernel, class Variant>
RADDLE_COLD void contract(const GpuLaunch& launch, const Variant& variant, const QueryTile& tile,
                          Sources sources, i32 count, i32 nth,
                          RowWorkers<typename Kernel::Team> row_workers, bool takes, u32* bits,
                          float* vector) {
  const auto row = [&](i32 n) { return quotient(tile.num_rows * n, count); };
  while (nth < count) {
    contract_rows<Kernel>(
        launch, variant, tile, row(nth), row(nth + 1), sources.kv_head, row_workers, vector,
        [&](auto& composed, i32 m) { compose_row(launch, sources, composed, m); });
    if (count == 1) return;
    i32* word = launch.arrived + counter_of(launch.plan, sources.which, sources.kv_head);
    nth = Kernel::Team::tell(takes, takes ? take_share(word, count, count) : 0, bits);
  }
}

/// Composes shares of contraction number `sources.which`.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract(const GpuLaunch& launch, const Variant& variant, const Sources& sources,
                            i32 count, i32 nth, RowWorkers<typename Kernel::Team> row_workers,
                            bool takes, u32* bits, float* vector) {
  const PlanView& plan = launch.plan;
  contract<Kernel>(launch, variant, plan.query_tiles[plan.contractions[sources.which].query_tile],
                   sources, count, nth, row_workers, takes, bits, vector);
}

/// Composes a share that another worker gave up waiting for.
template <class Kernel, class Variant>
RADDLE_DEVICE void contract_left(const GpuLaunch& launch, const Variant& variant, i32 which,
                                 i32 kv_head, bool takes, u32* bits, float* vector) {
  const PlanView& plan = launch.plan;
  const ContractionShares shares = look_up_shares<typename Kernel::Team>(plan, which, kv_head);
  i32* word = launch.arrived + counter_of(plan, which, kv_head);
  const i32 nth =
      Kernel::Team::tell(takes, takes ? take_share(word, shares.count, shares.workers) : 0, bits);
  contract<Kernel>(launch, variant, look_up_sources(plan, which, kv_head), shares.count, nth,
                   RowWorkers<typename Kernel::Team>{false}, takes, bits, vector);
}

/// Counts an item at every contraction that waits for it. If the item completes a contraction, this
/// worker composes it in two cases: a contraction that is composed at once, and shares for which
/// other workers gave up waiting. All threads of the team call it after they stored the item's
/// state; `ticket` is the thread's first one. `bits`, in shared memory, has a word a warp.
template <class Kernel, class Variant>
RADDLE_COLD void arrive(const GpuLaunch& launch, const Variant& variant, const WorkItem& item,
                        ArrivalTicket ticket, u32* bits, float* vector) {
  const QueryTile& tile = launch.plan.query_tiles[item.query_tile];
  const i32 count = tile.dependents_end - tile.dependents_begin;
  const bool at_once = composed_at_once<typename Kernel::Team>(launch, tile.num_rows);
  Kernel::Team::sync();  // every thread has stored its part of the state
  for (i32 first = 0; first < count; first += Kernel::Team::num_threads) {
    if (first > 0) ticket = look_up_ticket(launch, item, first + Kernel::Team::thread());
    i32 due = 0;  // shares that this worker has to compose
    if (ticket.at >= 0) {
      ptx::fence_device();  // makes the block's state visible before its arrival
      const Arrivals before{ptx::atomic_add(&launch.arrived[ticket.at], 1)};
      if (before.count() + 1 == ticket.expected) due = at_once ? 1 : before.left();
      if (due > 0 && at_once) launch.arrived[ticket.at] = 0;
    }
    for (i32 i; (i = Kernel::Team::first(due > 0, bits)) >= 0;) {
      ptx::fence_device();  // makes the other blocks' states visible after their arrivals
      const bool mine = Kernel::Team::thread() == i;
      if (mine) --due;
      if (at_once)
        contract<Kernel>(launch, variant, tile, own_sources(tile, ticket.split, item.kv_head), 1, 0,
                         RowWorkers<typename Kernel::Team>{false}, false, bits, vector);
      else
        contract_left<Kernel>(launch, variant,
                              launch.plan.dependents[tile.dependents_begin + first + i],
                              item.kv_head, mine, bits, vector);
    }
  }
}

}  // namespace gpu_kernel

RADDLE_ENGINE_END
