#include "jit/cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <tuple>

#include "jit/hash.h"
#include "jit/locks.h"
#include "jit/process.h"
#include "raddle/error.h"

namespace raddle::jit {
namespace {

namespace fs = std::filesystem;

constexpr const char* binary_file = "binary";
constexpr const char* source_file = "source";
constexpr const char* manifest_file = "manifest";
constexpr const char* lock_suffix = ".lock";
// Names of entries that are being published or removed. RADDLE_CACHE_DIR may name a folder with
// other files, so nothing is removed whose name is not one of these.
constexpr const char* fresh_prefix = ".raddle-new-";
constexpr const char* aside_prefix = ".raddle-old-";

bool is_entry_name(const std::string& name) {
  return name.size() == 32 && name.find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return in ? text.str() : "";
}

/// Writes a whole file, or returns the errno: a full disk shows at the end. Only the owner may
/// write the file, whatever the umask, or the entry would be refused.
int write_file(const fs::path& path, const std::string& content) {
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  out.close();
  if (out.fail()) return errno ? errno : EIO;
  return chmod(path.c_str(), 0644) == 0 ? 0 : errno;
}

/// Lines "hash …", "name …", "target …", "content …": what the binary must be.
std::string manifest_of(const Request& request, const std::string& binary) {
  return "hash " + content_hash(binary) + "\nname " + request.name + "\ntarget " + request.target +
         "\ncontent " + content_hash(request.key) + "\n";
}

std::string field(const std::string& manifest, const std::string& name) {
  std::istringstream lines(manifest);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name + " ")) return line.substr(name.size() + 1);
  return "";
}

/// A folder or file, no link.
bool owned(const fs::path& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return false;
  const bool writable_by_others = (info.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  const bool plain = S_ISREG(info.st_mode) || S_ISDIR(info.st_mode);
  return plain && !writable_by_others && (info.st_uid == geteuid() || info.st_uid == 0);
}

/// The entry's binary if it is whole, and only this user or root can have written it.
std::optional<Binary> read_entry(const fs::path& folder) {
  const fs::path binary = folder / binary_file;
  for (const fs::path& path : {folder, binary, folder / manifest_file})
    if (!owned(path)) return std::nullopt;
  std::string bytes = read_file(binary);
  if (bytes.empty() || field(read_file(folder / manifest_file), "hash") != content_hash(bytes))
    return std::nullopt;
  return Binary{binary.string(), std::move(bytes), false};
}

/// An entry of the same source and options by any compiler: for machines that have none.
std::optional<Binary> find_any_compiler(const fs::path& root, const Request& request) {
  const std::string content = content_hash(request.key);
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root, ignored)) {
    if (!is_entry_name(entry.path().filename().string())) continue;
    if (field(read_file(entry.path() / manifest_file), "content") != content) continue;
    if (auto found = read_entry(entry.path())) return found;
  }
  return std::nullopt;
}

/// Moves what stands at this path aside, in one step, then deletes it.
void discard(const fs::path& root, const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(folder, ignored))) return;
  const PrivateFolder aside(root, aside_prefix);
  if (aside.held()) fs::rename(folder, aside.path() / "entry", ignored);
}

/// Writes an entry and publishes it. Returns 0, or the errno where it cannot be written.
int publish(const fs::path& root, const fs::path& folder, const Request& request,
            const std::string& binary) {
  const PrivateFolder fresh(root, fresh_prefix);
  if (!fresh.held()) return fresh.error();
  int error = write_file(fresh.path() / binary_file, binary);
  if (!error) error = write_file(fresh.path() / source_file, request.source);
  if (!error) error = write_file(fresh.path() / manifest_file, manifest_of(request, binary));
  if (!error && chmod(fresh.path().c_str(), 0755) != 0) error = errno;
  if (!error && std::rename(fresh.path().c_str(), folder.c_str()) != 0) error = errno;
  return error && read_entry(folder) ? 0 : error;  // another host may have been faster
}

void warn_once(const fs::path& root, int error) {
  static std::atomic<bool> warned = false;
  if (!warned.exchange(true))
    announce(root.string() + " cannot be written (" + std::strerror(error) +
             "); what is compiled stays in memory. Set RADDLE_CACHE_DIR to a folder that can.");
}

