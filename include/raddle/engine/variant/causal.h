// Causal attention: a row keeps its own key and those before it in the request.
#pragma once

#include "raddle/engine/variant/contract.h"

RADDLE_ENGINE_BEGIN

struct Causal {
  RADDLE_FN bool mask(const Row& r, const Key& c) const { return c.kv_index <= r.q_index; }

  RADDLE_FN KvSpan kv_span(const Tile& t) const { return KvSpan{{0, t.q_index.last}, everything}; }

  RADDLE_FN KvSpan row_span(const Row& r, Range) const {
    return KvSpan{{0, r.q_index}, everything};
  }

  RADDLE_FN Coverage coverage(const Tile& t) const {
    if (t.kv_index.first > t.q_index.last) return Coverage::empty;
    return t.kv_index.last <= t.q_index.first ? Coverage::full : Coverage::partial;
  }
};
RADDLE_VARIANT_PLAIN(Causal, "causal");

RADDLE_ENGINE_END
