// Compiled once an instruction set, with RADDLE_ISA naming the namespace of everything included
// here.
#include "raddle/engine/kernel/cache/lane_scores.h"
#include "raddle/engine/kernel/cache/page_scores.h"
#if defined(__AMX_BF16__)
#include "raddle/engine/kernel/cache/tile_scores.h"
#endif

RADDLE_ENGINE_BEGIN

namespace cpu {
namespace {

template <class T>
void score_by_lanes(const ScoreJob& job) {
  score_pages<T>(job, 0, job.count);
}

template <class T>
constexpr PageScorer by_lanes{parted_bytes, part_row<T>, score_by_lanes<T>};

#if defined(__AMX_BF16__)
constexpr PageScorer of_bf16{tiled_bytes, arrange_tiles, score_in_tiles};
#else
constexpr PageScorer of_bf16 = by_lanes<bf16>;
#endif

constexpr PageScores scores{by_lanes<float>, by_lanes<f16>, of_bf16};

}  // namespace
}  // namespace cpu

const PageScores& page_scores();
const PageScores& page_scores() { return cpu::scores; }

RADDLE_ENGINE_END
