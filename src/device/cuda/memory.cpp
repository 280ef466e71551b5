#include "device/cuda/memory.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "device/cuda/driver.h"
#include "raddle/error.h"

namespace raddle::cuda {
namespace {

/// One of each kind a device, for the life of the process: blocks come back until its very end.
template <class T>
T& one_of(const Device& device, T* (*make)(const Device&)) {
  static std::mutex mutex;
  static std::map<i32, T*>& all = *new std::map<i32, T*>;
  const std::lock_guard lock(mutex);
  T*& found = all[device.ordinal()];
  if (!found) found = make(device);
  return *found;
}

/// Sizes that are asked for vary a little from batch to batch: coarser ones are found again.
std::size_t rounded(std::size_t bytes) {
  std::size_t size = 4096;
  while (size < bytes && size < (std::size_t{1} << 20)) size *= 2;
  const std::size_t step = std::min(size, std::size_t{1} << 20);
  return (std::max(bytes, std::size_t{1}) + step - 1) / step * step;
}

}  // namespace

// --- device memory -----------------------------------------------------------------------------

struct Block::State {
  /// A stream that works on the block, and how far it was when the block was given back.
  struct Use {
    StreamHandle stream = nullptr;
    Event event;
    bool recorded = false;
  };

  DevicePool* pool = nullptr;
  u64 address = 0;
  std::size_t bytes = 0;
  std::mutex mutex;
  std::vector<Use> uses;  ///< the first num_uses are in use, the rest keep their events
  std::size_t num_uses = 0;
  /// When what was sent up is there, and on which stream it went.
  std::shared_ptr<const Event> sent;
  StreamHandle sent_on = nullptr;
  std::atomic<bool> arrived = true;
  std::shared_ptr<const Event> own;  ///< for what is no Upload

  /// `event`, just recorded on `stream`, is what others must wait for. An upload's may be recorded
  /// again when it has passed, by a later one: then they wait longer than they need.
  void mark_sent(std::shared_ptr<const Event> event, StreamHandle stream) {
    const std::lock_guard lock(mutex);
    sent = std::move(event);
    sent_on = stream;
    arrived = false;
  }
  void add_use(StreamHandle stream) {
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < num_uses; ++i)
      if (uses[i].stream == stream) return;
    if (num_uses == uses.size()) {
      const OutsideCapture outside;
      uses.emplace_back();
    }
    uses[num_uses].stream = stream;
    uses[num_uses++].recorded = false;
  }
  void order_after_upload(StreamHandle stream) {
    if (arrived || stream == sent_on) return;
    const std::lock_guard lock(mutex);
    const OutsideCapture outside;
    if (sent->has_passed())
      arrived = true;
    else if (is_capturing(stream))
      sent->synchronize();
    else
      sent->delay(stream);
  }
  /// False where some stream is being captured just now: then nothing can be said of its work.
  bool record_uses() {
    for (std::size_t i = 0; i < num_uses; ++i) {
      Use& use = uses[i];
      if (use.recorded) continue;
      if (is_capturing(use.stream)) return false;
      use.event.record(use.stream);
      use.recorded = true;
    }
    return true;
  }
};

Block::Block() = default;
Block::Block(Block&& other) noexcept = default;
Block& Block::operator=(Block&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}
Block::~Block() {
  if (state_) state_->pool->give_back(std::move(state_));
}
void* Block::data() const { return state_ ? reinterpret_cast<void*>(state_->address) : nullptr; }
std::size_t Block::bytes() const { return state_ ? state_->bytes : 0; }
void Block::use_on(StreamHandle stream) const {
  state_->order_after_upload(stream);
  state_->add_use(stream);
}

void Block::written_on(StreamHandle stream) const {
  if (!state_->own) state_->own = std::make_shared<const Event>();
  state_->own->record(stream);
  state_->mark_sent(state_->own, stream);
}

DevicePool::DevicePool(const Device& device) : device_(&device) {}
DevicePool::~DevicePool() = default;  // never: pools live as long as the process
DevicePool& DevicePool::of(const Device& device) {
  return one_of<DevicePool>(device, [](const Device& d) { return new DevicePool(d); });
}

Block DevicePool::take(std::size_t bytes, StreamHandle stream, const char* what) {
  const ContextScope context(*device_);
  const OutsideCapture outside;
  Block block;
  block.state_ = reuse(rounded(bytes), stream);
  if (!block.state_) block.state_ = allocate(rounded(bytes), what);
  block.state_->num_uses = 0;
  block.state_->arrived = true;
  block.use_on(stream);
  return block;
}

std::unique_ptr<Block::State> DevicePool::reuse(std::size_t bytes, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  // The last one given back first: its stream is most often this one.
  for (std::size_t i = free_.size(); i-- > 0;) {
    if (free_[i]->bytes < bytes || free_[i]->bytes > 2 * bytes) continue;
    if (!free_[i]->record_uses()) continue;
    // A stream waits for itself anyway. (The driver gives a destroyed stream's handle to no other
    // before all its work is done.)
    for (std::size_t u = 0; u < free_[i]->num_uses; ++u)
      if (free_[i]->uses[u].stream != stream) free_[i]->uses[u].event.delay(stream);
    auto found = std::move(free_[i]);
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
    return found;
  }
  return nullptr;
}

