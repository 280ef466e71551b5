// Attention: checks a spec, plans layouts, runs plans; a backend a device does the rest.
#include "raddle/attention.h"

#include <cmath>
#include <numeric>
#include <sstream>

#include "api/planning.h"
#include "backend/backend.h"
#include "backend/kv_tensors.h"
#include "device/cpu/topology.h"
#include "plan/explain.h"
#include "plan/heuristics.h"
#include "plan/planner.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle {
namespace {

/// More than any device has; keeps the planner's integers far from their ends.
constexpr i32 max_workers = 65536;

}  // namespace

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

// --- Plan ------------------------------------------------------------------------------------

Plan::Plan(LayoutPtr layout, std::shared_ptr<const PlanArrays> arrays,
           std::shared_ptr<const BoundVariant> origin, std::shared_ptr<const BoundVariant> variant,
           std::vector<Range> positions, std::shared_ptr<const PlanOnDevice> on_device,
           bool is_reserved, bool arrays_suffice)
    : layout_(std::move(layout)),
      arrays_(std::move(arrays)),
      origin_(std::move(origin)),
      variant_(std::move(variant)),
      positions_(std::move(positions)),
      on_device_(std::move(on_device)),
      is_reserved_(is_reserved),
      arrays_suffice_(arrays_suffice),
      view_(arrays_->view()) {}
Plan::~Plan() = default;

const PlanArrays& Plan::arrays() const { return *arrays_; }
DeviceId Plan::device() const { return on_device_ ? on_device_->device() : DeviceId{}; }
bool Plan::made_on_device() const { return on_device_ && on_device_->made_on_device(); }
double Plan::balance() const { return arrays_->stats().heaviest_over_mean(); }
double Plan::estimated_us() const { return raddle::estimated_us(arrays_->stats().heaviest); }

std::string Plan::explain() const {
  std::ostringstream text;
  if (made_on_device()) {
    text << "schedule: linear (the plan is made on the device, which alone knows the lengths), for "
         << view_.num_workers << " workers\nkernels: " << on_device_->explain() << "\n";
    return text.str();
  }
  text << raddle::explain(*arrays_, variant_->read_bytes())
       << "kernels: " << (on_device_ ? on_device_->explain() : cpu_isa()) << "\n";
  const std::vector<Level>& levels = layout_->levels();
  for (std::size_t i = 0; levels.size() > 1 && i < levels.size(); ++i) {
    const auto keys = std::accumulate(levels[i].columns.begin(), levels[i].columns.end(), i64{0});
    const std::size_t groups = levels[i].columns.size();
    text << "level " << i << ": " << groups << (groups == 1 ? " group" : " groups")
         << " of requests, with " << keys << " keys\n";
  }
  if (!variant_->unknown_masks().empty())
    text << "coverage of " << variant_->unknown_masks()
         << " is unknown: there is no C++ compiler on the host, so every tile is read and masked\n";
  return text.str();
}

// --- Attention -------------------------------------------------------------------------------

Attention::Attention(const AttentionSpec& spec, DeviceId device) : spec_(spec) {
  check_spec(spec_);
  const bool on_cpu = device.kind == DeviceId::Kind::cpu;
  AttentionSpec composed = spec_;
  // A GPU's kernel is compiled with its variant anyway.
  composed.fuse = spec_.fuse && on_cpu;
  variant_ = std::make_shared<const BoundVariant>(composed, on_cpu ? "" : cuda_arch(device));
  backend_ = on_cpu ? make_cpu_backend(spec_) : make_cuda_backend(spec_, *variant_, device);
}
Attention::~Attention() = default;

DeviceId Attention::device() const { return backend_->device(); }
bool Attention::has_lse() const { return variant_->stages().scan == Scan::softmax; }

void check_options(const PlanOptions& options) {
  if (options.num_workers > max_workers)
    fail<ValueError>("num_workers is ", options.num_workers, "; expected at most ", max_workers);
  if (options.num_workers < 0)
    fail<ValueError>("num_workers is ", options.num_workers,
                     "; expected at least 1, or 0 for the default");
}

PlanPtr Attention::plan(const LayoutPtr& layout, const PlanOptions& options) const {
  check_options(options);
  return plan_layout(variant_, layout, options, *backend_);
}

SharedPrefixes Attention::share_prefixes(const PagedArgs& args, const PlanOptions& options) const {
  check_options(options);
  return raddle::share_prefixes(variant_, args, options, *backend_);
}

void Attention::run(const Plan& plan, const RunArgs& args, RunStats* stats) const {
  if (&plan.origin() != variant_.get() && !plan.origin().same_as(*variant_))
    fail<ValueError>(
        "plan is of another attention; expected one made by this Attention, or by one of an equal "
        "spec");
  if (plan.device() != device())
    fail<ValueError>("plan is for device '", name_of(plan.device()), "'; expected one for '",
                     name_of(device()), "', this attention's device");
  const RunView view = view_run(spec_, plan, args);
  const auto variant = variant_of_run(plan, args);
  backend_->run(plan, view, *variant, args, stats);
}

std::size_t workspace_bytes(const AttentionSpec& spec, i32 num_workers, const Maxima& maxima,
                            DeviceId device) {
  check_spec(spec);
  if (num_workers < 0 || num_workers > max_workers)
    fail<ValueError>("num_workers is ", num_workers, "; expected 1 to ", max_workers,
                     ", or 0 for the device's default");
  const i32 on_cpu = num_workers > 0 ? num_workers : cpu_threads();
  const PlanConfig config =
      device.kind == DeviceId::Kind::cpu
          ? cpu_plan_config(spec, cpu::selected_isa(), on_cpu, Schedule::automatic)
          : cuda_plan_config(spec, device, num_workers, Schedule::automatic);
  return static_cast<std::size_t>(workspace_bytes(config, maxima, spec.head_dim_vo));
}

}  // namespace raddle
