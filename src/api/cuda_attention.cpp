#include "api/cuda_attention.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>

#include "api/kv_tensors.h"
#include "api/planning.h"
#include "device/cuda/launch.h"
#include "jit/gpu_kernel.h"
#include "plan/heuristics.h"
#include "raddle/error.h"

namespace raddle::cuda {
namespace {

jit::GpuKernel kernel_of(const AttentionSpec& spec, const BoundVariant& variant) {
  if (spec.dtype == DType::float32)
    fail<ValueError>("dtype is 'float32'; GPU kernels compute 'float16' and 'bfloat16'");
  return {spec.dtype, spec.head_dim_qk, spec.head_dim_vo, variant.source(), variant.memory_bytes()};
}

/// Loaded once a process, and never unloaded.
const Module& module_of(const jit::GpuKernel& kernel) {
  static std::mutex mutex;
  static std::map<std::string, const Module*>& loaded = *new std::map<std::string, const Module*>;
  const std::string source = jit::source_of(kernel, Device::instance().arch());
  const std::lock_guard lock(mutex);
  const Module*& module = loaded[source];
  if (!module) module = new Module(jit::cubin_of(kernel, Device::instance().arch()));
  return *module;
}

/// The kernel reads rows of Q, K and V 16 bytes at a time.
HostSpan aligned_span(const std::string& name, const TensorRef& t) {
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(t.rank); ++i) {
    if (t.shape[i] <= 1) continue;
    if (t.stride[i] < 0)
      fail<ValueError>(name, " has stride ", t.stride[i], " in dimension ", i,
                       "; expected at least 0 on a GPU");
    if (t.stride[i] % 8 != 0)
      fail<ValueError>(name, " has stride ", t.stride[i], " in dimension ", i,
                       "; expected a multiple of 8 elements on a GPU: rows of 16-byte units");
  }
  return span_of(t);
}

}  // namespace

KernelReport compile(const AttentionSpec& spec, const std::string& arch) {
  check_spec(spec);
  const jit::GpuKernel kernel = kernel_of(spec, BoundVariant(spec));
  const auto start = std::chrono::steady_clock::now();
  jit::Cubin cubin = jit::compile(kernel, arch);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const jit::Resources used = jit::parse_resources(cubin.log);
  const mma::KernelConfig config =
      mma::kernel_config(spec.head_dim_qk, spec.head_dim_vo, jit::arch_number(arch));
  return {used.registers, used.spill_bytes, config.shared_bytes, took.count(),
          std::move(cubin.log)};
}

void warm(const AttentionSpec& spec, const std::string& arch) {
  check_spec(spec);
  jit::cubin_of(kernel_of(spec, BoundVariant(spec)), arch);
}

void attend(const AttentionSpec& spec, const LayoutPtr& layout, const PlanOptions& options,
            const RunArgs& args) {
  check_spec(spec);
  const auto variant = std::make_shared<const BoundVariant>(spec);
  const jit::GpuKernel kernel = kernel_of(spec, *variant);
  const ContextScope context;
  const i32 arch = jit::arch_number(Device::instance().arch());
  const mma::KernelConfig config = mma::kernel_config(spec.head_dim_qk, spec.head_dim_vo, arch);
  const i32 workers = options.num_workers > 0 ? options.num_workers
                                              : config.blocks_per_multiprocessor *
                                                    Device::instance().num_multiprocessors();
  const PlanPtr plan = plan_layout(spec, variant, layout, options,
                                   gpu_plan_config(spec, arch, workers, options.schedule));
  HostRun run{};
  static_cast<RunView&>(run.launch) = view_run(spec, *plan, args);
  const auto of_run = variant_of_run(*plan, args);
  run.layout = layout.get();
  run.plan = &plan->arrays();
  for (std::size_t i = 0; i < layout->levels().size(); ++i) {
    const KvRef& pair = args.kv[args.kv.size() == 1 ? 0 : i];
    run.k.push_back(aligned_span("kv: k", pair.k));
    run.v.push_back(aligned_span("kv: v", pair.v));
  }
  run.q = aligned_span("q", args.q);
  run.out = span_of(args.out);
  run.lse = span_of(args.lse);
  const auto* bytes = static_cast<const u8*>(of_run->memory());
  run.variant.assign(bytes, bytes + of_run->memory_bytes());
  for (const Capture& capture : of_run->captures())
    run.captured.push_back({capture.offset, capture.data, capture.bytes});
  run.dim_vo = spec.head_dim_vo;
  run.shared_bytes = config.shared_bytes;
  if (run.shared_bytes > Device::instance().max_shared_bytes())
    fail<ValueError>("head_dim ", spec.head_dim_qk, " needs ", run.shared_bytes,
                     " bytes of shared memory; ", Device::instance().name(), " has ",
                     Device::instance().max_shared_bytes());
  cuda::run(module_of(kernel), run);
}

Machine machine() {
  const Device& device = Device::instance();
  const jit::Nvrtc& nvrtc = jit::Nvrtc::instance();
  return {device.name(), device.arch(), device.driver_version(), nvrtc.version(), nvrtc.path()};
}

}  // namespace raddle::cuda
