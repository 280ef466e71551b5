#include "jit/cache.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
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

namespace raddle::jit {
namespace {

namespace fs = std::filesystem;

constexpr const char* binary_file = "binary";
constexpr const char* source_file = "source";
constexpr const char* manifest_file = "manifest";

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return in ? text.str() : "";
}

/// Whole, or an error: a full disk shows at the end.
bool write_file(const fs::path& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  out.close();
  return !out.fail();
}

/// Lines "hash …", "name …", "target …": what the binary must be.
std::string manifest_of(const Request& request, const std::string& binary) {
  return "hash " + content_hash(binary) + "\nname " + request.name + "\ntarget " + request.target +
         "\n";
}

std::string field(const std::string& manifest, const std::string& name) {
  std::istringstream lines(manifest);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(name + " ")) return line.substr(name.size() + 1);
  return "";
}

bool owned(const fs::path& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return false;
  const bool writable_by_others = (info.st_mode & (S_IWOTH)) != 0;
  return !writable_by_others && (info.st_uid == geteuid() || info.st_uid == 0);
}

/// The entry's binary if it is whole and ours.
std::optional<Binary> read_entry(const fs::path& folder) {
  const fs::path binary = folder / binary_file;
  for (const fs::path& path : {folder, binary, folder / manifest_file})
    if (!owned(path)) return std::nullopt;
  std::string bytes = read_file(binary);
  if (bytes.empty() || field(read_file(folder / manifest_file), "hash") != content_hash(bytes))
    return std::nullopt;
  return Binary{binary.string(), std::move(bytes), false};
}

/// A name that no other process or thread uses.
std::string unique_suffix() {
  static std::atomic<int> count = 0;
  return std::to_string(getpid()) + "-" + std::to_string(++count);
}

/// An exclusive lock on a file; released by the destructor, or by death.
class FileLock {
 public:
  explicit FileLock(const fs::path& path)
      : fd_(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600)) {
    while (fd_ >= 0 && flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~FileLock() {
    if (fd_ >= 0) close(fd_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  bool held() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// Moves whatever stands in the way aside, in one step, then deletes it.
void discard(const fs::path& root, const fs::path& folder) {
  std::error_code ignored;
  const fs::path aside = root / ("old-" + unique_suffix());
  fs::rename(folder, aside, ignored);
  fs::remove_all(aside, ignored);
}

/// Writes an entry and publishes it. False where the disk will not have it.
bool publish(const fs::path& root, const fs::path& folder, const Request& request,
             const std::string& binary) {
  const fs::path fresh = root / ("new-" + unique_suffix());
  std::error_code error;
  if (!fs::create_directory(fresh, error)) return false;
  const bool written = write_file(fresh / binary_file, binary) &&
                       write_file(fresh / source_file, request.source) &&
                       write_file(fresh / manifest_file, manifest_of(request, binary));
  if (written) fs::rename(fresh, folder, error);
  const bool published = written && !error;
  std::error_code ignored;
  if (!published) fs::remove_all(fresh, ignored);
  return published || read_entry(folder).has_value();  // another host may have been faster
}

void warn_once(const fs::path& root, const std::string& reason) {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  std::fprintf(stderr,
               "raddle: %s cannot be written (%s); what is compiled stays in memory. Set "
               "RADDLE_CACHE_DIR to a folder that can.\n",
               root.c_str(), reason.c_str());
}

/// Leftovers of processes that died while they wrote.
void sweep(const fs::path& root) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("new-") && !name.starts_with("old-")) continue;
    const int pid = std::atoi(name.c_str() + 4);
    if (pid > 0 && kill(pid, 0) != 0 && errno == ESRCH) fs::remove_all(entry.path(), ignored);
  }
}

Binary in_memory(const Request& request) { return Binary{"", request.compile(), true}; }

}  // namespace

std::string cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return value && *value ? std::string(value) : std::string();
  };
  if (const std::string folder = variable("RADDLE_CACHE_DIR"); !folder.empty()) return folder;
  if (const std::string base = variable("XDG_CACHE_HOME"); !base.empty()) return base + "/raddle";
  const std::string home = variable("HOME");
  return (home.empty() ? "/tmp/raddle-" + std::to_string(geteuid()) : home + "/.cache") + "/raddle";
}

Binary find_or_compile(const Request& request) {
  const fs::path root = cache_folder();
  const fs::path folder = root / content_hash(request.key);
  if (auto found = read_entry(folder)) return *found;

  std::error_code error;
  fs::create_directories(root, error);
  if (!error && access(root.c_str(), W_OK) != 0)
    error = std::error_code(errno, std::generic_category());
  if (error) {
    warn_once(root, error.message());
    return in_memory(request);
  }
  const FileLock lock(folder.string() + ".lock");
  if (!lock.held()) {
    warn_once(root, std::strerror(errno));
    return in_memory(request);
  }
  if (auto found = read_entry(folder)) return *found;  // compiled while this process waited
  std::string binary = request.compile();
  discard(root, folder);
  sweep(root);
  if (publish(root, folder, request, binary))
    return Binary{(folder / binary_file).string(), std::move(binary), true};
  warn_once(root, "disk full?");
  return Binary{"", std::move(binary), true};
}

std::vector<CacheEntry> list_cache() {
  std::vector<CacheEntry> entries;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(cache_folder(), ignored)) {
    if (!fs::exists(entry.path() / manifest_file, ignored)) continue;
    const std::string name = entry.path().filename().string();
    if (name.starts_with("new-") || name.starts_with("old-")) continue;
    const std::string manifest = read_file(entry.path() / manifest_file);
    entries.push_back({field(manifest, "name"), field(manifest, "target"), entry.path().string(),
                       static_cast<long>(fs::file_size(entry.path() / binary_file, ignored))});
  }
  std::sort(entries.begin(), entries.end(), [](const CacheEntry& a, const CacheEntry& b) {
    return std::tie(a.name, a.target, a.path) < std::tie(b.name, b.target, b.path);
  });
  return entries;
}

int clear_cache() {
  const std::vector<CacheEntry> entries = list_cache();
  std::error_code ignored;
  for (const CacheEntry& entry : entries) discard(cache_folder(), entry.path);
  for (const auto& left : fs::directory_iterator(cache_folder(), ignored))
    if (left.path().extension() == ".lock") fs::remove(left.path(), ignored);
  return static_cast<int>(entries.size());
}

}  // namespace raddle::jit
