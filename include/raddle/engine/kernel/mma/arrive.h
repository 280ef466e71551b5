// Who composes partial states, and when: items arrive at the contractions that wait for them. Few
// rows are composed by whoever brings their last state; many are shared among those who computed
// states of them, as are all of a cascade, where the last to arrive may be a piece of a prefix that
// hundreds of contractions wait for: when their queues are done (queue_end.h).
#pragma once

#include "raddle/engine/kernel/mma/contract.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// What a contraction's word in `arrived` says: how many items have, how many shares of its rows
/// are taken, and how many workers that were to take one have left without.
struct Arrivals {
  i32 word;
  static constexpr i32 one_taken = 1 << 16, one_left = 1 << 24;
  RADDLE_DEVICE i32 count() const { return word & 0xffff; }
  RADDLE_DEVICE i32 taken() const { return word >> 16 & 0xff; }
  RADDLE_DEVICE i32 left() const { return word >> 24; }
};

/// Rows that one worker composes in the time of waiting for others, two a warp. Of one level,
/// whoever brings the last state of so few composes them there and then; all else is shared, and
/// composed at the ends of queues.
constexpr i32 rows_at_once = 2 * num_warps;
RADDLE_DEVICE bool composed_at_once(const MmaLaunch& launch, i32 num_rows) {
  return launch.layout.num_levels == 1 && num_rows <= rows_at_once;
}

/// Which counter, of `arrived` and `expected`, is a contraction's.
RADDLE_DEVICE i32 counter_of(const PlanView& plan, i32 which, i32 kv_head) {
  return which * plan.num_kv_heads + kv_head;
}

/// In how many shares so many rows are composed by so many workers.
RADDLE_DEVICE i32 count_shares(i32 num_rows, i32 workers) {
  constexpr i32 most = 32;
  if (num_rows <= rows_at_once) return 1;
  return min(min(workers, most), ceil_div(num_rows, num_warps));
}

/// Who composes the rows of a contraction, in shares. Few rows are one share, for which two workers
/// look: that of the tile's own first chunk, and one of those that computed what it shares with
/// others. Of many rows there is a share a worker: those of the tile's own chunks, in their order,
/// and then those of what it shares with few others.
struct Shares {
  bool few;     ///< rows
  i32 count;    ///< of shares
  i32 workers;  ///< that look for some
  i32 own;      ///< chunks of the tile
  i32 helper;   ///< the tile whose chunks' workers follow; -1: none do
};

/// Of tiles that more contractions wait for than these, workers compose no shares of many rows:
/// each of those has workers of its own.
constexpr i32 most_dependents = 4;

RADDLE_DEVICE Shares look_up_shares(const PlanView& plan, i32 which, i32 kv_head) {
  const Contraction& contraction = plan.contractions[which];
  const QueryTile& tile = plan.query_tiles[contraction.query_tile];
  const i32 first = plan.sources[contraction.source_begin].query_tile;
  const QueryTile& shared = plan.query_tiles[first];
  const bool few = tile.num_rows <= rows_at_once;
  const bool helps = first != contraction.query_tile &&
                     (few || shared.dependents_end - shared.dependents_begin <= most_dependents);
  const i32 own = plan.splits[tile.split + kv_head].num_chunks;
  const i32 others = helps ? plan.splits[shared.split + kv_head].num_chunks : 0;
  const i32 count = count_shares(tile.num_rows, own + others);
  return Shares{few, count, few ? 1 + min(others, 1) : count, own, helps ? first : -1};
}

/// The next share of a contraction whose states are all there; none is left where that is not less
/// than their count. Of many, workers take some until then, so that who comes late finds less to
/// do. Who asks last has the next launch begin anew.
RADDLE_DEVICE i32 take_share(i32* word, i32 count, i32 workers) {
  const i32 last = count == 1 ? workers - 1 : count + workers - 1;
  const i32 nth = last == 0 ? 0 : Arrivals{ptx::atomic_add(word, Arrivals::one_taken)}.taken();
  if (nth == last) *word = 0;
  return nth;
}

/// What an item's arrival needs of the plan, for one of the contractions that wait for it, a thread
/// each. Asked for early, in two steps, it is waited for by nobody.
struct Awaiting {
  i32 at = -1;        ///< its word in `arrived`; -1: none
  i32 expected = 0;   ///< items
  Split split{0, 0};  ///< of the item's tile

  /// Contraction number `nth` of those that wait for an item.
  RADDLE_DEVICE void find(const MmaLaunch& launch, const WorkItem& item, const QueryTile& tile,
                          i32 nth) {
    at = -1;
    if (item.partial_row < 0) return;
    split = launch.plan.splits[tile.split + item.kv_head];
    if (tile.dependents_begin + nth < tile.dependents_end)
      at = counter_of(launch.plan, launch.plan.dependents[tile.dependents_begin + nth],
                      item.kv_head);
  }
  RADDLE_DEVICE void expect(const MmaLaunch& launch) {
    if (at >= 0) expected = launch.plan.expected[at];
  }
};

/// Both steps at once.
RADDLE_DEVICE Awaiting look_up_awaiting(const MmaLaunch& launch, const WorkItem& item, i32 nth) {
  Awaiting found;
  found.find(launch, item, launch.plan.query_tiles[item.query_tile], nth);
  found.expect(launch);
  return found;
}

