// A CUDA driver and an NVRTC for machines without either: kernels are compiled by the host's C++
// compiler and run on emulated threads (tests/cpp/emulated_ptx.h), device memory is the host's.
// Everything else of Raddle's GPU path runs as it is. See tests/gpu/emulate.sh.
//
// There are two devices, whose memories are told apart because tests ask for them by
// number. Work is done as soon as it is given to a stream. Tests steer and watch the driver through
// the functions raddle_emulator_*.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../cpp/emulated_box_map.h"

// The kernel's library is compiled with the emulated instructions, this one need not know them.
using Attend = void (*)(int cluster, int blocks, int size, int threads, int teams, int shared_bytes,
                        void** params);

/// What a function's handle points to.
struct Function {
  Attend attend;
  int (*param_bytes)(int param);
  int (*most_threads)();
};

/// A launch of a graph: it keeps the values of the parameters.
struct Node {
  const Function* function;
  unsigned blocks, cluster, threads, teams, shared_bytes;
  std::vector<std::max_align_t> params[2];
};

namespace {

constexpr int num_devices = 2;
constexpr int multiprocessors = 4, shared_bytes_of_a_block = 227 * 1024;
int contexts[num_devices];
thread_local int* current = nullptr;
std::atomic<void*> capturing = nullptr;
std::atomic<unsigned long> capture_number = 0;
std::atomic<int> allocations = 0, launches = 0, uploads = 0, refusals = 0;
std::atomic<int> misuses = 0, waits = 0, releases = 0;
std::atomic<bool> events_pass = true, launch_nothing = false, launches_fail = false;
/// Whether the default stream waits for the one that is being captured.
std::atomic<bool> capture_blocks = false;
std::atomic<std::size_t> memory_left = std::size_t{1} << 40;
std::atomic<unsigned> first_cluster = 1;
std::atomic<bool> together = false;

struct Program {
  std::string source, log, library;
  int (*stops)(void*, void*) = nullptr;
  void* asked = nullptr;
};

std::string environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

/// Compute capability, 10 times as much.
int emulated_compute() { return std::atoi(environment("RADDLE_EMULATOR_COMPUTE", "80").c_str()); }

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Kernels with loops of long queries are not compiled before the file RADDLE_EMULATOR_HOLD is
/// there. False where Raddle stops waiting for one.
bool may_compile(const Program& program) {
  const std::string gate = environment("RADDLE_EMULATOR_HOLD", "");
  if (gate.empty() || program.source.find("raddle::mma::attend<") == std::string::npos) return true;
  while (access(gate.c_str(), F_OK) != 0) {
    if (program.stops && program.stops(program.asked, nullptr)) return false;
    usleep(2000);
  }
  return true;
}

std::map<void*, std::vector<Node>>& graphs() {
  static std::map<void*, std::vector<Node>> of_streams;
  return of_streams;
}

/// Clusters, of one block each unless `size` says otherwise, one after another, in an order that no
/// kernel may rely on and raddle_emulator_order changes. Then no block finds others at work: those
/// that wait give up. Or all blocks at the same time, as if they were one cluster.
void run_blocks(const Function& function, unsigned blocks, unsigned size, unsigned threads,
                unsigned teams, unsigned shared_bytes, void** params) {
  if (together && size == 1) size = blocks;
  const unsigned clusters = blocks / size;
  for (unsigned i = 0; i < clusters; ++i) {
    const unsigned cluster = (i * 7919u + first_cluster) % clusters;
    const bool coprime = clusters % 7919u != 0;
    function.attend(static_cast<int>(coprime ? cluster : i), static_cast<int>(blocks),
                    static_cast<int>(size), static_cast<int>(threads), static_cast<int>(teams),
                    static_cast<int>(shared_bytes), params);
  }
}

std::vector<int*>& pushed() {
  thread_local std::vector<int*> stack;
  return stack;
}

/// What turns the kernel's text into a library: CUDA's words, and an entry for one cluster.
constexpr const char* prologue =
    "#include <cstddef>\n#include <type_traits>\n#define __global__ static\n#define "
    "__device__\n#define "
    "__grid_constant__\n"
    "#define __launch_bounds__(...)\n";
constexpr const char* epilogue = R"(
namespace {
struct Grid {
  int cluster, blocks, size, threads, teams, shared;
};
template <class Body>
void run_cluster(const Grid& grid, Body body) {
  raddle::emulated::run_cluster(grid.cluster, grid.size, grid.threads, grid.shared, grid.blocks,
                                grid.teams, body);
}
template <class Launch, class Variant>
void run(void (*kernel)(Launch, Variant), const Grid& grid, void** params) {
  run_cluster(grid, [&] {
    kernel(*static_cast<std::remove_cv_t<Launch>*>(params[0]),
           *static_cast<std::remove_cv_t<Variant>*>(params[1]));
  });
}
template <class Launch>
void run(void (*kernel)(Launch), const Grid& grid, void** params) {
  run_cluster(grid, [&] { kernel(*static_cast<std::remove_cv_t<Launch>*>(params[0])); });
}
/// sizeof of one parameter; 0 where the kernel has no such one.
template <class... Params>
constexpr int bytes_of(void (*)(Params...), int param) {
  const int bytes[] = {sizeof(Params)...};
  return param < int{sizeof...(Params)} ? bytes[param] : 0;
}
}
)";

