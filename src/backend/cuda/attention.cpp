// Attention on a GPU.
#include "backend/cuda/attention.h"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "backend/backend.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/plan.h"
#include "backend/cuda/scratch.h"
#include "backend/kv_tensors.h"
#include "jit/gpu_kernel.h"
#include "plan/heuristics.h"
#include "raddle/engine/kernel/mma/config.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle {
namespace cuda {

void check_rows(const TensorRef& t, const char* what, i64 level) {
  const auto name = [&] {
    return (level >= 0 ? "kv[" + std::to_string(level) + "]: " : std::string()) + what;
  };
  if (!t.data) return;
  if (reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0) [[unlikely]]
    fail<ValueError>(name(),
                     " begins at an address that is no multiple of 16 bytes; expected one "
                     "on a GPU");
  const i64 unit = 16 / dtype_bytes(t.dtype);
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(t.rank); ++i)
    if (t.shape[i] > 1 && t.stride[i] % unit != 0) [[unlikely]]
      fail<ValueError>(name(), " has stride ", t.stride[i], " in dimension ", i,
                       "; expected a multiple of ", unit,
                       " elements on a GPU: rows of 16-byte "
                       "units");
}

namespace {

jit::GpuKernel kernel_of(const AttentionSpec& spec, const BoundVariant& variant,
                         const std::string& arch) {
  if (spec.dtype == DType::float32)
    fail<ValueError>("dtype is 'float32'; GPU kernels compute 'float16' and 'bfloat16'");
  if (spec.dtype == DType::bfloat16 && jit::arch_number(arch) < 80)
    fail<ValueError>("dtype is 'bfloat16'; expected 'float16' on sm_", jit::arch_number(arch),
                     ", whose matrix instructions take no other");
  if (has_8_bits(spec.stored_dtype()) && mma::is_wide(spec.head_dim_qk, spec.head_dim_vo))
    fail<ValueError>("kv_dtype is '", name_of(spec.stored_dtype()),
                     "'; GPU kernels take K and V in '", name_of(spec.dtype),
                     "', dtype, where a head_dim is above ", mma::widest_of_a_warp);
  return {choose_gpu_kernel(spec, jit::arch_number(arch)).family,
          spec.dtype,
          spec.stored_dtype(),
          spec.head_dim_qk,
          spec.head_dim_vo,
          variant.source(),
          variant.memory_bytes()};
}

jit::PlannerKernel planner_of(const BoundVariant& variant, bool prefixes) {
  return {variant.source(), variant.memory_bytes(), prefixes};
}

/// Compiles a kernel, without looking into the cache.
template <class Source>
KernelReport report_of(const Source& kernel, const std::string& arch, i32 shared_bytes) {
  const auto start = std::chrono::steady_clock::now();
  jit::Cubin cubin = jit::compile(kernel, arch);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const jit::Resources used = jit::parse_resources(cubin.log);
  return {used.registers, used.spill_bytes,     shared_bytes,
          took.count(),   std::move(cubin.log), std::move(cubin.bytes)};
}

/// What an attention's kernel takes of a multiprocessor.
KernelConfig config_of(const AttentionSpec& spec, const std::string& arch) {
  const KernelConfig config = choose_gpu_kernel(spec, jit::arch_number(arch)).config;
  if (config.blocks_per_multiprocessor == 0)
    fail<ValueError>("head_dim is ", spec.head_dim_qk, " and head_dim_vo ", spec.head_dim_vo,
                     "; expected tiles that fit the shared memory of sm_", jit::arch_number(arch));
  return config;
}

void check_alignment(const RunArgs& args) {
  check_rows(args.q, "q");
  check_rows(args.out, "out");
  if (args.kv.size() == 1) {
    check_rows(args.kv[0].k, "kv: k");
    check_rows(args.kv[0].v, "kv: v");
    return;
  }
  for (std::size_t i = 0; i < args.kv.size(); ++i) {
    check_rows(args.kv[i].k, "k", static_cast<i64>(i));
    check_rows(args.kv[i].v, "v", static_cast<i64>(i));
  }
}

bool is_short(const PlanView& plan) {
  return std::all_of(plan.query_tiles, plan.query_tiles + plan.num_query_tiles,
                     [](const QueryTile& tile) { return tile.shape == 0; });
}

TimelineView view_timeline(const TensorRef& t, i32 num_workers) {
  if (!t.data) return {};
  check_output("timeline", t, DType::float32, {num_workers, -1, 2});
  const i64 capacity = dim(t, 1);
  if (capacity < 2 || capacity >= i64{1} << 31 || step(t, 1) != 2 || step(t, 0) != 2 * capacity)
    fail<ValueError>("timeline is ", shape_text(t),
                     "; expected a contiguous tensor of two marks a worker or more");
  return {static_cast<TimelineView::Mark*>(t.data), static_cast<i32>(capacity)};
}

/// What kernels count in fewer bits than plans do.
void check_counts(const Layout& layout, const PlanView& plan, bool batch_invariant) {
  constexpr i32 most_ragged = 1 << 30, most_states = 0xffff;
  for (const Level& level : layout.levels()) {
    if (level.storage != KvStorage::ragged) continue;
    for (std::size_t g = 0; g < level.columns.size(); ++g)
      if (level.columns[g] > most_ragged)
        fail<ValueError>("kv_indptr gives request ", g, " ", level.columns[g],
                         " keys; expected at most ", most_ragged, " on a GPU, or pages");
  }
  // Other schedules have at most a partial state a worker and a level.
  if (!batch_invariant) return;
  for (i64 c = 0; c < i64{plan.num_contractions} * plan.num_kv_heads; ++c)
    if (plan.expected[c] > most_states)
      fail<ValueError>("a query tile's keys are computed in ", plan.expected[c],
                       " chunks with batch_invariant=True; expected at most ", most_states,
                       " on a GPU: shorter requests");
}

class CudaBackend final : public AttentionBackend {
 public:
  CudaBackend(const AttentionSpec& spec, const BoundVariant& variant, const Device& device)
      : spec_(spec),
        device_(&device),
        config_(config_of(spec, device.info().arch)),
        captured_(device),
        scratch_(device, spec.head_dim_vo) {
    if (config_.shared_bytes > device.info().max_shared_bytes)
      fail<ValueError>("head_dim ", spec.head_dim_qk, " needs ", config_.shared_bytes,
                       " bytes of shared memory; ", device.info().name, " has ",
                       device.info().max_shared_bytes);
    // Compiles both at once. Any use needs the short kernel soon, and it has all parts of the
    // variant, so that their errors are raised here. The full kernel takes twice as long; plans
    // with long queries wait for it.
    jit::GpuKernel kernel = kernel_of(spec, variant, device.info().arch);
    kernel.short_only = true;
    short_kernel_ = coming(kernel, device, config_);
    kernel.short_only = false;
    kernel_ = coming(kernel, device, config_);
    short_kernel_.get();
  }

