// Values that a process makes once for each key: kernels and tables that are compiled and never
// unloaded.
#pragma once

#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace raddle::jit {

/// Threads make different values side by side; of several that want one value, one makes it. A
/// process that is forked while a value is made makes it anew.
template <class T>
class MadeOnce {
 public:
  /// What `make()` returned for `key`, a pointer that stays valid. What it throws passes through,
  /// and the next call makes the value again.
  template <class Make>
  const T& get(const std::string& key, const Make& make) {
    Slot& slot = slot_of(key);
    if (const T* value = slot.value) return *value;
    const std::lock_guard lock(slot.mutex);
    if (!slot.value) slot.value = make();
    return *slot.value;
  }

 private:
  struct Slot {
    const pid_t process = getpid();
    std::mutex mutex;
    std::atomic<const T*> value = nullptr;
  };

  Slot& slot_of(const std::string& key) {
    const std::lock_guard lock(mutex_);
    Slot*& slot = slots_[key];
    // The thread that was making it when this process was forked does not exist here to unlock it.
    if (!slot || (!slot->value && slot->process != getpid())) slot = new Slot;
    return *slot;
  }

  std::mutex mutex_;
  std::map<std::string, Slot*> slots_;
};

}  // namespace raddle::jit
