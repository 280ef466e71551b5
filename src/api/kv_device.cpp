#include "api/kv_device.h"

namespace raddle::cuda {

jit::KvKernels kv_kernels(DType dtype, const BoundVariant* variant) {
  if (!variant) return {dtype, {}, 0};
  return {dtype, variant->source(), variant->memory_bytes()};
}

std::string compile_kv(const AttentionSpec& spec, const std::string& arch) {
  const BoundVariant bound(spec);
  return jit::compile(kv_kernels(spec.dtype, &bound), arch).log;
}

}  // namespace raddle::cuda
