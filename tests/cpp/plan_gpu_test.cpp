// The planner kernel on a GPU, captured in a CUDA graph: the host's plan byte for byte, and how
// long it takes. Skipped where there is no GPU; `raddle_tests --gtest_filter='PlannerOnGpu*'`.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>

#include "jit/planner_kernel.h"
#include "plan_device_testing.h"
#include "variant/bound_variant.h"

namespace raddle::plan_testing {
namespace {

using Address = unsigned long long;

/// As much of the CUDA driver as this needs.
class Gpu {
 public:
  /// Null where there is none.
  static Gpu* instance() {
    static Gpu gpu;
    return gpu.handle_ ? &gpu : nullptr;
  }

  template <class... Args>
  void call(const char* name, Args... args) {
    auto* f = reinterpret_cast<int (*)(Args...)>(dlsym(library_, name));
    if (!f) throw std::runtime_error(std::string(name) + " is missing");
    if (const int code = f(args...))
      throw std::runtime_error(std::string(name) + " returns " + std::to_string(code));
  }

  std::string arch() {
    int major = 0, minor = 0;
    call("cuDeviceGetAttribute", &major, 75, 0);
    call("cuDeviceGetAttribute", &minor, 76, 0);
    return "sm_" + std::to_string(10 * major + minor) + (major == 9 ? "a" : "");
  }
  int max_shared_bytes() {
    int bytes = 0;
    call("cuDeviceGetAttribute", &bytes, 97, 0);
    return bytes;
  }
  Address allocate(i64 bytes) {
    Address address = 0;
    call("cuMemAlloc_v2", &address, static_cast<std::size_t>(bytes + 16));
    call("cuMemsetD8_v2", address, static_cast<unsigned char>(0),
         static_cast<std::size_t>(bytes + 16));
    return address;
  }
  void release(Address address) { call("cuMemFree_v2", address); }
  void upload(Address to, const void* from, std::size_t bytes) {
    if (bytes > 0) call("cuMemcpyHtoD_v2", to, from, bytes);
  }
  void download(void* to, Address from, std::size_t bytes) {
    if (bytes > 0) call("cuMemcpyDtoH_v2", to, from, bytes);
  }

 private:
  Gpu() : library_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (!library_) return;
    try {
      call("cuInit", 0u);
      call("cuDevicePrimaryCtxRetain", &handle_, 0);
      call("cuCtxSetCurrent", handle_);
    } catch (const std::exception&) {
      handle_ = nullptr;
    }
  }
  void* library_;
  void* handle_ = nullptr;
};

/// Device memory of one batch's arrays.
class Arrays {
 public:
  explicit Arrays(Gpu& gpu) : gpu_(gpu) {}
  Arrays(const Arrays&) = delete;
  ~Arrays() {
    for (const Address address : all_) gpu_.release(address);
  }
  template <class T>
  const T* copy(const std::vector<T>& values) {
    all_.push_back(gpu_.allocate(static_cast<i64>(values.size() * sizeof(T))));
    gpu_.upload(all_.back(), values.data(), values.size() * sizeof(T));
    return reinterpret_cast<const T*>(all_.back());
  }
  template <class T>
  T* zeros(i64 bytes) {
    all_.push_back(gpu_.allocate(bytes));
    return reinterpret_cast<T*>(all_.back());
  }

 private:
  Gpu& gpu_;
  std::vector<Address> all_;
};

/// A composition's planner on the GPU.
class GpuPlanner {
 public:
  GpuPlanner(Gpu& gpu, std::vector<Variant> variant, bool prefixes) : gpu_(gpu) {
    AttentionSpec spec;
    spec.num_qo_heads = 8;
    spec.num_kv_heads = 1;
    spec.variant = std::move(variant);
    variant_ = std::make_unique<BoundVariant>(spec);
    for (const bool in_shared : {false, true}) {
      const std::string cubin = jit::cubin_of(
          jit::PlannerKernel{variant_->source(), variant_->memory_bytes(), prefixes, in_shared},
          gpu.arch());
      void* module = nullptr;
      gpu.call("cuModuleLoadData", &module, static_cast<const void*>(cubin.data()));
      gpu.call("cuModuleGetFunction", &functions_[in_shared], module, jit::planner_entry_point);
    }
    gpu.call("cuStreamCreate", &stream_, 1u);
  }