/// The entries of kernel `name`: for one cluster, for what its parameters take, and for the threads
/// that a block may have, an expression.
std::string entries_of(const std::string& name, const std::string& threads) {
  return "extern \"C\" void raddle_emulated_" + name +
         "(int cluster, int blocks, int size, int threads, int teams, int shared, void** params) "
         "{\n"
         "  run(" +
         name +
         ", Grid{cluster, blocks, size, threads, teams, shared}, params);\n}\nextern \"C\" int "
         "raddle_emulated_bytes_" +
         name + "(int param) { return bytes_of(" + name +
         ", param); }\nextern \"C\" int raddle_emulated_threads_" + name + "() { return " +
         threads + "; }\n";
}

/// The same of a kernel that does nothing, which is compiled in no time: where only the host's side
/// is looked at (RADDLE_EMULATOR_HOLLOW).
std::string hollow_entries_of(const std::string& name) {
  return "extern \"C\" void raddle_emulated_" + name +
         "(int, int, int, int, int, int, void**) {}\nextern \"C\" int raddle_emulated_bytes_" +
         name + "(int) { return 0; }\nextern \"C\" int raddle_emulated_threads_" + name +
         "() { return 0; }\n";
}

struct Destroyed {
  std::mutex mutex;
  std::set<void*> streams;
  bool has(void* stream) {
    const std::lock_guard lock(mutex);
    return streams.count(stream) != 0;
  }
} destroyed;

bool is_beside_capture(void* stream) {
  return capture_blocks && capturing && reinterpret_cast<std::uintptr_t>(stream) < 2;
}

/// The error of a call that gives a stream work which it cannot take: it was destroyed, or it is
/// the default one and would end another one's capture.
int misuse_of(void* stream) {
  const int error = destroyed.has(stream) ? 400 : is_beside_capture(stream) ? 906 : 0;
  misuses += error != 0;
  return error;
}

