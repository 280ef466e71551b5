// Which parts of the contract a variant has.
#pragma once

#include "raddle/engine/variant/contract.h"

RADDLE_ENGINE_BEGIN

template <class V>
concept has_query = requires(const V v, HeadVector x, Row r) {
  v.query(x, r);
};
template <class V>
concept has_key = requires(const V v, HeadVector x, Key c) {
  v.key(x, c);
};
template <class V>
concept has_value = requires(const V v, HeadVector x, Key c) {
  v.value(x, c);
};
template <class V>
concept has_logits = requires(const V v, Row r, Key c) {
  v.logits(0.0f, r, c);
};
template <class V>
concept has_near_logits = has_logits<V> && requires(const V v, Row r, Key c) {
  v.near_logits(0.0f, 1.0f, r, c) <= v.near_limit(1.0f);
};
/// Logits change by a multiple of the distance alone, which a row's softmax can take for all keys.
template <class V>
concept has_distance_slope = has_logits<V> && requires(const V v, Row r) {
  v.distance_slope(r);
};
template <class V>
concept has_mask = requires(const V v, Row r, Key c) {
  v.mask(r, c);
};
template <class V>
concept has_kv_span = requires(const V v, Tile t) {
  v.kv_span(t);
};
template <class V>
concept has_row_span = requires(const V v, Row r) {
  v.row_span(r, RowKeys{});
};
/// kv_span may bound nothing, which depends on members: an array may be in order or in none.
template <class V>
concept may_lack_spans = has_kv_span<V> && requires(const V v) {
  v.knows_spans();
};
template <class V>
concept has_coverage = requires(const V v, Tile t) {
  v.coverage(t);
};
/// Whether what a row keeps may be all that kv_span leaves, which coverage can tell then.
template <class V>
RADDLE_FN constexpr bool keeps_spans() {
  if constexpr (requires { V::keeps_spans; })
    return V::keeps_spans;
  else
    return has_kv_span<V> && has_coverage<V>;
}
/// Whether kv_span bounds what rows keep.
template <class V>
RADDLE_FN constexpr bool knows_spans(const V& variant) {
  if constexpr (may_lack_spans<V>)
    return variant.knows_spans();
  else
    return has_kv_span<V>;
}
template <class V>
concept has_sink = requires(const V v, Row r) {
  v.sink(r);
};
template <class V>
concept has_output = requires(const V v, HeadVector x, Row r) {
  v.output(x, r, 0.0f);
};

template <class V>
RADDLE_FN constexpr Scan scan_of() {
  if constexpr (requires { V::scan; }) return V::scan;
  return Scan::softmax;
}

/// Checks that every function with the name of a part has the part's signature: with another
/// signature it would silently be left out. Instantiated for every variant that is compiled just in
/// time.
template <class V>
struct FollowsContract {
  // clang-format off
  static_assert(has_logits<V> || !requires { &V::logits; },
                "logits: expected RADDLE_FN float logits(float s, const Row& r, const Key& c) const");
  static_assert(has_near_logits<V> || !requires { &V::near_logits; },
                "near_logits: expected RADDLE_FN float near_logits(float s, float scale, const Row& r, const Key& c) const, "
                "and beside it logits and RADDLE_FN float near_limit(float scale) const");
  static_assert(has_distance_slope<V> || !requires { &V::distance_slope; },
                "distance_slope: expected RADDLE_FN float distance_slope(const Row& r) const, and logits beside it");
  static_assert(has_mask<V> || !requires { &V::mask; },
                "mask: expected RADDLE_FN bool mask(const Row& r, const Key& c) const");
  static_assert(has_kv_span<V> || !requires { &V::kv_span; },
                "kv_span: expected RADDLE_FN KvSpan kv_span(const Tile& t) const");
  static_assert(has_row_span<V> || !requires { &V::row_span; },
                "row_span: expected RADDLE_FN KvSpan row_span(const Row& r, Range keys) const");
  static_assert(!has_row_span<V> || (has_kv_span<V> && has_coverage<V>),
                "row_span says of a row what kv_span and coverage say of tiles; expected them beside it");
  static_assert(may_lack_spans<V> || !requires { &V::knows_spans; },
                "knows_spans: expected RADDLE_FN bool knows_spans() const, and kv_span beside it");
  static_assert(has_coverage<V> || !requires { &V::coverage; },
                "coverage: expected RADDLE_FN Coverage coverage(const Tile& t) const");
  static_assert(has_sink<V> || !requires { &V::sink; },
                "sink: expected RADDLE_FN float sink(const Row& r) const");
  static_assert(has_query<V> || !requires { &V::template query<HeadVector>; },
                "query: expected template <class Vec> RADDLE_FN void query(Vec& q, const Row& r) const");
  static_assert(has_key<V> || !requires { &V::template key<HeadVector>; },
                "key: expected template <class Vec> RADDLE_FN void key(Vec& k, const Key& c) const");
  static_assert(has_value<V> || !requires { &V::template value<HeadVector>; },
                "value: expected template <class Vec> RADDLE_FN void value(Vec& v, const Key& c) const");
  static_assert(has_output<V> || !requires { &V::template output<HeadVector>; },
                "output: expected template <class Vec> RADDLE_FN void output(Vec& o, const Row& r, float lse) const");
  // clang-format on
  static_assert(has_logits<V> || has_mask<V> || has_sink<V> || has_query<V> || has_key<V> ||
                    has_value<V> || has_output<V> || scan_of<V>() == Scan::sum,
                "a variant needs at least one part of the contract: query, key, value, logits, "
                "mask, sink, output or scan");
  static_assert(has_mask<V> || !(has_kv_span<V> || has_coverage<V>),
                "kv_span and coverage say what a mask keeps; expected a mask beside them");
  static_assert(__is_trivially_copyable(V), "a variant's members are scalars and tensors");
};

RADDLE_ENGINE_END
