// The parameters of the cache kernels of GPUs, which the host passes by value; pointers are device
// pointers. Plain data: the host's compiler and NVRTC lay it out alike.
#pragma once

#include "raddle/engine/kernel/cache/accept.h"
#include "raddle/engine/kernel/cache/append.h"
#include "raddle/engine/kernel/cache/copy.h"
#include "raddle/engine/kernel/cache/merge.h"
#include "raddle/engine/kernel/cache/select.h"

namespace raddle {

/// A layout of one level; the layout's own `levels` is null.
struct KvLaunch {
  LayoutView layout;
  LevelView level;
  i64 num_units;  ///< of warps
};

struct AppendLaunch : KvLaunch {
  AppendView view;
};

struct AcceptLaunch : KvLaunch {
  AcceptView view;
};

struct SummarizeLaunch : KvLaunch {
  SummarizeView view;
  i32 max_pages;  ///< of a request
};

struct SelectLaunch : KvLaunch {
  SelectView view;
};

struct CopyLaunch {
  CopyView view;
  i64 num_units;
};

struct MergeLaunch {
  MergeView view;
  i64 num_units;
  i32 group_size;
};

// Both compilers check these numbers, so neither can lay the parameters out in its own way.
static_assert(sizeof(PoolBytes) == 48 && sizeof(SummaryBytes) == 40 && sizeof(RowBytes) == 24);
static_assert(sizeof(AppendLaunch) == 432 && sizeof(AcceptLaunch) == 368);
static_assert(sizeof(SummarizeLaunch) == 312 && sizeof(SelectLaunch) == 288);
static_assert(sizeof(CopyLaunch) == 384 && sizeof(MergeLaunch) == 216);

}  // namespace raddle

RADDLE_ENGINE_BEGIN

namespace kv {

constexpr i32 num_warps = 4;
constexpr i32 num_threads = 32 * num_warps;
/// A head in fp32 for each warp.
constexpr i32 shared_bytes = num_warps * max(max_head_dim, max_state_dim) * 4;

/// Warps of the blocks that select pages.
constexpr i32 num_select_warps = 8;
constexpr i32 num_select_threads = 32 * num_select_warps;
constexpr i32 select_shared_bytes = 2 * num_select_warps * 4;

/// Units of the score kernel: a warp scores as many pages at a time as it has lanes for.
RADDLE_FN i64 score_units(const SelectView& view, i32 num_requests) {
  i32 width = 1;
  while (width < view.summary.dim / piece_size) width *= 2;
  return i64{num_requests} * lists_of_request(view) * ceil_div(view.max_pages, 32 / width);
}

}  // namespace kv

RADDLE_ENGINE_END
