#include "jit/cubin.h"

#include "jit/cache.h"
#include "jit/nvrtc.h"

namespace raddle::jit {
namespace {

Binary binary_of(const std::string& name, const std::string& source, const std::string& arch,
                 Watch* watch) {
  Request request;
  request.compiler = "nvrtc " + Nvrtc::instance().version();
  for (const std::string& option : Nvrtc::options(arch)) request.key += option + " ";
  request.key += "\n" + source;
  request.name = name;
  request.target = arch;
  request.source = source;
  request.compile = [&] {
    return Nvrtc::instance().compile(source, arch, watch ? &watch->stop : nullptr).bytes;
  };
  request.watch = watch;
  return find_or_compile(request);
}

}  // namespace

std::string find_or_compile_cubin(const std::string& name, const std::string& source,
                                  const std::string& arch, Watch* watch) {
  return binary_of(name, source, arch, watch).bytes;
}

bool warm_cubin(const std::string& name, const std::string& source, const std::string& arch) {
  return binary_of(name, source, arch, nullptr).compiled;
}

}  // namespace raddle::jit