/// Leftovers of processes that died.
void sweep(const fs::path& root) {
  PrivateFolder::sweep(root, fresh_prefix);
  PrivateFolder::sweep(root, aside_prefix);
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root, ignored))
    if (entry.path().extension() == lock_suffix && is_entry_name(entry.path().stem().string()))
      FileLock::sweep(entry.path());
}

/// Where the cache's folder lies for a user without a home folder.
fs::path homeless_base() {
  const char* base = std::getenv("TMPDIR");
  return fs::path(base && *base ? base : "/tmp") / ("raddle-" + std::to_string(geteuid()));
}

/// In a folder for temporary files another user may have created this one, and could replace its
/// contents between check and use.
bool is_safe(const fs::path& root) {
  const fs::path base = root.parent_path();
  if (base != homeless_base()) return true;
  mkdir(base.c_str(), 0700);
  return owned(base);
}

Binary in_memory(const Request& request) {
  if (request.watch) request.watch->compiling = true;
  return Binary{"", request.compile(), true};
}

}  // namespace

std::string cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return value && *value ? std::string(value) : std::string();
  };
  if (const std::string folder = variable("RADDLE_CACHE_DIR"); !folder.empty()) return folder;
  if (const std::string base = variable("XDG_CACHE_HOME"); !base.empty()) return base + "/raddle";
  const std::string home = variable("HOME");
  return home.empty() ? (homeless_base() / "raddle").string() : home + "/.cache/raddle";
}

Binary find_or_compile(const Request& request) {
  const fs::path root = cache_folder();
  if (!is_safe(root)) {
    warn_once(root, EPERM);
    return in_memory(request);
  }
  const fs::path folder = root / content_hash(request.compiler + "\n" + request.key);
  if (auto found = read_entry(folder)) return *found;
  if (request.compiler.empty()) {
    if (auto found = find_any_compiler(root, request)) return *found;
    return in_memory(request);  // which says that there is no compiler
  }

  std::error_code error;
  fs::create_directories(root, error);
  if (!error && access(root.c_str(), W_OK) != 0)
    error = std::error_code(errno, std::generic_category());
  if (error) {
    warn_once(root, error.value());
    return in_memory(request);
  }
  const FileLock lock(folder.string() + lock_suffix,
                      "waiting for variant '" + request.name +
                          "', which another process compiles (" + folder.string() + ")",
                      request.watch ? &request.watch->stop : nullptr);
  if (lock.error() == ECANCELED)
    fail<CompileError>("compiling '", request.name, "' was stopped: the process ends");
  if (!lock.held()) {
    warn_once(root, lock.error());
    return in_memory(request);
  }
  if (auto found = read_entry(folder)) return *found;  // compiled while this process waited
  sweep(root);
  std::string binary = in_memory(request).bytes;
  discard(root, folder);
  const int failed = publish(root, folder, request, binary);
  if (failed) warn_once(root, failed);
  return Binary{failed ? "" : (folder / binary_file).string(), std::move(binary), true};
}

std::vector<CacheEntry> list_cache() {
  std::vector<CacheEntry> entries;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(cache_folder(), ignored)) {
    if (!is_entry_name(entry.path().filename().string())) continue;
    const std::string manifest = read_file(entry.path() / manifest_file);
    const auto bytes = fs::file_size(entry.path() / binary_file, ignored);
    entries.push_back({field(manifest, "name"), field(manifest, "target"), entry.path().string(),
                       ignored ? 0 : static_cast<long>(bytes)});
  }
  std::sort(entries.begin(), entries.end(), [](const CacheEntry& a, const CacheEntry& b) {
    return std::tie(a.name, a.target, a.path) < std::tie(b.name, b.target, b.path);
  });
  return entries;
}

int clear_cache() {
  const std::vector<CacheEntry> entries = list_cache();
  for (const CacheEntry& entry : entries) discard(cache_folder(), entry.path);
  sweep(cache_folder());
  return static_cast<int>(entries.size());
}

}  // namespace raddle::jit
