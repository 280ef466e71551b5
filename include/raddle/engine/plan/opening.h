// A worker's opening. From its queue, the item, the query tile, the runs and the group's lists,
// each of which says where the next lies, a worker would learn in five look-ups, one after another,
// where its first keys are; this is one.
#pragma once

#include "raddle/engine/layout/layout.h"
#include "raddle/engine/plan/run_walk.h"

RADDLE_ENGINE_BEGIN

/// Whether a plan has all of its items in the shared queue. Worker w begins with item w then; what
/// follows, workers draw.
RADDLE_FN bool all_are_shared(const i32* queue_indptr, i32 num_workers) {
  return queue_indptr[num_workers] == 0 && queue_indptr[num_workers + 1] > 0;
}
/// The item that a worker begins with; -1 if it has to draw the first one, or there is none.
RADDLE_FN i32 first_item(const i32* queue_indptr, i32 num_workers, i32 worker) {
  if (all_are_shared(queue_indptr, num_workers))
    return worker < queue_indptr[num_workers + 1] ? worker : -1;
  return queue_indptr[worker] < queue_indptr[worker + 1] ? queue_indptr[worker] : -1;
}

/// KV tiles of `keys` columns in a run and those that follow it.
RADDLE_FN i32 count_kv_tiles(Span run, RunWalk runs, i32 keys) {
  i32 count = 0;
  for (; run.begin < run.end; run = runs.next()) count += ceil_div(run.end - run.begin, keys);
  return count;
}

/// The opening of item number `number`, whose KV tiles have `tile_keys` columns; its queue ends at
/// `queue_end`. Its span is the first of its runs, or the last one if it is read `from_end`.
RADDLE_FN Opening make_opening(const WorkItem& item, const QueryTile& tile, const LevelView& level,
                               const Run* all_runs, i32 tile_keys, i32 number, i32 queue_end,
                               bool from_end = false) {
  RunWalk runs(all_runs, tile.run_begin, tile.run_end, item.col_begin, item.col_end);
  const Span first = from_end ? runs.last() : runs.next();
  return Opening{.item = number,
                 .queue_end = queue_end,
                 .query_tile = item.query_tile,
                 .kv_head = item.kv_head,
                 .partial_row = item.partial_row,
                 .level = tile.level,
                 .group = tile.group,
                 .row_begin = tile.row_begin,
                 .num_rows = tile.num_rows,
                 .col_begin = tile.col_begin,
                 .col_end = tile.col_end,
                 .first_entry = level.block_begin[tile.group],
                 .first_index = first_kv_index(level, tile.group),
                 .span_begin = first.begin,
                 .span_end = first.end,
                 .span_partial = first.partial ? 1 : 0,
                 .next_run = runs.next_run(),
                 .run_end = runs.run_end(),
                 .item_col_begin = item.col_begin,
                 .item_col_end = item.col_end,
                 .num_kv_tiles = count_kv_tiles(first, runs, tile_keys),
                 .unused = {}};
}

/// The opening of a worker without a first item.
RADDLE_FN Opening no_opening(i32 queue_end) {
  Opening none{};
  none.item = -1, none.queue_end = queue_end;
  return none;
}

RADDLE_ENGINE_END
