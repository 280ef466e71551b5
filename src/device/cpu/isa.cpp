#include "device/cpu/isa.h"

#include <algorithm>
#include <iterator>

// built_isas.inc is the build's: a line RADDLE_BUILT(isa) for each instruction set.
#define RADDLE_BUILT(isa)              \
  namespace raddle::isa {              \
  const CpuKernels& cpu_kernels();     \
  const ComputeLoops& compute_loops(); \
  const PageScores& page_scores();     \
  }
#include "built_isas.inc"
#undef RADDLE_BUILT

namespace raddle::cpu {
namespace {

/// What isa_*.cpp define for one instruction set.
struct Units {
  Isa isa;
  const CpuKernels& (*kernels)();
  const ComputeLoops& (*compute_loops)();
  const PageScores& (*page_scores)();
};

#define RADDLE_BUILT(isa) \
  {Isa::isa, raddle::isa::cpu_kernels, raddle::isa::compute_loops, raddle::isa::page_scores},
constexpr Units all_units[] = {
#include "built_isas.inc"
};
#undef RADDLE_BUILT

const Units* find(Isa isa) {
  const auto* found = std::find_if(std::begin(all_units), std::end(all_units),
                                   [&](const Units& units) { return units.isa == isa; });
  return found == std::end(all_units) ? nullptr : found;
}

}  // namespace

bool built(Isa isa) { return find(isa) != nullptr; }
const CpuKernels& kernels(Isa isa) { return find(isa)->kernels(); }
const ComputeLoops& compute_loops(Isa isa) { return find(isa)->compute_loops(); }
const PageScores& page_scores(Isa isa) { return find(isa)->page_scores(); }

}  // namespace raddle::cpu
