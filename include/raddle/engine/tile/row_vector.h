// A head vector in registers, as the contract's query, key and value see it in attention on a GPU.
// Several lanes hold a row together, so a warp has several rows in flight, and lanes of different
// rows do not wait for one another.
#pragma once

#include "raddle/engine/core/math.h"
#include "raddle/engine/ptx/instructions.h"
#include "raddle/engine/tile/shared_rows.h"

RADDLE_ENGINE_BEGIN

/// The parts of rows that a lane holds. Lane l of a row's lanes has chunks l and l + half: both
/// elements of half-split pairs, and whole interleaved pairs. Lanes without chunks of their own see
/// those of the last lane, so that all lanes do the same.
template <i32 dim>
class RowShare {
  using Rows = SharedRows<dim>;
  static constexpr i32 chunks = ceil_div(dim, 8);

 public:
  static constexpr i32 half = ceil_div(chunks, 2);
  static constexpr i32 lanes = [] {
    i32 n = 1;
    while (n < half) n *= 2;
    return n;
  }();
  static_assert(lanes <= 32 && dim % 8 == 0);
  static constexpr i32 rows = 32 / lanes;  ///< rows that a warp holds at a time
  /// Whether one lane holds both elements of every half-split pair of a whole row.
  static constexpr bool splits_evenly = chunks % 2 == 0;

  /// For the rows from `first` on: a multiple of eight, or of the number of rows that are looked
  /// at.
  RADDLE_DEVICE RowShare(u8* memory, i32 first) : memory_(memory) {
    const i32 lane = ptx::lane_index();
    lane_ = lane % lanes;
    nth_ = lane / lanes;
    row_ = first + nth_;
    members_ = (lanes == 32 ? ~0u : (1u << lanes % 32) - 1u) << nth_ * lanes;
    RADDLE_UNROLL
    for (i32 k = 0; k < 2; ++k) at_[k] = Rows::at(first + nth_, chunk_index(k));
  }

  /// The number, among the warp's rows, of the row that this lane has a part of.
  RADDLE_DEVICE i32 nth_row() const { return nth_; }
  /// The lanes that hold the same row, one bit each.
  RADDLE_DEVICE u32 members() const { return members_; }
  RADDLE_DEVICE i32 lane_of_row() const { return lane_; }
  /// The first element of the lane's chunk k.
  RADDLE_DEVICE i32 first_element(i32 k) const { return 8 * chunk_index(k); }
  /// Whether the row has this chunk,
  RADDLE_DEVICE bool sees(i32 k) const { return splits_evenly || first_element(k) < dim; }
  /// and whether it is this lane's own.
  RADDLE_DEVICE bool owns(i32 k) const { return (lanes == half || lane_ < half) && sees(k); }
  /// Chunk k of the row that lies `down` rows below.
  RADDLE_DEVICE Packed8& chunk(i32 k, i32 down) const {
    return *reinterpret_cast<Packed8*>(memory_ + Rows::rows_after(at_[k], down));
  }
  /// Float number i < dim / 2 of those that take the row's place in memory while its elements are
  /// in registers. They lie where elements do: padding, which products read, stays zero.
  RADDLE_DEVICE float& room(i32 i, i32 down) const {
    const u32 at = Rows::rows_after(Rows::at(row_, i / 4), down);
    return reinterpret_cast<float*>(memory_ + at)[i % 4];
  }

 private:
  RADDLE_DEVICE i32 chunk_index(i32 k) const {
    return (lanes == half ? lane_ : min(lane_, half - 1)) + k * half;
  }

  u8* memory_;
  i32 row_, lane_, nth_;
  u32 members_, at_[2];
};

/// One row. `whole`: pairs usually span the whole row, and no element has to move between lanes.
template <class T, i32 dim, bool whole>
class RowVector {
  using Share = RowShare<dim>;

