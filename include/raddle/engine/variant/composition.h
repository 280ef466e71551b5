// A composition of variants as one struct of the contract: what a GPU kernel is compiled with, and
// what a fused CPU stage is made of. The variants' structs lie one after another, each in a slot of
// whole 16 bytes, so that the host knows their offsets without compiling anything. The composition
// has a part of the contract only if one of its variants has it.
//
//   Composition<AllOf<Leaf<1>, Leaf<2>>, SoftCap, Causal, SlidingWindow>
//
// keeps what variants 1 and 2, Causal and SlidingWindow, both keep; variants are numbered from 0.
#pragma once

#include "raddle/engine/variant/parts.h"

RADDLE_ENGINE_BEGIN

/// Bytes of a variant's slot in a composition.
RADDLE_FN constexpr i32 slot_bytes(i32 bytes) { return round_up(bytes, 16); }

/// The variants' structs in order.
template <class... V>
struct Pack;
template <>
struct Pack<> {};
template <class First, class... Rest>
struct Pack<First, Rest...> {
  alignas(16) First first;
  [[no_unique_address]] Pack<Rest...> rest;
};

template <i32 index, class First, class... Rest>
RADDLE_FN constexpr const auto& variant_at(const Pack<First, Rest...>& pack) {
  if constexpr (index == 0)
    return pack.first;
  else
    return variant_at<index - 1>(pack.rest);
}

/// Calls f with every variant, in order.
template <class F>
RADDLE_FN constexpr void for_each_variant(const Pack<>&, F&&) {}
template <class First, class... Rest, class F>
RADDLE_FN constexpr void for_each_variant(const Pack<First, Rest...>& pack, F&& f) {
  f(pack.first);
  for_each_variant(pack.rest, f);
}

// --- mask expressions: types that say how the variants' masks combine ---------------------------
//
// keeps_spans: whether what a row keeps may be all that kv_span leaves (parts.h); has_row_span:
// whether row_span tells; may_lack_spans: whether knows_spans tells if they bound anything.

/// The mask of the variant at `index`.
template <i32 index>
struct Leaf {
  template <class P>
  static constexpr bool keeps_spans = requires(const P& variants, const Tile& t) {
    variant_at<index>(variants).kv_span(t);
  };
  template <class P>
  static constexpr bool has_row_span = requires(const P& variants, const Row& r) {
    variant_at<index>(variants).row_span(r, RowKeys{});
  };
  template <class P>
  RADDLE_FN static KvSpan row_span(const P& variants, const Row& r, const RowKeys& keys) {
    return variant_at<index>(variants).row_span(r, keys);
  }
  template <class P>
  static constexpr bool may_lack_spans = requires(const P& variants) {
    variant_at<index>(variants).knows_spans();
  };
  template <class P>
  RADDLE_FN static bool knows_spans(const P& variants) {
    if constexpr (may_lack_spans<P>)
      return variant_at<index>(variants).knows_spans();
    else
      return keeps_spans<P>;
  }
  template <class P>
  RADDLE_FN static bool mask(const P& variants, const Row& r, const Key& c) {
    return variant_at<index>(variants).mask(r, c);
  }
  template <class P>
  RADDLE_FN static KvSpan kv_span(const P& variants, const Tile& t) {
    const auto& v = variant_at<index>(variants);
    if constexpr (requires { v.kv_span(t); })
      return v.kv_span(t);
    else
      return KvSpan{everything, everything};
  }
  template <class P>
  RADDLE_FN static Coverage coverage(const P& variants, const Tile& t) {
    const auto& v = variant_at<index>(variants);
    if constexpr (requires { v.coverage(t); })
      return v.coverage(t);
    else
      return Coverage::partial;
  }
};

