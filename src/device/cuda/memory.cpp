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
  /// A stream that works on the block, and its ticket of when the block was given back.
  struct Use {
    std::shared_ptr<StreamProgress> stream;
    u64 ticket = 0;
  };

  DevicePool* pool = nullptr;
  u64 address = 0;
  std::size_t bytes = 0;
  std::mutex mutex;
  std::vector<Use> uses;
  /// When what was sent up is there, and on which stream it went.
  std::shared_ptr<const Event> sent;
  StreamId sent_on;
  std::atomic<bool> arrived = true;
  std::shared_ptr<const Event> own;  ///< for what is no Upload

  /// `event`, just recorded on `stream`, is what others must wait for. An upload's may be recorded
  /// again when it has passed, by a later one: then they wait longer than they need.
  void mark_sent(std::shared_ptr<const Event> event, StreamHandle stream) {
    const std::lock_guard lock(mutex);
    sent = std::move(event);
    sent_on = id_of(stream);
    arrived = false;
  }
  void add_use(StreamHandle stream) {
    const StreamId id = id_of(stream);
    const std::lock_guard lock(mutex);
    for (const Use& use : uses)
      if (use.stream->id() == id) return use.stream->mark();
    uses.push_back({pool->progress_of(id), 0});
    uses.back().stream->mark();
  }
  void order_after_upload(StreamHandle stream) {
    if (arrived) return;
    const std::lock_guard lock(mutex);
    if (id_of(stream) == sent_on) return;
    const OutsideCapture outside;
    if (sent->has_passed())
      arrived = true;
    else if (is_capturing(stream))
      sent->synchronize();
    else
      sent->delay(stream);
  }
  /// Has the stream wait for the work of all others. Returns false where the end of some has no
  /// mark.
  bool order_after_uses(StreamHandle stream) const {
    const StreamId id = id_of(stream);
    return std::all_of(uses.begin(), uses.end(), [&](const Use& use) {
      // A stream waits for itself anyway. (The driver gives a destroyed stream's handle to no other
      // before all its work is done.)
      return use.stream->id() == id || use.stream->delay(stream, use.ticket);
    });
  }
  /// Whether the block is large enough, and not much larger.
  bool suits(std::size_t wanted) const { return bytes >= wanted && bytes <= 2 * wanted; }
  /// Whether the end of each stream's work has a mark.
  bool has_marks() const {
    return std::all_of(uses.begin(), uses.end(),
                       [](const Use& use) { return use.stream->has_mark(use.ticket); });
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
  // Where callers destroy streams, marks of their work never come: such blocks are freed, many at a
  // time. Callers that work on many streams in turns find each one's own block again.
  constexpr int most_unknown = 64;
  const std::size_t size = rounded(bytes);
  int unknown = 0;
  block.state_ = reuse(size, stream, unknown);
  if (!block.state_ && unknown >= most_unknown)
    release([size](const Block::State& state) { return state.suits(size) && !state.has_marks(); });
  if (!block.state_) block.state_ = allocate(size, what);
  block.state_->uses.clear();
  block.state_->arrived = true;
  block.use_on(stream);
  return block;
}

std::unique_ptr<Block::State> DevicePool::reuse(std::size_t bytes, StreamHandle stream,
                                                int& unknown) {
  const std::lock_guard lock(mutex_);
  // The last one given back first: its stream is most often this one.
  for (std::size_t i = free_.size(); i-- > 0;) {
    if (!free_[i]->suits(bytes)) continue;
    if (!free_[i]->order_after_uses(stream)) {
      ++unknown;
      continue;
    }
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
    release([](const Block::State&) { return true; });
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

/// Frees blocks that were given back. The driver waits for what still works on them; to wait for
/// the whole device instead would end the capture of a graph, of whatever thread.
template <class Which>
void DevicePool::release(Which which) {
  const std::lock_guard lock(mutex_);
  std::erase_if(free_, [&](const std::unique_ptr<Block::State>& state) {
    return which(*state) && driver().release(state->address) == 0;
  });
}

std::shared_ptr<StreamProgress> DevicePool::progress_of(const StreamId& id) {
  const std::lock_guard lock(streams_mutex_);
  std::erase_if(streams_, [](const auto& each) { return each.expired(); });
  for (const auto& each : streams_)
    if (auto found = each.lock(); found && found->id() == id) return found;
  auto made = std::make_shared<StreamProgress>(id);
  streams_.push_back(made);
  return made;
}

void DevicePool::give_back(std::unique_ptr<Block::State> state) {
  // Nothing is asked of the streams, which may be gone.
  for (Block::State::Use& use : state->uses) use.ticket = use.stream->take_ticket();
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(state));
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
  check_takes_work(stream);
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
  check_takes_work(stream);
  check(driver().set_bytes(reinterpret_cast<u64>(block.data()) + at, value, bytes, stream),
        "setting device memory");
  block.written_on(stream);
}

void download(void* to, const Block& block, std::size_t at, std::size_t bytes,
              StreamHandle stream) {
  check_takes_work(stream);
  block.use_on(stream);
  const auto address = reinterpret_cast<u64>(block.data()) + at;
  check(driver().copy_from_device(to, address, bytes, stream), "copying from the GPU");
  const Event copied;
  copied.record(stream);
  copied.synchronize();
}

}  // namespace raddle::cuda
