// Tensor maps: what Hopper's bulk copies know of a tensor (engine/ptx/bulk.h).
#pragma once

#include "raddle/engine/core/tensor_map.h"

namespace raddle::cuda {

/// A tensor of four dimensions in device memory, the innermost first, and the box of it that one
/// instruction copies. Rows of a box become 128 bytes of shared memory, swizzled.
struct BoxedTensor {
  u64 data = 0;
  i32 element_bytes = 2;  ///< 1 or 2
  u64 size[4] = {};       ///< elements
  u64 stride[3] = {};     ///< bytes from one row, head, page to the next
  u32 box[4] = {};        ///< elements; the innermost ones are 128 bytes
  bool operator==(const BoxedTensor&) const = default;
};

/// Whether the driver makes tensor maps, and launches kernels with as many as Raddle's have:
/// parameters of more than 4,096 bytes, which that of CUDA 12.1 takes.
bool takes_tensor_maps();

/// Whether the hardware can copy boxes of the tensor; not of one without rows.
bool can_be_boxed(const BoxedTensor& tensor);

/// The map of a tensor that can be boxed; of the current device. Raises DeviceError where the
/// driver refuses it, or is older than Hopper.
TensorMap make_tensor_map(const BoxedTensor& tensor);

}  // namespace raddle::cuda
