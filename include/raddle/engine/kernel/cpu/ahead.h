// Prefetching the next KV tile, a few lines at a time while this one is computed.
#pragma once

#include "raddle/engine/kernel/cpu/keys.h"
#include "raddle/engine/simd/vec.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// Prefetches the lines of the next tile's rows of K, or of V, of all KV heads of a run, as sixteen
/// streams side by side, each in the order of addresses. Memory is read fastest so: hardware
/// prefetchers follow a stream within 4 KiB at most and take a few lines to start, which other
/// streams hide, above all where pages have one token each. They follow one stream in each 4 KiB,
/// so streams lie as far apart as they can: where a head's rows are contiguous, in several heads.
///
/// A core has sixteen fill buffers, and the lines in use need some, too. So prefetches are spread
/// evenly: one line for each line that is used up.
///
/// Intel's cores read fastest when lines are prefetched into the L1 cache, AMD's into the L2.
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
    StreamRow at;
    for (i32 i = 0; i < streams && n > 0; ++i) {
      stream_rows_[i] = at;
      advance(at, left_);
    }
    update_addresses();
  }

  /// From here on prefetches one line for every two that are used up.
  void prefetch_half() { half_ = true; }

  /// Prefetches as many bytes of the next rows as were used up of the present ones.
  template <i32 bytes>
  RADDLE_FN void used(Int<bytes>) {
    used_in_loop(Int<bytes>{});
    catch_up();
  }

  /// used() for loops that keep sums in vector registers. A call in such a loop would make the
  /// compiler keep the sums in memory, because a callee may change all vector registers. So no
  /// stream moves to its next row here: lines behind the present row wait for catch_up.
  template <i32 bytes>
  RADDLE_FN void used_in_loop(Int<bytes>) {
    if (half_) return pay<bytes / 2>();
    pay<bytes>();
  }

  /// Moves the streams to their next rows where they are due; called between such loops.
  RADDLE_FN void catch_up() {
    if (at_ == end_ && left_ > 0) move_on();
  }

  /// Prefetches what is left.
  void finish() {
    while (left_ > 0) {
      while (at_ < end_) prefetch_lines();
      next_rows();
    }
  }

 private:
  static constexpr i32 streams = 16;
  static constexpr i32 at_a_time = 4;  ///< streams that prefetch a line together; more were slower
  static_assert(streams % at_a_time == 0);

  /// A stream's row: of one head, or of all where heads are adjacent.
  struct StreamRow {
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
      prefetch_lines();
  }

  /// One line of each of the next few streams.
  RADDLE_FN void prefetch_lines() {
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
      next_rows();
      for (; owed_ > 0 && at_ < end_; --owed_) prefetch_lines();
    }
  }

  void next_rows() {
    if (--left_ > 0)
      for (StreamRow& at : stream_rows_) advance(at, 1);
    update_addresses();
  }

  /// Advances by `count` rows, from one head's last row to the next head's first; stays at the very
  /// last row.
  void advance(StreamRow& at, i32 count) const {
    at.row += count;
    for (; at.row >= num_rows_ && at.head + 1 < heads_; ++at.head) at.row -= num_rows_;
    at.row = min(at.row, num_rows_ - 1);
  }

  void update_addresses() {
    at_ = left_ > 0 ? 0 : end_;
    if (left_ > 0)
      for (i32 i = 0; i < streams; ++i)
        row_[i] =
            static_cast<const u8*>(rows_[stream_rows_[i].row]) + stream_rows_[i].head * stride_;
  }

  const u8* row_[streams] = {};
  i32 at_ = 0, end_ = 0;  ///< lines prefetched of the streams' rows, and their number
  i32 budget_ = 0;        ///< bytes used up for which nothing was prefetched, less than a step's
  i32 owed_ = 0;          ///< steps that wait for the next rows
  bool half_ = false, into_l2_ = false;
  i32 left_ = 0;  ///< rows of each stream that are not prefetched yet
  StreamRow stream_rows_[streams];
  const void* const* rows_ = nullptr;
  i32 num_rows_ = 0, heads_ = 0;  ///< 1 where the rows of all heads are one
  i64 stride_ = 0;                ///< from head to head, in bytes
};

}  // namespace cpu

RADDLE_ENGINE_END