  DeviceId device() const override { return DeviceId::cuda(device_->ordinal()); }
  const AttentionSpec& spec() const override { return spec_; }

  PlanConfig plan_config(i32 num_workers, Schedule schedule) const override {
    return cuda_plan_config(spec_, device(), num_workers, schedule);
  }

  std::shared_ptr<const PlanOnDevice> upload(const Layout& layout, const PlanArrays& arrays,
                                             const BoundVariant& origin,
                                             const BoundVariant& variant, ReservedMemory* memory,
                                             void* stream) const override {
    const ContextScope context(*device_);
    if (is_capturing(stream))
      fail<ValueError>(
          "the stream is capturing a graph, in which a new plan cannot be made; expected plan, or "
          "update of a reservation, before the capture");
    check_counts(layout, arrays.view(), spec_.batch_invariant);
    if (!memory)
      return std::make_shared<const CudaPlan>(kernel_for(is_short(arrays.view())), layout, arrays,
                                              variant_on_device(origin, variant, stream), stream);
    auto& reservation = static_cast<CudaReservation&>(*memory);
    if (!reservation.variant()) reservation.set_variant(variant_on_device(origin, variant, stream));
    return std::make_shared<const CudaPlan>(reservation.kernel(), reservation,
                                            reservation.place(layout, arrays, stream));
  }

  std::shared_ptr<ReservedMemory> reserve(const PlanConfig& config, const Maxima& maxima,
                                          void* stream) const override {
    const ContextScope context(*device_);
    if (is_capturing(stream))
      fail<ValueError>("the stream is capturing a graph; expected reserve before the capture");
    const i64 most_rows = i64{max_group_rows(maxima)} * spec_.group_size();
    return std::make_shared<CudaReservation>(kernel_for(most_rows <= config.shapes[0].rows), config,
                                             maxima, spec_.head_dim_vo, stream);
  }

  std::shared_ptr<ReservedMemory> reserve_planner(const PlanConfig& config, const Maxima& maxima,
                                                  const BoundVariant& origin,
                                                  const BoundVariant& variant,
                                                  void* stream) const override {
    const ComingKernel kernel = coming(planner_of(variant, maxima.max_levels > 1), *device_);
    auto memory = reserve(config, maxima, stream);
    const ContextScope context(*device_);
    auto& reservation = static_cast<CudaReservation&>(*memory);
    reservation.set_variant(variant_on_device(origin, variant, stream));
    reservation.plan_with(
        std::make_unique<CudaPlanner>(kernel.get(), config, maxima, variant.has_masks(), stream));
    return memory;
  }

  std::shared_ptr<const PlanOnDevice> plan_on_device(const DeviceLayoutPtr& layout,
                                                     const Layout& shape, ReservedMemory& memory,
                                                     void* stream) const override {
    const ContextScope context(*device_);
    auto& reservation = static_cast<CudaReservation&>(memory);
    return std::make_shared<const CudaPlan>(reservation.kernel(), reservation,
                                            reservation.plan(layout, shape, stream), layout,
                                            capture_of(stream));
  }

