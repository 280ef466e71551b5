#include "backend/cuda/plan.h"

#include <algorithm>
#include <cstring>

#include "backend/cuda/layout.h"
#include "backend/cuda/reservation.h"
#include "backend/kv_tensors.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle::cuda {
namespace {

void check_alignment(const RunArgs& args) {
  check_gpu_rows(args.q, "q");
  check_gpu_rows(args.out, "out");
  if (args.kv.size() == 1) {
    check_gpu_rows(args.kv[0].k, "kv: k");
    check_gpu_rows(args.kv[0].v, "kv: v");
    return;
  }
  for (std::size_t i = 0; i < args.kv.size(); ++i) {
    check_gpu_rows(args.kv[i].k, "k", static_cast<i64>(i));
    check_gpu_rows(args.kv[i].v, "v", static_cast<i64>(i));
  }
}

bool is_short(const PlanView& plan) {
  return std::all_of(plan.query_tiles, plan.query_tiles + plan.num_query_tiles,
                     [](const QueryTile& tile) { return tile.shape == short_queries; });
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

/// Kernels count the partial states of a query tile and KV head in 16 bits.
constexpr i32 most_states = 0xffff;

/// What kernels count in fewer bits than plans do.
void check_counts(const Layout& layout, const PlanArrays& arrays) {
  constexpr i32 most_ragged = 1 << 30;
  for (const Level& level : layout.levels()) {
    if (level.storage != KvStorage::ragged) continue;
    for (std::size_t g = 0; g < level.columns.size(); ++g)
      if (level.columns[g] > most_ragged)
        fail<ValueError>("kv_indptr gives request ", g, " ", level.columns[g],
                         " keys; expected at most ", most_ragged, " on a GPU, or pages");
  }
  const PlanView plan = arrays.view();
  // Other schedules have at most a partial state a worker and a level.
  if (!arrays.config().batch_invariant) return;
  for (i64 c = 0; c < i64{plan.num_contractions} * plan.num_kv_heads; ++c)
    if (plan.expected[c] > most_states)
      fail<ValueError>("a query tile's keys are computed in ", plan.expected[c],
                       " chunks with batch_invariant=True; expected at most ", most_states,
                       " on a GPU: shorter requests");
}

}  // namespace

std::shared_ptr<const CudaVariant> AttentionMemory::variant_of(const BoundVariant& origin,
                                                               const BoundVariant& variant,
                                                               StreamHandle stream) {
  std::shared_ptr<const CudaVariant> own;
  {
    const std::lock_guard lock(mutex_);
    if (!origin_) origin_ = captured.variant(origin, nullptr, stream);
    own = origin_;
  }
  return &variant == &origin ? own : captured.variant(variant, own.get(), stream);
}

void check_reserved_counts(const PlanConfig& config, const Maxima& maxima) {
  const i64 chunk = least_absolute_chunk(config);
  if (config.batch_invariant && maxima.max_kv_tokens > (most_states - 1) * chunk)
    fail<ValueError>("max_kv_tokens is ", maxima.max_kv_tokens, "; expected at most ",
                     (most_states - 1) * chunk,
                     " with batch_invariant=True and lengths on a GPU, where one request may have "
                     "them all");
}

void check_upload(const Layout& layout, const PlanArrays& arrays, StreamHandle stream) {
  if (is_capturing(stream))
    fail<ValueError>(
        "the stream is capturing a graph, in which a new plan cannot be made; expected plan, or "
        "update of a reservation, before the capture");
  check_counts(layout, arrays);
}

CudaPlan::CudaPlan(const Kernel& kernel, const KernelChoice& choice, AttentionMemoryPtr memory,
                   const Layout& layout, const PlanArrays& arrays,
                   std::shared_ptr<const CudaVariant> variant, StreamHandle stream)
    : kernel_(&kernel),
      choice_(choice),
      memory_(std::move(memory)),
      variant_(std::move(variant)),
      launch_(launch_of(layout)),
      joins_(arrays.stats().pairs_halves) {
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    launch_.levels[i].block_size = addressed_block_size(layout.levels()[i]);
  const auto of_layout = [&](const auto& visit) { visit_arrays(launch_, layout, visit); };
  ArrayCarver room, places;
  for (ArrayCarver* carve : {&room, &places}) carve->place<u8>(static_cast<i64>(arrays.bytes()));
  carve_arrays(of_layout, room);
  const auto total = static_cast<std::size_t>(room.used());
  const OutsideCapture outside;  // once for both kinds of memory
  block_ = DevicePool::of(kernel.device()).take(total, stream, "a plan");
  Upload upload(kernel.device(), total);
  auto* base = static_cast<std::byte*>(block_.data());
  if (arrays.bytes() > 0) std::memcpy(upload.data(), arrays.data(), arrays.bytes());
  stage_arrays(of_layout, places, upload.data(), base);
  launch_.plan = arrays.view_of_copy(base);
  launch_.arrays = reinterpret_cast<const u8*>(base);
  launch_.array_bytes = static_cast<i64>(total);
  upload.send(block_, {{0, total}}, stream);
}

CudaPlan::CudaPlan(CudaReservation& reservation, const GpuLaunch& launch)
    : kernel_(&reservation.kernel()),
      choice_(reservation.choice()),
      memory_(reservation.memory()),
      variant_(reservation.variant()),
      reservation_(reservation.shared_from_this()),
      launch_(launch) {}

CudaPlan::CudaPlan(CudaReservation& reservation, const GpuLaunch& launch, DeviceLayoutPtr layout,
                   u64 capture)
    : CudaPlan(reservation, launch) {
  layout_ = std::move(layout);
  capture_ = capture;
}

DeviceId CudaPlan::device() const { return DeviceId::cuda(kernel_->device().ordinal()); }

std::string CudaPlan::explain() const {
  const bool launches = launch_.plan.num_items > 0 || reservation_;
  return (reservation_ ? reservation_->explain() : "") + kernel_->label() + " for " +
         kernel_->device().info().arch + " on " + kernel_->device().info().name + "; a run is " +
         (!launches ? "0 launches"
          : choice_.serves.clusters
              ? "1 launch of " + kernel_->describe_clusters(launch_.plan.num_workers)
              : "1 launch of " + kernel_->describe_teams(launch_.plan.num_workers, joins())) +
         "\n" + choice_.explain();
}

const Kernel& CudaPlan::kernel_of(const RunView& view, bool in_boxes) const {
  const bool scales = view.kv_scales[0].v.value != 1.0f && !memory_->kernels.is_quantized();
  const bool rows = !in_boxes && !choice_.serves.rows;
  return scales || rows ? memory_->kernels.in_place_of(*kernel_, scales, rows) : *kernel_;
}

void CudaPlan::run(const Plan& plan, const RunView& view, const BoundVariant& variant,
                   const RunArgs& args, RunStats* stats) const {
  check_alignment(args);
  if (args.timeline.data && !marks_timelines())
    fail<ValueError>(
        "timeline is given, and the plan runs on the wgmma family's kernel of long queries, which "
        "marks nothing; expected an Attention made with RADDLE_BACKEND=mma");
  if (stats) stats->busy_us.clear();
  if (plan.view().num_items == 0 && !reservation_) return;
  const ContextScope context(kernel_->device());
  const bool captured = is_capturing(args.stream);
  if (captured && !reservation_)
    fail<ValueError>(
        "plan is no reservation, and the stream is capturing a graph, which would keep its "
        "addresses; expected a reservation of this attention");
  wgmma::Launch with_maps;  // the maps are written where they are read
  GpuLaunch& launch = with_maps;
  launch = launch_;
  static_cast<RunView&>(launch) = view;
  launch.query_rows =
      args.q.rank == 3 ? static_cast<i32>(args.q.shape[0]) : 0;  // none is prefetched
  launch.lse_base_2 = args.lse_base_2;
  launch.timeline = view_timeline(args.timeline, launch.plan.num_workers);
  with_maps.keys_leave_first = choice_.keys_leave_first;
  const i32 tile_keys = launch_.plan.shapes[long_queries].keys;
  const bool in_boxes = choice_.family != KernelFamily::wgmma ||
                        memory_->maps.provide(plan.layout(), args, tile_keys, with_maps);
  if (choice_.is_long_wgmma()) memory_->maps.provide_rows(args, with_maps);
  // May wait for a compilation, or throw: before anything is locked, or kept for a graph.
  const Kernel& kernel = kernel_of(view, in_boxes);
  std::unique_lock<std::mutex> lock;
  if (reservation_) {
    reservation_->provide(launch);
    if (args.zero_unused_rows) launch.unused_rows_begin = reservation_->num_rows_at(launch.layout);
  } else {
    lock = memory_->scratch.provide(plan.view(), args.stream, launch);
  }
  std::shared_ptr<const CudaVariant> of_run = variant_;
  if (&variant != &plan.variant()) {
    // What went up on a stream that is being captured would be a part of the graph.
    StreamHandle up = captured ? upload_stream(kernel_->device()) : args.stream;
    of_run = memory_->captured.variant(variant, variant_.get(), up);
  }
  if (captured) reservation_->capture(*this, args, plan.layout(), variant, of_run);
  of_run->use_on(args.stream);
  reservation_ ? reservation_->use_on(args.stream) : block_.use_on(args.stream);
  void* params[] = {&with_maps,
                    of_run->bytes()};  // mma kernels take the GpuLaunch that it begins with
  if (choice_.serves.clusters)
    kernel.launch_clusters(launch.plan.num_workers, args.stream, params);
  else
    kernel.launch_teams(launch.plan.num_workers, joins(), args.stream, params);
}

std::shared_ptr<const PlanOnDevice> CudaPlans::put(const Layout& layout, const PlanArrays& arrays,
                                                   const KernelChoice& kernel,
                                                   const BoundVariant& origin,
                                                   const BoundVariant& variant, void* stream) {
  const ContextScope context(*device_);
  check_upload(layout, arrays, stream);
  KernelChoice of_plan = kernel;
  // Tiles of clusters have as many rows as two blocks compute. If the planner preferred blocks
  // alone, the kernel for clusters is compiled meanwhile, so that a longer prompt's plan waits
  // less.
  const bool in_clusters = arrays.config().shapes[long_queries].rows > wgmma::long_rows;
  of_plan.serves.clusters &= in_clusters;
  if (kernel.serves.clusters && !in_clusters) memory_->kernels.start(kernel);
  return std::make_shared<const CudaPlan>(memory_->kernels.get(of_plan, is_short(arrays.view())),
                                          of_plan, memory_, layout, arrays,
                                          memory_->variant_of(origin, variant, stream), stream);
}

}  // namespace raddle::cuda
