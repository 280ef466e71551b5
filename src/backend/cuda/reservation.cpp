#include "backend/cuda/reservation.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "backend/kv_tensors.h"
#include "raddle/error.h"

namespace raddle::cuda {
namespace {

/// Gaps up to this size are copied along: cheaper than a copy of their own.
constexpr std::size_t small_gap = 16 * 1024;

/// The first array that visit_arrays visits: qo_indptr.
constexpr std::size_t row_offsets = 0;

/// Fills pinned memory that lies as the device's does, and remembers what was filled.
class Filler {
 public:
  explicit Filler(std::byte* base) : base_(base) {}
  void put(std::size_t at, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(base_ + at, from, bytes);
    if (!pieces_.empty() && at >= pieces_.back().at &&
        at <= pieces_.back().at + pieces_.back().bytes + small_gap)
      pieces_.back().bytes = std::max(pieces_.back().bytes, at + bytes - pieces_.back().at);
    else
      pieces_.push_back({at, bytes});
  }
  const std::vector<Upload::Piece>& pieces() const { return pieces_; }

 private:
  std::byte* base_;
  std::vector<Upload::Piece> pieces_;
};

/// The arrays of a plan, at the offsets of a block of other sizes.
void put_plan(const PlanArrays& arrays, const PlanSizes& bounds, Filler& filler) {
  visit_plan_arrays(
      [&filler]<class T>(const T* array, i64 count, i64 offset, i64 most) {
        // plan_bounds is what no plan within the maxima exceeds; a write beyond it must never
        // happen.
        if (count > most) fail<ValueError>("layout takes a larger plan than the reservation has");
        filler.put(static_cast<std::size_t>(offset), array,
                   static_cast<std::size_t>(count) * sizeof(T));
      },
      arrays.view(), arrays.sizes(), plan_offsets(bounds), bounds);
  if (arrays.sizes().partial_rows > bounds.partial_rows)
    fail<ValueError>("layout takes more partial states than the reservation has");
}

}  // namespace

CudaReservation::CudaReservation(const Kernel& kernel, AttentionMemoryPtr memory,
                                 const Planning& planning, const Maxima& maxima, i32 dim_vo,
                                 StreamHandle stream)
    : kernel_(&kernel),
      choice_(planning.kernel),
      device_(&kernel.device()),
      config_(planning.config),
      maxima_(maxima),
      bounds_(plan_bounds(config_, maxima)),
      memory_(std::move(memory)),
      dim_vo_(dim_vo) {
  const i64 bytes = workspace_bytes(config_, maxima, dim_vo);
  scratch_ = DevicePool::of(*device_).take(static_cast<std::size_t>(bytes), stream,
                                           "the workspace of this reservation");
  const i64 counters = scratch_offsets(bounds_.partial_rows, bounds_.expected, dim_vo).drawn;
  clear(scratch_, static_cast<std::size_t>(counters), static_cast<std::size_t>(bytes - counters),
        stream);
}

void CudaReservation::provide(RunView& view) const {
  point_to_scratch(scratch_.data(), bounds_.partial_rows, bounds_.expected, dim_vo_, view);
}

void CudaReservation::use_on(StreamHandle stream) const {
  const std::lock_guard lock(mutex_);
  use_arrays_on(stream);
  scratch_.use_on(stream);
}

void CudaReservation::check_values(const Batch& batch) const {
  const std::lock_guard lock(mutex_);
  for (const BoundVariant& variant : captured_values_) {
    try {
      variant.check_batch(batch, MemberTime::run);
    } catch (const ValueError& error) {
      fail<ValueError>(error.what(), "; a captured run's graph keeps it");
    }
  }
}

void CudaReservation::check_pools(const Layout& layout) const {
  for (std::size_t i = 0; i < captured_pools_.size(); ++i) {
    const Level& level = layout.levels()[i];
    const bool blocks = level.storage == KvStorage::blocks;
    if (const i64 used = blocks ? level.max_slot : level.max_block; used >= captured_pools_[i])
      fail<ValueError>("layout uses ", blocks ? "slot " : "page or row ", used,
                       "; the pool of a captured run has ", captured_pools_[i]);
  }
}

void CudaReservation::capture(const CudaPlan& plan, const RunArgs& args, const Layout& layout,
                              const BoundVariant& variant,
                              std::shared_ptr<const CudaVariant> on_device) {
  if (const i64 rows = captured_rows(layout); args.q.shape[0] < rows)
    fail<ValueError>("q has ", args.q.shape[0],
                     " rows; a captured run needs max_qo_tokens = ", rows,
                     ", as many as a later plan may have");
  const std::lock_guard lock(mutex_);
  keep_arrays(plan, args.stream);
  if (std::find(captured_.begin(), captured_.end(), on_device) == captured_.end()) {
    captured_.push_back(std::move(on_device));
    captured_values_.push_back(variant);
  }
  captured_pools_.resize(layout.levels().size(), std::numeric_limits<i64>::max());
  for (std::size_t i = 0; i < captured_pools_.size(); ++i) {
    const Level& level = layout.levels()[i];
    const KvRef& kv = args.kv[args.kv.size() == 1 ? 0 : i];
    for (const TensorRef* t : {&kv.k, &kv.v}) {
      const bool slots = level.storage == KvStorage::blocks;
      captured_pools_[i] =
          std::min(captured_pools_[i], slots ? slots_of(*t, level.order) : t->shape[0]);
    }
  }
}

std::size_t HostPlannedReservation::capacity(const Level& level, Of of) const {
  const auto requests = static_cast<std::size_t>(maxima_.max_requests) + 1;
  if (of == Of::rows) return static_cast<std::size_t>(maxima_.max_qo_tokens) * sizeof(i32);
  if (of != Of::entries) return requests * sizeof(i32);
  const auto keys = static_cast<std::size_t>(maxima_.max_kv_tokens);
  return (keys / static_cast<std::size_t>(level.block_size) + requests) * sizeof(i32);
}

HostPlannedReservation::Form HostPlannedReservation::form_of(const LayoutKind& kind,
                                                             const GpuLaunch& launch,
                                                             const Layout& layout,
                                                             StreamHandle stream) const {
  Form form;
  form.kind = kind;
  form.first = launch;
  ArrayCarver carve;
  carve.place<u8>(plan_offsets(bounds_).bytes);
  const auto places_of = [&](const Level& level) {
    return [&](const auto* pointer, std::size_t, Of of) {
      std::size_t bytes = pointer ? capacity(level, of) : 0;
      if constexpr (sizeof(*pointer) == 1)  // mask bits
        bytes = bytes / sizeof(i32) *
                ((static_cast<std::size_t>(level.block_rows) *
                      static_cast<std::size_t>(level.block_size) +
                  7) /
                 8);
      form.places.push_back(
          {static_cast<std::size_t>(carve.place<u8>(static_cast<i64>(bytes))), bytes});
    };
  };
  visit_arrays(form.first.layout, places_of(layout.levels()[0]));
  for (std::size_t i = 0; i < layout.levels().size(); ++i)
    visit_arrays(form.first.levels[i], layout.levels()[i], places_of(layout.levels()[i]));
  form.bytes = static_cast<std::size_t>(carve.used());
  form.block = DevicePool::of(*device_).take(form.bytes, stream, "this reservation");
  auto* base = static_cast<std::byte*>(form.block.data());
  std::size_t nth = 0;
  visit_arrays(form.first, layout, [&](auto*& pointer, std::size_t, Of) {
    if (pointer)
      pointer =
          reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + form.places[nth].at);
    ++nth;
  });
  form.first.arrays = reinterpret_cast<const u8*>(base);
  form.first.array_bytes = static_cast<i64>(form.bytes);
  return form;
}