/// The first thread of the team that says yes; -1: none does. `bits`, in shared memory, has a word
/// a warp.
template <class K>
RADDLE_DEVICE i32 first_of_team(bool yes, u32* bits) {
  const u32 of_warp = ptx::ballot(yes);
  if (ptx::lane_index() == 0) bits[ptx::warp_index()] = of_warp;
  sync_team<K>();
  i32 first = -1;
  for (i32 w = num_warps - 1; w >= 0; --w)
    if (bits[w] != 0) first = 32 * w + ptx::lowest_bit(bits[w]);
  sync_team<K>();  // they have been read
  return first;
}

/// What one thread of the team says, to all of them.
template <class K>
RADDLE_DEVICE i32 tell_team(bool tells, i32 what, u32* bits) {
  if (tells) bits[0] = static_cast<u32>(what);
  sync_team<K>();
  const i32 told = static_cast<i32>(bits[0]);
  sync_team<K>();
  return told;
}

/// Composes share number `nth` of `count` of a tile's rows, if there is one, and then what others
/// have not taken, which one thread of the team asks for, the one that `takes`. One function for
/// all contractions, and not in line: a copy for each kind took a fifth of the compiler's time, and
/// the loop of long queries spilled.
template <class K, class V>
RADDLE_COLD void contract(const MmaLaunch& launch, const V& variant, const QueryTile& tile,
                          Sources sources, i32 count, i32 nth, Crew crew, bool takes, u32* bits,
                          float* vector) {
  const auto row = [&](i32 n) { return quotient(tile.num_rows * n, count); };
  while (nth < count) {
    contract_rows<K>(launch, variant, tile, row(nth), row(nth + 1), sources.kv_head, crew, vector,
                     [&](auto& composed, i32 m) { compose_row(launch, sources, composed, m); });
    if (count == 1) return;
    i32* word = launch.arrived + counter_of(launch.plan, sources.which, sources.kv_head);
    nth = tell_team<K>(takes, takes ? take_share(word, count, count) : 0, bits);
  }
}

/// The same of contraction number `sources.which`.
template <class K, class V>
RADDLE_DEVICE void contract(const MmaLaunch& launch, const V& variant, const Sources& sources,
                            i32 count, i32 nth, Crew crew, bool takes, u32* bits, float* vector) {
  const PlanView& plan = launch.plan;
  contract<K>(launch, variant, plan.query_tiles[plan.contractions[sources.which].query_tile],
              sources, count, nth, crew, takes, bits, vector);
}

/// Composes what somebody left.
template <class K, class V>
RADDLE_DEVICE void contract_left(const MmaLaunch& launch, const V& variant, i32 which, i32 kv_head,
                                 bool takes, u32* bits, float* vector) {
  const PlanView& plan = launch.plan;
  const Shares shares = look_up_shares(plan, which, kv_head);
  i32* word = launch.arrived + counter_of(plan, which, kv_head);
  const i32 nth =
      tell_team<K>(takes, takes ? take_share(word, shares.count, shares.workers) : 0, bits);
  contract<K>(launch, variant, look_up_sources(plan, which, kv_head), shares.count, nth,
              Crew{false}, takes, bits, vector);
}

/// Counts an item up at every contraction that waits for it, and composes what it completes where
/// that is done at once, or where those who were to do so have left. All threads of the team come
/// here with the item's state stored; `awaiting` is the thread's first. `bits`, in shared memory,
/// has a word a warp.
template <class K, class V>
RADDLE_COLD void arrive(const MmaLaunch& launch, const V& variant, const WorkItem& item,
                        Awaiting awaiting, u32* bits, float* vector) {
  const QueryTile& tile = launch.plan.query_tiles[item.query_tile];
  const i32 count = tile.dependents_end - tile.dependents_begin;
  const bool at_once = composed_at_once(launch, tile.num_rows);
  sync_team<K>();  // the state is stored
  for (i32 first = 0; first < count; first += num_threads) {
    if (first > 0) awaiting = look_up_awaiting(launch, item, first + ptx::thread_index());
    i32 due = 0;  // shares that fall to this worker
    if (awaiting.at >= 0) {
      ptx::fence_device();  // the block's state before its arrival
      const Arrivals before{ptx::atomic_add(&launch.arrived[awaiting.at], 1)};
      if (before.count() + 1 == awaiting.expected) due = at_once ? 1 : before.left();
      if (due > 0 && at_once) launch.arrived[awaiting.at] = 0;
    }
    for (i32 i; (i = first_of_team<K>(due > 0, bits)) >= 0;) {
      ptx::fence_device();  // the others' states, after their arrival
      const bool mine = ptx::thread_index() == i;
      if (mine) --due;
      if (at_once)
        contract<K>(launch, variant, tile, own_sources(tile, awaiting.split, item.kv_head), 1, 0,
                    Crew{false}, false, bits, vector);
      else
        contract_left<K>(launch, variant, launch.plan.dependents[tile.dependents_begin + first + i],
                         item.kv_head, mine, bits, vector);
    }
  }
}

}  // namespace mma

RADDLE_ENGINE_END
