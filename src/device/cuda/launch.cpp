#include "device/cuda/launch.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace raddle::cuda {
namespace {

/// Many small arrays in one device buffer, each at a multiple of 16 bytes.
class Packer {
 public:
  /// Takes a copy; returns where it will lie.
  std::size_t add(const void* data, std::size_t bytes) {
    const std::size_t at = bytes_.size();
    bytes_.resize((at + bytes + 16) / 16 * 16);  // an empty array has an address too
    if (bytes > 0) std::memcpy(bytes_.data() + at, data, bytes);
    return at;
  }
  template <class T>
  std::size_t add(const std::vector<T>& list) {
    return add(list.data(), list.size() * sizeof(T));
  }
  std::size_t bytes() const { return bytes_.size(); }
  void upload(const Buffer& to) const { to.upload(bytes_.data(), bytes_.size()); }

 private:
  std::vector<u8> bytes_;
};

template <class T>
void set(const T*& pointer, const Buffer& buffer, std::size_t offset) {
  pointer = reinterpret_cast<const T*>(static_cast<const u8*>(buffer.data()) + offset);
}

/// A layout's arrays on the device.
class DeviceLayout {
 public:
  explicit DeviceLayout(const Layout& layout) : view_(layout.view()) {
    Packer pack;
    const LayoutView& host = layout.view();
    const auto requests = static_cast<std::size_t>(host.num_requests);
    const auto rows = static_cast<std::size_t>(host.num_rows);
    const std::size_t qo_indptr = pack.add(host.qo_indptr, (requests + 1) * sizeof(i32));
    const std::size_t kv_len = pack.add(host.kv_len, requests * sizeof(i32));
    const std::size_t qo_pos = pack.add(host.qo_pos, host.qo_pos ? rows * sizeof(i32) : 0);
    const std::size_t row_request =
        pack.add(host.row_request, host.row_request ? rows * sizeof(i32) : 0);
    std::vector<Offsets> offsets;
    for (const Level& level : layout.levels()) {
      offsets.push_back(Offsets(pack, level));
      levels_.push_back(level.view());
    }
    buffer_ = Buffer(pack.bytes());
    pack.upload(buffer_);
    for (std::size_t i = 0; i < levels_.size(); ++i) offsets[i].point(levels_[i], buffer_);
    set(view_.qo_indptr, buffer_, qo_indptr);
    set(view_.kv_len, buffer_, kv_len);
    if (view_.qo_pos) set(view_.qo_pos, buffer_, qo_pos);
    if (view_.row_request) set(view_.row_request, buffer_, row_request);
    view_.levels = nullptr;  // the kernel has them by value
  }
  const LayoutView& view() const { return view_; }
  const std::vector<LevelView>& levels() const { return levels_; }

 private:
  /// Where a level's arrays lie in the buffer.
  struct Offsets {
    std::size_t row_indptr, rows, columns, kv_begin, block_begin, blocks, block_index, block_pos,
        block_first, block_count, mask_bits;

    Offsets(Packer& pack, const Level& level)
        : row_indptr(pack.add(level.row_indptr)),
          rows(pack.add(level.rows)),
          columns(pack.add(level.columns)),
          kv_begin(pack.add(level.kv_begin)),
          block_begin(pack.add(level.block_begin)),
          blocks(pack.add(level.blocks)),
          block_index(pack.add(level.block_index)),
          block_pos(pack.add(level.block_pos)),
          block_first(pack.add(level.block_first)),
          block_count(pack.add(level.block_count)),
          mask_bits(pack.add(level.mask_bits)) {}

    /// Arrays that are absent stay null.
    void point(LevelView& v, const Buffer& buffer) const {
      const auto move = [&buffer](auto& pointer, std::size_t offset) {
        if (pointer) set(pointer, buffer, offset);
      };
      move(v.row_indptr, row_indptr);
      move(v.rows, rows);
      move(v.columns, columns);
      move(v.kv_begin, kv_begin);
      move(v.block_begin, block_begin);
      move(v.blocks, blocks);
      move(v.block_index, block_index);
      move(v.block_pos, block_pos);
      move(v.block_first, block_first);
      move(v.block_count, block_count);
      move(v.mask_bits, mask_bits);
    }
  };

