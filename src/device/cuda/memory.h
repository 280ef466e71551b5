// Device memory and pinned host memory from pools, one pair a device. What is given back is reused
// in stream order: after the first batches nothing is allocated, and the host waits for no stream.
// The exceptions are captured graphs, downloads, and blocks of streams that callers have destroyed.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda/device.h"
#include "device/cuda/stream.h"

namespace raddle::cuda {

class DevicePool;

/// Device memory on loan from a pool, at least 256-byte aligned; goes back at the end.
class Block {
 public:
  Block();
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  ~Block();

  void* data() const;
  std::size_t bytes() const;
  /// Must be called with every stream that is given work on it, before that work: the
  /// stream waits for uploads and for work named by `written_on`, and the memory's next user waits
  /// for the stream. A stream that is being captured cannot wait for what is not part of its graph:
  /// there the host waits. The stream may be destroyed any time after that work was launched.
  void use_on(StreamHandle stream) const;
  /// What `stream` was given last writes the block: other streams wait for it as for an upload. Not
  /// while it is being captured.
  void written_on(StreamHandle stream) const;

 private:
  friend class DevicePool;
  friend class Upload;
  struct State;
  std::unique_ptr<State> state_;
};

class DevicePool {
 public:
  static DevicePool& of(const Device& device);

  /// Memory that work on `stream` may use from now on; its contents are undefined. Raises
  /// DeviceError where there is not enough, naming `what` it was for and how much is free.
  Block take(std::size_t bytes, StreamHandle stream, const char* what);

 private:
  friend class Block;
  explicit DevicePool(const Device& device);
  ~DevicePool();
  void give_back(std::unique_ptr<Block::State> state);
  /// `unknown` counts blocks of the size that other streams may still work on: their ends have no
  /// mark.
  std::unique_ptr<Block::State> reuse(std::size_t bytes, StreamHandle stream, int& unknown);
  std::unique_ptr<Block::State> allocate(std::size_t bytes, const char* what);
  template <class Which>
  void release(Which which);
  std::shared_ptr<StreamProgress> progress_of(const StreamId& id);

  const Device* device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block::State>> free_;
  std::mutex streams_mutex_;
  std::vector<std::weak_ptr<StreamProgress>> streams_;  ///< that blocks were used on
};

/// A block of pinned host memory to fill, and then to send in one asynchronous copy. The pool does
/// not lend the memory again before that copy is complete.
class Upload {
 public:
  Upload(const Device& device, std::size_t bytes);
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  std::byte* data() const;
  struct Piece {
    std::size_t at, bytes;
  };
  /// Copies pieces to the same places of `block` in stream order.
  void send(const Block& block, const std::vector<Piece>& pieces, StreamHandle stream);

 private:
  struct Pinned;
  friend struct PinnedPool;
  const Device* device_;
  std::unique_ptr<Pinned> pinned_;
};

/// A stream of Raddle's own, for uploads that must not be part of a graph.
StreamHandle upload_stream(const Device& device);

/// Gives bytes of a block a value, in stream order.
void set_bytes(const Block& block, std::size_t at, std::size_t bytes, u8 value,
               StreamHandle stream);
/// Zeroes them.
inline void clear(const Block& block, std::size_t at, std::size_t bytes, StreamHandle stream) {
  set_bytes(block, at, bytes, 0, stream);
}

/// Copies from a block, in stream order, and waits on the host until it is there.
void download(void* to, const Block& block, std::size_t at, std::size_t bytes, StreamHandle stream);

}  // namespace raddle::cuda
