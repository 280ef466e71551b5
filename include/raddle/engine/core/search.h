// Bisection, for host and device.
#pragma once

#include "raddle/engine/core/config.h"

RADDLE_ENGINE_BEGIN

/// The first i of [begin, end) for which `holds(i)`, or end where there is none. `holds` is false
/// up to that i and true from it on.
template <class Holds>
RADDLE_FN i32 first_where(i32 begin, i32 end, const Holds& holds) {
  while (begin < end) {
    const i32 middle = begin + (end - begin) / 2;
    if (holds(middle)) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

RADDLE_ENGINE_END