/// Both sides keep.
template <class A, class B>
struct AllOf {
  template <class P>
  static constexpr bool keeps_spans = A::template keeps_spans<P>&& B::template keeps_spans<P>;
  template <class P>
  static constexpr bool has_row_span = A::template has_row_span<P>&& B::template has_row_span<P>;
  template <class P>
  RADDLE_FN static KvSpan row_span(const P& variants, const Row& r, const RowKeys& keys) {
    const KvSpan of_a = A::row_span(variants, r, keys);
    const Range left = intersect(keys, intersect(of_a.index, of_a.pos));
    return both(of_a, B::row_span(variants, r, RowKeys{left, keys.guess}));
  }
  template <class P>
  static constexpr bool may_lack_spans = keeps_spans<P> && (A::template may_lack_spans<P> ||
                                                            B::template may_lack_spans<P>);
  template <class P>
  RADDLE_FN static bool knows_spans(const P& variants) {
    return A::knows_spans(variants) && B::knows_spans(variants);
  }
  template <class P>
  RADDLE_FN static bool mask(const P& variants, const Row& r, const Key& c) {
    return A::mask(variants, r, c) & B::mask(variants, r, c);
  }
  template <class P>
  RADDLE_FN static KvSpan kv_span(const P& variants, const Tile& t) {
    return both(A::kv_span(variants, t), B::kv_span(variants, t));
  }
  template <class P>
  RADDLE_FN static Coverage coverage(const P& variants, const Tile& t) {
    return both(A::coverage(variants, t), B::coverage(variants, t));
  }
};

/// Either side keeps.
template <class A, class B>
struct AnyOf {
  template <class P>
  static constexpr bool keeps_spans = false;  // what either side keeps may have gaps
  template <class P>
  static constexpr bool has_row_span = false;
  template <class P>
  static constexpr bool may_lack_spans = false;
  template <class P>
  RADDLE_FN static bool mask(const P& variants, const Row& r, const Key& c) {
    return A::mask(variants, r, c) | B::mask(variants, r, c);
  }
  template <class P>
  RADDLE_FN static KvSpan kv_span(const P& variants, const Tile& t) {
    return either(A::kv_span(variants, t), B::kv_span(variants, t));
  }
  template <class P>
  RADDLE_FN static Coverage coverage(const P& variants, const Tile& t) {
    return either(A::coverage(variants, t), B::coverage(variants, t));
  }
};

/// No variant has a mask.
struct NoMask {
  template <class P>
  static constexpr bool keeps_spans = false;
  template <class P>
  static constexpr bool has_row_span = false;
  template <class P>
  static constexpr bool may_lack_spans = false;
};

/// The logit after this variant's `logits` part if the variant has this scan; otherwise s itself.
template <Scan scan, class V>
RADDLE_FN float logits_of(const V& v, float s, const Row& r, const Key& c) {
  if constexpr (has_logits<V> && scan_of<V>() == scan)
    return v.logits(s, r, c);
  else
    return s;
}

/// `Mask` is NoMask or a mask expression over the variants.
template <class Mask, class... Variants>
struct Composition {
  Pack<Variants...> variants;

  static constexpr Scan scan =
      ((scan_of<Variants>() == Scan::sum) || ...) ? Scan::sum : Scan::softmax;
  // NVRTC has no <type_traits>: only a NoMask* converts to a NoMask*.
  static constexpr bool masked = !requires(NoMask * none, Mask* mask) { none = mask; };
  static constexpr bool keeps_spans = Mask::template keeps_spans<Pack<Variants...>>;
  /// Whether the first variant with logits has near_logits.
  static constexpr bool starts_near = [] {
    bool found = false, near = false;
    ((has_logits<Variants> && !found ? (near = has_near_logits<Variants>, found = true) : true),
     ...);
    return near && scan == Scan::softmax;
  }();
  /// Whether one variant alone has logits.
  static constexpr bool changes_once = (i32{has_logits<Variants>} + ... + 0) == 1;

