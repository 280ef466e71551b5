#include "jit/nvrtc.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "device/library.h"
#include "jit/background.h"
#include "raddle/error.h"

namespace raddle::jit {
namespace {

namespace fs = std::filesystem;

using Program = struct OpaqueProgram*;

/// The functions used, with the types of nvrtc.h (which users do not have).
struct Functions {
  int (*version)(int* major, int* minor);
  const char* (*error_string)(int result);
  int (*create)(Program*, const char* source, const char* name, int num_headers,
                const char* const* headers, const char* const* include_names);
  int (*destroy)(Program*);
  int (*compile)(Program, int num_options, const char* const* options);
  int (*log_size)(Program, std::size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, std::size_t*);
  int (*cubin)(Program, char*);
  int (*ptx_size)(Program, std::size_t*);
  int (*ptx)(Program, char*);
  /// Newer releases call back now and then and ask whether to continue; null in older ones.
  int (*set_callback)(Program, int (*stops)(void* payload, void* reserved), void* payload);
};

struct Loaded {
  SharedLibrary builtins, library;
  Functions call{};
};

Loaded& loaded() {
  static Loaded& state = *new Loaded;  // never unloaded
  return state;
}

std::vector<std::string>& search_folders() {
  static std::vector<std::string> folders;
  return folders;
}

/// libnvrtc.so.<major> in a folder, newest first.
std::vector<std::string> libraries_in(const fs::path& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("libnvrtc.so")) found.push_back(entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

/// The builtins lie beside the library, but some wheels do not tell the loader so.
SharedLibrary load_builtins(const fs::path& library) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(library.parent_path(), error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("libnvrtc-builtins.so."))
      if (SharedLibrary builtins = SharedLibrary::open(entry.path())) return builtins;
  }
  return {};
}

/// A library that may exist, and where.
struct Candidate {
  std::string path;
  const char* origin;
};

std::vector<Candidate> candidates() {
  const char* given = std::getenv("RADDLE_NVRTC");
  if (given && *given) return {{given, "RADDLE_NVRTC"}};
  std::vector<Candidate> all;
  const auto add = [&all](const fs::path& folder, const char* origin) {
    for (std::string& path : libraries_in(folder)) all.push_back({std::move(path), origin});
  };
  std::vector<fs::path> wheels = {fs::path(own_folder()).parent_path() / "nvidia"};
  for (const std::string& folder : search_folders()) wheels.emplace_back(folder);
  for (const fs::path& wheel : wheels)
    for (const char* lib : {"cu13/lib", "cuda_nvrtc/lib", "cu12/lib"})
      add(wheel / lib, "the wheel nvidia-cuda-nvrtc");
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) all.push_back({name, "system"});
  for (const char* folder : {"/usr/local/cuda/lib64", "/usr/local/cuda/lib"}) add(folder, "system");
  return all;
}

bool load(const std::string& path, Loaded& into, std::string& reasons) {
  if (path.find('/') != std::string::npos) into.builtins = load_builtins(path);
  into.library = SharedLibrary::open(path, &reasons);
  if (!into.library) return false;
  const SharedLibrary& lib = into.library;
  Functions& call = into.call;
  lib.find(call.version, "nvrtcVersion");
  lib.find(call.error_string, "nvrtcGetErrorString");
  lib.find(call.create, "nvrtcCreateProgram");
  lib.find(call.destroy, "nvrtcDestroyProgram");
  lib.find(call.compile, "nvrtcCompileProgram");
  lib.find(call.log_size, "nvrtcGetProgramLogSize");
  lib.find(call.log, "nvrtcGetProgramLog");
  lib.find(call.cubin_size, "nvrtcGetCUBINSize");
  lib.find(call.cubin, "nvrtcGetCUBIN");
  lib.find(call.ptx_size, "nvrtcGetPTXSize");
  lib.find(call.ptx, "nvrtcGetPTX");
  lib.find(call.set_callback, "nvrtcSetFlowCallback");
  const bool whole = call.version && call.error_string && call.create && call.destroy &&
                     call.compile && call.log_size && call.log && call.cubin_size && call.cubin &&
                     call.ptx_size && call.ptx;
  if (!whole) reasons += "\n  " + path + ": too old, it lacks nvrtcGetCUBIN";
  return whole;
}

/// Loads the first candidate that is an NVRTC.
Candidate load_first(Loaded& into) {
  std::string reasons;
  const std::vector<Candidate> all = candidates();
  for (const Candidate& candidate : all)
    if (load(candidate.path, into, reasons)) return candidate;
  if (all.size() == 1)
    fail<CompileError>("RADDLE_NVRTC is '", all[0].path, "', which cannot be loaded:", reasons);
  fail<CompileError>(
      "GPU kernels need NVRTC, which was not found; install it with `pip install "
      "nvidia-cuda-nvrtc`, or name its libnvrtc.so in RADDLE_NVRTC. Tried:",
      reasons);
}

