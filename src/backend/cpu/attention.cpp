// Attention on the worker pool.
#include <cstring>

#include "backend/backend.h"
#include "device/cpu/execute.h"
#include "device/cpu/isa.h"
#include "plan/heuristics.h"
#include "plan/planner.h"
#include "raddle/engine/core/math.h"
#include "variant/bound_variant.h"

namespace raddle {
namespace {

/// Below this planned cost (in the units of heuristics.cpp, quarters of a nanosecond) waking a
/// second thread does not pay.
constexpr i64 single_thread_cost = 4 * 20'000;

/// The host's own arrays are where kernels read a plan, so all plans of an attention share this.
class HostPlans final : public PlanOnDevice {
 public:
  explicit HostPlans(const AttentionSpec& spec) : spec_(spec) {}

  DeviceId device() const override { return {}; }
  std::string explain() const override { return cpu_isa(); }
  bool made_on_device() const override { return false; }

  void run(const Plan& plan, const RunView& view, const BoundVariant& variant, const RunArgs& args,
           RunStats* stats) const override {
    CpuLaunch launch{};
    static_cast<RunView&>(launch) = view;
    launch.dim_qk = spec_.head_dim_qk;
    launch.dim_vo = spec_.head_dim_vo;
    launch.k_begin = spec_.k_extends_v ? spec_.head_dim_vo : 0;
    launch.dtype = spec_.dtype;
    launch.kv_dtype = spec_.stored_dtype();
    launch.prefetch_into_l2 = cpu::prefetch_into_l2();
    launch.layout = &plan.layout().view();
    launch.plan = &plan.view();
    launch.stages = &variant.stages();
    const bool small = plan.arrays().stats().total < single_thread_cost;
    cpu::execute(launch, cpu::kernels(cpu::selected_isa()), small ? 1 : cpu_threads(), scratch_,
                 stats ? &stats->busy_us : nullptr);
    const i32 num_rows = plan.layout().num_rows();
    if (args.lse_base_2 && view.lse.data) change_base(args.lse);
    if (args.zero_unused_rows) zero_rows(view, num_rows, args.q.shape[0]);
  }

 private:
  /// Natural logarithms of the batch's rows become those to base 2: what the kernels of a GPU do
  /// themselves.
  static void change_base(const TensorRef& lse, int d = 0, i64 at = 0) {
    const auto dim = static_cast<std::size_t>(d);
    if (d == lse.rank)
      static_cast<float*>(lse.data)[at] *= math::log2e;
    else
      for (i64 i = 0; i < lse.shape[dim]; ++i) change_base(lse, d + 1, at + i * lse.stride[dim]);
  }

  /// Rows beyond the batch's become what a row without keys has: what GPU kernels do themselves.
  void zero_rows(const RunView& view, i64 begin, i64 end) const {
    const i64 bytes = dtype_bytes(view.state_only ? DType::float32 : spec_.dtype);
    for (i64 row = begin; row < end; ++row) {
      for (i64 head = 0; head < spec_.num_qo_heads; ++head) {
        const i64 at = row * view.out.row_stride + head * view.out.head_stride;
        std::memset(static_cast<std::byte*>(view.out.data) + at * bytes, 0,
                    static_cast<std::size_t>(spec_.head_dim_vo * bytes));
        if (view.lse.data)
          static_cast<float*>(
              view.lse.data)[row * view.lse.row_stride + head * view.lse.head_stride] =
              -math::infinity;
      }
    }
  }

  AttentionSpec spec_;
  mutable cpu::ScratchPool scratch_;
};

/// Plans stay where they were made, those of reservations, too.
class HostStore final : public PlanStore {
 public:
  explicit HostStore(const AttentionSpec& spec) : plans_(std::make_shared<const HostPlans>(spec)) {}

  std::shared_ptr<const PlanOnDevice> put(const Layout&, const PlanArrays&, const KernelChoice&,
                                          const BoundVariant&, const BoundVariant&,
                                          void*) override {
    return plans_;
  }

 private:
  std::shared_ptr<const HostPlans> plans_;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const AttentionSpec& spec)
      : spec_(spec), store_(std::make_shared<HostStore>(spec)) {
    cpu::selected_isa();  // a bad RADDLE_CPU_ISA is refused here, not at the first run
  }

  DeviceId device() const override { return {}; }
  const AttentionSpec& spec() const override { return spec_; }

  Planning planning_of(const Layout&, i32 num_workers, Schedule schedule) const override {
    return reserved_planning({}, num_workers, schedule);
  }
  Planning reserved_planning(const Maxima&, i32 num_workers, Schedule schedule) const override {
    return {cpu_plan_config(spec_, cpu::selected_isa(),
                            num_workers > 0 ? num_workers : cpu_threads(), schedule),
            {}};
  }

  PlanStore& plans() const override { return *store_; }

  std::shared_ptr<PlanStore> reserve(const Planning&, const Maxima&, void*) const override {
    return store_;
  }

 private:
  AttentionSpec spec_;
  std::shared_ptr<HostStore> store_;
};

}  // namespace

std::shared_ptr<const Backend> make_cpu_backend(const AttentionSpec& spec) {
  return std::make_shared<const CpuBackend>(spec);
}

std::string cpu_isa() { return cpu::to_string(cpu::selected_isa()); }
i32 cpu_threads() { return cpu::default_threads(); }

}  // namespace raddle
