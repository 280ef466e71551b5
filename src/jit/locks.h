// Locks between processes, which the kernel releases when their holder dies.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>

namespace raddle::jit {

/// An exclusive lock on a file, which exists only while a process holds or wants the lock.
class FileLock {
 public:
  /// Waits, until `stop` at most; says `waiting` to stderr after a second.
  FileLock(const std::filesystem::path& path, const std::string& waiting,
           const std::atomic<bool>* stop = nullptr);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  bool held() const { return fd_ >= 0; }
  int error() const { return error_; }  ///< errno where it is not held

  /// Removes the file that a dead process left.
  static void sweep(const std::filesystem::path& path);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  int error_ = 0;
};

/// A new folder of this process's own. It is locked, so that other processes see that this one is
/// alive, and the destructor removes it unless it has been renamed.
class PrivateFolder {
 public:
  /// Named `prefix` and six letters; not held where it cannot be made.
  PrivateFolder(const std::filesystem::path& base, const std::string& prefix);
  PrivateFolder(PrivateFolder&& other) noexcept;
  ~PrivateFolder();
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  PrivateFolder& operator=(PrivateFolder&&) = delete;
  bool held() const { return !path_.empty(); }
  int error() const { return error_; }
  const std::filesystem::path& path() const { return path_; }

  /// Removes this user's folders of that prefix whose processes have died.
  static void sweep(const std::filesystem::path& base, const std::string& prefix);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  int error_ = 0;
};

}  // namespace raddle::jit
