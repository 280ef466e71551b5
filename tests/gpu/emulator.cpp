// A CUDA driver and an NVRTC for machines without either: kernels are compiled by the host's C++
// compiler and run on emulated threads (tests/cpp/emulated_ptx.h), device memory is the host's.
// Everything else of Raddle's GPU path runs as it is. See tests/gpu/emulate.sh.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

// The kernel's library is compiled with the emulated instructions, this one need not know them.
using Attend = void (*)(int block, int threads, int shared_bytes, void** params);

namespace {

struct Program {
  std::string source, log, library;
};

std::string environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// What turns the kernel's text into a library: CUDA's words, and an entry for one block.
constexpr const char* prologue =
    "#include <cstddef>\n#include <type_traits>\n#define __global__ static\n#define "
    "__grid_constant__\n"
    "#define __launch_bounds__(...)\n";
constexpr const char* epilogue = R"(
namespace {
template <class Launch, class Variant>
void run(void (*kernel)(Launch, Variant), int block, int threads, int shared, void** params) {
  raddle::emulated::Block emulated(block, threads, shared);
  emulated.run([&] {
    kernel(*static_cast<std::remove_cv_t<Launch>*>(params[0]),
           *static_cast<std::remove_cv_t<Variant>*>(params[1]));
  });
}
}
extern "C" void raddle_emulated(int block, int threads, int shared, void** params) {
  run(raddle_attention, block, threads, shared, params);
}
)";

}  // namespace

extern "C" {

// --- NVRTC ---------------------------------------------------------------------------------------

int nvrtcVersion(int* major, int* minor) {
  *major = *minor = 0;
  return 0;
}
const char* nvrtcGetErrorString(int) { return "the emulating compiler failed"; }
int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char**,
                       const char**) {
  *program = new Program{source, "", ""};
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return 0;
}
int nvrtcCompileProgram(Program* program, int, const char**) {
  char folder[] = "/tmp/raddle-emulated-XXXXXX";
  if (!mkdtemp(folder)) return 1;
  const std::string base = std::string(folder) + "/kernel";
  std::string text = program->source;
  for (std::size_t at; (at = text.find("extern \"C\" __global__")) != std::string::npos;)
    text.replace(at, 10, "");
  std::ofstream(base + ".cpp") << prologue << text << epilogue;
  const std::string command =
      environment("CXX", "c++") + " -std=c++20 -O1 -fPIC -shared -w -ffp-contract=off -I" +
      environment("RADDLE_EMULATOR_INCLUDE", ".") +
      " -DRADDLE_AMALGAMATED -DRADDLE_EMULATED_PTX='\"emulated_ptx.h\"' -o " + base + ".so " +
      base + ".cpp > " + base + ".log 2>&1";
  const int result = std::system(command.c_str());
  program->log = read(base + ".log");
  program->library = read(base + ".so");
  std::system(("rm -r " + std::string(folder)).c_str());
  return result == 0 ? 0 : 6;
}
int nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(Program* program, char* to) {
  std::memcpy(to, program->log.c_str(), program->log.size() + 1);
  return 0;
}
int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  *size = program->library.size();
  return 0;
}
int nvrtcGetCUBIN(Program* program, char* to) {
  std::memcpy(to, program->library.data(), program->library.size());
  return 0;
}

// --- the driver ----------------------------------------------------------------------------------

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 0;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuDeviceGet(int* device, int) {
  *device = 0;
  return 0;
}
int cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, static_cast<std::size_t>(length), "emulated threads");
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  // Multiprocessors, compute capability 8.0, shared memory of a block.
  *value = attribute == 16 ? 4 : attribute == 75 ? 8 : attribute == 76 ? 0 : 99 * 1024;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = nullptr;
  return 0;
}
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuMemAlloc_v2(unsigned long* address, std::size_t bytes) {
  *address = reinterpret_cast<unsigned long>(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
  std::memset(reinterpret_cast<void*>(*address), 0xff, bytes);  // NaN
  return 0;
}
int cuMemFree_v2(unsigned long address) {
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
int cuMemcpyHtoD_v2(unsigned long to, const void* from, std::size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, unsigned long from, std::size_t bytes) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}
int cuMemsetD8_v2(unsigned long to, unsigned char value, std::size_t bytes) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  // A shared object's own header says how long it is: its section headers come last.
  const auto* bytes = static_cast<const unsigned char*>(image);
  unsigned long sections = 0;
  unsigned short size = 0, count = 0;
  std::memcpy(&sections, bytes + 40, 8);
  std::memcpy(&size, bytes + 58, 2);
  std::memcpy(&count, bytes + 60, 2);
  char path[] = "/tmp/raddle-emulated-XXXXXX";
  const int file = mkstemp(path);
  const auto length = static_cast<std::size_t>(sections + size * count);
  const bool written = write(file, bytes, length) == static_cast<ssize_t>(length);
  close(file);
  *module = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!*module) std::fprintf(stderr, "%s\n", dlerror());
  unlink(path);
  return *module ? 0 : 200;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char*) {
  *function = dlsym(module, "raddle_emulated");
  return *function ? 0 : 500;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                   unsigned, unsigned shared_bytes, void*, void** params, void**) {
  // Blocks in an order that no kernel may rely on.
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned block = (i * 7919u + 1u) % blocks;
    const bool coprime = blocks % 7919u != 0;
    reinterpret_cast<Attend>(function)(static_cast<int>(coprime ? block : i),
                                       static_cast<int>(threads), static_cast<int>(shared_bytes),
                                       params);
  }
  return 0;
}
int cuStreamCreate(void** stream, unsigned) {
  *stream = nullptr;
  return 0;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) { return 0; }
int cuGetErrorName(int, const char** name) {
  *name = "EMULATED_ERROR";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "the emulated driver failed";
  return 0;
}
}
