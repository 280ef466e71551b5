// Attention for GPUs with mma.sync (sm_75 on): FlashAttention-2's loop over KV tiles (algorithm 1)
// in one persistent launch. Four warps compute the queue of one worker. Short and long queries have
// separate loops.
#pragma once

#include "raddle/engine/kernel/gpu/queue.h"
#include "raddle/engine/kernel/mma/long_queries.h"
#include "raddle/engine/kernel/mma/short_queries.h"
#include "raddle/engine/kernel/mma/wide_queries.h"

RADDLE_ENGINE_BEGIN

namespace mma {

/// Whose memory contractions at the end of a queue use.
template <class Kernel>
using EndMemory = typename Either<Kernel::wide, ShortWideMemory<Kernel>, ShortMemory<Kernel>>::Type;

/// The loops that compute the items of each shape.
template <class Kernel, class Variant>
using Long = typename Either<Kernel::wide, WideQueries<Kernel, Variant, Kernel::long_rows / 16>,
                             LongQueries<Kernel, Variant, Kernel::long_rows / 64>>::Type;
template <class Kernel, class Variant>
using Short = typename Either<Kernel::wide, WideQueries<Kernel, Variant, 1>,
                              ShortQueries<Kernel, Variant>>::Type;

/// Computes long queries, those of the worker's own queue and then those it draws from the
/// shared one, and after them short queries. Two loops one after the other leave all registers to
/// each of them; as branches of one loop, they spill.
template <class Kernel, class Variant>
RADDLE_DEVICE void attend(const GpuLaunch& launch, const Variant& variant) {
  const PlanView& plan = launch.plan;
  const auto is_short = [&](i32 i) {
    return plan.query_tiles[plan.items[i].query_tile].shape == short_queries;
  };
  attend_queue<Kernel, EndMemory<Kernel>>(launch, variant, [&](i32 begin, i32 end) {
    RADDLE_ROLLED
    for (i32 i = first_long(launch, begin, end); i >= 0;)
      i = Long<Kernel, Variant>(launch, variant, i).run([&](i32 item) {
        return next_long(launch, ptx::block_index(), item);
      });
    for (i32 i = begin; i < end;)
      i = is_short(i) ? Short<Kernel, Variant>(launch, variant, i, end).run() : i + 1;
    return true;
  });
}

/// The entry for plans that have short queries only, such as batches that only decode: a third of
/// the code, and no registers are held for the other loop.
template <class Kernel, class Variant>
RADDLE_DEVICE void attend_short(const GpuLaunch& launch, const Variant& variant) {
  attend_queue<Kernel, EndMemory<Kernel>>(launch, variant, [&](i32 begin, i32 end) {
    bool shares = launch.layout.num_levels > 1;
    for (i32 i = begin; i < end;) {
      Short<Kernel, Variant> items(launch, variant, i, end);
      i = items.run();
      shares = shares || items.leaves_shares();
    }
    return shares;
  });
}

}  // namespace mma

RADDLE_ENGINE_END
