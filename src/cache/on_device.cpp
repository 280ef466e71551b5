#include "cache/on_device.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "backend/cuda/layout.h"
#include "backend/cuda/variant.h"
#include "backend/kv_tensors.h"
#include "device/cuda/module.h"
#include "jit/gpu_kernel.h"
#include "jit/made_once.h"
#include "raddle/error.h"

namespace raddle {

DeviceId common_device(const std::vector<NamedTensor>& tensors) {
  const DeviceId device = tensors.front().tensor.device;
  const auto text = [](DeviceId id) {
    return is_gpu(id) ? "cuda:" + std::to_string(id.ordinal) : std::string("cpu");
  };
  for (const auto& [name, t] : tensors) {
    if (t.device != device)
      fail<ValueError>(name, " lies on '", text(t.device), "'; expected '", text(device), "', as ",
                       tensors.front().name, " does");
    if (!is_gpu(device) || t.rank == 0) continue;
    check_gpu_rows(t, name);
    const i64 row = dim(t, t.rank - 1) * dtype_bytes(t.dtype);
    if (row % 16 != 0)
      fail<ValueError>(name, " has rows of ", row, " bytes; expected a multiple of 16 on a GPU");
  }
  return device;
}

namespace cuda {
namespace {

jit::KvKernels kernels_of(DType dtype, DType kv_dtype, const BoundVariant* variant) {
  if (!variant) return {dtype, kv_dtype, {}, 0};
  return {dtype, kv_dtype, variant->source(), variant->memory_bytes()};
}

/// For calls that move keys whatever their dtype: the kernels that other calls on pools of this
/// dtype compile, too.
jit::KvKernels kernels_for_pools(DType kv_dtype) {
  return kernels_of(has_8_bits(kv_dtype) ? DType::bfloat16 : kv_dtype, kv_dtype, nullptr);
}

/// Identifies a kernel without writing its source.
std::string key_of(const Device& device, const char* entry, const jit::KvKernels& kernels) {
  std::string key = std::to_string(device.ordinal()) + " " + entry + " " +
                    std::to_string(static_cast<int>(kernels.dtype)) + " " +
                    std::to_string(static_cast<int>(kernels.kv_dtype));
  for (const jit::Functor& part : kernels.composition.parts)
    key += "\n" + part.type + "\n" + part.name + "\n" + (part.source ? part.source->text : "");
  for (const jit::MaskNode& node : kernels.composition.masks)
    key += " " + std::to_string(static_cast<int>(node.join)) + " " + std::to_string(node.part);
  return key;
}

/// The kernel, compiled or found, and loaded: once per process and device.
const Kernel& loaded(const Device& device, const char* entry, const jit::KvKernels& kernels) {
  static auto& all = *new jit::MadeOnce<Kernel>;
  return all.get(key_of(device, entry, kernels), [&] {
    const bool chooses = std::strcmp(entry, jit::select_entry) == 0;
    const std::string& arch = device.info().arch;
    const bool waits = std::strcmp(entry, jit::append_entry) == 0 && jit::arch_number(arch) >= 90;
    return new Kernel(device, jit::cubin_of(kernels, arch), entry, entry,
                      chooses ? kv::num_select_threads : kv::num_threads,
                      chooses ? kv::select_shared_bytes : kv::shared_bytes, 1,
                      waits ? Begin::early : Begin::after_earlier_work);
  });
}

CapturedArrays& captured_on(const Device& device) {
  static std::mutex mutex;
  static auto& all = *new std::map<i32, std::unique_ptr<CapturedArrays>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<CapturedArrays>& one = all[device.ordinal()];
  if (!one) one = std::make_unique<CapturedArrays>(device);
  return *one;
}

/// One call: its device is current, and what it has uploaded lives until it ends. The pool does not
/// lend the memory again before the stream has finished with it.
class Call {
 public:
  Call(const Target& on, jit::KvKernels kernels)
      : device_(Device::get(on.device.ordinal)),
        stream_(on.stream),
        context_(device_),
        kernels_(std::move(kernels)) {
    check_takes_work(stream_);
  }

