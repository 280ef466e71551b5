// Who sits beside whom: workers w and w + W / 2 share a multiprocessor, and its way to memory.
#pragma once

#include "raddle/engine/plan/assign.h"

RADDLE_ENGINE_BEGIN

/// Seats of workers that were assigned pieces longest first: who has much to do shares with who has
/// little, for together they have one way to memory; but the halves of a tile that is cut in two
/// share, where nobody has a second piece, for they can be added up there (kernel/mma/team.h).
/// Worker w of the assignment gets seat[w]; `nth` has room for all pieces.
RADDLE_FN void take_seats(const RankedPiece* ranked, i32 num_pieces, const Piece* pieces,
                          const i32* piece_begin, i32 num_kv_heads, i32 num_workers, i32* nth,
                          i32* seat) {
  const i32 half = num_workers / 2;
  i32 first = 0, next = 0;  // seats from `first` on are free, of which `next` are taken
  const auto sit = [&](i32 worker) {
    const i32 free = half - first;
    seat[worker] = next < free ? first + next : num_workers - 1 - (next - free);
    ++next;
  };
  if (num_pieces * num_kv_heads > num_workers) {
    for (i32 w = 0; w < num_workers; ++w) sit(w);
    return;
  }
  const auto is_half = [&](i32 piece) {
    const i32 t = pieces[piece].tile;
    return piece_begin[t + 1] - piece_begin[t] == 2;
  };
  for (i32 i = 0; i < num_pieces; ++i) nth[ranked[i].piece] = i;
  for (i32 i = 0; i < num_pieces; ++i) {
    const i32 piece = ranked[i].piece;
    if (!is_half(piece) || piece != piece_begin[pieces[piece].tile]) continue;
    for (i32 h = 0; h < num_kv_heads; ++h, ++first) {
      seat[i * num_kv_heads + h] = first;
      seat[nth[piece + 1] * num_kv_heads + h] = first + half;
    }
  }
  for (i32 i = 0; i < num_pieces; ++i)
    for (i32 h = 0; h < num_kv_heads && !is_half(ranked[i].piece); ++h) sit(i * num_kv_heads + h);
  for (i32 w = num_pieces * num_kv_heads; w < num_workers; ++w) sit(w);
}

RADDLE_ENGINE_END