std::unique_ptr<Block::State> DevicePool::allocate(std::size_t bytes, const char* what) {
  auto state = std::make_unique<Block::State>();
  int result = driver().allocate(&state->address, bytes);
  if (result == out_of_memory) {
    release_idle();
    result = driver().allocate(&state->address, bytes);
  }
  if (result == out_of_memory) {
    std::size_t free = 0, total = 0;
    driver().memory_info(&free, &total);
    fail<DeviceError>(what, " takes ", bytes, " bytes; 'cuda:", device_->ordinal(), "' has ", free,
                      " of its ", total, " bytes free");
  }
  check(result, "allocating device memory");
  state->pool = this;
  state->bytes = bytes;
  return state;
}

/// Frees what no stream works on any more.
void DevicePool::release_idle() {
  const std::lock_guard lock(mutex_);
  std::erase_if(free_, [](const std::unique_ptr<Block::State>& state) {
    if (!state->record_uses()) return false;
    for (std::size_t u = 0; u < state->num_uses; ++u) state->uses[u].event.synchronize();
    driver().release(state->address);
    return true;
  });
}

void DevicePool::give_back(std::unique_ptr<Block::State> state) {
  try {
    const ContextScope context(*device_);
    const OutsideCapture outside;
    state->record_uses();
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(state));
  } catch (const DeviceError&) {
    // The device is lost, and its memory with it; its next use raises an error.
    (void)state.release();
  }
}

// --- pinned memory -----------------------------------------------------------------------------

struct Upload::Pinned {
  void* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const Event> sent = std::make_shared<const Event>();
  bool in_flight = false;
};

/// Blocks that are not being filled; some may still be on their way.
struct PinnedPool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Upload::Pinned>> blocks;

  static PinnedPool& of(const Device& device) {
    return one_of<PinnedPool>(device, [](const Device&) { return new PinnedPool; });
  }
  std::unique_ptr<Upload::Pinned> take(std::size_t bytes) {
    const std::lock_guard lock(mutex);
    // The oldest first: its copy is through most probably.
    for (auto at = blocks.begin(); at != blocks.end(); ++at) {
      if ((*at)->bytes < bytes || (*at)->bytes > 4 * bytes) continue;
      if ((*at)->in_flight && !(*at)->sent->has_passed()) continue;
      auto found = std::move(*at);
      found->in_flight = false;
      blocks.erase(at);
      return found;
    }
    auto fresh = std::make_unique<Upload::Pinned>();
    constexpr unsigned portable = 1;  // for the contexts of all devices
    check(driver().allocate_pinned(&fresh->data, bytes, portable), "allocating pinned memory");
    fresh->bytes = bytes;
    return fresh;
  }
};

Upload::Upload(const Device& device, std::size_t bytes) : device_(&device) {
  const ContextScope context(device);
  const OutsideCapture outside;
  pinned_ = PinnedPool::of(device).take(rounded(bytes));
}

Upload::~Upload() {
  PinnedPool& pool = PinnedPool::of(*device_);
  const std::lock_guard lock(pool.mutex);
  pool.blocks.push_back(std::move(pinned_));
}

std::byte* Upload::data() const { return static_cast<std::byte*>(pinned_->data); }

void Upload::send(const Block& block, const std::vector<Piece>& pieces, StreamHandle stream) {
  const ContextScope context(*device_);
  Block::State& to = *block.state_;
  for (const Piece& piece : pieces)
    if (piece.bytes > 0)
      check(driver().copy_to_device(to.address + piece.at, data() + piece.at, piece.bytes, stream),
            "copying to the GPU");
  pinned_->in_flight = true;
  pinned_->sent->record(stream);
  to.mark_sent(pinned_->sent, stream);
}

StreamHandle upload_stream(const Device& device) {
  struct Own {
    StreamHandle handle = nullptr;
  };
  return one_of<Own>(device,
                     [](const Device& d) {
                       const ContextScope context(d);
                       const OutsideCapture outside;
                       auto own = std::make_unique<Own>();
                       constexpr unsigned non_blocking = 1;
                       check(driver().create_stream(&own->handle, non_blocking),
                             "creating a stream");
                       return own.release();
                     })
      .handle;
}

void set_bytes(const Block& block, std::size_t at, std::size_t bytes, u8 value,
               StreamHandle stream) {
  if (bytes == 0) return;
  check(driver().set_bytes(reinterpret_cast<u64>(block.data()) + at, value, bytes, stream),
        "setting device memory");
  block.written_on(stream);
}

void download(void* to, const Block& block, std::size_t at, std::size_t bytes,
              StreamHandle stream) {
  block.use_on(stream);
  const auto address = reinterpret_cast<u64>(block.data()) + at;
  check(driver().copy_from_device(to, address, bytes, stream), "copying from the GPU");
  const Event copied;
  copied.record(stream);
  copied.synchronize();
}

}  // namespace raddle::cuda
