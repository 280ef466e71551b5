// What was compiled, on disk: a folder of finished folders. An entry is named by its content's
// hash, written under another name and published by one atomic rename, so that a reader sees a
// whole entry or none. One process per host compiles an entry (a file lock, which the kernel
// releases when its holder dies); a duplicate from another host is harmless.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "jit/background.h"

namespace raddle::jit {

/// What to look up, and how to make it if it is not there.
struct Request {
  std::string key;       ///< everything that the result depends on, except the compiler
  std::string compiler;  ///< its identity; empty where this machine has none
  std::string name;      ///< for people: "FlashSigmoid"
  std::string target;    ///< for people: "avx512", "sm_90a"
  std::string source;    ///< kept beside the binary
  /// Compiles into memory. Raises where it cannot.
  std::function<std::string()> compile;
  Watch* watch = nullptr;  ///< of a caller that waits for it on another thread
};

/// A compiled binary. It is loaded from these bytes, never from the path of an entry: what was
/// checked is what runs, also where the file is exchanged meanwhile.
struct Binary {
  std::string bytes;
  bool compiled = false;  ///< by this call
};

/// RADDLE_CACHE_DIR, else XDG_CACHE_HOME/raddle, else ~/.cache/raddle. Without a HOME it lies in a
/// folder of this user's among the temporary files (TMPDIR, else /tmp).
std::string cache_folder();

/// The entry of that key: found and intact, or compiled now. A damaged entry, or one that another
/// user can have written, is refused and made again. Where the folder cannot be written, or others
/// can write it, the result stays in memory, and a warning is printed once per process. Raises
/// CompileError when it is stopped.
Binary find_or_compile(const Request& request);

struct CacheEntry {
  std::string name, target, path;
  long bytes = 0;  ///< of the binary
};

/// Finished entries of the cache folder, by name.
std::vector<CacheEntry> list_cache();
/// Removes all entries; returns how many there were.
int clear_cache();

}  // namespace raddle::jit
