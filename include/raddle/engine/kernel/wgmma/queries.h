// Finding items, and loading their queries, by three warps that are an item ahead of all others.
#pragma once

#include "raddle/engine/kernel/gpu/queue.h"
#include "raddle/engine/kernel/gpu/rows.h"
#include "raddle/engine/kernel/wgmma/memory.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

template <class Kernel, class Variant>
class QueryLoader {
  using T = typename Kernel::T;
  using Block = Memory<Kernel>;
  using Slots = typename Block::Queries;

 public:
  static constexpr i32 num_threads = 96;

  RADDLE_DEVICE QueryLoader(const GpuLaunch& launch, const Variant& variant)
      : launch_(launch), variant_(variant) {}

  /// Loads the queries of item `first` and of those that follow it; then names an item that is
  /// none. An item is drawn when the queries of the one before it are there.
  RADDLE_DEVICE void run(i32 first) const {
    Block& block = Block::get();
    RADDLE_ROLLED
    for (i32 nth = 0;; ++nth) {
      ptx::barrier_wait(ptx::shared_address(&block.items.free[nth & 3]), (nth >> 2 & 1) ^ 1);
      auto& facts = block.item[nth & 3];
      if (thread() == 0)
        facts.item = nth == 0 ? first : next_long(launch_, block.item[(nth - 1) & 3].item);
      ptx::sync_threads(item_known, num_threads);
      const u32 found = ptx::shared_address(&block.items.full[nth & 3]);
      if (facts.item < 0) {
        if (thread() == 0) ptx::barrier_arrive(found);
        return;
      }
      const WorkItem item = launch_.plan.items[facts.item];
      const QueryTile& tile = launch_.plan.query_tiles[item.query_tile];
      if (thread() < 32) {
        open(item, tile, facts);
        if (thread() == 0) ptx::barrier_arrive(found);
      }
      ptx::sync_threads(item_known, num_threads);  // the source is known
      describe_rows(item, tile, facts);
      ptx::sync_threads(item_known, num_threads);
      ptx::barrier_wait(ptx::shared_address(&block.queries.free[nth & 1]), (nth >> 1 & 1) ^ 1);
      load(min(tile.num_rows, Kernel::long_rows), facts, ptx::shared_address(block.q[nth & 1]));
      ptx::copy_commit();
      ptx::copy_wait<0>();
      if (!has_logits<Variant> && launch_.scale <= 0.0f) turn(block.q[nth & 1]);
      ptx::fence_proxy();
      ptx::barrier_arrive(ptx::shared_address(&block.queries.full[nth & 1]));
    }
  }

 private:
  static constexpr i32 item_known = consumers + 1;
  RADDLE_DEVICE static i32 thread() { return ptx::thread_index() % group_threads - 32; }

  RADDLE_DEVICE void open(const WorkItem& item, const QueryTile& tile,
                          ItemFacts<Kernel>& facts) const {
    const Span first = open_item<Kernel>(launch_, item, facts.source);
    if (thread() != 0) return;
    facts.source.rest = first;
    facts.request = request_of_keys(launch_, tile);
    facts.kv_head = item.kv_head;
    facts.num_rows = tile.num_rows;
    facts.partial_row = item.partial_row;
  }

  RADDLE_DEVICE void describe_rows(const WorkItem& item, const QueryTile& tile,
                                   ItemFacts<Kernel>& facts) const {
    const LevelView& level = launch_.levels[tile.level];
    RADDLE_ROLLED
    for (i32 m = thread(); m < Kernel::long_rows; m += num_threads) {
      const Row row =
          make_row(launch_.layout, level, tile.group, tile.row_begin + min(m, tile.num_rows - 1),
                   item.kv_head, launch_.plan.group_size);
      facts.row[m] = row;
      facts.kept[m] = columns_kept(row, facts.source);
    }
  }

  /// The columns that a row keeps, if the variant can say that they are an interval.
  RADDLE_DEVICE KeptColumns columns_kept(const Row& row, const KeySource& source) const {
    if constexpr (has_mask<Variant> && has_kv_span<Variant> && has_coverage<Variant>) {
      if (source.plain && !source.bits) {
        const i32 first = source.first_index;
        Tile tile{{row.request, row.request},
                  {row.q_index, row.q_index},
                  {row.q_pos, row.q_pos},
                  {row.q_head, row.q_head},
                  {first + source.col_begin, first + source.col_end - 1},
                  {}};
        tile.kv_pos = tile.kv_index;
        const KvSpan span = variant_.kv_span(tile);
        const Range keys = intersect(intersect(span.index, span.pos), tile.kv_index);
        if (is_empty(keys)) return {0, 0};
        tile.kv_index = tile.kv_pos = keys;
        if (variant_.coverage(tile) == Coverage::full)
          return {keys.first - first, keys.last + 1 - first};
      }
    }
    return {KeptColumns::unknown, 0};
  }

  /// Starts copying. Rows beyond the tile's, and columns beyond the head's, become zero.
  RADDLE_DEVICE void load(i32 num_rows, const ItemFacts<Kernel>& facts, u32 to) const {
    constexpr i32 chunks = 8 * Kernel::qk_halves;
    RADDLE_ROLLED
    for (i32 at = thread(); at < Kernel::long_rows * chunks; at += num_threads) {
      const i32 m = at / chunks, chunk = at % chunks;
      const i32 columns = Kernel::dim_qk - 8 * chunk;
      ptx::copy_async(to + static_cast<u32>(Slots::at(m, chunk)),
                      address(facts.row[m]) + (columns > 0 ? 8 * chunk : 0),
                      m < num_rows ? min(max(columns, 0) * 2, 16) : 0);
    }
  }
  /// Softmax takes positive scales alone. With another one, what this thread has copied changes its
  /// sign, or becomes zero.
  RADDLE_DEVICE void turn(u8* slot) const {
    constexpr i32 chunks = 8 * Kernel::qk_halves;
    RADDLE_ROLLED
    for (i32 at = thread(); at < Kernel::long_rows * chunks; at += num_threads) {
      auto& x = *reinterpret_cast<Packed8*>(slot + Slots::at(at / chunks, at % chunks));
      RADDLE_UNROLL
      for (i32 i = 0; i < 4; ++i) x.x[i] = launch_.scale == 0.0f ? 0u : x.x[i] ^ 0x80008000u;
    }
  }
  RADDLE_DEVICE const T* address(const Row& row) const {
    return static_cast<const T*>(launch_.q.data) + row.row * launch_.q.row_stride +
           row.q_head * launch_.q.head_stride;
  }

  const GpuLaunch& launch_;
  const Variant& variant_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
