#include "plan/packer.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "raddle/engine/plan/opening.h"

namespace raddle {

/// Finds the tiles that have partial states; returns the number of Splits they take.
i32 Packer::mark_splits() {
  QueryTile* tiles = tiling_->tiles.data();
  if (is_cut() && !units().all_partial) {
    mark_cut_tiles(chosen_->cuts.data(), chosen_->num_spans, tiles);
  } else {
    for (i32 t = 0; t < units().num_tiles; ++t) {
      const bool split = units().all_partial || (!is_drawn() && chunks_of(t) > 1);
      tiles[t].split = split ? 0 : -1;
    }
  }
  return config_.num_kv_heads * number_splits(tiles, units().num_tiles, config_.num_kv_heads);
}

i64 Packer::count_items() const {
  if (is_drawn()) return i64{units().num_tiles} * config_.num_kv_heads;
  if (!is_cut()) return chosen_->num_pieces * config_.num_kv_heads;
  return i64{units().num_tiles} * config_.num_kv_heads + chosen_->num_cut_chunks;
}

/// Places the partial states; returns the rows they take.
i32 Packer::fill_splits(i32 num_splits) {
  const Cut* cuts = chosen_->cuts.data();
  const QueryTile* tiles = tiling_->tiles.data();
  Split* splits = splits_.grow(num_splits);
  if (num_splits == 0) return 0;
  if (!is_cut()) {
    return fill_piece_splits(tiles, units().num_tiles, config_.num_kv_heads,
                             chosen_->piece_begin.data(), splits);
  }
  if (units().all_partial) return fill_all_splits(units(), cuts, chosen_->num_spans, splits);
  const i32 rows = fill_cut_splits(units(), cuts, chosen_->num_spans, num_splits, splits);
  return split_all_heads(chosen_->workers_of_span, rows, num_splits, splits);
}

ContractionMap Packer::contract(i32 num_splits) {
  const i64 tiles = units().num_tiles;
  const i32 levels = units().all_partial ? layout_->num_levels : 1;
  const i64 most_sources =
      levels > 1 ? tiles + (levels - 1) * (layout_->num_rows + 2 * tiles) : tiles;
  ContractionMap map{contractions_.grow(tiles),
                     expected_.grow(num_splits),
                     sources_.grow(most_sources),
                     dependents_.grow(most_sources),
                     0,
                     0,
                     0};
  if (levels <= 1) {
    contract_tiles(tiling_->tiles.data(), units().num_tiles, num_splits, splits_.data(), map);
    return map;
  }
  const i64 rows = layout_->num_rows;
  row_group_.grow(rows * (levels - 1));
  row_index_.grow(rows * (levels - 1));
  row_maps_.grow(levels - 1);
  for (i32 l = 0; l + 1 < levels; ++l) {
    row_maps_[l] = RowMap{row_group_.data() + rows * l, row_index_.data() + rows * l};
    map_rows(layout_->levels[l], layout_->num_rows, row_maps_[l]);
  }
  contract_levels(*layout_, tiling_->tiles.data(), units().num_tiles, units().group_tile,
                  config_.num_kv_heads, config_.group_size, row_maps_.data(), splits_.data(),
                  seen_.grow(tiles), map);
  return map;
}

void Packer::write_items(WorkItem* items, i32* queue_indptr) {
  const i32 workers = config_.num_workers;
  queue_indptr[0] = 0;
  queue_indptr[workers + 1] = static_cast<i32>(count_items());
  if (is_drawn()) {
    std::fill_n(queue_indptr, workers + 1, 0);
    return write_drawn(items);
  }
  is_cut() ? write_spans(items, queue_indptr) : write_placed(items, queue_indptr);
}

/// The items of spans, each of which one worker computes, or a worker for each KV head; before it
/// the chunk in step that a worker has.
void Packer::write_spans(WorkItem* items, i32* queue_indptr) const {
  const Cut* in_step = chosen_->cuts.data();
  const Cut* cuts = in_step + chosen_->num_in_step;
  const Split* splits = splits_.data();
  const Units line = units();
  const i32 each = chosen_->workers_of_span;
  i32 w = 0, end = 0;
  for (i32 s = 0; s < chosen_->num_spans - chosen_->num_in_step; ++s) {
    if (s < chosen_->num_in_step)
      end += write_span(line, splits, in_step[s], in_step[s + 1], items + end);
    const Cut &a = cuts[s], &b = cuts[s + 1];
    for (i32 head = 0; head < each; ++head) {
      end += each == 1 ? write_span(line, splits, a, b, items + end)
                       : write_head_span(line, splits, a, b, head, items + end);
      queue_indptr[++w] = end;
    }
  }
  while (w < config_.num_workers) queue_indptr[++w] = end;
}

/// The items of placed pieces; the workers of a group have queues of one length.
void Packer::write_placed(WorkItem* items, i32* queue_indptr) {
  const Placement* placements = chosen_->placements.data();
  const i32 workers = config_.num_workers;
  const i32 group = chosen_->head_group, groups = workers / group;
  const i64 count = chosen_->num_pieces * config_.num_kv_heads / group;
  const i32* numbered = chosen_->is_paired ? chosen_->numbered.data() : nullptr;
  const auto queue_of = [numbered](i32 worker) { return numbered ? numbered[worker] : worker; };
  i32* length = cursor_.grow(groups);
  std::fill_n(length, groups, 0);
  for (i64 i = 0; i < count; ++i) ++length[placements[i].worker];
  for (i32 g = 0, w = 0; g < groups; ++g)
    for (const i32 end = w + group; w < end; ++w) queue_indptr[queue_of(w) + 1] = length[g];
  for (i32 w = 0, end = 0; w < workers; ++w) queue_indptr[w + 1] = end += queue_indptr[w + 1];
  std::fill_n(length, groups, 0);
  // A compiler must assume that writing items changes any integer in memory: all that the heads of
  // a piece have in common is read before.
  const Split* splits = splits_.data();
  for (i64 i = 0; i < count; ++i) {
    const Placement p = placements[i];
    const Piece piece = chosen_->pieces[p.piece];
    const QueryTile& tile = units().tiles[piece.tile];
    const i32 at = length[p.worker]++;
    const i32 paired = chosen_->pairs_halves && chunks_of(piece.tile) == 2 ? 1 : 0;
    stats_.pairs_halves |= paired == 1;
    const i32 head = p.kv_head * group;
    const i32 worker = p.worker * group;
    const Split* split = tile.split >= 0 ? splits + tile.split + head : nullptr;
    const i32 row = split ? (p.piece - chosen_->piece_begin[piece.tile]) * tile.num_rows : -1;
    for (i32 j = 0; j < group; ++j) {
      items[queue_indptr[queue_of(worker + j)] + at] =
          WorkItem{.query_tile = piece.tile,
                   .kv_head = head + j,
                   .col_begin = piece.col_begin,
                   .col_end = piece.col_end,
                   .partial_row = row + (split ? split[j].partial_row : 0),
                   .paired_half = paired};
    }
  }
}

void Packer::write_drawn(WorkItem* items) const {
  const i64 count = count_items();
  for (i64 i = 0; i < count; ++i) {
    const DrawnUnit& unit = chosen_->queue[i];
    items[i] = WorkItem{
        .query_tile = unit.tile,
        .kv_head = unit.kv_head,
        .col_begin = unit_column(units(), unit.tile, 0),
        .col_end = unit_column(units(), unit.tile, units().kv_tiles[unit.tile]),
        .partial_row = -1,
        .paired_half = 0,
    };
  }
}

void Packer::write_openings(const WorkItem* items, const i32* queue_indptr,
                            Opening* openings) const {
  for (i32 w = 0; w < config_.num_workers; ++w) {
    const i32 first = first_item(queue_indptr, config_.num_workers, w), end = queue_indptr[w + 1];
    // Made in place: an assignment's temporary is written by single words and read by vectors
    // before these have left the store buffer, which took a fifth of a small batch's planning.
    if (first < 0) {
      ::new (openings + w) Opening(no_opening(end));
      continue;
    }
    const WorkItem& item = items[first];
    const QueryTile& tile = units().tiles[item.query_tile];
    ::new (openings + w) Opening(make_opening(item, tile, layout_->levels[tile.level], units().runs,
                                              config_.shapes[tile.shape].keys, first, end));
  }
}

PlanArrays Packer::pack(const LayoutView& layout, const PlanConfig& config, Tiling& tiling,
                        const Assignment& chosen, const PlanStats& stats) {
  layout_ = &layout;
  config_ = config;
  tiling_ = &tiling;
  chosen_ = &chosen;
  stats_ = stats;
  // Splits and contraction map come first: how large they are shows only when they are there.
  const i32 num_splits = mark_splits();
  const i64 partial_rows = fill_splits(num_splits);
  const ContractionMap map = contract(num_splits);
  const PlanSizes sizes{.query_tiles = units().num_tiles,
                        .runs = tiling_->num_runs,
                        .items = count_items(),
                        .queue_indptr = config_.num_workers + 2,
                        .splits = num_splits,
                        .contractions = map.num_contractions,
                        .expected = i64{map.num_contractions} * config_.num_kv_heads,
                        .sources = map.num_sources,
                        .dependents = map.num_dependents,
                        .openings = config_.has_openings ? config_.num_workers : 0,
                        .partial_rows = partial_rows};
  const PlanOffsets offsets = plan_offsets(sizes);
  std::shared_ptr<std::byte[]> block(new std::byte[static_cast<std::size_t>(offsets.bytes)]);
  std::byte* base = block.get();
  PlanView made{};  // where the arrays are now; null: written in place
  made.query_tiles = tiling_->tiles.data();
  made.runs = tiling_->runs.data();
  made.splits = splits_.data();
  made.contractions = map.contractions;
  made.expected = map.expected;
  made.sources = map.sources;
  made.dependents = map.dependents;
  visit_plan_arrays(
      [base]<class T>(const T* from, i64 count, i64 offset) {
        const i64 bytes = count * i64{sizeof(T)}, end = offset + bytes;
        if (from && bytes > 0) std::memcpy(base + offset, from, static_cast<std::size_t>(bytes));
        // Equal plans are equal bytes, the gaps that align the arrays included.
        std::memset(base + end, 0, static_cast<std::size_t>(round_up(end, i64{16}) - end));
      },
      made, sizes, offsets);
  auto* items = reinterpret_cast<WorkItem*>(base + offsets.items);
  auto* queue_indptr = reinterpret_cast<i32*>(base + offsets.queue_indptr);
  write_items(items, queue_indptr);
  if (config_.has_openings)
    write_openings(items, queue_indptr, reinterpret_cast<Opening*>(base + offsets.openings));
  return PlanArrays(std::move(block), sizes, config_, stats_);
}

}  // namespace raddle
