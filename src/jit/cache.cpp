#include "jit/cache.h"

#include <fcntl.h>
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

std::string entry_name(const Request& request) {
  return content_hash(request.compiler + "\n" + request.key);
}

/// Lines "entry …", "hash …", "name …", "target …", "content …": which entry it is, what its binary
/// must be, and of which source and options. So an entry under another's name is not taken for it.
std::string manifest_of(const Request& request, const std::string& binary) {
  return "entry " + entry_name(request) + "\nhash " + content_hash(binary) + "\nname " +
         request.name + "\ntarget " + request.target + "\ncontent " + content_hash(request.key) +
         "\n";
}

std::string field(const std::string& manifest, const std::string& name) {
  std::istringstream lines(manifest);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name + " ")) return line.substr(name.size() + 1);
  return "";
}

/// An open file or folder, which stays the same whatever its path leads to later.
class Opened {
 public:
  /// No link; a pipe in the place of a file is not waited for.
  Opened(int folder, const std::string& path, int flags)
      : fd_(openat(folder, path.c_str(), flags | O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Opened() {
    if (fd_ >= 0) close(fd_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  int fd() const { return fd_; }

  /// What keeps it from being trusted; empty where only this user or root can have written it.
  std::string distrusted() const {
    struct stat info {};
    if (fd_ < 0 || fstat(fd_, &info) != 0) return "cannot be read";
    if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) return "is no plain file";
    if (info.st_uid != geteuid() && info.st_uid != 0)
      return "belongs to another user (" + std::to_string(info.st_uid) + ")";
    return (info.st_mode & (S_IWGRP | S_IWOTH)) != 0 ? "can be written by other users" : "";
  }

  /// Its content; empty where it cannot be read.
  std::string read_all() const {
    std::string content;
    char buffer[1 << 16];
    for (;;) {
      const ssize_t n = ::read(fd_, buffer, sizeof(buffer));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return "";
      if (n == 0) return content;
      content.append(buffer, static_cast<std::size_t>(n));
    }
  }

 private:
  int fd_;
};

/// The entry `name` of an open cache folder, if it is whole, of this content, and only this user or
/// root can have written it. All is read through descriptors, and the bytes that were checked are
/// those that are returned.
std::optional<Binary> read_entry(int root, const fs::path& folder, const std::string& content) {
  const std::string name = folder.filename().string();
  const Opened entry(root, name, O_DIRECTORY | O_NOFOLLOW);
  if (!entry.distrusted().empty()) return std::nullopt;
  const Opened binary(entry.fd(), binary_file, O_NOFOLLOW);
  const Opened manifest(entry.fd(), manifest_file, O_NOFOLLOW);
  if (!binary.distrusted().empty() || !manifest.distrusted().empty()) return std::nullopt;
  const std::string said = manifest.read_all();
  if (field(said, "entry") != name || field(said, "content") != content) return std::nullopt;
  std::string bytes = binary.read_all();
  if (bytes.empty() || field(said, "hash") != content_hash(bytes)) return std::nullopt;
  return Binary{std::move(bytes), false};
}

/// An entry of the same source and options by any compiler: for machines that have none.
std::optional<Binary> find_any_compiler(int root, const fs::path& path, const Request& request) {
  const std::string content = content_hash(request.key);
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(path, ignored)) {
    if (!is_entry_name(entry.path().filename().string())) continue;
    if (auto found = read_entry(root, entry.path(), content)) return found;
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
int publish(int root_fd, const fs::path& root, const fs::path& folder, const Request& request,
            const std::string& binary) {
  const PrivateFolder fresh(root, fresh_prefix);
  if (!fresh.held()) return fresh.error();
  int error = write_file(fresh.path() / binary_file, binary);
  if (!error) error = write_file(fresh.path() / source_file, request.source);
  if (!error) error = write_file(fresh.path() / manifest_file, manifest_of(request, binary));
  if (!error && chmod(fresh.path().c_str(), 0755) != 0) error = errno;
  if (!error && std::rename(fresh.path().c_str(), folder.c_str()) != 0) error = errno;
  const bool there = error && read_entry(root_fd, folder, content_hash(request.key));
  return there ? 0 : error;  // another host may have been faster
}

void warn_once(const std::string& warning) {
  static std::atomic<bool> warned = false;
  if (!warned.exchange(true)) announce(warning);
}

void warn_unwritable(const fs::path& root, int error) {
  warn_once(root.string() + " cannot be written (" + std::strerror(error) +
            "); what is compiled stays in memory. Set RADDLE_CACHE_DIR to a folder that can.");
}

void warn_distrusted(const fs::path& root, const std::string& why) {
  warn_once(root.string() + " " + why +
            ", so nothing in it is loaded, and what is compiled stays in memory. Run 'chmod go-w " +
            root.string() + "' if it is yours, or set RADDLE_CACHE_DIR to a folder of your own.");
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

/// In a folder for temporary files another user may have made the one that ours would be in.
std::string distrusted_base(const fs::path& root) {
  const fs::path base = root.parent_path();
  if (base != homeless_base()) return "";
  mkdir(base.c_str(), 0700);
  return Opened(AT_FDCWD, base, O_DIRECTORY | O_NOFOLLOW).distrusted();
}

/// Makes the folder and those above it, writable by their owner alone, whatever the umask.
std::error_code make_folders(const fs::path& root) {
  std::error_code failed;
  fs::path made;
  for (const fs::path& part : fs::absolute(root, failed)) {
    made /= part;
    if (mkdir(made.c_str(), 0755) == 0)
      chmod(made.c_str(), 0755);
    else
      failed = std::error_code(errno, std::generic_category());
  }
  std::error_code ignored;
  if (!fs::is_directory(root, ignored)) return failed;
  if (access(root.c_str(), W_OK) == 0) return {};
  return std::error_code(errno, std::generic_category());
}

Binary in_memory(const Request& request) {
  if (request.watch) request.watch->compiling = true;
  return Binary{request.compile(), true};
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
  if (const std::string why = distrusted_base(root); !why.empty()) {
    warn_distrusted(root.parent_path(), why);
    return in_memory(request);
  }
  std::error_code error;
  if (!request.compiler.empty()) error = make_folders(root);
  const Opened opened(AT_FDCWD, root, O_DIRECTORY);
  if (opened.fd() < 0) {
    if (!request.compiler.empty()) warn_unwritable(root, error ? error.value() : errno);
    return in_memory(request);  // which says so where there is no compiler
  }
  if (const std::string why = opened.distrusted(); !why.empty()) {
    warn_distrusted(root, why);
    return in_memory(request);
  }
  const fs::path folder = root / entry_name(request);
  const auto find = [&] { return read_entry(opened.fd(), folder, content_hash(request.key)); };
  if (auto found = find()) return *found;
  if (request.compiler.empty()) {
    if (auto found = find_any_compiler(opened.fd(), root, request)) return *found;
    return in_memory(request);
  }
  if (error) {
    warn_unwritable(root, error.value());
    return in_memory(request);
  }
  const FileLock lock(folder.string() + lock_suffix,
                      "waiting for variant '" + request.name +
                          "', which another process compiles (" + folder.string() + ")",
                      request.watch ? &request.watch->stop : nullptr);
  if (lock.error() == ECANCELED)
    fail<CompileError>("compiling '", request.name, "' was stopped: the process ends");
  if (!lock.held()) {
    warn_unwritable(root, lock.error());
    return in_memory(request);
  }
  if (auto found = find()) return *found;  // compiled while this process waited
  sweep(root);
  std::string binary = in_memory(request).bytes;
  discard(root, folder);
  const int failed = publish(opened.fd(), root, folder, request, binary);
  if (failed) warn_unwritable(root, failed);
  return Binary{std::move(binary), true};
}

std::vector<CacheEntry> list_cache() {
  std::vector<CacheEntry> entries;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(cache_folder(), ignored)) {
    if (!is_entry_name(entry.path().filename().string())) continue;
    const std::string manifest =
        Opened(AT_FDCWD, entry.path() / manifest_file, O_NOFOLLOW).read_all();
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
