// Prefix discovery on the device: requests whose page lists begin alike (engine/plan/prefixes.h)
// become the groups of a level before the requests' own.
#pragma once

#include "raddle/engine/kernel/plan/context.h"
#include "raddle/engine/plan/tiles.h"

RADDLE_ENGINE_BEGIN

namespace planner {

RADDLE_FN i32 shareable(const DeviceBatch& batch, const DeviceRequest& q) {
  return shareable_pages(q.rows, q.keys, batch.page_size);
}

/// Links request r to the first one that shares enough of its leading pages; by a whole block.
RADDLE_DEVICE PrefixLink find_link(const PlanLaunch& launch, PlannerShared& x, i32 r) {
  const DeviceBatch& batch = launch.batch;
  const i32 thread = ptx::thread_index(), threads = ptx::thread_count();
  const i32 depth = least_prefix_pages(batch.min_prefix, batch.page_size);
  const i32 max_rows = launch.maxima.max_qo_tokens;
  const DeviceRequest q = read_request(batch, max_rows, r);
  // A first other one beside it: one trip to memory.
  DeviceRequest o = thread < r ? read_request(batch, max_rows, thread) : DeviceRequest{};
  const i32* list = batch.pages + q.begin;
  i32 common = shareable(batch, q);
  if (common < depth) return PrefixLink{r, 0};
  ptx::sync_block();  // the request before has read these
  if (thread == 0) x.report = PlanReport{int_max, r};
  ptx::sync_block();
  i32& differs = x.report.errors;  // the block does not plan while it looks
  i32& leader = x.report.request;
  for (i32 other = thread; other < r; other += threads) {
    if (other > thread) o = read_request(batch, max_rows, other);
    if (shareable(batch, o) < depth) continue;
    if (may_share(list, batch.pages + o.begin, depth)) {
      ptx::atomic_min(&leader, other);
      break;  // its own later ones are no leaders
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

/// Where every request's rows and tiles lie in its group, and what its own level keeps; a warp a
/// request.
RADDLE_DEVICE void place_members(Context& b) {
  const LayoutArrays to = b.arrays();
  const i32 page_size = b.launch.batch.page_size;
  for (i32 r = b.warp; r < b.num_requests; r += b.warps) {
    const PrefixLink link = b.s.links[r];
    const PrefixGroup group = b.s.group[link.leader];
    const bool grouped = link.pages > 0 && group.members > 1;
    const i32 pages = grouped ? b.s.depth[link.leader] : 0;
    i32 rows = 0, tiles = 0;
    for (i32 o = link.leader + b.lane; grouped && o < r; o += 32) {
      if (b.s.links[o].leader != link.leader) continue;
      rows += b.rows_of(o);
      tiles += b.tiles_of(o);
    }
    rows = add_lanes(rows);
    tiles = add_lanes(tiles);
    if (b.lane == 0) {
      b.s.row_before[r] = grouped ? rows : -1;
      b.s.tiles_before[r] = tiles;
      to.suffix[r] = b.s.kv_len[r] - pages * page_size;
      to.kv_begin[r] = pages * page_size;
      to.block_begin[r] += pages;
    }
    const i32 first = b.s.qo_indptr[r];
    const i32 begin = grouped ? group.row_begin + rows : 0;
    for (i32 i = b.lane; i < b.rows_of(r); i += 32) {
      to.row_request[first + i] = r;
      if (grouped) to.prefix_rows[begin + i] = first + i;
    }
  }
}

/// Hulls over the rows of every query tile of the prefixes: of each request that has some, the ends
/// say it all. A warp a tile.
RADDLE_DEVICE void find_hulls(Context& b) {
  const i32 total = b.s.prefix_tiles[b.num_prefixes];
  for (i32 c = b.warp; c < total; c += b.warps) {
    const i32 g = last_at_most(b.s.prefix_tiles, b.num_prefixes, c);
    const i32 leader = b.s.group[g].leader;
    const i32 fused = b.s.group[leader].rows * b.config.group_size;
    const QueryTile tile = make_tile(b.config, 0, g, fused, c - b.s.prefix_tiles[g]);
    const Range rows{tile.row_begin / b.config.group_size,
                     (tile.row_begin + tile.num_rows - 1) / b.config.group_size};
    RowHull h{{int_max, int_min}, {int_max, int_min}};
    for (i32 r = leader + b.lane; r < b.num_requests; r += 32) {
      if (b.s.links[r].leader != leader || b.s.row_before[r] < 0) continue;
      const i32 begin = b.s.row_before[r];
      const i32 count = b.rows_of(r);
      const Range held = intersect(rows, Range{begin, begin + count - 1});
      if (is_empty(held)) continue;
      const i32 q_index = b.s.kv_len[r] - count - begin;  // of the group's row 0
      h = RowHull{hull(h.request, Range{r, r}),
                  hull(h.q_index, Range{q_index + held.first, q_index + held.last})};
    }
    h = RowHull{join_lanes(h.request), join_lanes(h.q_index)};
    if (b.lane == 0) b.s.hulls[c] = h;
  }
}

/// Makes the prefix level's arrays of the requests' links.
RADDLE_DEVICE void make_prefixes(Context& b) {
  const LayoutArrays to = b.arrays();
  const auto* found =
      reinterpret_cast<const PrefixLink*>(b.launch.scratch + b.launch.scratch_at.found);
  for (i32 r = b.thread; r < b.num_requests; r += b.threads) {
    PrefixLink link = found[r];
    // A list with a bad page is not used, so neither are its links.
    if (b.marked(r, page_outside) || b.marked(link.leader, page_outside)) link = PrefixLink{r, 0};
    b.s.links[r] = link;
    b.s.depth[r] = int_max;
    b.s.group[r] = PrefixGroup{0, 0, 0, 0, 0};
  }
  ptx::sync_block();
  for (i32 r = b.thread; r < b.num_requests; r += b.threads) {
    const PrefixLink link = b.s.links[r];
    if (link.pages == 0) continue;
    ptx::atomic_min(&b.s.depth[link.leader], link.pages);
    ptx::atomic_add(&b.s.group[link.leader].members, 1);
    ptx::atomic_add(&b.s.group[link.leader].rows, b.rows_of(r));
  }
  ptx::sync_block();
  Sums<3, i32> sums{};  // groups, rows, query tiles
  for (i32 base = 0; base < b.num_requests; base += b.threads) {
    const i32 r = base + b.thread;
    const bool leads = r < b.num_requests && b.s.links[r].leader == r && b.s.group[r].members > 1;
    Sums<3, i32> mine{};
    if (leads)
      mine = Sums<3, i32>{
          {1, b.s.group[r].rows, count_tiles(b.config, b.s.group[r].rows * b.config.group_size)}};
    const Sums<3, i32> before = b.scan.exclusive(mine, sums, b.num_requests - base);
    if (!leads) continue;
    const i32 g = before.of[0];
    b.s.group[r].number = g;
    b.s.group[r].row_begin = before.of[1];
    b.s.group[g].leader = r;
    b.s.prefix_tiles[g] = before.of[2];
    to.prefix_indptr[g] = before.of[1];
    to.prefix_len[g] = b.s.depth[r] * b.launch.batch.page_size;
    to.prefix_begin[g] = to.block_begin[r];
  }
  b.num_prefixes = sums.of[0];
  if (b.thread == 0) {
    b.s.prefix_tiles[b.num_prefixes] = sums.of[2];
    to.prefix_indptr[b.num_prefixes] = sums.of[1];
  }
  ptx::sync_block();
  place_members(b);
  ptx::sync_block();
  find_hulls(b);
  ptx::sync_block();
}

}  // namespace planner

RADDLE_ENGINE_END
