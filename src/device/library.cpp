#include "device/library.h"

#include <dlfcn.h>

namespace raddle {

SharedLibrary::~SharedLibrary() {
  if (handle_) dlclose(handle_);
}

SharedLibrary SharedLibrary::open(const std::string& name, std::string* reasons) {
  SharedLibrary library;
  library.handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  library.name_ = name;
  if (!library.handle_ && reasons) *reasons += std::string("\n  ") + dlerror();
  return library;
}

void* SharedLibrary::address(const char* symbol) const { return dlsym(handle_, symbol); }

std::string own_folder() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&own_folder), &info) || !info.dli_fname) return {};
  const std::string path = info.dli_fname;
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

}  // namespace raddle
