#include "jit/cpu_stages.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "jit/cache.h"
#include "jit/host_compiler.h"
#include "jit/locks.h"
#include "jit/made_once.h"
#include "raddle/error.h"

namespace raddle::jit {
namespace {

constexpr const char* entry_point = "raddle_variant";

std::atomic<int> compiled_count = 0;

bool write_all(int file, const std::string& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = write(file, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return true;
}

/// Never unloaded: plans and compositions point into it.
void* load_from_memory(const std::string& bytes) {
  const int memory = memfd_create("raddle-variant", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (memory < 0) return nullptr;
  if (!write_all(memory, bytes)) {
    close(memory);
    return nullptr;
  }
  fcntl(memory, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW);
  // The descriptor stays open: the loader knows libraries by their path, and the next file of this
  // number would be taken for the same library.
  return dlopen(("/proc/self/fd/" + std::to_string(memory)).c_str(), RTLD_NOW | RTLD_LOCAL);
}

/// Where there is no /proc, or nothing is executed from memory: a copy that only this user can
/// write, gone when it is loaded.
void* load_from_copy(const std::string& bytes) {
  const char* wanted = std::getenv("TMPDIR");
  for (const char* base : {wanted && *wanted ? wanted : "/tmp", "/tmp"}) {
    const PrivateFolder folder(base, ".raddle-load-");
    if (!folder.held()) continue;
    const std::string path = (folder.path() / "binary").string();
    const int file = open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (file < 0) continue;
    const bool written = write_all(file, bytes);
    close(file);
    if (void* library = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr)
      return library;
  }
  return nullptr;
}

void* load(const Binary& binary, const std::string& name) {
  void* library = load_from_memory(binary.bytes);
  if (!library) library = load_from_copy(binary.bytes);
  if (library) return library;
  const char* why = dlerror();
  fail<CompileError>("variant '", name, "' cannot be loaded: ", why ? why : std::strerror(errno));
}

const VariantOps& compile(const std::string& text, const std::string& name,
                          const std::string& isa) {
  const std::string source =
      amalgamate("#define RADDLE_ISA jit_" + isa +
                 "\n#include \"raddle/engine/kernel/cpu/stages.h\"\n" + text);
  const HostCompiler& compiler = host_compiler();
  const std::vector<std::string> flags = isa_flags(isa);
  Request request;
  for (const auto* list : {&common_flags(), &flags})
    for (const std::string& flag : *list) request.key += flag + " ";
  request.key += "\n" + source;
  request.compiler = compiler.identity;
  request.name = name;
  request.target = isa;
  request.source = source;
  request.compile = [&] { return compile_shared(compiler, flags, source, name); };
  const Binary binary = find_or_compile(request);
  compiled_count += binary.compiled;
  const auto entry =
      reinterpret_cast<const VariantOps* (*)()>(dlsym(load(binary, name), entry_point));
  if (!entry) fail<CompileError>("variant '", name, "' has no entry point");
  return *entry();
}

/// `text` declares a functor and defines the entry point.
const VariantOps& compiled(const std::string& text, const std::string& name,
                           const std::string& isa) {
  static MadeOnce<VariantOps>& all = *new MadeOnce<VariantOps>;
  return all.get(isa + "\n" + text, [&] { return &compile(text, name, isa); });
}

std::string entry_for(const std::string& initialiser) {
  return std::string(
             "extern \"C\" __attribute__((visibility(\"default\"))) const raddle::VariantOps* ") +
         entry_point + "() {\n  static constexpr raddle::VariantOps ops = " + initialiser +
         ";\n  return &ops;\n}\n";
}

}  // namespace

const VariantOps& compile_stages(const VariantSource& source, const std::string& isa) {
  const VariantOps& ops = compiled(
      declare(source) + entry_for("raddle::cpu::variant_ops<raddle::user::" + source.name + ">()"),
      source.name, isa);
  check_members(source, ops);
  return ops;
}

const VariantOps& compile_stages(const CompositionSource& composition, const std::string& isa) {
  std::string name;
  for (const Functor& part : composition.parts) name += (name.empty() ? "" : "+") + part.type;
  return compiled(
      declare(composition, "Fused") + entry_for("raddle::cpu::stages_of<raddle::Fused>()"), name,
      isa);
}

int num_compiled() { return compiled_count; }

}  // namespace raddle::jit