  StreamHandle stream() const { return stream_; }
  const Device& device() const { return device_; }

  void refuse_capture(const char* what) const {
    if (is_capturing(stream_))
      fail<ValueError>("the stream is capturing a graph, which would keep ", what,
                       " of this step; expected a call outside of the capture");
  }

  /// The layout's views on the device.
  void place(const Layout& layout, KvLaunch& launch) {
    refuse_capture("the layout");
    layout_ = layout.copies().on(device_, layout, stream_);
    layout_->use_on(stream_);
    launch.layout = layout_->layout();
    launch.level = layout_->level();
  }

  /// Room for a result or scratch.
  void* take(std::size_t bytes, const char* what) {
    blocks_.push_back(
        DevicePool::of(device_).take(std::max<std::size_t>(bytes, 16), stream_, what));
    blocks_.back().use_on(stream_);
    return blocks_.back().data();
  }

  /// A copy of a host array.
  const i32* send(const i32* list, i64 entries, const char* what) {
    refuse_capture(what);
    const auto bytes = static_cast<std::size_t>(entries) * sizeof(i32);
    blocks_.push_back(
        DevicePool::of(device_).take(std::max<std::size_t>(bytes, 16), stream_, what));
    Upload upload(device_, std::max<std::size_t>(bytes, 16));
    if (bytes > 0) std::memcpy(upload.data(), list, bytes);
    upload.send(blocks_.back(), {{0, bytes}}, stream_);
    blocks_.back().use_on(stream_);
    return static_cast<const i32*>(blocks_.back().data());
  }

  /// A composition's struct as the second parameter.
  void* place(const BoundVariant* variant) {
    static u8 nothing[16] = {};  // a kernel without a variant still has the parameter
    if (!variant) return nothing;
    variant_ = captured_on(device_).variant(*variant, nullptr, stream_);
    variant_->use_on(stream_);
    return variant_->bytes();
  }

  /// One block a `per_block` units.
  template <class Launch>
  void launch(const char* entry, i64 units, i32 per_block, Launch& parameter,
              void* variant = nullptr) const {
    const i64 blocks = ceil_div<i64>(units, per_block);
    if (blocks == 0) return;
    if (blocks > int_max)
      fail<ValueError>(entry, " has ", units, " units of work; expected at most ",
                       i64{int_max} * per_block);
    void* params[] = {&parameter, variant};
    loaded(device_, entry, kernels_).launch(static_cast<i32>(blocks), stream_, params);
  }

