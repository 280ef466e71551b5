// The choice among candidate schedules: a table of them, gone through once.
#pragma once

#include "plan/candidates.h"

namespace raddle {

class Chooser {
 public:
  /// Works candidates out until one is taken. The assignment is valid until the next call. Fills in
  /// all of `stats` but pairs_halves.
  const Assignment& choose(const Tiling& tiling, const PlanConfig& config, PlanStats& stats);

 private:
  static constexpr i32 num_candidates = 10;

  Candidates candidates_;
  Assignment made_[num_candidates];  // each candidate's own; buffers keep their memory
};

}  // namespace raddle
