// Tensor maps of the tensors that runs bring: made once a tensor, since a model's layers run
// again and again with the same ones.
#pragma once

#include <mutex>
#include <unordered_map>
#include <utility>

#include "device/cuda/tensor_map.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/run.h"
#include "raddle/engine/kernel/wgmma/launch.h"

namespace raddle::cuda {

class TensorMaps {
 public:
  explicit TensorMaps(const AttentionSpec& spec)
      : dims_{spec.head_dim_qk, spec.head_dim_vo},
        heads_(spec.num_kv_heads),
        group_size_(spec.group_size()),
        element_bytes_(dtype_bytes(spec.stored_dtype())) {}

  /// Says which of the layout's levels lie in boxes, and writes the maps of their K and V, whose
  /// tensors `args` has, for a kernel whose tiles have `tile_keys` keys. Returns whether all levels
  /// do. Raises DeviceError where the driver refuses a map.
  bool provide(const Layout& layout, const RunArgs& args, i32 tile_keys, wgmma::Launch& launch);

  /// Says how the rows of Q and O, launch.q and launch.out, lie in boxes, and writes their maps:
  /// for the kernel of long queries, which alone reads them.
  void provide_rows(const RunArgs& args, wgmma::Launch& launch);

 private:
  struct Hash {
    std::size_t operator()(const BoxedTensor& tensor) const;
  };
  /// Beyond so many, those of tensors that are gone are in the way: all are made anew.
  static constexpr std::size_t most = 4096;

  BoxedTensor box(const PoolView& pool, const TensorRef& tensor, const Level& level, i32 dim,
                  i32 box_rows) const;
  /// How rows of Q or O, `dim` elements each, lie in boxes of `box_rows` fused rows.
  std::pair<wgmma::RowBoxes, BoxedTensor> box_of_rows(const RowsView& rows, const TensorRef& tensor,
                                                      i32 dim, i32 box_rows) const;
  TensorMap map_of(const BoxedTensor& tensor);

  i32 dims_[2];  ///< of Q and K, and of V
  i32 heads_, group_size_, element_bytes_;
  std::mutex mutex_;
  std::unordered_map<BoxedTensor, TensorMap, Hash> maps_;
};

}  // namespace raddle::cuda
