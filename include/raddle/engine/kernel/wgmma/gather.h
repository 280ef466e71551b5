// The rows of a KV tile where boxes cannot copy them, copied by a warp.
#pragma once

#include "raddle/engine/kernel/wgmma/addresses.h"
#include "raddle/engine/kernel/wgmma/row_copies.h"

RADDLE_ENGINE_BEGIN

namespace wgmma {

/// The rows of an item's tiles of K (`which` 0) or V. Eight lanes copy one, whose address they read
/// from shared memory: another warp has written it, or this one does.
template <class Kernel, i32 which>
class Gather {
  static constexpr i32 tile_keys = Kernel::tile_keys;
  static constexpr i32 dim = which == 0 ? Kernel::dim_qk : Kernel::dim_vo;
  using T = typename Kernel::T;
  using Slots = Slot<tile_keys, ceil_div(dim, 64)>;

 public:
  using Found = typename RowAddresses<Kernel>::Found;
  /// Rows without a key are copied from a row of zeros.
  static constexpr bool clears_missing = true;
  static constexpr bool leaves_time = false;  ///< to ask about parts of tiles

  /// `tiles`: how many tiles of the block have been copied by this class.
  RADDLE_DEVICE Gather(const GpuLaunch& launch, const KeySource& source, i32& tiles)
      : addresses_(launch, source), tiles_(tiles) {}

  RADDLE_DEVICE Found find(const Span& tile) const {
    return Kernel::finds_addresses ? Found{} : addresses_.find(tile);
  }
  RADDLE_DEVICE void prepare(const Span& tile, const Found& found) const {
    if constexpr (!Kernel::finds_addresses) {
      ptx::sync_warp();  // all lanes have read those of the tile before
      addresses_.template write<which>(tile, found, table(0));
      ptx::sync_warp();
    }
  }
  /// Starts copying the tile that has been prepared to a slot, which `full` waits for. What the
  /// copies write, products see behind a fence of the threads that wait (await_tile).
  RADDLE_DEVICE void copy(const Span&, const Found&, u32 slot, u32 full) {
    auto& tables = Memory<Kernel>::get().tables[which];
    const auto at = tables.place(tiles_++);
    if constexpr (Kernel::finds_addresses)
      ptx::barrier_wait(ptx::shared_address(&tables.full[at.slot]), at.parity);
    RADDLE_ROLLED
    for (i32 first = 0; first < tile_keys; first += 32) {
      const u8** rows = table(at.slot) + first;
      copy_rows<Slots, dim, 32, T>(slot + static_cast<u32>(128 * first), [rows](i32 m) {
        return *reinterpret_cast<const RowPair<T>*>(rows + m);
      });
    }
    ptx::barrier_await_copies(full);
    ptx::sync_warp();
    if (ptx::lane_index() != 0) return;
    ptx::barrier_arrive(full);
    if constexpr (Kernel::finds_addresses)
      ptx::barrier_arrive(ptx::shared_address(&tables.free[at.slot]));
  }

 private:
  RADDLE_DEVICE static const u8** table(i32 slot) {
    return Memory<Kernel>::get().scratch.rows[slot].row[which];
  }

  const RowAddresses<Kernel> addresses_;
  i32& tiles_;
};

}  // namespace wgmma

RADDLE_ENGINE_END
