// The numbers that a replay computes with: a counter-based hash of (seed, layer, owner, position,
// head) and of which tensor is meant. Any row can be computed at any time, so that the
// reference needs neither pool nor page table nor plan, and no row depends on the batch that it was
// in.
//
// A row's key is mixed with 64 bits once; its elements cost one 32-bit mix each (two
// multiplications, C. Wellons' lowbias32), which vectorises. The sum of the four bytes of that is
// close enough to a normal distribution, within ±3.45 standard deviations, and exact in every
// element type's arithmetic but for one rounding.
#pragma once

#include "raddle/engine/core/dtype.h"

namespace raddle::replay {

/// Which tensor a row belongs to.
enum class Stream : u32 { query, key, value, sink };

/// All that tells one row from another.
struct RowId {
  u64 seed;
  Stream stream;
  i32 layer;
  i64 owner;  ///< a request, or what several of them share (SharedPrompts)
  i32 position, head;
};

struct RowKey {
  u32 start, twist;
  float amplitude;  ///< standard deviation of the row's elements
};

/// Every fourth (position, query head) is peaked: logits of standard deviation 3, a few keys
/// decide, and the softmax has work to do. The others have 1/2: all keys weigh about the same, so
/// that each one shows.
constexpr float flat_amplitude = 0.5f;
constexpr float peaked_amplitude = 3.0f;
/// Sinks are drawn around this, so that they weigh as much as some twenty keys.
constexpr float sink_mean = 3.0f;

/// The finaliser of splitmix64: every bit of the result depends on every bit of x.
constexpr u64 mix64(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr u64 pair64(i32 high, i32 low) {
  return static_cast<u64>(static_cast<u32>(high)) << 32 | static_cast<u32>(low);
}

constexpr RowKey row_key(const RowId& id) {
  u64 h = mix64(id.seed + 0x9e3779b97f4a7c15ull);
  h = mix64(h ^ pair64(static_cast<i32>(id.stream), id.layer));
  h = mix64(h ^ static_cast<u64>(id.owner));
  h = mix64(h ^ pair64(id.position, id.head));
  const float query = (h >> 62) == 0 ? peaked_amplitude : flat_amplitude;
  const float amplitude = id.stream == Stream::query ? query : 1.0f;
  return RowKey{static_cast<u32>(h), static_cast<u32>(h >> 32), amplitude};
}

/// Element e of the row, before it is rounded to the row's element type.
constexpr float element(const RowKey& row, u32 e) {
  u32 x = row.start + e * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) + row.twist;
  x = x * 0x846ca68bu;
  x = x ^ (x >> 16);
  const u32 halves = (x & 0x00ff00ffu) + ((x >> 8) & 0x00ff00ffu);
  const i32 sum = static_cast<i32>((halves & 0xffffu) + (halves >> 16));
  // The sum of four bytes has mean 510 and variance (256² - 1) / 3.
  constexpr float unit = 1.0f / 147.80054f;
  return static_cast<float>(sum - 510) * (unit * row.amplitude);
}

/// The learned logit of a query head's sink.
constexpr float sink_logit(u64 seed, i32 layer, i32 head) {
  return sink_mean + element(row_key({seed, Stream::sink, layer, 0, 0, head}), 0);
}

}  // namespace raddle::replay
