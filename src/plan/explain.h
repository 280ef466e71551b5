// A plan in words, for people: which schedule was taken, and what its workers are expected to do.
#pragma once

#include <string>

#include "plan/planner.h"

namespace raddle {

/// Microseconds that a cost stands for, by the planner's cost model.
double estimated_us(i64 cost);

/// The same in words: "12.5 us".
std::string in_time(i64 cost);

/// "12.5 MB", in powers of 1000.
std::string in_bytes(double bytes);

/// Lines on a plan's schedule, its estimated time, the keys and values that it reads, and its work
/// items; each ends with a line feed. `read_bytes`: as the function of that name.
std::string explain(const PlanArrays& plan, i32 read_bytes);

}  // namespace raddle
