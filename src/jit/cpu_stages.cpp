#include "jit/cpu_stages.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "jit/cache.h"
#include "jit/host_compiler.h"
#include "raddle/error.h"

namespace raddle::jit {
namespace {

constexpr const char* entry_point = "raddle_variant";

std::atomic<int> compiled_count = 0;

/// Loads a shared library from its file, or from memory where it has none.
void* load(const Binary& binary, const std::string& name) {
  int memory = -1;
  std::string path = binary.path;
  if (path.empty()) {
    memory = memfd_create("raddle-variant", MFD_CLOEXEC);
    const auto size = static_cast<ssize_t>(binary.bytes.size());
    if (memory < 0 || write(memory, binary.bytes.data(), binary.bytes.size()) != size)
      fail<CompileError>("variant '", name, "' cannot be kept in memory");
    path = "/proc/self/fd/" + std::to_string(memory);
  }
  // Never unloaded: plans and compositions point into it.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (memory >= 0) close(memory);
  if (!library) fail<CompileError>("variant '", name, "' cannot be loaded: ", dlerror());
  return library;
}

/// `text` declares a functor and defines the entry point.
const VariantOps& compile(const std::string& text, const std::string& name,
                          const std::string& isa) {
  static std::mutex mutex;
  static std::map<std::string, const VariantOps*> loaded;
  const std::string source =
      amalgamate("#define RADDLE_ISA jit_" + isa +
                 "\n#include \"raddle/engine/kernel/cpu/stages.h\"\n" + text);
  const std::lock_guard lock(mutex);
  const std::string memory_key = isa + "\n" + source;
  if (const auto found = loaded.find(memory_key); found != loaded.end()) return *found->second;

  const HostCompiler& compiler = host_compiler();
  const std::vector<std::string> flags = isa_flags(isa);
  Request request;
  request.key = compiler.identity + "\n";
  for (const auto* list : {&common_flags(), &flags})
    for (const std::string& flag : *list) request.key += flag + " ";
  request.key += "\n" + source;
  request.name = name;
  request.target = isa;
  request.source = source;
  request.compile = [&] { return compile_shared(compiler, flags, source, name); };
  const Binary binary = find_or_compile(request);
  compiled_count += binary.compiled;
  const auto entry =
      reinterpret_cast<const VariantOps* (*)()>(dlsym(load(binary, name), entry_point));
  if (!entry) fail<CompileError>("variant '", name, "' has no entry point");
  return *loaded.emplace(memory_key, entry()).first->second;
}

std::string entry_for(const std::string& initialiser) {
  return std::string(
             "extern \"C\" __attribute__((visibility(\"default\"))) const raddle::VariantOps* ") +
         entry_point + "() {\n  static constexpr raddle::VariantOps ops = " + initialiser +
         ";\n  return &ops;\n}\n";
}

}  // namespace

const VariantOps& compile_stages(const VariantSource& source, const std::string& isa) {
  const VariantOps& ops = compile(
      declare(source) + entry_for("raddle::cpu::variant_ops<raddle::" + source.name + ">()"),
      source.name, isa);
  for (i32 i = 0; i < ops.num_members; ++i) {
    const MemberType& said = source.params[static_cast<std::size_t>(i)].type;
    const MemberType& is = ops.members[i].type;
    if (said.kind != is.kind || said.rank != is.rank)
      fail<TypeError>("params: '", ops.members[i].name, "' is said to be ", describe(said),
                      "; expected ", describe(is), ", as the member of struct ", source.name,
                      " is");
  }
  return ops;
}

const VariantOps& compile_stages(const CompositionSource& composition, const std::string& isa) {
  std::string name;
  for (const Functor& part : composition.parts) name += (name.empty() ? "" : "+") + part.type;
  return compile(
      declare(composition, "Fused") + entry_for("raddle::cpu::stages_of<raddle::Fused>()"), name,
      isa);
}

int num_compiled() { return compiled_count; }

}  // namespace raddle::jit
