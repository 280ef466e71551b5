// A plan as the kernels read it: query tiles, their coverage runs, work items in queues, and how
// partial states come together. Plain data; `plan/` makes it, `kernel/` consumes it.
//
// Work. A query tile (rows of one group, the heads of a KV head fused into rows) times a KV head
// times a span of columns is a work item. Each worker has a queue of them; when that is empty, the
// worker draws the next item from a queue that all workers share.
//
// Contraction. An item of an unsplit tile on a single-level layout writes its final output
// (writethrough). All others store a partial state. The chunks of one (tile, head) lie in the state
// buffer one after another, `num_rows` rows each, in chunk order. A contraction composes all
// partial states of one query tile of the last level: those of its own chunks and, in a cascade,
// those that tiles of earlier levels have of its rows, level by level, chunk by chunk. Each
// finished item counts up every contraction that depends on it. The worker that brings the counter
// to `expected` resets it and composes the states, except on a GPU where workers share the rows of
// a contraction (kernel/gpu/arrive.h).
#pragma once

#include "raddle/engine/core/row.h"

namespace raddle {

/// Tq fused rows by Tkv keys.
struct TileShape {
  i32 rows;
  i32 keys;
};

/// A coverage run: columns [begin, end) of which a query tile keeps some (partial) or all (full)
/// pairs. Both ends are multiples of the shape's `keys`, except for the end of the group's list.
struct Run {
  i32 begin;
  i32 end;
  Coverage kind;
};

struct QueryTile {
  i32 level;
  i32 group;
  i32 row_begin;  ///< first fused row in the group: row · group_size + head in KV head
  i32 num_rows;   ///< fused rows
  i32 shape;      ///< QueryShape: index into PlanView::shapes
  /// No column outside [col_begin, col_end) is ever read, because the mask keeps none there. The
  /// runs, which consist of whole KV tiles, may reach beyond it.
  i32 col_begin;
  i32 col_end;
  i32 run_begin;
  i32 run_end;
  i32 split;             ///< index of KV head 0's Split; -1: every head is written through
  i32 dependents_begin;  ///< contractions that wait for this tile: a range of PlanView::dependents
  i32 dependents_end;
};

struct WorkItem {
  i32 query_tile;
  i32 kv_head;
  i32 col_begin;  ///< columns [col_begin, col_end), cut at multiples of the shape's `keys`; may be
                  ///< empty
  i32 col_end;
  i32 partial_row;  ///< first row of its partial state in the state buffer; -1: writethrough
  i32 paired_half;  ///< 1: half of a unit, whose other half ends the queue of the worker that is
                    ///< paired with this one (pairing.h)
};

/// All that is looked up for a work item before its first key can be asked for, in one piece of
/// memory (opening.h). A plan may have one for every worker's first item.
struct alignas(16) Opening {
  i32 item;       ///< its index, with which the worker's queue begins; -1: the queue is empty
  i32 queue_end;  ///< of the same queue
  i32 query_tile, kv_head, partial_row;                 ///< WorkItem's
  i32 level, group, row_begin, num_rows;                ///< QueryTile's
  i32 col_begin, col_end;                               ///< QueryTile's, too
  i32 first_entry;                                      ///< LevelView::block_begin of the group
  i32 first_index;                                      ///< LevelView::kv_begin of the group, or 0
  i32 span_begin, span_end, span_partial;               ///< the item's first columns (Span)
  i32 next_run, run_end, item_col_begin, item_col_end;  ///< those that follow (RunWalk)
  i32 num_kv_tiles;                                     ///< KV tiles of the item
  i32 unused[3];                                        ///< 0: equal plans are equal bytes
};

/// The partial states of one (query tile, KV head); num_chunks is 0 where that head is written
/// through.
struct Split {
  i32 partial_row;
  i32 num_chunks;
};

/// Rows [row, row + num_rows) of a query tile are rows [dst_row, …) of the contracted tile.
struct Source {
  i32 query_tile;
  i32 row;
  i32 dst_row;
  i32 num_rows;
};

struct Contraction {
  i32 query_tile;  ///< of the last level: the rows whose output it writes
  i32 source_begin;
  i32 source_end;
};

/// What a caller asks for. `automatic` takes one of the candidates of plan/chooser.cpp.
enum class Schedule : i32 { automatic, linear, algorithm1, one_per_request };

/// Indices of tile shapes and their costs.
enum QueryShape : i32 { short_queries, long_queries };

struct PlanView {
  i32 num_workers;
  i32 num_kv_heads;
  i32 group_size;
  i32 num_query_tiles;
  i32 num_runs;
  i32 num_items;
  i32 num_splits;
  i32 num_contractions;
  i32 num_sources;
  i32 num_dependents;
  i32 num_partial_rows;  ///< rows of the state buffer in use
  TileShape shapes[2];   ///< [short_queries], [long_queries]
  const QueryTile* query_tiles;
  const Run* runs;
  const WorkItem* items;
  const i32* queue_indptr;  ///< [num_workers + 2] into items; the last queue is the shared one
  const Split* splits;
  const Contraction* contractions;
  const i32* expected;  ///< [num_contractions · num_kv_heads] items a contraction waits for; 0:
                        ///< none needed
  const Source* sources;
  const i32* dependents;    ///< contraction numbers
  const Opening* openings;  ///< [num_workers]; none where PlanConfig::has_openings is false
};

/// Rows of a query tile that kernels compute faster than tiles of more rows.
constexpr i32 few_rows = 8;

/// Integer costs, in quarters of a nanosecond (src/plan/heuristics.h). Only their ratios decide
/// what is planned; `raddle explain` also prints them as times.
struct CostModel {
  i32 per_item;      ///< starting a work item: loading and transforming queries, storing the result
  i32 per_item_row;  ///< what each fused row adds to that
  i32 per_tile;      ///< a KV tile's share that does not depend on the query rows (loading K and V)
  i32 per_tile_row;  ///< what each fused row adds to that
  i32 per_state_row;  ///< storing and composing one row of a partial state
  i32 per_state;  ///< what a partial state adds whatever its size: announcing it to other workers
  i32 per_level_item;      ///< an item in plans of several levels, with the state that each stores
  i32 per_level_item_row;  ///< what each fused row adds to that
  i32 per_level_tile;      ///< per_tile in plans of several levels
  i32 per_level_tile_row;  ///< per_tile_row in plans of several levels
  i32 level_rows;          ///< where tiles of more than few_rows take as long as of this many there
};

/// What is planned for: numbers of workers and heads, tile shapes and their costs. Pure values.
struct PlanConfig {
  i32 num_workers;
  i32 num_kv_heads;
  i32 group_size;
  TileShape shapes[2];
  CostModel costs[2];  ///< of each shape
  Schedule schedule;
  bool batch_invariant;
  bool short_only;  ///< tiles of long queries have the shape of short ones, and count as such: for
                    ///< the kernel without the loop of long queries
  /// Reading one KV head's keys costs as much as reading those of all heads, which lie side by
  /// side. So where it is balanced, a worker computes all heads of the keys that it reads.
  bool reads_whole_rows;
  bool has_openings;  ///< the kernel begins with PlanView::openings
  /// The linear split has workers read the same tokens at the same time: the KV heads of one level
  /// (linear_split.h), heads and query tiles of shared prefixes (in_step.h).
  bool keeps_in_step;
  /// How many columns of one KV head fit the cache that all workers share. 0: workers share no
  /// cache, and there is no shared queue.
  i32 cached_columns;
  i32 cached_discount;  ///< percent of the cost of reading keys that is saved where another worker
                        ///< has just read them
  /// Workers that share one path to memory, as those of a multiprocessor do. One of them that reads
  /// alone is this many times as fast as when all do. 0 means 1.
  i32 bandwidth_sharers;
  i32 invariant_chunk;  ///< batch-invariant mode cuts KV at absolute multiples of this many columns
  i32 max_runs;         ///< coverage runs of one query tile; surplus runs merge to partial. 0: 64
};

}  // namespace raddle
