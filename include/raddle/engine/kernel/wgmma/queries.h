// Loading the queries of an item, by three warps that wait for nothing else.
#pragma once

#include "raddle/engine/kernel/gpu/rows.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

template <class Kernel>
class QueryLoader {
  using T = typename Kernel::T;
  using Block = Memory<Kernel>;
  using Slots = typename Block::Queries;

 public:
  static constexpr i32 num_threads = 96;

  RADDLE_DEVICE explicit QueryLoader(const GpuLaunch& launch) : launch_(launch) {}

  /// Loads the queries of every item that the key loader names, until it names none.
  RADDLE_DEVICE void run() const {
    Block& block = Block::get();
    RADDLE_ROLLED
    for (i32 nth = 0;; ++nth) {
      const i32 slot = nth & 1;
      ptx::barrier_wait(ptx::shared_address(&block.found[slot]), nth >> 1 & 1);
      auto& facts = block.item[slot];
      if (facts.item < 0) return;
      const WorkItem item = launch_.plan.items[facts.item];
      const QueryTile& tile = launch_.plan.query_tiles[item.query_tile];
      describe(item, tile, facts);
      ptx::sync_threads(queries_described, num_threads);
      load(min(tile.num_rows, Kernel::long_rows), facts, block.q[slot]);
      ptx::fence_proxy();
      ptx::barrier_arrive(ptx::shared_address(&block.queries.full[slot]));
    }
  }

 private:
  static constexpr i32 queries_described = consumers + 1;
  RADDLE_DEVICE static i32 thread() { return ptx::thread_index() % group_threads - 32; }

  RADDLE_DEVICE void describe(const WorkItem& item, const QueryTile& tile,
                              ItemFacts<Kernel>& facts) const {
    const LevelView& level = launch_.levels[tile.level];
    RADDLE_ROLLED
    for (i32 m = thread(); m < Kernel::long_rows; m += num_threads)
      facts.row[m] =
          make_row(launch_.layout, level, tile.group, tile.row_begin + min(m, tile.num_rows - 1),
                   item.kv_head, launch_.plan.group_size);
    if (thread() != 0) return;
    facts.request = request_of_keys(launch_, tile);
    facts.kv_head = item.kv_head;
    facts.num_rows = tile.num_rows;
    facts.partial_row = item.partial_row;
  }

  /// Rows beyond the tile's, and columns beyond the head's, become zero.
  RADDLE_DEVICE void load(i32 num_rows, const ItemFacts<Kernel>& facts, u8* to) const {
    constexpr i32 chunks = 8 * Kernel::qk_halves, batch = 4;
    RADDLE_ROLLED
    for (i32 first = thread(); first < Kernel::long_rows * chunks; first += batch * num_threads) {
      Packed8 x[batch];
      RADDLE_UNROLL
      for (i32 i = 0; i < batch; ++i) {
        const i32 at = first + i * num_threads, m = at / chunks, chunk = at % chunks;
        x[i] = m < num_rows && 8 * chunk < Kernel::dim_qk
                   ? *reinterpret_cast<const Packed8*>(address(facts.row[m]) + 8 * chunk)
                   : Packed8{};
      }
      RADDLE_UNROLL
      for (i32 i = 0; i < batch; ++i) {
        const i32 at = first + i * num_threads;
        if (at < Kernel::long_rows * chunks)
          *reinterpret_cast<Packed8*>(to + Slots::at(at / chunks, at % chunks)) = x[i];
      }
    }
  }
  RADDLE_DEVICE const T* address(const Row& row) const {
    return static_cast<const T*>(launch_.q.data) + row.row * launch_.q.row_stride +
           row.q_head * launch_.q.head_stride;
  }

  const GpuLaunch& launch_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
