// Asking for the KV tile after this one, a few lines at a time while this one is computed.
#pragma once

#include "raddle/engine/kernel/cpu/keys.h"
#include "raddle/engine/simd/vec.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Walks the lines of the coming tile's rows of K, or of V, all KV heads of a run together, as
/// sixteen streams side by side, each in the order of addresses. Memory is read fastest so:
/// hardware prefetchers follow a stream within 4 KiB at most and take a few lines to start, which
/// other streams hide, above all where pages are a token each. They follow one stream in each 4
/// KiB, so streams lie as far apart as they can: where a head's rows are one after another, in
/// several heads.
///
/// A core has sixteen buffers for lines on their way, which what is computed needs, too: asking has
/// to be spread evenly, a line for each one that is used up.
///
/// Intel's cores read fastest when lines are asked for into the L1 cache, AMD's into the L2.
class Ahead {
 public:
  Ahead() = default;

  /// `rows` are the first head's of `heads`, which lie `stride` bytes apart.
  Ahead(const void* const* rows, i32 n, i32 heads, i64 stride, i32 row_bytes, bool into_l2)
      : into_l2_(into_l2), rows_(rows), num_rows_(n), stride_(stride) {
    // Heads that touch are one long row.
    const bool touch = stride == row_bytes;
    heads_ = touch ? 1 : heads;
    end_ = streams * ceil_div(touch ? heads * row_bytes : row_bytes, 64);
    left_ = ceil_div(n * heads_, streams);
    Piece piece;
    for (i32 i = 0; i < streams && n > 0; ++i) {
      pieces_[i] = piece;
      advance(piece, left_);
    }
    go_to_pieces();
  }

  /// A line for every two that are used up from here on.
  void ask_for_half() { half_ = true; }

  /// As many bytes of the coming rows as have been used up of the present ones.
  template <i32 bytes>
  RADDLE_FN void used(Int<bytes>) {
    used_in_loop(Int<bytes>{});
    catch_up();
  }

  /// The same in a loop that keeps sums in vector registers. A function call in it would make the
  /// compiler keep them in memory instead, since a callee may change all vector registers. So no
  /// stream moves to its next row here: lines past the present rows wait for catch_up.
  template <i32 bytes>
  RADDLE_FN void used_in_loop(Int<bytes>) {
    if (half_) return pay<bytes / 2>();
    pay<bytes>();
  }

  /// Between such loops: moves the streams to their next rows where they are due.
  RADDLE_FN void catch_up() {
    if (at_ == end_ && left_ > 0) move_on();
  }

  /// The rest.
  void finish() {
    while (left_ > 0) {
      while (at_ < end_) ask();
      next_pieces();
    }
  }

 private:
  static constexpr i32 streams = 16;
  static constexpr i32 at_a_time = 4;  ///< of them, a line each; more at once were slower
  static_assert(streams % at_a_time == 0);

  /// A row of one head, or of all.
  struct Piece {
    i32 row = 0, head = 0;
  };

  template <i32 bytes>
  RADDLE_FN void pay() {
    constexpr i32 each = at_a_time * 64;
    if constexpr (bytes % each == 0) {
#pragma GCC unroll 16
      for (i32 i = 0; i < bytes / each; ++i) step();
    } else {
      budget_ += bytes;
      if constexpr (bytes > each)
        for (; budget_ >= 2 * each; budget_ -= each) step();
      if (budget_ < each) return;
      budget_ -= each;
      step();
    }
  }

  RADDLE_FN void step() {
    if (at_ == end_)
      ++owed_;
    else
      ask();
  }

  /// A line of each of the next few streams.
  RADDLE_FN void ask() {
    const u32 at = static_cast<u32>(at_), n = streams;  // halves the instructions of / and %
    const u8* const* row = row_ + at % n;
    const u32 offset = at / n * 64;
    if (into_l2_) {
#pragma GCC unroll 4
      for (i32 i = 0; i < at_a_time; ++i) simd::prefetch_l2(row[i] + offset);
    } else {
#pragma GCC unroll 4
      for (i32 i = 0; i < at_a_time; ++i) simd::prefetch(row[i] + offset);
    }
    at_ += at_a_time;
  }

  __attribute__((noinline)) void move_on() {
    while (at_ == end_ && left_ > 0) {
      next_pieces();
      for (; owed_ > 0 && at_ < end_; --owed_) ask();
    }
  }

  void next_pieces() {
    if (--left_ > 0)
      for (Piece& piece : pieces_) advance(piece, 1);
    go_to_pieces();
  }

  /// By so many pieces, one head's after another's; behind the last there is the last.
  void advance(Piece& piece, i32 count) const {
    piece.row += count;
    for (; piece.row >= num_rows_ && piece.head + 1 < heads_; ++piece.head) piece.row -= num_rows_;
    piece.row = min(piece.row, num_rows_ - 1);
  }

  void go_to_pieces() {
    at_ = left_ > 0 ? 0 : end_;
    if (left_ > 0)
      for (i32 i = 0; i < streams; ++i)
        row_[i] = static_cast<const u8*>(rows_[pieces_[i].row]) + pieces_[i].head * stride_;
  }

  const u8* row_[streams] = {};
  i32 at_ = 0, end_ = 0;  ///< lines that have been asked for, of so many: a piece a stream
  i32 budget_ = 0;        ///< bytes used up that have not been asked for, less than a step's
  i32 owed_ = 0;          ///< steps that wait for the next pieces
  bool half_ = false, into_l2_ = false;
  i32 left_ = 0;  ///< pieces of a stream that have not been asked for
  Piece pieces_[streams];
  const void* const* rows_ = nullptr;
  i32 num_rows_ = 0, heads_ = 0;  ///< 1 where the rows of all heads are one
  i64 stride_ = 0;                ///< from head to head, in bytes
};

}  // namespace cpu

RADDLE_ENGINE_END
