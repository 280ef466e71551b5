// NVRTC, NVIDIA's run-time compiler: loaded when first needed, never linked. It needs no GPU, and
// Raddle's sources need no CUDA header.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "raddle/engine/core/config.h"

namespace raddle::jit {

/// A compiled GPU kernel and the assembler's messages. For a virtual architecture ("compute_75") it
/// is PTX, which no assembler has processed yet: drivers translate it for any later GPU.
struct Cubin {
  std::string bytes;
  std::string log;
};

/// What a kernel takes, read from its log.
struct Resources {
  i32 registers = 0;    ///< per thread
  i32 spill_bytes = 0;  ///< stores and loads
};

class Nvrtc {
 public:
  /// Where it was found: "RADDLE_NVRTC", "the wheel nvidia-cuda-nvrtc" or "system".
  struct Found {
    std::string path, origin, version;
  };

  /// Looks for NVRTC again and keeps nothing loaded. Raises CompileError as instance() does.
  static Found find();

  /// The library that was found first: RADDLE_NVRTC (a file), the wheels nvidia-cuda-nvrtc beside
  /// this package or in search folders, the loader's path, /usr/local/cuda. Raises CompileError
  /// naming what to install.
  static const Nvrtc& instance();

  /// Folders ("site-packages/nvidia") to look into before the first use.
  static void add_search_folder(const std::string& folder);

  const std::string& path() const { return path_; }
  /// "13.0"
  std::string version() const;

  /// Compiles complete source for an architecture ("sm_90a", "compute_75"). Raises CompileError
  /// with the compiler's text, and soon after `stop`, if that is given; before CUDA 13, at the end.
  Cubin compile(const std::string& source, const std::string& arch,
                const std::atomic<bool>* stop = nullptr) const;

  /// The options of every compilation, for hashes.
  static std::vector<std::string> options(const std::string& arch);

 private:
  Nvrtc();
  std::string path_;
};

Resources parse_resources(const std::string& log);

}  // namespace raddle::jit