  CoverFns cover() const {
    if (!variant_->has_masks()) return {};
    return CoverFns{variant_.get(),
                    [](const void* v, const Tile& t) {
                      return static_cast<const BoundVariant*>(v)->kv_span(t);
                    },
                    [](const void* v, const Tile& t) {
                      return static_cast<const BoundVariant*>(v)->coverage(t);
                    }};
  }

  /// Plans by replays of a graph of `launches` launches; returns the microseconds of one, the least
  /// of all replays.
  float run(const OwnedBatch& batch, i32 min_prefix, const PlanConfig& config, const Maxima& maxima,
            DevicePlan& result, i32 launches = 1, i32 replays = 2) {
    Arrays memory(gpu_);
    DeviceBatch at = batch.view();
    at.qo_indptr = memory.copy(batch.qo_indptr);
    at.kv_len = memory.copy(batch.kv_len);
    at.kv_indptr = memory.copy(batch.kv_indptr);
    if (at.pages) at.pages = memory.copy(batch.pages);
    if (at.page_indptr) at.page_indptr = memory.copy(batch.page_indptr);
    at.min_prefix = min_prefix;
    PlanLaunch launch =
        plan_launch(at, config, maxima, variant_->has_masks(), gpu_.max_shared_bytes());
    launch.plan = memory.zeros<u8>(launch.at.bytes);
    launch.layout = memory.zeros<u8>(launch.layout_at.bytes);
    launch.scratch = memory.zeros<u8>(launch.scratch_at.device_bytes);
    launch.sizes = memory.zeros<PlanSizes>(sizeof(PlanSizes));
    launch.report = memory.zeros<PlanReport>(sizeof(PlanReport));
    const float time = replay(launch, launches, replays);
    result.launch = launch;
    result.plan.resize(static_cast<std::size_t>(launch.at.bytes) + 16);
    gpu_.download(result.plan.data(), reinterpret_cast<Address>(launch.plan),
                  result.plan.size() - 16);
    gpu_.download(&result.sizes, reinterpret_cast<Address>(launch.sizes), sizeof(PlanSizes));
    gpu_.download(&result.report, reinterpret_cast<Address>(launch.report), sizeof(PlanReport));
    return time;
  }

 private:
  float replay(PlanLaunch& launch, i32 launches, i32 replays) {
    const PlannerGrid grid = planner_grid(launch);
    void* function = functions_[launch.scratch_in_shared];
    gpu_.call("cuFuncSetAttribute", function, 8, grid.shared_bytes);
    std::vector<u8> variant(static_cast<std::size_t>(std::max(variant_->memory_bytes(), 16)));
    if (variant_->memory_bytes() > 0)
      std::memcpy(variant.data(), variant_->memory(),
                  static_cast<std::size_t>(variant_->memory_bytes()));
    void* params[] = {&launch, variant.data()};
    void *graph = nullptr, *ready = nullptr, *start = nullptr, *stop = nullptr;
    gpu_.call("cuStreamBeginCapture_v2", stream_, 2);
    for (i32 i = 0; i < launches; ++i)
      gpu_.call("cuLaunchKernel", function, static_cast<unsigned>(grid.blocks), 1u, 1u,
                static_cast<unsigned>(grid.threads), 1u, 1u,
                static_cast<unsigned>(grid.shared_bytes), stream_, static_cast<void**>(params),
                static_cast<void**>(nullptr));
    gpu_.call("cuStreamEndCapture", stream_, &graph);
    gpu_.call("cuGraphInstantiateWithFlags", &ready, graph, 0ull);
    gpu_.call("cuEventCreate", &start, 0u);
    gpu_.call("cuEventCreate", &stop, 0u);
    float least = 1e9f;
    for (i32 i = 0; i < replays; ++i) {
      float ms = 0;
      gpu_.call("cuEventRecord", start, stream_);
      gpu_.call("cuGraphLaunch", ready, stream_);
      gpu_.call("cuEventRecord", stop, stream_);
      gpu_.call("cuStreamSynchronize", stream_);
      gpu_.call("cuEventElapsedTime", &ms, start, stop);
      least = std::min(least, 1000.0f * ms / static_cast<float>(launches));
    }
    gpu_.call("cuGraphExecDestroy", ready);
    gpu_.call("cuGraphDestroy", graph);
    return least;
  }

