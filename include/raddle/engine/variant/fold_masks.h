// A mask expression's answers about a whole tile.
#pragma once

#include "raddle/engine/core/row.h"
#include "raddle/engine/variant/stages.h"

RADDLE_ENGINE_BEGIN

/// The answer of the whole expression: `ask` answers for one mask, both() and either() combine two
/// answers; `none` is the answer where there is no mask.
template <class Answer, class Ask>
inline Answer fold_masks(const Stages& stages, Answer none, const Ask& ask) {
  Answer stack[max_mask_depth + 1];
  i32 depth = 0;
  for (i32 i = 0; i < stages.num_mask; ++i) {
    const MaskStep& step = stages.mask[i];
    if (step.kind == MaskStep::Kind::leaf) {
      stack[depth++] = ask(step.stage);
      continue;
    }
    --depth;
    Answer& a = stack[depth - 1];
    a = step.kind == MaskStep::Kind::all_of ? both(a, stack[depth]) : either(a, stack[depth]);
  }
  return depth > 0 ? stack[0] : none;
}

/// What the masks keep of a tile, as far as its hulls say.
inline Coverage coverage_of_masks(const Stages& stages, const Tile& tile) {
  return fold_masks(stages, Coverage::full, [&](const BoundStage& s) {
    return s.ops->coverage ? s.ops->coverage(s.self, tile) : Coverage::partial;
  });
}

RADDLE_ENGINE_END
