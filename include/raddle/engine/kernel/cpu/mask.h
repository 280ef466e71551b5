// The element mask of one row of a tile: the variant's mask expression and the layout's mask bits.
#pragma once

#include "raddle/engine/kernel/cpu/keys.h"
#include "raddle/engine/variant/stages.h"

RADDLE_ENGINE_BEGIN

/// keep[j] = whether the composition's masks keep key j of the row: a postfix expression over byte
/// rows.
RADDLE_FN void evaluate_mask(const Stages& stages, const Row& row, const KeyLanes& keys, i32 n,
                             u8* keep) {
  u8 stack[max_mask_depth][max_tile_keys];
  i32 depth = 0;
  for (i32 i = 0; i < stages.num_mask; ++i) {
    const MaskStep& step = stages.mask[i];
    if (step.kind == MaskStep::Kind::leaf) {
      step.stage.ops->mask(step.stage.self, stack[depth++], n, row, keys);
      continue;
    }
    --depth;
    u8* a = stack[depth - 1];
    const u8* b = stack[depth];
    if (step.kind == MaskStep::Kind::all_of)
      for (i32 j = 0; j < n; ++j) a[j] = a[j] & b[j];
    else
      for (i32 j = 0; j < n; ++j) a[j] = a[j] | b[j];
  }
  for (i32 j = 0; j < n; ++j) keep[j] = depth > 0 ? stack[0][j] : u8{1};
}

/// keep[j] &= the bit that a BSR block stores for (row of the group, column).
RADDLE_FN void apply_mask_bits(const LevelView& level, i32 group, i32 row_in_group,
                               const i32* column, i32 n, u8* keep) {
  for (i32 j = 0; j < n; ++j)
    keep[j] &= mask_bit(level, group, row_in_group, column[j]) ? u8{1} : u8{0};
}

RADDLE_ENGINE_END
