// A shared library loaded at run time, so that Raddle starts without it.
#pragma once

#include <string>
#include <utility>

namespace raddle {

class SharedLibrary {
 public:
  SharedLibrary() = default;
  SharedLibrary(SharedLibrary&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), name_(std::move(other.name_)) {}
  SharedLibrary& operator=(SharedLibrary&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(name_, other.name_);
    return *this;
  }
  ~SharedLibrary();

  /// Empty where `name` (a path, or a name that the loader searches for) cannot be loaded; the
  /// reason is added to `reasons`.
  static SharedLibrary open(const std::string& name, std::string* reasons = nullptr);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }

  /// Sets `function` to the library's function of that name; null where it has none.
  template <class F>
  void find(F*& function, const char* symbol) const {
    function = reinterpret_cast<F*>(address(symbol));
  }
  void* address(const char* symbol) const;

 private:
  void* handle_ = nullptr;
  std::string name_;
};

/// The folder of the library or program that holds this code; empty if unknown.
std::string own_folder();

}  // namespace raddle