  void run(const Plan& plan, const RunView& view, const BoundVariant& variant, const RunArgs& args,
           RunStats* stats) const override {
    check_alignment(args);
    if (stats) stats->busy_us.clear();
    const auto& on_device = static_cast<const CudaPlan&>(*plan.on_device());
    CudaReservation* reservation = on_device.reservation();
    if (plan.view().num_items == 0 && !reservation) return;
    const ContextScope context(*device_);
    const bool captured = is_capturing(args.stream);
    if (captured && !reservation)
      fail<ValueError>(
          "plan is no reservation, and the stream is capturing a graph, which would keep its "
          "addresses; expected a reservation of this attention");
    GpuLaunch launch = on_device.launch();
    static_cast<RunView&>(launch) = view;
    launch.query_rows = static_cast<i32>(args.q.shape[0]);
    launch.timeline = view_timeline(args.timeline, launch.plan.num_workers);
    std::unique_lock<std::mutex> lock;
    if (reservation)
      reservation->provide(launch);
    else
      lock = scratch_.provide(plan.view(), args.stream, launch);
    const CudaVariant* of_run = &on_device.variant();
    std::shared_ptr<const CudaVariant> changed;
    if (&variant != &plan.variant()) {
      // What went up on a stream that is being captured would be a part of the graph.
      StreamHandle up = captured ? upload_stream(*device_) : args.stream;
      changed = captured_.variant(variant, of_run, up);
      of_run = changed.get();
    }
    if (captured) {
      reservation->capture(args, plan.layout(), on_device.launch(), variant,
                           changed ? changed : reservation->variant());
      const bool planned_in_graph = on_device.capture() == capture_of(args.stream);
      if (on_device.layout() && !planned_in_graph) reservation->capture(on_device.layout());
    }
    of_run->use_on(args.stream);
    on_device.use_on(args.stream);
    void* params[] = {&launch, of_run->bytes()};
    on_device.kernel().launch_teams(launch.plan.num_workers, on_device.joins(), args.stream,
                                    params);
  }

 private:
  std::shared_ptr<const CudaVariant> variant_on_device(const BoundVariant& origin,
                                                       const BoundVariant& variant,
                                                       StreamHandle stream) const {
    auto own = spec_variant(origin, stream);
    return &variant == &origin ? own : captured_.variant(variant, own.get(), stream);
  }

  /// The spec's own variant, which most plans and runs share.
  std::shared_ptr<const CudaVariant> spec_variant(const BoundVariant& origin,
                                                  StreamHandle stream) const {
    const std::lock_guard lock(mutex_);
    if (!spec_variant_) spec_variant_ = captured_.variant(origin, nullptr, stream);
    return spec_variant_;
  }

  /// The one that all queries are short for, or that takes any; waits for it.
  const Kernel& kernel_for(bool all_short) const {
    return (all_short ? short_kernel_ : kernel_).get();
  }

  AttentionSpec spec_;
  const Device* device_;
  KernelConfig config_;
  ComingKernel kernel_, short_kernel_;
  mutable CapturedArrays captured_;
  mutable StreamScratch scratch_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const CudaVariant> spec_variant_;
};

}  // namespace

KernelReport compile(const AttentionSpec& spec, const std::string& arch, bool short_only) {
  check_spec(spec);
  jit::GpuKernel kernel = kernel_of(spec, BoundVariant(spec, arch), arch);
  kernel.short_only = short_only;
  return report_of(kernel, arch, config_of(spec, arch).shared_bytes);
}

KernelReport compile_planner(const AttentionSpec& spec, const std::string& arch, bool prefixes) {
  check_spec(spec);
  return report_of(planner_of(BoundVariant(spec, arch), prefixes), arch, 0);
}

void warm(const AttentionSpec& spec, const std::string& arch) {
  check_spec(spec);
  jit::GpuKernel kernel = kernel_of(spec, BoundVariant(spec, arch), arch);
  jit::cubin_of(kernel, arch);
  kernel.short_only = true;
  jit::cubin_of(kernel, arch);
}

}  // namespace cuda

PlanConfig cuda_plan_config(const AttentionSpec& spec, DeviceId device, i32 num_workers,
                            Schedule schedule) {
  const cuda::DeviceInfo& info = cuda::Device::get(device.ordinal).info();
  const i32 all =
      info.num_multiprocessors * cuda::config_of(spec, info.arch).blocks_per_multiprocessor;
  return gpu_plan_config(spec, jit::arch_number(info.arch), num_workers > 0 ? num_workers : all,
                         schedule);
}

std::unique_ptr<AttentionBackend> make_cuda_backend(const AttentionSpec& spec,
                                                    const BoundVariant& variant, DeviceId device) {
  return std::make_unique<cuda::CudaBackend>(spec, variant, cuda::Device::get(device.ordinal));
}

std::string cuda_arch(DeviceId device) { return cuda::Device::get(device.ordinal).info().arch; }

}  // namespace raddle
