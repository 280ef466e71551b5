// Attention: checks a spec, plans layouts, runs plans on the worker pool.
#include "raddle/attention.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "api/bound_variant.h"
#include "api/kv_tensors.h"
#include "api/planning.h"
#include "device/cpu/execute.h"
#include "device/cpu/isa.h"
#include "plan/heuristics.h"
#include "plan/planner.h"
#include "raddle/error.h"

namespace raddle {
namespace {

/// More than any device has; keeps the planner's integers far from their ends.
constexpr i32 max_workers = 65536;

/// Below this planned cost (in the units of heuristics.cpp, quarters of a nanosecond) waking a
/// second thread does not pay.
constexpr i64 single_thread_cost = 4 * 20'000;

}  // namespace

void check_spec(const AttentionSpec& spec) {
  if (spec.num_qo_heads <= 0)
    fail<ValueError>("num_qo_heads is ", spec.num_qo_heads, "; expected at least 1");
  if (spec.num_kv_heads <= 0)
    fail<ValueError>("num_kv_heads is ", spec.num_kv_heads, "; expected at least 1");
  if (spec.num_qo_heads % spec.num_kv_heads != 0)
    fail<ValueError>("num_qo_heads is ", spec.num_qo_heads,
                     "; expected a multiple of num_kv_heads = ", spec.num_kv_heads);
  const auto check_dim = [](const char* name, i32 dim) {
    if (dim < 8 || dim > 256 || dim % 8 != 0)
      fail<ValueError>(name, " is ", dim, "; expected a multiple of 8, at most 256");
  };
  check_dim("head_dim", spec.head_dim_qk);
  check_dim("head_dim_vo", spec.head_dim_vo);
  if (spec.scale && !std::isfinite(*spec.scale))
    fail<ValueError>("scale is ", *spec.scale, "; expected a finite number");
}

float AttentionSpec::softmax_scale() const {
  return scale ? *scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim_qk)));
}

// --- Plan ------------------------------------------------------------------------------------

Plan::Plan(LayoutPtr layout, std::shared_ptr<const PlanArrays> arrays,
           std::shared_ptr<const BoundVariant> origin, std::shared_ptr<const BoundVariant> variant,
           std::vector<Range> positions)
    : layout_(std::move(layout)),
      arrays_(std::move(arrays)),
      origin_(std::move(origin)),
      variant_(std::move(variant)),
      positions_(std::move(positions)),
      view_(arrays_->view()) {}
Plan::~Plan() = default;

const PlanArrays& Plan::arrays() const { return *arrays_; }
double Plan::balance() const { return arrays_->stats().heaviest_over_mean(); }

std::string Plan::explain() const {
  std::ostringstream text;
  text << arrays_->stats().explain() << "\n"
       << view_.num_query_tiles << " query tiles, " << view_.num_items << " work items for "
       << view_.num_workers << " workers, " << view_.num_contractions << " contractions over "
       << view_.num_partial_rows << " partial rows\n"
       << "tiles of " << view_.shapes[0].rows << " x " << view_.shapes[0].keys
       << " (short queries) and " << view_.shapes[1].rows << " x " << view_.shapes[1].keys
       << " (long queries); kernels: " << cpu_isa() << "\n";
  return text.str();
}

// --- Attention -------------------------------------------------------------------------------

namespace {

/// Everything of a launch but the stages and the scratch.
CpuLaunch make_launch(const AttentionSpec& spec, const Plan& plan, const RunArgs& args) {
  CpuLaunch launch{};
  static_cast<RunView&>(launch) = view_run(spec, plan, args);
  launch.dim_qk = spec.head_dim_qk;
  launch.dim_vo = spec.head_dim_vo;
  launch.dtype = spec.dtype;
  launch.layout = &plan.layout().view();
  launch.plan = &plan.view();
  return launch;
}

}  // namespace

Attention::Attention(const AttentionSpec& spec)
    : spec_(spec), scratch_(std::make_unique<cpu::ScratchPool>()) {
  check_spec(spec_);
  cpu::selected_isa();  // a bad RADDLE_CPU_ISA is refused here, not at the first run
  variant_ = std::make_shared<const BoundVariant>(spec_);
}
Attention::~Attention() = default;

bool Attention::has_lse() const { return variant_->stages().scan == Scan::softmax; }

PlanPtr Attention::plan(const LayoutPtr& layout, const PlanOptions& options) const {
  if (options.num_workers > max_workers)
    fail<ValueError>("num_workers is ", options.num_workers, "; expected at most ", max_workers);
  if (options.num_workers < 0)
    fail<ValueError>("num_workers is ", options.num_workers,
                     "; expected at least 1, or 0 for the default");
  const i32 workers = options.num_workers > 0 ? options.num_workers : cpu_threads();
  return plan_layout(spec_, variant_, layout, options,
                     cpu_plan_config(spec_, workers, options.schedule));
}

void Attention::run(const Plan& plan, const RunArgs& args, RunStats* stats) const {
  if (&plan.origin() != variant_.get() && !plan.origin().same_as(*variant_))
    fail<ValueError>(
        "plan is of another attention; expected one made by this Attention, or by one of an equal "
        "spec");
  CpuLaunch launch = make_launch(spec_, plan, args);
  const auto variant = variant_of_run(plan, args);
  launch.stages = &variant->stages();
  const bool small = plan.arrays().stats().total < single_thread_cost;
  cpu::execute(launch, cpu::kernels(cpu::selected_isa()), small ? 1 : cpu_threads(), *scratch_,
               stats ? &stats->busy_us : nullptr);
}

std::size_t workspace_bytes(const AttentionSpec& spec, i32 num_workers, const Maxima& maxima) {
  check_spec(spec);
  if (num_workers < 1 || num_workers > max_workers)
    fail<ValueError>("num_workers is ", num_workers, "; expected 1 to ", max_workers);
  return static_cast<std::size_t>(workspace_bytes(
      cpu_plan_config(spec, num_workers, Schedule::automatic), maxima, spec.head_dim_vo));
}

std::string cpu_isa() { return to_string(cpu::selected_isa()); }
i32 cpu_threads() { return cpu::default_threads(); }

}  // namespace raddle
