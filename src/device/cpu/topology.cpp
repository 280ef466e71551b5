#include "device/cpu/topology.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "device/cpu/isa.h"
#include "raddle/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace raddle::cpu {
namespace {

constexpr Isa all_isas[] = {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx};
constexpr i32 max_threads = 4096;

#if defined(__x86_64__)
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

#if defined(RADDLE_EMULATED_TILES)
constexpr bool emulated_tiles = true;
#else
constexpr bool emulated_tiles = false;
#endif

/// AMX_TILE and AMX_BF16 (leaf 7.0, EDX), AVX512_VBMI (ECX), AVX512_BF16 (leaf 7.1, EAX).
bool has_amx() {
  constexpr unsigned amx = emulated_tiles ? 0u : 1u << 24 | 1u << 22;
  constexpr unsigned avx512_vbmi = 1u << 1, avx512_bf16 = 1u << 5;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & amx) != amx || (c & avx512_vbmi) == 0)
    return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & avx512_bf16) != 0;
}

/// Linux gives tile registers (8 KiB more state per thread) to processes that request them. It
/// refuses where a thread's signal stack is too small for them; emulators don't know the request.
bool may_use_tiles() {
  if (emulated_tiles) return true;
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

std::string supported_names() {
  std::string names;
  for (const Isa isa : all_isas) {
    if (supported(isa)) names += (names.empty() ? "" : ", ") + std::string(to_string(isa));
  }
  return names;
}

/// RADDLE_NUM_THREADS; 0 where it is not set.
i32 threads_asked_for() {
  const char* value = environment("RADDLE_NUM_THREADS");
  if (!value) return 0;
  char* end = nullptr;
  const long n = std::strtol(value, &end, 10);
  if (*end != '\0' || n < 1 || n > max_threads) {
    fail<ValueError>("RADDLE_NUM_THREADS is \"", value, "\"; expected an integer from 1 to ",
                     max_threads);
  }
  return static_cast<i32>(n);
}

i32 threads_of(std::size_t cpus, const CpuQuota& quota) {
  double n = static_cast<double>(std::max<std::size_t>(cpus, 1));
  if (quota.cpus > 0) n = std::min(n, std::max(1.0, std::ceil(quota.cpus)));
  return static_cast<i32>(std::min<double>(n, max_threads));
}

std::atomic<i32> known_threads{0};

}  // namespace

const char* to_string(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return "amx";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "generic";
  }
}

bool supported(Isa isa) {
  if (!built(isa)) return false;
#if defined(__x86_64__)
  // The builtin checks the operating system, too: it must save wide registers at a context switch.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == Isa::amx) return avx2 && avx512 && has_amx() && may_use_tiles();
  if (isa == Isa::avx512_bf16) return avx2 && avx512 && __builtin_cpu_supports("avx512bf16");
  return isa == Isa::generic || (avx2 && (isa == Isa::avx2 || avx512));
#else
  return true;
#endif
}

bool prefetch_into_l2() {
#if defined(__x86_64__)
  static const bool is_amd = __builtin_cpu_is("amd");
  return is_amd;
#else
  return false;
#endif
}

Isa choose_isa(const char* wanted) {
  Isa best = Isa::generic;
  for (const Isa isa : all_isas) {
    if (supported(isa)) best = isa;
    if (wanted && std::strcmp(wanted, to_string(isa)) == 0) {
      if (supported(isa)) return isa;
      fail<ValueError>("RADDLE_CPU_ISA is \"", wanted,
                       "\", which this CPU cannot run or this build lacks; expected one of ",
                       supported_names());
    }
  }
  if (!wanted || !*wanted) return best;
  fail<ValueError>("RADDLE_CPU_ISA is \"", wanted, "\"; expected one of ", supported_names());
}

Isa selected_isa() {
  static std::atomic<i32> known{-1};
  i32 isa = known.load(std::memory_order_relaxed);
  if (isa < 0) {
    isa = static_cast<i32>(choose_isa(std::getenv("RADDLE_CPU_ISA")));
    known.store(isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

std::vector<i32> allowed_cpus() {
  // The kernel refuses a set smaller than its own, whose size it doesn't tell.
  for (int size = 1024; size <= (1 << 20); size *= 2) {
    cpu_set_t* set = CPU_ALLOC(size);
    const std::size_t bytes = CPU_ALLOC_SIZE(size);
    std::vector<i32> cpus;
    const bool ok = set && sched_getaffinity(0, bytes, set) == 0;
    for (i32 cpu = 0; ok && cpu < size; ++cpu) {
      if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set)) cpus.push_back(cpu);
    }
    if (set) CPU_FREE(set);
    if (ok) return cpus;
  }
  return {0};
}

i32 default_threads() {
  i32 n = known_threads.load(std::memory_order_relaxed);
  if (n == 0) {
    n = threads_asked_for();
    if (n == 0) n = threads_of(allowed_cpus().size(), cgroup_quota());
    known_threads.store(n, std::memory_order_relaxed);
  }
  return n;
}

void forget_default_threads() { known_threads.store(0, std::memory_order_relaxed); }

bool pinning_wanted() {
  const char* value = environment("RADDLE_PIN");
  if (!value || std::strcmp(value, "0") == 0) return false;
  if (std::strcmp(value, "1") == 0) return true;
  fail<ValueError>("RADDLE_PIN is \"", value, "\"; expected 0 or 1");
}

Report report() {
  Report found;
  found.isa = to_string(selected_isa());
  found.isa_reason = environment("RADDLE_CPU_ISA") ? "RADDLE_CPU_ISA" : "the best this CPU runs";
  for (const Isa isa : all_isas)
    if (supported(isa)) found.supported_isas.push_back(to_string(isa));
  found.threads = default_threads();
  found.affinity_cpus = static_cast<i32>(allowed_cpus().size());
  found.online_cpus = static_cast<i32>(sysconf(_SC_NPROCESSORS_ONLN));
  found.quota = cgroup_quota();
  found.threads_reason = threads_asked_for() > 0               ? "RADDLE_NUM_THREADS"
                         : found.threads < found.affinity_cpus ? "the CPU quota"
                                                               : "CPUs of the affinity mask";
  found.pinned = pinning_wanted();
  return found;
}

}  // namespace raddle::cpu
