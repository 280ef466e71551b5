// Attention: checks a spec, and makes the backend of its device.
#include "raddle/attention.h"

#include <algorithm>
#include <cmath>

#include "api/plan.h"
#include "backend/backend.h"
#include "backend/kv_tensors.h"
#include "device/cpu/isa.h"
#include "plan/heuristics.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle {

void check_spec(const AttentionSpec& spec) {
  if (spec.num_qo_heads <= 0)
    fail<ValueError>("num_qo_heads is ", spec.num_qo_heads, "; expected at least 1");
  if (spec.num_kv_heads <= 0)
    fail<ValueError>("num_kv_heads is ", spec.num_kv_heads, "; expected at least 1");
  if (spec.num_qo_heads % spec.num_kv_heads != 0)
    fail<ValueError>("num_qo_heads is ", spec.num_qo_heads,
                     "; expected a multiple of num_kv_heads = ", spec.num_kv_heads);
  const auto check_dim = [](const char* name, i32 dim, i32 most) {
    if (dim < 8 || dim > most || dim % 8 != 0)
      fail<ValueError>(name, " is ", dim, "; expected a multiple of 8, at most ", most);
  };
  check_dim("head_dim", spec.head_dim_qk, max_head_dim_qk);
  check_dim("head_dim_vo", spec.head_dim_vo, max_head_dim_vo);
  if (spec.k_extends_v && spec.k_columns() <= 0)
    fail<ValueError>("head_dim is ", spec.head_dim_qk, ", and head_dim_vo ", spec.head_dim_vo,
                     "; expected a head_dim above head_dim_vo with k_extends_v=True: it counts the "
                     "columns of V and K");
  if (has_8_bits(spec.dtype))
    fail<ValueError>("dtype is '", name_of(spec.dtype),
                     "'; expected 'float32', 'float16' or 'bfloat16': kv_dtype is that of K and V");
  if (spec.stored_dtype() != spec.dtype && !has_8_bits(spec.stored_dtype()))
    fail<ValueError>("kv_dtype is '", name_of(spec.stored_dtype()),
                     "'; expected 'float8_e4m3fn', 'float8_e5m2', 'int8', or dtype, '",
                     name_of(spec.dtype), "'");
  if (spec.scale && !std::isfinite(*spec.scale))
    fail<ValueError>("scale is ", *spec.scale, "; expected a finite number");
}

float AttentionSpec::softmax_scale() const {
  return scale ? *scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim_qk)));
}

Attention::Attention(const AttentionSpec& spec, DeviceId device) : spec_(spec) {
  check_spec(spec_);
  const bool on_cpu = device.kind == DeviceId::Kind::cpu;
  AttentionSpec composed = spec_;
  // A GPU's kernel is compiled with its variant anyway.
  composed.fuse = spec_.fuse && on_cpu;
  variant_ = std::make_shared<const BoundVariant>(composed, on_cpu ? "" : cuda_arch(device));
  if (!on_cpu) gpu_ = make_cuda_backend(spec_, *variant_, device);
  backend_ = on_cpu ? make_cpu_backend(spec_) : gpu_;
}
Attention::~Attention() = default;

DeviceId Attention::device() const { return backend_->device(); }
bool Attention::has_lse() const { return variant_->stages().scan == Scan::softmax; }

std::size_t workspace_bytes(const AttentionSpec& spec, i32 num_workers, const Maxima& maxima,
                            DeviceId device) {
  check_spec(spec);
  if (num_workers < 0 || num_workers > max_workers)
    fail<ValueError>("num_workers is ", num_workers, "; expected 1 to ", max_workers,
                     ", or 0 for the device's default");
  const i32 on_cpu = num_workers > 0 ? num_workers : cpu_threads();
  const std::vector<PlanConfig> configs =
      device.kind == DeviceId::Kind::cpu
          ? std::vector{cpu_plan_config(spec, cpu::selected_isa(), on_cpu, Schedule::automatic)}
          : cuda_plan_configs(spec, device, maxima, num_workers);
  i64 most = 0;
  for (const PlanConfig& config : configs) {
    check_maxima(maxima, config, spec.head_dim_vo, true);
    most = std::max(most, workspace_bytes(config, maxima, spec.head_dim_vo));
  }
  return static_cast<std::size_t>(most);
}

}  // namespace raddle