 public:
  /// Loads the row `down` rows below the first one of its lanes.
  RADDLE_DEVICE void load(const Share& share, i32 down) {
    share_ = &share;
    down_ = down;
    RADDLE_UNROLL
    for (i32 k = 0; k < 2; ++k) {
      const Packed8 packed = share.sees(k) ? share.chunk(k, down) : Packed8{};
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e)
        ptx::unpack(packed.x[e], elements_[k][2 * e], elements_[k][2 * e + 1], T{});
    }
  }
  /// Rounds once.
  RADDLE_DEVICE void store(const Share& share, i32 down) const {
    RADDLE_UNROLL
    for (i32 k = 0; k < 2; ++k) {
      Packed8 packed;
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e)
        packed.x[e] = ptx::pack(elements_[k][2 * e], elements_[k][2 * e + 1], T{});
      if (share.owns(k)) share.chunk(k, down) = packed;
    }
  }

  RADDLE_DEVICE i32 size() const { return dim; }

  /// x[i] = f(x[i], i) for every element.
  template <class F>
  RADDLE_DEVICE void map(F f) {
    each([&](float& x, i32 i) { x = f(x, i); });
  }

  /// Half-split pairs (x[i], x[i + n/2]) of the first n elements: f(a, b, i) changes both in place.
  template <class F>
  RADDLE_DEVICE void half_pairs(i32 n, F f) {
    if (!(whole && Share::splits_evenly && n == dim)) return part_halves(n / 2, f);
    RADDLE_UNROLL
    for (i32 e = 0; e < 8; ++e) f(elements_[0][e], elements_[1][e], share_->first_element(0) + e);
  }

  /// Interleaved pairs (x[2i], x[2i + 1]) of the first n elements.
  template <class F>
  RADDLE_DEVICE void interleaved_pairs(i32 n, F f) {
    RADDLE_UNROLL
    for (i32 k = 0; k < 2; ++k) {
      if (!share_->sees(k)) continue;
      const i32 first = share_->first_element(k) / 2;
      if ((whole && n == dim) || first + 4 <= n / 2) {
        RADDLE_UNROLL
        for (i32 e = 0; e < 4; ++e) f(elements_[k][2 * e], elements_[k][2 * e + 1], first + e);
      } else {
        RADDLE_UNROLL
        for (i32 e = 0; e < 3; ++e)
          if (first + e < n / 2) f(elements_[k][2 * e], elements_[k][2 * e + 1], first + e);
      }
    }
  }

  /// Sum of f(x[i]) over all elements, by lanes and then by a butterfly: the same in every lane.
  template <class F>
  RADDLE_DEVICE float sum(F f) const {
    float total = 0.0f;
    RADDLE_UNROLL
    for (i32 k = 0; k < 2; ++k) {
      if (!share_->owns(k)) continue;
      RADDLE_UNROLL
      for (i32 e = 0; e < 8; ++e) total += f(elements_[k][e]);
    }
    RADDLE_UNROLL
    for (i32 step = Share::lanes / 2; step > 0; step /= 2)
      total += ptx::shuffle_xor(total, step, share_->members());
    return total;
  }

  // Functions for turning pairs: approximations of the hardware, far more precise than the rounding
  // of a row.
  /// Sine and cosine of turn / 2^32 full turns, within 2^-20.
  RADDLE_DEVICE static math::SinCos sincos_turns(u32 turn) {
    const float x = static_cast<float>(static_cast<i32>(turn)) * 1.46291807926716e-9f;  // 2π / 2^32
    return math::SinCos{ptx::sin(x), ptx::cos(x)};
  }
  RADDLE_DEVICE static float multiply_add(float x, float y, float z) { return ptx::fma(x, y, z); }

 private:
  /// f(x[i], i) for this lane's elements.
  template <class F>
  RADDLE_DEVICE void each(F f) {
    RADDLE_UNROLL
    for (i32 k = 0; k < 2; ++k) {
      if (!share_->sees(k)) continue;
      RADDLE_UNROLL
      for (i32 e = 0; e < 8; ++e) f(elements_[k][e], share_->first_element(k) + e);
    }
  }

  /// Half-split pairs whose elements are in different lanes. In most partial rotations the elements
  /// are whole chunks that two lanes can swap.
  template <class F>
  RADDLE_DEVICE void part_halves(i32 half, F f) {
    const i32 apart = half / 8;  // chunks
    if (half % 8 == 0 && (apart & (apart - 1)) == 0 && 2 * apart <= Share::half)
      swap_halves(apart, f);
    else
      exchange_halves(half, f);
  }

  /// Both elements of a pair are in first chunks of lanes whose numbers differ in one bit: each
  /// lane of such a pair turns half of the elements.
  template <class F>
  RADDLE_DEVICE void swap_halves(i32 apart, F f) {
    const i32 lane = share_->lane_of_row();
    const bool second = (lane & apart) != 0, turns = lane < 2 * apart;
    const i32 pair = share_->first_element(0) - (second ? 8 * apart - 4 : 0);
    float a[4], b[4];
    RADDLE_UNROLL
    for (i32 e = 0; e < 4; ++e) {
      const float mine = second ? elements_[0][4 + e] : elements_[0][e];
      const float other = ptx::shuffle_xor(second ? elements_[0][e] : elements_[0][4 + e], apart,
                                           share_->members());
      a[e] = second ? other : mine;
      b[e] = second ? mine : other;
    }
    if (turns) {
      RADDLE_UNROLL
      for (i32 e = 0; e < 4; ++e) f(a[e], b[e], pair + e);
    }
    RADDLE_UNROLL
    for (i32 e = 0; e < 4; ++e) {
      const float back = ptx::shuffle_xor(second ? a[e] : b[e], apart, share_->members());
      const float kept = second ? b[e] : a[e];
      elements_[0][e] = turns ? (second ? back : kept) : elements_[0][e];
      elements_[0][4 + e] = turns ? (second ? kept : back) : elements_[0][4 + e];
    }
  }

  /// The other cases: second elements go to the lanes of the first ones and back, through the
  /// memory of the row, whose elements are in registers.
  template <class F>
  RADDLE_DEVICE void exchange_halves(i32 half, F f) {
    const auto room = [&](i32 i) -> float& { return share_->room(i, down_); };
    const auto second = [&](i32 i) { return i >= half && i < 2 * half; };
    ptx::sync_lanes(share_->members());  // all have loaded
    each([&](float& x, i32 i) {
      if (second(i)) room(i - half) = x;
    });
    ptx::sync_lanes(share_->members());
    RADDLE_UNROLL
    for (i32 e = 0; e < 8; ++e) {
      const i32 i = share_->first_element(0) + e;  // first elements are in first chunks
      if (share_->owns(0) && i < half) f(elements_[0][e], room(i), i);
    }
    ptx::sync_lanes(share_->members());
    each([&](float& x, i32 i) {
      if (second(i)) x = room(i - half);
    });
    ptx::sync_lanes(share_->members());  // all have read, and may store
  }

  const Share* share_;
  i32 down_;
  float elements_[2][8];
};

/// Stands in for a row, to find out whether a variant's pairs span whole rows.
template <i32 dim>
struct WholePairs : math::SameBits {
  bool whole = true;

  RADDLE_DEVICE i32 size() const { return dim; }
  template <class F>
  RADDLE_DEVICE void map(F) {}
  template <class F>
  RADDLE_DEVICE void half_pairs(i32 n, F) {
    whole = whole && n == dim && RowShare<dim>::splits_evenly;
  }
  template <class F>
  RADDLE_DEVICE void interleaved_pairs(i32 n, F) {
    whole = whole && n == dim;
  }
  template <class F>
  RADDLE_DEVICE float sum(F) const {
    return 0.0f;
  }
};

RADDLE_ENGINE_END
