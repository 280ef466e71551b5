#include "jit/locks.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <system_error>
#include <thread>

#include "jit/process.h"

namespace raddle::jit {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// Locks, and prints after a second what it waits for. Returns 0 or the errno: ECANCELED after
/// `stop`.
int lock(int fd, const std::string& waiting, const std::atomic<bool>* stop) {
  const auto begin = Clock::now();
  bool said = false;
  while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return errno;
    if (stop && *stop) return ECANCELED;
    if (!said && Clock::now() - begin > std::chrono::seconds(1)) {
      announce(waiting);
      said = true;
    }
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return 0;
}

/// Whether the path still leads to the open file: the lock's last holder may have removed it.
bool leads_to(const fs::path& path, int fd) {
  struct stat there {
  }, here{};
  return stat(path.c_str(), &there) == 0 && fstat(fd, &here) == 0 && there.st_ino == here.st_ino &&
         there.st_dev == here.st_dev;
}

}  // namespace

FileLock::FileLock(const fs::path& path, const std::string& waiting, const std::atomic<bool>* stop)
    : path_(path) {
  for (;;) {
    fd_ = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd_ < 0) {
      error_ = errno;
      return;
    }
    int failed = 0;
    try {
      failed = lock(fd_, waiting, stop);
    } catch (...) {
      close(fd_);
      throw;
    }
    // Where the file system has no locks, duplicates are compiled, which is harmless.
    if (failed != ECANCELED && (failed || leads_to(path, fd_))) return;
    close(fd_);
    if (failed) {
      fd_ = -1;
      error_ = failed;
      return;
    }
  }
}

FileLock::~FileLock() {
  if (fd_ < 0) return;
  unlink(path_.c_str());
  // A process that was forked meanwhile has a copy of the descriptor, which would keep the lock.
  flock(fd_, LOCK_UN);
  close(fd_);
}

void FileLock::sweep(const fs::path& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return;
  if (flock(fd, LOCK_EX | LOCK_NB) == 0 && leads_to(path, fd)) unlink(path.c_str());
  close(fd);
}

PrivateFolder::PrivateFolder(const fs::path& base, const std::string& prefix) {
  for (;;) {
    std::string pattern = (base / (prefix + "XXXXXX")).string();
    if (!mkdtemp(pattern.data())) {
      error_ = errno;
      return;
    }
    fd_ = open(pattern.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // Before the folder was locked, another process may have removed it as a leftover.
    if (fd_ < 0 && errno == ENOENT) continue;
    const bool locked = fd_ >= 0 && flock(fd_, LOCK_EX) == 0;
    if (!locked || leads_to(pattern, fd_)) {
      path_ = pattern;
      return;
    }
    close(fd_);
  }
}

PrivateFolder::PrivateFolder(PrivateFolder&& other) noexcept
    : path_(std::move(other.path_)), fd_(other.fd_), error_(other.error_) {
  other.path_.clear();
  other.fd_ = -1;
}

PrivateFolder::~PrivateFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
  if (fd_ >= 0) close(fd_);
}

void PrivateFolder::sweep(const fs::path& base, const std::string& prefix) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(base, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix) || name.size() != prefix.size() + 6) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) continue;
    struct stat info {};
    if (fstat(fd, &info) == 0 && info.st_uid == geteuid() && flock(fd, LOCK_EX | LOCK_NB) == 0)
      fs::remove_all(entry.path(), ignored);
    close(fd);
  }
}

}  // namespace raddle::jit
