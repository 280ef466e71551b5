// The contract's parts as stages: one function a part, looping over key lanes or head elements,
// made from the variant's own functions. The variant is copied to a local first, so that the
// compiler knows that nothing the loop writes can change its members.
#pragma once

#include "raddle/engine/variant/parts.h"
#include "raddle/engine/variant/stages.h"

RADDLE_ENGINE_BEGIN

namespace cpu {

/// The stages of V, all but its name and members.
template <class V>
constexpr VariantOps stages_of() {
  VariantOps ops{};
  ops.bytes = static_cast<i32>(sizeof(V));
  ops.scan = scan_of<V>();

  if constexpr (has_query<V>)
    ops.query = [](const void* self, float* q, i32 dim, const Row& row) {
      const V v = *static_cast<const V*>(self);
      HeadVector vec(q, dim);
      v.query(vec, row);
    };
  if constexpr (has_key<V>)
    ops.key = [](const void* self, float* k, i32 dim, const Key& key) {
      const V v = *static_cast<const V*>(self);
      HeadVector vec(k, dim);
      v.key(vec, key);
    };
  if constexpr (has_value<V>)
    ops.value = [](const void* self, float* x, i32 dim, const Key& key) {
      const V v = *static_cast<const V*>(self);
      HeadVector vec(x, dim);
      v.value(vec, key);
    };
  if constexpr (has_logits<V>)
    // All rows in one call, and their scale on the way: a pass over a row and what a call sets up
    // take as long as a short expression.
    ops.logits = [](const void* self, const LogitRows& logits, const KeyLanes& keys) {
      const V v = *static_cast<const V*>(self);
      const LogitRows all = logits;
      const KeyLanes k = keys;
      for (i32 m = 0; m < all.num_rows; ++m) {
        const Row r = all.rows[m];
        float* s = all.s + i64{m} * all.stride;
#pragma GCC ivdep
        for (i32 j = 0; j < all.n; ++j)
          s[j] =
              v.logits(s[j] * all.scale, r, Key{k.request, k.kv_index[j], k.kv_pos[j], k.kv_head});
      }
    };
  if constexpr (has_mask<V>)
    ops.mask = [](const void* self, u8* keep, i32 n, const Row& row, const KeyLanes& keys) {
      const V v = *static_cast<const V*>(self);
      const Row r = row;
      const KeyLanes k = keys;
#pragma GCC ivdep
      for (i32 j = 0; j < n; ++j)
        keep[j] = v.mask(r, Key{k.request, k.kv_index[j], k.kv_pos[j], k.kv_head}) ? u8{1} : u8{0};
    };
  if constexpr (has_kv_span<V>)
    ops.kv_span = [](const void* self, const Tile& t) {
      return static_cast<const V*>(self)->kv_span(t);
    };
  if constexpr (has_coverage<V>)
    ops.coverage = [](const void* self, const Tile& t) {
      return static_cast<const V*>(self)->coverage(t);
    };
  if constexpr (has_sink<V>)
    ops.sink = [](const void* self, const Row& r) { return static_cast<const V*>(self)->sink(r); };
  if constexpr (has_output<V>)
    ops.output = [](const void* self, float* o, i32 dim, const Row& row, float lse) {
      const V v = *static_cast<const V*>(self);
      HeadVector vec(o, dim);
      v.output(vec, row, lse);
    };
  return ops;
}

template <class V>
constexpr VariantOps variant_ops() {
  VariantOps ops = stages_of<V>();
  ops.name = Describe<V>::name;
  ops.type = Describe<V>::type;
  ops.members = Describe<V>::members;
  ops.num_members = Describe<V>::num_members;
  return ops;
}

}  // namespace cpu

RADDLE_ENGINE_END