  Gpu& gpu_;
  std::unique_ptr<BoundVariant> variant_;
  void* functions_[2] = {};  // the second for launches with scratch in shared memory
  void* stream_ = nullptr;
};

std::vector<std::vector<Variant>> variants() {
  return {{}, {causal()}, {soft_cap(30.0f), sliding_window(100), causal()}};
}

#define NEEDS_A_GPU()               \
  Gpu* const gpu = Gpu::instance(); \
  if (!gpu) GTEST_SKIP() << "there is no GPU here"

TEST(PlannerOnGpu, IsTheHosts) {
  NEEDS_A_GPU();
  for (const auto& variant : variants()) {
    GpuPlanner planner(*gpu, variant, false);
    repeat(60, [&](std::mt19937& random) {
      const OwnedBatch batch = random_batch(random, between(random, 0, 700), 70, 900);
      const PlanConfig config = random_config(random);
      DevicePlan got;
      planner.run(batch, 0, config, maxima_of(batch, config, between(random, 0, 3)), got);
      EXPECT_EQ(got.report.errors, 0);
      OwnedLayout layout = host_layout(batch);
      expect_equal_plans(got, make_plan(layout.view(), config, planner.cover()));
    });
  }
}

TEST(PlannerOnGpu, FindsTheHostsPrefixes) {
  NEEDS_A_GPU();
  for (const auto& variant : variants()) {
    GpuPlanner planner(*gpu, variant, true);
    repeat(60, [&](std::mt19937& random) {
      const OwnedBatch batch = random_shared(random, between(random, 0, 300), 20);
      const PlanConfig config = random_config(random);
      const i32 min_prefix = between(random, 1, 100);
      DevicePlan got;
      planner.run(batch, min_prefix, config, maxima_of(batch, config, between(random, 0, 3), 2),
                  got);
      EXPECT_EQ(got.report.errors, 0);
      const std::vector<i32> begins = begins_of(batch);
      OwnedLayout layout = layout_of(batch, discover_prefixes(lists_of(batch, begins), min_prefix));
      expect_equal_plans(got, make_plan(layout.view(), config, planner.cover()));
    });
  }
}

/// Decode: `shared` leading pages in common, the rest each request's own.
OwnedBatch decode_batch(i32 requests, i32 least_keys, i32 most_keys, i32 shared) {
  std::mt19937 random(1);
  OwnedBatch batch;
  batch.page_size = 16;
  batch.num_pages = 1 << 20;
  batch.row_stride = ceil_div(most_keys, 16);
  batch.kv_indptr.push_back(0);
  for (i32 r = 0; r < requests; ++r) {
    batch.qo_indptr.push_back(r + 1);
    batch.kv_len.push_back(between(random, least_keys, most_keys));
    for (i32 p = 0; p < batch.row_stride; ++p)
      batch.pages.push_back(p < shared ? p : 1000 + r * static_cast<i32>(batch.row_stride) + p);
  }
  return batch;
}

PlanConfig h200_config() {
  PlanConfig config = config_for(264, 8, 4);
  config.shapes[short_queries] = TileShape{16, 64};
  config.shapes[long_queries] = TileShape{128, 64};
  config.schedule = Schedule::linear;
  return config;
}

TEST(PlannerOnGpu, Times) {
  NEEDS_A_GPU();
  GpuPlanner planner(*gpu, {causal()}, false), finder(*gpu, {causal()}, true);
  const PlanConfig config = h200_config();
  const auto time = [&](const char* name, GpuPlanner& by, OwnedBatch batch, bool checks,
                        i32 min_prefix) {
    if (!checks) batch.num_pages = 0;
    DevicePlan got;
    const float us = by.run(batch, min_prefix, config,
                            maxima_of(batch, config, 0, min_prefix > 0 ? 2 : 1), got, 50, 20);
    EXPECT_EQ(got.report.errors, 0);
    std::printf("%-58s %7.2f us\n", name, static_cast<double>(us));
  };
  time("B16 x 8192", planner, decode_batch(16, 8192, 8192, 0), false, 0);
  time("B256 x U(1024, 2048)", planner, decode_batch(256, 1024, 2048, 0), false, 0);
  time("B256 x U(1024, 2048), pages checked", planner, decode_batch(256, 1024, 2048, 0), true, 0);
  time("B1024 x U(1024, 2048)", planner, decode_batch(1024, 1024, 2048, 0), false, 0);
  time("64 rows of 600 pages, 512 shared, prefixes found", finder,
       decode_batch(64, 9500, 9600, 512), false, 1024);
  time("64 rows of 600 pages, 512 shared, and checked", finder, decode_batch(64, 9500, 9600, 512),
       true, 1024);
  time("64 rows of 600 pages, none shared", finder, decode_batch(64, 9500, 9600, 0), false, 1024);
}

}  // namespace
}  // namespace raddle::plan_testing