int without_context() {
  ++refusals;
  return 201;
}

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
  *program = new Program{source, {}, {}};
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return 0;
}
int nvrtcSetFlowCallback(Program* program, int (*stops)(void*, void*), void* asked) {
  program->stops = stops;
  program->asked = asked;
  return 0;
}
int nvrtcCompileProgram(Program* program, int num_options, const char** options) {
  if (!may_compile(*program)) return 16;
  char folder[] = "/tmp/raddle-emulated-XXXXXX";
  if (!mkdtemp(folder)) return 1;
  const std::string base = std::string(folder) + "/kernel";
  std::string text = program->source;
  std::string entries, hollow;
  for (std::size_t at; (at = text.find("extern \"C\" __global__")) != std::string::npos;) {
    // … __launch_bounds__(…)\nname(
    const std::size_t begin = text.find('\n', at) + 1;
    const std::string name = text.substr(begin, text.find('(', begin) - begin);
    const std::string bounds = "__launch_bounds__(";
    const std::size_t threads = text.find(bounds, at) + bounds.size();
    entries += entries_of(name, text.substr(threads, text.find(',', threads) - threads));
    hollow += hollow_entries_of(name);
    text.replace(at, 10, "");
  }
  if (std::getenv("RADDLE_EMULATOR_HOLLOW") && !hollow.empty()) {
    text = hollow;
    entries.clear();
  }
  // What only tells of a variant (src/jit/gpu_description.cpp) has no kernels.
  std::ofstream(base + ".cpp") << prologue << text << (entries.empty() ? "" : epilogue) << entries;
  std::string defined;
  for (int i = 0; i < num_options; ++i) {
    if (std::string(options[i]).ends_with("_75")) defined = " -DRADDLE_EMULATED_PLAIN_COPIES";
    if (std::string(options[i]).ends_with("_90a")) defined = " -include emulated_tanh.h";
  }
  const std::string command =
      environment("CXX", "c++") + " -std=c++20 -O1 -fPIC -shared -w -ffp-contract=off -I" +
      environment("RADDLE_EMULATOR_INCLUDE", ".") + defined +
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
// As PTX, too, it is the host's machine code.
int nvrtcGetPTXSize(Program* program, std::size_t* size) {
  return nvrtcGetCUBINSize(program, size);
}
int nvrtcGetPTX(Program* program, char* to) { return nvrtcGetCUBIN(program, to); }

// --- the driver ----------------------------------------------------------------------------------

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  // With Hopper's kernels the first version that takes their parameters. Else none, of which torch
  // does not say that it is too old.
  *version = emulated_compute() >= 90 ? 12010 : 0;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = num_devices;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < num_devices ? 0 : 101;
}
int cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, static_cast<std::size_t>(length), "emulated threads");
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  // Multiprocessors, compute capability, shared memory of a block.
  const int compute = emulated_compute();
  *value = attribute == 16   ? multiprocessors
           : attribute == 75 ? compute / 10
           : attribute == 76 ? compute % 10
                             : shared_bytes_of_a_block;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device];
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxGetDevice(int* device) {
  if (!current) return without_context();
  *device = static_cast<int>(current - contexts);
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  pushed().push_back(current);
  current = static_cast<int*>(context);
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = current;
  current = pushed().back();
  pushed().pop_back();
  return 0;
}
int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *free = memory_left;
  *total = std::size_t{1} << 40;
  return 0;
}
int cuMemAlloc_v2(unsigned long* address, std::size_t bytes) {
  if (!current) return without_context();
  if (bytes > memory_left) return 2;
  ++allocations;
  *address = reinterpret_cast<unsigned long>(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
  std::memset(reinterpret_cast<void*>(*address), 0xff, bytes);  // NaN
  return 0;
}
int cuMemFree_v2(unsigned long address) {
  ++releases;
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
int cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
  ++allocations;
  *address = std::aligned_alloc(256, (bytes + 511) / 256 * 256);
  return 0;
}
int cuMemFreeHost(void* address) {
  std::free(address);
  return 0;
}
int cuMemcpyHtoD_v2(unsigned long to, const void* from, std::size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long to, const void* from, std::size_t bytes, void* stream) {
  if (const int error = misuse_of(stream)) return error;
  ++uploads;
  return cuMemcpyHtoD_v2(to, from, bytes);
}
int cuMemcpyDtoH_v2(void* to, unsigned long from, std::size_t bytes) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long from, std::size_t bytes, void* stream) {
  if (const int error = misuse_of(stream)) return error;
  return cuMemcpyDtoH_v2(to, from, bytes);
}
int cuMemsetD8Async(unsigned long to, unsigned char value, std::size_t bytes, void* stream) {
  if (const int error = misuse_of(stream)) return error;
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  if (!current) return without_context();
  static int one;
  ++allocations;
  *event = &one;
  return 0;
}
int cuEventDestroy_v2(void*) {
  ++releases;
  return 0;
}
int cuEventRecord(void*, void* stream) { return misuse_of(stream); }
int cuEventQuery(void*) { return events_pass ? 0 : 600; }
int cuEventSynchronize(void*) { return 0; }
int cuStreamCreate(void** stream, unsigned) {
  static int one;
  *stream = &one;
  return 0;
}
int cuStreamWaitEvent(void* stream, void*, unsigned) {
  ++waits;
  return misuse_of(stream);
}
int cuStreamIsCapturing(void* stream, int* status) {
  if (is_beside_capture(stream)) return 906;
  if (const int error = misuse_of(stream)) return error;
  *status = capturing && capturing == stream;
  return 0;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long* id, void*, void*, void*) {
  *id = capture_number;
  return cuStreamIsCapturing(stream, status);
}
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
/// As the emulated bulk copies read it (tests/cpp/emulated_hopper.h), with the conditions of the
/// real one.
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, std::uint64_t data,
                           const std::uint64_t* size, const std::uint64_t* stride,
                           const unsigned* box, const unsigned*, int, int swizzle, int, int) {
  if (rank != 4 || type > 1 || swizzle != 3 || data % 16 != 0) return 1;
  const unsigned bytes = type == 0 ? 1 : 2;
  if (box[0] * bytes != 128) return 1;
  for (int i = 0; i < 4; ++i)
    if (size[i] == 0 || size[i] > std::uint64_t{1} << 32 || box[i] == 0 || box[i] > 256) return 1;
  for (int i = 0; i < 3; ++i)
    if (stride[i] % 16 != 0 || stride[i] >= std::uint64_t{1} << 40) return 1;
  raddle::emulated::BoxMap boxes{};
  boxes.data = reinterpret_cast<std::byte*>(data);
  boxes.element_bytes = static_cast<int>(bytes), boxes.swizzled = 1;
  for (int i = 0; i < 4; ++i) boxes.size[i] = size[i], boxes.box[i] = static_cast<int>(box[i]);
  std::copy_n(stride, 3, boxes.stride);
  std::memcpy(map, &boxes, sizeof boxes);
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
int cuModuleGetFunction(void** function, void* module, const char* name) {
  const auto find = [&](const char* prefix) {
    return dlsym(module, (prefix + std::string(name)).c_str());
  };
  auto* found = new Function;
  found->attend = reinterpret_cast<Attend>(find("raddle_emulated_"));
  found->param_bytes = reinterpret_cast<int (*)(int)>(find("raddle_emulated_bytes_"));
  found->most_threads = reinterpret_cast<int (*)()>(find("raddle_emulated_threads_"));
  *function = found;
  return found->attend && found->param_bytes && found->most_threads ? 0 : 500;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
/// Of the attributes, the threads that a block may have.
int cuFuncGetAttribute(int* value, int, void* function) {
  *value = static_cast<const Function*>(function)->most_threads();
  return 0;
}
static int launch(void* handle, unsigned blocks, unsigned cluster, unsigned threads, unsigned teams,
                  unsigned shared_bytes, void* stream, void** params) {
  if (launches_fail) return 701;
  if (const int error = misuse_of(stream)) return error;
  ++launches;
  if (launch_nothing) return 0;
  const auto& function = *static_cast<const Function*>(handle);
  if (capturing && capturing == stream) {
    Node node{&function, blocks, cluster, threads, teams, shared_bytes, {}};
    for (int i = 0; i < 2; ++i) {
      const auto bytes = static_cast<std::size_t>(function.param_bytes(i));
      node.params[i].resize(bytes / sizeof(std::max_align_t) + 1);
      if (bytes > 0) std::memcpy(node.params[i].data(), params[i], bytes);
    }
    graphs()[stream].push_back(std::move(node));
    return 0;
  }
  run_blocks(function, blocks, cluster, threads, teams, shared_bytes, params);
  return 0;
}
int cuLaunchKernel(void* handle, unsigned blocks, unsigned, unsigned, unsigned threads,
                   unsigned teams, unsigned, unsigned shared_bytes, void* stream, void** params,
                   void**) {
  return launch(handle, blocks, 1, threads, teams, shared_bytes, stream, params);
}
/// CUlaunchConfig and CUlaunchAttribute. The kernel begins when earlier ones have ended, whether it
/// may begin early (attribute 6) or not. Blocks come in clusters of so many in each dimension
/// (attribute 4); other attributes are unknown.
struct LaunchAttribute {
  int id, padding, value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void**) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const int id = config->attributes[i].id, *value = config->attributes[i].value;
    if (id != 4 && id != 6) return 1;
    if (id == 4 ? value[0] < 1 || value[1] != 1 || value[2] != 1 : value[0] != 1) return 1;
    if (id == 4) cluster = static_cast<unsigned>(value[0]);
  }
  const unsigned *grid = config->grid, *block = config->block;
  if (grid[0] % cluster != 0) return 1;
  return launch(function, grid[0], cluster, block[0], block[1], config->shared_bytes,
                config->stream, params);
}
int cuGetErrorName(int, const char** name) {
  *name = "EMULATED_ERROR";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "the emulated driver failed";
  return 0;
}

