// Loaded kernels and their launch.
#pragma once

#include <string>

#include "device/cuda/device.h"
#include "device/cuda/stream.h"

namespace raddle::cuda {

/// When a kernel's blocks may begin: after all earlier work of the stream, or while the kernel
/// before ends, because this one waits itself (ptx/stream.h).
enum class Begin { after_earlier_work, early };

/// One kernel of a loaded cubin, with the shape of its launches. Never unloaded.
class Kernel {
 public:
  /// `label` names the kernel in errors; threads and shared memory are those of a block, or of each
  /// of its teams, which are as many of `most_teams` as the kernel was compiled for. Raises
  /// DeviceError where it cannot be loaded.
  Kernel(const Device& device, const std::string& cubin, const char* entry_point, std::string label,
         i32 num_threads, i32 shared_bytes, i32 most_teams = 1,
         Begin begin = Begin::after_earlier_work);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const std::string& label() const { return label_; }
  i32 shared_bytes() const { return shared_bytes_; }
  const Device& device() const { return *device_; }

  /// Launches `num_blocks` in stream order and waits for nothing. Raises DeviceError with the
  /// kernel's name, its configuration and the driver's own message.
  void launch(i32 num_blocks, StreamHandle stream, void** params) const {
    launch(num_blocks, num_threads_, shared_bytes_, stream, params);
  }
  /// The same with fewer threads and less than shared_bytes() of shared memory a block.
  void launch(i32 num_blocks, i32 num_threads, i32 shared_bytes, StreamHandle stream,
              void** params) const {
    launch(Grid{num_blocks, 1, num_threads, shared_bytes}, stream, params);
  }
  /// The same for so many teams, which `join` if they are to meet in blocks.
  void launch_teams(i32 num_teams, bool join, StreamHandle stream, void** params) const {
    launch(grid_of(num_teams, join), stream, params);
  }
  /// The same for so many clusters of two blocks.
  void launch_clusters(i32 num_clusters, StreamHandle stream, void** params) const {
    launch(clusters(num_clusters), stream, params);
  }
  /// "132 blocks of 2 x 128 threads": what launch_teams launches, and launch_clusters.
  std::string describe_teams(i32 num_teams, bool join) const {
    return describe(grid_of(num_teams, join));
  }
  std::string describe_clusters(i32 num_clusters) const { return describe(clusters(num_clusters)); }

 private:
  struct Grid {
    i32 blocks, teams;  ///< teams of a block
    i32 threads;        ///< of a team
    i32 shared_bytes;   ///< of a block
    i32 cluster = 1;    ///< blocks of a cluster
  };
  Grid clusters(i32 num_clusters) const {
    return {2 * num_clusters, 1, num_threads_, shared_bytes_, 2};
  }
  /// Teams that are no more than multiprocessors have one each.
  Grid grid_of(i32 num_teams, bool join) const;
  void launch(const Grid& grid, StreamHandle stream, void** params) const;
  std::string describe(const Grid& grid) const;
  const Device* device_;
  std::string label_;
  void* function_ = nullptr;
  i32 num_threads_, shared_bytes_, teams_;
  bool begins_early_;
};

}  // namespace raddle::cuda
