// Compiled once an instruction set, with RADDLE_ISA naming the namespace of everything included
// here.
#include "raddle/engine/kernel/cpu/attend.h"
#include "raddle/engine/kernel/cpu/stages.h"
#include "raddle/engine/variant/shipped.h"

RADDLE_ENGINE_BEGIN

namespace cpu {
namespace {

void attend_any(const CpuLaunch& launch, i32 first, i32 end, i32 next, void* scratch) {
  dispatch_kv_dtype(launch.kv_dtype,
                    [&](auto t) { attend<decltype(t)>(launch, first, end, next, scratch); });
}

i64 scratch_bytes(const CpuLaunch& launch) {
  return dispatch_kv_dtype(launch.kv_dtype,
                           [&](auto t) { return item_scratch_bytes<decltype(t)>(launch); });
}

template <class... V>
constexpr auto variant_table(VariantList<V...>) {
  struct Table {
    VariantOps ops[sizeof...(V)];
  };
  return Table{{variant_ops<V>()...}};
}

constexpr auto variants = variant_table(ShippedVariants{});

#if defined(__AMX_BF16__)
constexpr const char* isa_name = "amx";
#elif defined(__AVX512BF16__)
constexpr const char* isa_name = "avx512_bf16";
#elif defined(__AVX512F__)
constexpr const char* isa_name = "avx512";
#elif defined(__AVX2__)
constexpr const char* isa_name = "avx2";
#else
constexpr const char* isa_name = "generic";
#endif

constexpr CpuKernels table{
    isa_name,      simd::lanes,
    run_length,    attend_any,
    scratch_bytes, finish_state,
    variants.ops,  static_cast<i32>(sizeof(variants.ops) / sizeof(VariantOps))};

}  // namespace
}  // namespace cpu

const CpuKernels& cpu_kernels();
const CpuKernels& cpu_kernels() { return cpu::table; }

RADDLE_ENGINE_END