  template <class Vec>
  requires(has_query<Variants> || ...) RADDLE_FN void query(Vec& q, const Row& r) const {
    for_each_variant(variants, [&](const auto& v) {
      if constexpr (requires { v.query(q, r); }) v.query(q, r);
    });
  }

  template <class Vec>
  requires(has_key<Variants> || ...) RADDLE_FN void key(Vec& k, const Key& c) const {
    for_each_variant(variants, [&](const auto& v) {
      if constexpr (requires { v.key(k, c); }) v.key(k, c);
    });
  }

  template <class Vec>
  requires(has_value<Variants> || ...) RADDLE_FN void value(Vec& x, const Key& c) const {
    for_each_variant(variants, [&](const auto& v) {
      if constexpr (requires { v.value(x, c); }) v.value(x, c);
    });
  }

  /// The part that turns logits into weights (Scan::sum) runs last, wherever it stands in the list.
  RADDLE_FN float logits(float s, const Row& r, const Key& c) const
      requires(has_logits<Variants> || ...) {
    for_each_variant(variants, [&](const auto& v) { s = logits_of<Scan::softmax>(v, s, r, c); });
    if constexpr (scan == Scan::sum)
      for_each_variant(variants, [&](const auto& v) { s = logits_of<Scan::sum>(v, s, r, c); });
    return s;
  }

  /// Of the first variant with logits; the others see what it returns.
  RADDLE_FN float near_limit(float scale) const requires starts_near {
    float limit = 0.0f;
    bool found = false;
    for_each_variant(variants, [&](const auto& v) {
      if constexpr (requires { v.near_limit(scale); })
        if (!found) limit = v.near_limit(scale), found = true;
    });
    return limit;
  }
  RADDLE_FN float near_logits(float s, float scale, const Row& r,
                              const Key& c) const requires starts_near {
    bool is_scaled = false;
    for_each_variant(variants, [&](const auto& v) {
      if constexpr (requires { v.near_limit(scale); })
        s = is_scaled ? v.logits(s, r, c) : v.near_logits(s, scale, r, c), is_scaled = true;
      else
        s = logits_of<Scan::softmax>(v, s, r, c);
    });
    return s;
  }
  RADDLE_FN float distance_slope(const Row& r) const
      requires(changes_once && (has_distance_slope<Variants> || ...)) {
    float slope = 0.0f;
    for_each_variant(variants, [&](const auto& v) {
      if constexpr (requires { v.distance_slope(r); }) slope = v.distance_slope(r);
    });
    return slope;
  }

  RADDLE_FN bool mask(const Row& r, const Key& c) const requires masked {
    return Mask::mask(variants, r, c);
  }

  RADDLE_FN KvSpan kv_span(const Tile& t) const requires masked {
    return Mask::kv_span(variants, t);
  }

  RADDLE_FN KvSpan row_span(const Row& r, const RowKeys& keys) const
      requires(masked&& Mask::template has_row_span<Pack<Variants...>>) {
    return Mask::row_span(variants, r, keys);
  }

  RADDLE_FN bool knows_spans() const
      requires(masked&& Mask::template may_lack_spans<Pack<Variants...>>) {
    return Mask::knows_spans(variants);
  }

  RADDLE_FN Coverage coverage(const Tile& t) const requires masked {
    return Mask::coverage(variants, t);
  }

  /// At most one variant has a sink (src/variant/bound_variant.cpp refuses more).
  RADDLE_FN float sink(const Row& r) const requires(has_sink<Variants> || ...) {
    float logit = -math::infinity;
    for_each_variant(variants, [&](const auto& v) {
      if constexpr (requires { v.sink(r); }) logit = v.sink(r);
    });
    return logit;
  }

  template <class Vec>
  requires(has_output<Variants> || ...) RADDLE_FN
      void output(Vec& o, const Row& r, float lse) const {
    for_each_variant(variants, [&](const auto& v) {
      if constexpr (requires { v.output(o, r, lse); }) v.output(o, r, lse);
    });
  }
};

RADDLE_ENGINE_END