// --- for tests -----------------------------------------------------------------------------------

void raddle_emulator_capture(void* stream) {
  capturing = stream;
  ++capture_number;
}
void raddle_emulator_replay(void* stream) {
  for (Node& node : graphs()[stream]) {
    void* params[] = {node.params[0].data(), node.params[1].data()};
    run_blocks(*node.function, node.blocks, node.cluster, node.threads, node.teams,
               node.shared_bytes, params);
  }
}
/// Launches begin with that cluster, or with the remainder by the number of clusters.
void raddle_emulator_order(int first) { first_cluster = static_cast<unsigned>(first); }
/// Whether the blocks of launches without clusters run at the same time.
void raddle_emulator_together(int on) { together = on != 0; }
void raddle_emulator_capture_blocks(int on) { capture_blocks = on != 0; }
void raddle_emulator_destroy_stream(void* stream) {
  const std::lock_guard lock(destroyed.mutex);
  destroyed.streams.insert(stream);
}
int raddle_emulator_misuses() { return misuses; }
int raddle_emulator_waits() { return waits; }
int raddle_emulator_releases() { return releases; }
void raddle_emulator_events_pass(int pass) { events_pass = pass != 0; }
void raddle_emulator_launch_nothing(int on) { launch_nothing = on != 0; }
void raddle_emulator_launches_fail(int on) { launches_fail = on != 0; }
void raddle_emulator_memory_left(std::size_t bytes) { memory_left = bytes; }
int raddle_emulator_allocations() { return allocations; }
int raddle_emulator_launches() { return launches; }
int raddle_emulator_refusals() { return refusals; }
int raddle_emulator_uploads() { return uploads; }
}
