// Prefix discovery on the device: requests whose page lists begin alike (engine/plan/prefixes.h)
// become the groups of a level before the requests' own.
#pragma once

#include "raddle/engine/kernel/gpu_planner/context.h"
#include "raddle/engine/plan/units.h"

RADDLE_ENGINE_BEGIN

namespace planner {

RADDLE_FN i32 shareable(const DeviceBatch& batch, const DeviceRequest& q) {
  return shareable_pages(q.rows, q.keys, batch.page_size);
}

/// Links request r to the first one that shares enough of its leading pages. All threads of a block
/// call it.
RADDLE_DEVICE PrefixLink find_link(const PlanLaunch& launch, PlannerShared& shared, i32 r) {
  const DeviceBatch& batch = launch.batch;
  const i32 thread = ptx::thread_index(), threads = ptx::thread_count();
  const i32 depth = least_prefix_pages(batch.min_prefix, batch.page_size);
  const i32 max_rows = launch.maxima.max_qo_tokens;
  const DeviceRequest q = read_request(batch, max_rows, r);
  // The first other request is read together with this one, in one round trip to memory.
  DeviceRequest o = thread < r ? read_request(batch, max_rows, thread) : DeviceRequest{};
  const i32* list = batch.pages + q.begin;
  i32 common = shareable(batch, q);
  if (common < depth) return PrefixLink{r, 0};
  ptx::sync_block();  // every thread has read the result for the request before
  if (thread == 0) shared.report = PlanReport{int_max, r};
  ptx::sync_block();
  i32& differs = shared.report.errors;  // free for this use: the block does not plan meanwhile
  i32& leader = shared.report.request;
  for (i32 other = thread; other < r; other += threads) {
    if (other > thread) o = read_request(batch, max_rows, other);
    if (shareable(batch, o) < depth) continue;
    if (may_share(list, batch.pages + o.begin, depth)) {
      ptx::atomic_min(&leader, other);
      break;  // later requests of this thread cannot be the leader
    }
  }
  ptx::sync_block();
  const i32 found = leader;
  if (found == r) return link_to(r, r, common, depth);
  o = read_request(batch, max_rows, found);
  common = min(common, shareable(batch, o));
  for (i32 i = thread; i < common; i += threads) {
    if (shares_page(list, batch.pages + o.begin, i)) continue;
    ptx::atomic_min(&differs, i);
    break;
  }
  ptx::sync_block();
  return link_to(r, found, min(common, differs), depth);
}

/// Finds where every request's rows and tiles lie in its group, and which keys remain for its own
/// level; a warp a request.
RADDLE_DEVICE void place_members(Context& context) {
  const LayoutArrays to = context.arrays();
  const i32 page_size = context.launch.batch.page_size;
  for (i32 r = context.warp; r < context.num_requests; r += context.warps) {
    const PrefixLink link = context.scratch.links[r];
    const PrefixGroup group = context.scratch.group[link.leader];
    const bool grouped = link.pages > 0 && group.members > 1;
    const i32 pages = grouped ? context.scratch.depth[link.leader] : 0;
    i32 rows = 0, tiles = 0;
    for (i32 o = link.leader + context.lane; grouped && o < r; o += 32) {
      if (context.scratch.links[o].leader != link.leader) continue;
      rows += context.rows_of(o);
      tiles += context.tiles_of(o);
    }
    rows = add_lanes(rows);
    tiles = add_lanes(tiles);
    if (context.lane == 0) {
      context.scratch.row_before[r] = grouped ? rows : -1;
      context.scratch.tiles_before[r] = tiles;
      to.suffix[r] = context.scratch.kv_len[r] - pages * page_size;
      to.kv_begin[r] = pages * page_size;
      to.block_begin[r] += pages;
    }
    const i32 first = context.scratch.qo_indptr[r];
    const i32 begin = grouped ? group.row_begin + rows : 0;
    for (i32 i = context.lane; i < context.rows_of(r); i += 32) {
      to.row_request[first + i] = r;
      if (grouped) to.prefix_rows[begin + i] = first + i;
    }
  }
}

/// Computes the hulls over the rows of every query tile of the prefixes, from the first and last
/// row of each request in it. A warp a tile.
RADDLE_DEVICE void find_hulls(Context& context) {
  const i32 total = context.scratch.prefix_tile_indptr[context.num_prefixes];
  for (i32 c = context.warp; c < total; c += context.warps) {
    const i32 g = last_at_most(context.scratch.prefix_tile_indptr, context.num_prefixes, c);
    const i32 leader = context.scratch.group[g].leader;
    const i32 fused = context.scratch.group[leader].rows * context.config.group_size;
    const QueryTile tile =
        make_tile(context.config, 0, g, fused, c - context.scratch.prefix_tile_indptr[g]);
    const Range rows{tile.row_begin / context.config.group_size,
                     (tile.row_begin + tile.num_rows - 1) / context.config.group_size};
    RowHull h{{int_max, int_min}, {int_max, int_min}};
    for (i32 r = leader + context.lane; r < context.num_requests; r += 32) {
      if (context.scratch.links[r].leader != leader || context.scratch.row_before[r] < 0) continue;
      const i32 begin = context.scratch.row_before[r];
      const i32 count = context.rows_of(r);
      const Range held = intersect(rows, Range{begin, begin + count - 1});
      if (is_empty(held)) continue;
      const i32 q_index = context.scratch.kv_len[r] - count - begin;  // of the group's row 0
      h = RowHull{hull(h.request, Range{r, r}),
                  hull(h.q_index, Range{q_index + held.first, q_index + held.last})};
    }
    h = RowHull{join_lanes(h.request), join_lanes(h.q_index)};
    if (context.lane == 0) context.scratch.hulls[c] = h;
  }
}

/// Makes the arrays of the prefix level from the requests' links.
RADDLE_DEVICE void make_prefixes(Context& context) {
  const LayoutArrays to = context.arrays();
  const auto* found =
      reinterpret_cast<const PrefixLink*>(context.launch.scratch + context.launch.scratch_at.found);
  for (i32 r = context.thread; r < context.num_requests; r += context.threads) {
    PrefixLink link = found[r];
    // A list with a bad page is not used, and neither are links to it.
    if (context.marked(r, page_outside) || context.marked(link.leader, page_outside))
      link = PrefixLink{r, 0};
    context.scratch.links[r] = link;
    context.scratch.depth[r] = int_max;
    context.scratch.group[r] = PrefixGroup{0, 0, 0, 0, 0};
  }
  ptx::sync_block();
  for (i32 r = context.thread; r < context.num_requests; r += context.threads) {
    const PrefixLink link = context.scratch.links[r];
    if (link.pages == 0) continue;
    ptx::atomic_min(&context.scratch.depth[link.leader], link.pages);
    ptx::atomic_add(&context.scratch.group[link.leader].members, 1);
    ptx::atomic_add(&context.scratch.group[link.leader].rows, context.rows_of(r));
  }
  ptx::sync_block();
  Sums<3, i32> sums{};  // groups, rows, query tiles
  for (i32 base = 0; base < context.num_requests; base += context.threads) {
    const i32 r = base + context.thread;
    const bool leads = r < context.num_requests && context.scratch.links[r].leader == r &&
                       context.scratch.group[r].members > 1;
    Sums<3, i32> mine{};
    if (leads)
      mine = Sums<3, i32>{
          {1, context.scratch.group[r].rows,
           count_tiles(context.config, context.scratch.group[r].rows * context.config.group_size)}};
    const Sums<3, i32> before = context.scan.exclusive(mine, sums, context.num_requests - base);
    if (!leads) continue;
    const i32 g = before.of[0];
    context.scratch.group[r].number = g;
    context.scratch.group[r].row_begin = before.of[1];
    context.scratch.group[g].leader = r;
    context.scratch.prefix_tile_indptr[g] = before.of[2];
    to.prefix_indptr[g] = before.of[1];
    to.prefix_len[g] = context.scratch.depth[r] * context.launch.batch.page_size;
    to.prefix_begin[g] = to.block_begin[r];
  }
  context.num_prefixes = sums.of[0];
  if (context.thread == 0) {
    context.scratch.prefix_tile_indptr[context.num_prefixes] = sums.of[2];
    to.prefix_indptr[context.num_prefixes] = sums.of[1];
  }
  ptx::sync_block();
  place_members(context);
  ptx::sync_block();
  find_hulls(context);
  ptx::sync_block();
}

}  // namespace planner

RADDLE_ENGINE_END