  LayoutView view_;
  std::vector<LevelView> levels_;
  Buffer buffer_;
};

/// Copies of host memory on the device, one for each piece however often it is asked for.
class Copies {
 public:
  void* of(const void* data, std::size_t bytes) {
    auto [at, fresh] = buffers_.try_emplace({data, bytes});
    if (fresh) {
      at->second = Buffer(bytes);
      at->second.upload(data, bytes);
    }
    return at->second.data();
  }
  void* of(const HostSpan& span) { return of(span.data, span.bytes); }
  void download(const HostSpan& span) const {
    buffers_.at({span.data, span.bytes}).download(span.data, span.bytes);
  }

 private:
  std::map<std::pair<const void*, std::size_t>, Buffer> buffers_;
};

}  // namespace

HostSpan span_of(const TensorRef& tensor) {
  i64 last = 0;
  bool any = tensor.data != nullptr;
  for (std::size_t i = 0; i < static_cast<std::size_t>(tensor.rank); ++i) {
    any = any && tensor.shape[i] > 0;
    last += (tensor.shape[i] - 1) * tensor.stride[i];
  }
  const i64 bytes = any ? (last + 1) * dtype_bytes(tensor.dtype) : 0;
  return HostSpan{tensor.data, static_cast<std::size_t>(bytes)};
}

void run(const Module& module, const HostRun& run) {
  if (run.plan->view().num_items == 0) return;
  Copies copies;
  const DeviceLayout layout(*run.layout);
  MmaLaunch launch = run.launch;
  launch.layout = layout.view();
  std::copy(layout.levels().begin(), layout.levels().end(), launch.levels);
  launch.plan = run.plan->view_of_copy(copies.of(run.plan->data(), run.plan->bytes()));
  for (std::size_t i = 0; i < run.k.size(); ++i) {
    launch.kv[i].k.data = copies.of(run.k[i]);
    launch.kv[i].v.data = copies.of(run.v[i]);
  }
  launch.q.data = copies.of(run.q);
  launch.out.data = copies.of(run.out);  // with what lies between its rows
  if (launch.lse) launch.lse = static_cast<float*>(copies.of(run.lse));

  const auto rows = static_cast<std::size_t>(launch.plan.num_partial_rows);
  const auto counters =
      static_cast<std::size_t>(launch.plan.num_contractions * launch.plan.num_kv_heads);
  const Buffer partial_o(rows * static_cast<std::size_t>(run.dim_vo) * sizeof(float));
  const Buffer partial_lse(rows * sizeof(float));
  const Buffer arrived(counters * sizeof(i32));
  partial_o.fill(0xff);  // NaN: a state that nobody stored must show
  partial_lse.fill(0xff);
  arrived.fill(0);
  launch.partial_o = static_cast<float*>(partial_o.data());
  launch.partial_lse = static_cast<float*>(partial_lse.data());
  launch.arrived = static_cast<i32*>(arrived.data());

  std::vector<u8> variant = run.variant;
  if (variant.empty()) variant.resize(16);  // a kernel without a variant still has the parameter
  for (const CapturedSpan& captured : run.captured) {
    const void* address = copies.of(captured.data, captured.bytes);
    std::memcpy(variant.data() + captured.offset, &address, sizeof(address));
  }

  const Stream stream;
  void* params[] = {&launch, variant.data()};
  module.launch(kernel_name, launch.plan.num_workers, mma::num_threads, run.shared_bytes, stream,
                params);
  stream.synchronize();
  copies.download(run.out);
  if (launch.lse) copies.download(run.lse);
}

}  // namespace raddle::cuda