void HostPlannedReservation::check_sizes(const Form& form, const GpuLaunch& launch,
                                         const Layout& layout) const {
  GpuLaunch now = launch;
  std::size_t nth = 0;
  visit_arrays(now, layout, [&](const auto* pointer, std::size_t bytes, Of) {
    const std::size_t room = form.places[nth++].bytes;
    if (pointer && bytes > room)
      fail<ValueError>("layout has an array of ", bytes, " bytes; the reservation has room for ",
                       room, ": page lists without entries past kv_len fit");
  });
}

LayoutKind HostPlannedReservation::kind_with(const Layout& layout) const {
  const LayoutKind kind = kind_of(layout);
  if (form_.bytes == 0 || kind == form_.kind) return kind;
  LayoutKind common = common_kind(form_.kind, kind);
  if (common != form_.kind && has_captures())
    fail<ValueError>("layout has ", beyond(form_.kind, common),
                     ", which graphs of captured runs do not read; expected an update with such a "
                     "layout before the first capture");
  return common;
}

LayoutPtr HostPlannedReservation::fit(const LayoutPtr& layout) const {
  const std::lock_guard lock(mutex_);
  return as_kind(layout, kind_with(*layout));
}

std::shared_ptr<const PlanOnDevice> HostPlannedReservation::put(
    const Layout& layout, const PlanArrays& arrays, const KernelChoice&, const BoundVariant& origin,
    const BoundVariant& variant, void* stream) {
  const ContextScope context(*device_);
  check_upload(layout, arrays, stream);
  if (!this->variant()) {
    batch_arrays_ = BatchArrays(*device_, variant, maxima_, stream);
    set_variant(memory()->variant_of(origin, variant, stream));
  }
  const BatchArrays::Staged staged = batch_arrays_.stage(variant);
  const GpuLaunch launch = send(layout, arrays, stream);
  if (!batch_arrays_.empty())
    set_variant(batch_arrays_.send(staged, variant, *this->variant(), stream));
  return std::make_shared<const CudaPlan>(*this, launch);
}

