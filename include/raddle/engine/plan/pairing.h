// Pairing of workers: workers w and w + W / 2 share a multiprocessor, and its way to memory.
#pragma once

#include "raddle/engine/plan/assign.h"

RADDLE_ENGINE_BEGIN

/// Pairs workers that were assigned pieces longest first: worker w of the assignment becomes worker
/// `numbered[w]` of the plan. A worker with much to do is paired with one that has little, for
/// together they have one way to memory. But where no worker has a second piece, the halves of a
/// tile that is cut in two are paired, for they can be added up inside the multiprocessor
/// (kernel/mma/warp_states.h). `rank_of` has room for all pieces.
RADDLE_FN void pair_workers(const Ranked* ranked, i32 num_pieces, const Piece* pieces,
                            const i32* piece_begin, i32 num_kv_heads, i32 num_workers, i32* rank_of,
                            i32* numbered) {
  const i32 half = num_workers / 2;
  i32 first = 0, next = 0;  // pairs from `first` on are free, and `next` of their places are taken
  const auto place = [&](i32 worker) {
    const i32 free = half - first;
    numbered[worker] = next < free ? first + next : num_workers - 1 - (next - free);
    ++next;
  };
  if (num_pieces * num_kv_heads > num_workers) {
    for (i32 w = 0; w < num_workers; ++w) place(w);
    return;
  }
  const auto is_half = [&](i32 piece) {
    const i32 t = pieces[piece].tile;
    return piece_begin[t + 1] - piece_begin[t] == 2;
  };
  for (i32 i = 0; i < num_pieces; ++i) rank_of[ranked[i].number] = i;
  for (i32 i = 0; i < num_pieces; ++i) {
    const i32 piece = ranked[i].number;
    if (!is_half(piece) || piece != piece_begin[pieces[piece].tile]) continue;
    for (i32 h = 0; h < num_kv_heads; ++h, ++first) {
      numbered[i * num_kv_heads + h] = first;
      numbered[rank_of[piece + 1] * num_kv_heads + h] = first + half;
    }
  }
  for (i32 i = 0; i < num_pieces; ++i)
    for (i32 h = 0; h < num_kv_heads && !is_half(ranked[i].number); ++h)
      place(i * num_kv_heads + h);
  for (i32 w = num_pieces * num_kv_heads; w < num_workers; ++w) place(w);
}

RADDLE_ENGINE_END