void check(int result, const char* what) {
  if (result != 0)
    fail<CompileError>("NVRTC: ", what, " failed: ", loaded().call.error_string(result));
}

/// During the first compilation, what NVRTC uses registers itself for the program's end. A small
/// compilation takes 30 ms; registering after it makes the program's end stop other compilations
/// before it destroys what they use.
void prepare_exit(const std::string& arch) {
  if (is_promised_to_stop()) return;
  static const bool prepared = [&] {
    Program program = nullptr;
    const Functions& call = loaded().call;
    const char* source = "extern \"C\" __global__ void nothing(float* x) { *x += 1.0f; }";
    const std::string target = "--gpu-architecture=" + arch;
    const char* options[] = {target.c_str()};
    check(call.create(&program, source, "nothing.cu", 0, nullptr, nullptr), "creating");
    call.compile(program, 1, options);
    call.destroy(&program);
    stop_at_exit();
    return true;
  }();
  static_cast<void>(prepared);
}

/// The number that ends at `at`.
i32 number_before(const std::string& log, std::size_t at) {
  while (at > 0 && log[at - 1] == ' ') --at;
  std::size_t begin = at;
  while (begin > 0 && log[begin - 1] >= '0' && log[begin - 1] <= '9') --begin;
  return begin == at ? 0 : std::stoi(log.substr(begin, at - begin));
}

}  // namespace

Nvrtc::Nvrtc() : path_(load_first(loaded()).path) {}

Nvrtc::Found Nvrtc::find() {
  Loaded library;
  const Candidate from = load_first(library);
  int major = 0, minor = 0;
  library.call.version(&major, &minor);
  return {from.path, from.origin, std::to_string(major) + "." + std::to_string(minor)};
}

const Nvrtc& Nvrtc::instance() {
  static const Nvrtc nvrtc;
  return nvrtc;
}

void Nvrtc::add_search_folder(const std::string& folder) { search_folders().push_back(folder); }

std::string Nvrtc::version() const {
  int major = 0, minor = 0;
  check(loaded().call.version(&major, &minor), "nvrtcVersion");
  return std::to_string(major) + "." + std::to_string(minor);
}

std::vector<std::string> Nvrtc::options(const std::string& arch) {
  // No floating-point contraction: C++ and traced Python give equal bits, on every backend.
  // Some NVRTC releases take a lambda in a member function with a requires-clause for host code.
  return {"--gpu-architecture=" + arch, "--std=c++20", "--fmad=false",
          "--device-as-default-execution-space", "--ptxas-options=-v"};
}

Cubin Nvrtc::compile(const std::string& source, const std::string& arch,
                     const std::atomic<bool>* stop) const {
  const Functions& call = loaded().call;
  if (stop) prepare_exit(arch);
  Program program = nullptr;
  check(call.create(&program, source.c_str(), "raddle.cu", 0, nullptr, nullptr), "creating");
  const struct Destroy {
    Program* program;
    ~Destroy() { loaded().call.destroy(program); }
  } destroy{&program};

  if (stop && call.set_callback)
    check(call.set_callback(
              program,
              [](void* asked, void*) {
                return static_cast<int>(static_cast<const std::atomic<bool>*>(asked)->load());
              },
              const_cast<std::atomic<bool>*>(stop)),
          "setting the callback");

  const std::vector<std::string> texts = options(arch);
  std::vector<const char*> list;
  for (const std::string& text : texts) list.push_back(text.c_str());
  const int result = call.compile(program, static_cast<int>(list.size()), list.data());

  if (result != 0 && stop && *stop) fail<CompileError>("NVRTC was stopped: the process ends");

  Cubin cubin;
  std::size_t size = 0;
  check(call.log_size(program, &size), "reading the log");
  cubin.log.resize(size);
  check(call.log(program, cubin.log.data()), "reading the log");
  while (!cubin.log.empty() && (cubin.log.back() == '\0' || cubin.log.back() == '\n'))
    cubin.log.pop_back();
  if (result != 0)
    fail<CompileError>("NVRTC cannot compile the kernel for ", arch, ": ",
                       call.error_string(result), "\n", cubin.log);
  const bool is_virtual = arch.starts_with("compute_");
  check((is_virtual ? call.ptx_size : call.cubin_size)(program, &size), "reading the code's size");
  cubin.bytes.resize(size);
  check((is_virtual ? call.ptx : call.cubin)(program, cubin.bytes.data()), "reading the code");
  return cubin;
}

Resources parse_resources(const std::string& log) {
  Resources used;
  if (const std::size_t at = log.find(" registers"); at != std::string::npos)
    used.registers = number_before(log, at);
  for (const char* key : {" bytes spill stores", " bytes spill loads"})
    if (const std::size_t at = log.find(key); at != std::string::npos)
      used.spill_bytes += number_before(log, at);
  return used;
}

}  // namespace raddle::jit