GpuLaunch HostPlannedReservation::send(const Layout& layout, const PlanArrays& arrays,
                                       StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  GpuLaunch launch = launch_of(layout);
  const LayoutKind kind = kind_with(layout);
  const bool grows = form_.bytes == 0 || kind != form_.kind;
  Form grown = grows ? form_of(kind, launch, layout, stream) : Form{};
  Form& form = grows ? grown : form_;
  outgrown_.reserve(outgrown_.size() + 1);
  check_pools(layout);
  check_sizes(form, launch, layout);
  Upload upload(*device_, form.bytes);
  Filler filler(upload.data());
  put_plan(arrays, bounds_, filler);
  std::size_t nth = 0;
  visit_arrays(launch, layout, [&](const auto* pointer, std::size_t bytes, Of) {
    const Place& place = form.places[nth];
    if (pointer) filler.put(place.at, pointer, bytes);
    if (nth++ == row_offsets)  // and the number of rows as the last entry that there is room for
      filler.put(place.at + place.bytes - sizeof(i32), &launch.layout.num_rows, sizeof(i32));
  });
  // Every worker of a captured launch reads its own queue: the plan's lengths are all in memory.
  form.block.use_on(stream);
  upload.send(form.block, filler.pieces(), stream);
  if (grows) {  // nothing fails any more: until here the plan before stays in force
    std::swap(form_, grown);
    if (grown.bytes > 0) outgrown_.push_back(std::move(grown.block));
  }
  const LayoutView counts = launch.layout;
  launch = form_.first;
  launch.layout.num_requests = counts.num_requests;
  launch.layout.num_rows = counts.num_rows;
  launch.plan = view_at(form_.block.data(), bounds_, config_);
  return launch;
}

void HostPlannedReservation::use_arrays_on(StreamHandle stream) const {
  form_.block.use_on(stream);
  for (const Block& block : outgrown_) block.use_on(stream);
}

void HostPlannedReservation::keep_arrays(const CudaPlan& plan, StreamHandle) {
  if (plan.launch().arrays != form_.first.arrays)
    fail<ValueError>(
        "plan is of an earlier update than the one that gave the reservation its present arrays; "
        "expected the reservation itself, or its present plan, which later updates change");
}

}  // namespace raddle::cuda
