// What all constructors of layouts share: index arrays on their way in are checked, narrowed to 32
// bits and copied; Layout (raddle/layout.h) is the view of them as the engine's normal form.
#pragma once

#include <cstddef>
#include <vector>

#include "raddle/engine/core/config.h"
#include "raddle/tensor.h"

namespace raddle {

/// Smallest and largest of some integers; min > max when there are none.
struct Extremes {
  i32 min = 0x7fffffff;
  i32 max = -0x7fffffff - 1;
};

Extremes extremes(const std::vector<i32>& values);

/// A one-dimensional array of any length.
std::vector<i32> copy_index(const char* name, const IndexRef& ref);

/// A one-dimensional array of exactly `count` entries; `why` says what it has one of ("one a
/// request").
std::vector<i32> copy_index(const char* name, const IndexRef& ref, std::size_t count,
                            const char* why);

/// Entries of at least 0.
std::vector<i32> copy_lengths(const char* name, const IndexRef& ref, std::size_t count,
                              const char* why);

/// Row pointers: at least one, starting at 0, never falling.
std::vector<i32> copy_indptr(const char* name, const IndexRef& ref);

/// Appends the `count` entries at elements first, first + step, … of `ref`.
void append_index(const char* name, const IndexRef& ref, i64 first, i64 step, i64 count,
                  std::vector<i32>& to);

/// A bound that is given, 0 or more, or -1.
void check_num_rows(i32 num_rows);

}  // namespace raddle
