#include "device/cuda/tensor_map.h"

#include "device/cuda/driver.h"
#include "raddle/error.h"

namespace raddle::cuda {
namespace {

// Enumerators of cuda.h.
constexpr int bytes_as_they_are = 0, words_of_two_bytes = 1, not_interleaved = 0, swizzle_128 = 3,
              fetch_128_bytes = 2, zeros_outside = 0;
constexpr u64 most_elements = u64{1} << 32, most_stride = u64{1} << 40;

}  // namespace

bool makes_tensor_maps() { return driver().encode_tensor_map != nullptr; }

std::string why_not_boxed(const BoxedTensor& tensor) {
  if (tensor.data % 16 != 0) return "its address is no multiple of 16";
  for (const u64 stride : tensor.stride)
    if (stride % 16 != 0 || stride >= most_stride)
      return "a stride of " + std::to_string(stride) + " bytes is no multiple of 16 below 2^40";
  for (const u64 size : tensor.size)
    if (size == 0 || size > most_elements)
      return "a size of " + std::to_string(size) + " is not from 1 to 2^32";
  for (const u32 size : tensor.box)
    if (size == 0 || size > 256)
      return "a box of " + std::to_string(size) + " rows is not from 1 to 256";
  return "";
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
