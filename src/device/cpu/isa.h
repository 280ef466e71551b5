// The instruction sets that this library was built for: kernels and limits of each.
#pragma once

#include "device/cpu/compute_loops.h"
#include "device/cpu/topology.h"
#include "raddle/engine/kernel/cache/page_scores.h"
#include "raddle/engine/kernel/cpu/launch.h"

namespace raddle::cpu {

/// Whether this library holds it: the option RADDLE_ISAS of its build leaves some out.
bool built(Isa isa);
/// What is compiled for an instruction set that the library was built for.
const CpuKernels& kernels(Isa isa);
const ComputeLoops& compute_loops(Isa isa);
const PageScores& page_scores(Isa isa);

}  // namespace raddle::cpu