 private:
  const Device& device_;
  StreamHandle stream_;
  ContextScope context_;
  jit::KvKernels kernels_;
  std::shared_ptr<const LayoutOnDevice> layout_;
  std::shared_ptr<const CudaVariant> variant_;
  std::vector<Block> blocks_;
};

AppendLaunch append_launch(i64 rows, const AppendView& view) {
  AppendLaunch launch{};
  launch.view = view;
  launch.num_units = rows * view.k.num_heads;
  return launch;
}

/// Rows that are quantised already are bytes, as rows of the pool's own dtype are.
jit::KvKernels append_kernels(DType dtype, DType kv_dtype, const BoundVariant* variant) {
  if (has_8_bits(dtype)) dtype = kv_dtype = DType::bfloat16;
  return kernels_of(dtype, kv_dtype, variant);
}

i32 longest_list(const LevelView& level) {
  i32 pages = 0;
  for (i32 i = 0; i < level.num_groups; ++i) pages = std::max(pages, kv::pages_of_group(level, i));
  return pages;
}

}  // namespace

void append(const Target& on, const Layout& layout, const AppendView& view, DType dtype,
            DType kv_dtype, const BoundVariant* variant) {
  AppendLaunch launch = append_launch(layout.num_rows(), view);
  if (launch.num_units == 0) return;
  Call call(on, append_kernels(dtype, kv_dtype, variant));
  call.place(layout, launch);
  call.launch(jit::append_entry, launch.num_units, kv::num_warps, launch, call.place(variant));
}

void append(const Target& on, i64 rows, const AppendView& view, DType dtype, DType kv_dtype) {
  AppendLaunch launch = append_launch(rows, view);
  Call call(on, append_kernels(dtype, kv_dtype, nullptr));
  call.launch(jit::append_entry, launch.num_units, kv::num_warps, launch, call.place(nullptr));
}

void copy(const Target& on, const CopyView& view, DType kv_dtype) {
  CopyLaunch launch{};
  launch.view = view;
  launch.num_units = i64{view.num_copies} * view.page_size * view.k_from.num_heads;
  if (launch.num_units == 0) return;
  Call call(on, kernels_for_pools(kv_dtype));
  launch.view.from_pages = call.send(view.from_pages, view.num_copies, "from_pages");
  launch.view.to_pages = call.send(view.to_pages, view.num_copies, "to_pages");
  call.launch(jit::copy_entry, launch.num_units, kv::num_warps, launch);
}

void accept(const Target& on, const Layout& layout, const AcceptView& view, DType kv_dtype) {
  AcceptLaunch launch{};
  launch.view = view;
  launch.num_units = i64{layout.num_requests()} * view.k.num_heads;
  if (launch.num_units == 0) return;
  Call call(on, kernels_for_pools(kv_dtype));
  call.place(layout, launch);
  const i32 requests = layout.num_requests();
  launch.view.path = call.send(view.path, view.path_begin[requests], "the accepted paths");
  launch.view.path_begin = call.send(view.path_begin, i64{requests} + 1, "the accepted paths");
  call.launch(jit::accept_entry, launch.num_units, kv::num_warps, launch);
}

void summarize(const Target& on, const Layout& layout, const SummarizeView& view, DType dtype,
               DType kv_dtype) {
  SummarizeLaunch launch{};
  launch.view = view;
  launch.max_pages = longest_list(layout.view().levels[0]);
  launch.num_units = i64{layout.num_requests()} * launch.max_pages * view.k.num_heads;
  if (launch.num_units == 0) return;
  Call call(on, kernels_of(dtype, kv_dtype, nullptr));
  call.place(layout, launch);
  call.launch(jit::summarize_entry, launch.num_units, kv::num_warps, launch);
}

void select(const Target& on, const Layout& layout, const SelectView& view, DType dtype) {
  SelectLaunch launch{};
  launch.view = view;
  launch.view.max_pages = longest_list(layout.view().levels[0]);
  launch.num_units = kv::score_units(launch.view, layout.num_requests());
  const i64 lists = i64{layout.num_requests()} * kv::lists_of_request(view);
  if (lists == 0) return;
  Call call(on, kernels_of(dtype, dtype, nullptr));
  call.place(layout, launch);
  const auto scores = static_cast<std::size_t>(lists * launch.view.max_pages);
  launch.view.scores = static_cast<u32*>(call.take(scores * sizeof(u32), "scores of pages"));
  call.launch(jit::score_entry, launch.num_units, kv::num_warps, launch);
  call.launch(jit::select_entry, lists, 1, launch);
}

void merge(const Target& on, const MergeView& view, const BoundVariant* finish, i32 group_size) {
  MergeLaunch launch{};
  launch.view = view;
  launch.group_size = group_size;
  launch.num_units = i64{view.num_rows} * view.num_heads;
  if (launch.num_units == 0) return;
  Call call(on, kernels_of(DType::float32, DType::float32, finish));
  if (finish) call.refuse_capture("the parameters of finish");
  call.launch(jit::merge_entry, launch.num_units, kv::num_warps, launch, call.place(finish));
}

jit::Cubin compile_kv(const AttentionSpec& spec, const std::string& arch) {
  const BoundVariant bound(spec);
  return jit::compile(kernels_of(spec.dtype, spec.stored_dtype(), &bound), arch);
}

}  // namespace cuda
}  // namespace raddle
