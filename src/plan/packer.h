// The last step of planning: the arrays that kernels read, from query tiles and the assignment that
// was chosen for them.
#pragma once

#include "plan/assignment.h"
#include "plan/buffer.h"
#include "plan/planner.h"
#include "plan/tiling.h"
#include "raddle/engine/plan/contraction.h"

namespace raddle {

class Packer {
 public:
  /// Numbers the tiles' splits and dependents in `tiling` on the way; `stats` go into the plan,
  /// with pairs_halves.
  PlanArrays pack(const LayoutView& layout, const PlanConfig& config, Tiling& tiling,
                  const Assignment& chosen, const PlanStats& stats);

 private:
  i32 mark_splits();
  i64 count_items() const;
  i32 fill_splits(i32 num_splits);
  ContractionMap contract(i32 num_splits);
  void write_items(WorkItem* items, i32* queue_indptr);
  void write_spans(WorkItem* items, i32* queue_indptr) const;
  void write_placed(WorkItem* items, i32* queue_indptr);
  void write_drawn(WorkItem* items) const;
  void write_openings(const WorkItem* items, const i32* queue_indptr, Opening* openings) const;
  const Units& units() const { return tiling_->units; }
  bool is_cut() const { return chosen_->form == Assignment::Form::cuts; }
  bool is_drawn() const { return chosen_->form == Assignment::Form::queue; }
  i32 chunks_of(i32 tile) const {
    return chosen_->piece_begin[tile + 1] - chosen_->piece_begin[tile];
  }

  const LayoutView* layout_ = nullptr;
  PlanConfig config_{};
  Tiling* tiling_ = nullptr;
  const Assignment* chosen_ = nullptr;
  PlanStats stats_;
  Buffer<Split> splits_;
  Buffer<Contraction> contractions_;
  Buffer<Source> sources_;
  Buffer<i32> expected_, dependents_, seen_, cursor_, row_group_, row_index_;
  Buffer<RowMap> row_maps_;
};

}  // namespace raddle
