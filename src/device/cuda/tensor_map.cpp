#include "device/cuda/tensor_map.h"

#include <algorithm>

#include "device/cuda/device.h"
#include "device/cuda/driver.h"
#include "raddle/error.h"

namespace raddle::cuda {
namespace {

// Enumerators of cuda.h.
constexpr int bytes_as_they_are = 0, words_of_two_bytes = 1, not_interleaved = 0, swizzle_128 = 3,
              fetch_128_bytes = 2, zeros_outside = 0;
constexpr u64 most_elements = u64{1} << 32, most_stride = u64{1} << 40;
constexpr u32 most_of_box = 256;

}  // namespace

bool takes_tensor_maps() {
  constexpr int cuda_12_1 = 12010;
  return driver().encode_tensor_map && driver_version_number() >= cuda_12_1;
}

bool can_be_boxed(const BoxedTensor& tensor) {
  const auto strides = [](u64 bytes) { return bytes % 16 == 0 && bytes < most_stride; };
  const auto counts = [](u64 elements) { return elements > 0 && elements <= most_elements; };
  const auto rows = [](u32 elements) { return elements > 0 && elements <= most_of_box; };
  return tensor.data % 16 == 0 && std::all_of(tensor.stride, tensor.stride + 3, strides) &&
         std::all_of(tensor.size, tensor.size + 4, counts) &&
         std::all_of(tensor.box, tensor.box + 4, rows);
}

TensorMap make_tensor_map(const BoxedTensor& tensor) {
  const auto encode = driver().encode_tensor_map;
  if (!encode)
    fail<DeviceError>(
        "libcuda.so.1 lacks cuTensorMapEncodeTiled: update NVIDIA's driver to CUDA 12");
  TensorMap map{};
  const u32 every_element[4] = {1, 1, 1, 1};
  check(encode(&map, tensor.element_bytes == 1 ? bytes_as_they_are : words_of_two_bytes, 4,
               tensor.data, tensor.size, tensor.stride, tensor.box, every_element, not_interleaved,
               swizzle_128, fetch_128_bytes, zeros_outside),
        "making a tensor map");
  return map;
}

}  // namespace raddle::cuda
