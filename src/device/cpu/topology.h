// What this machine gives to this process: CPUs, a share of them, an instruction set.
#pragma once

#include <string>
#include <vector>

#include "raddle/engine/kernel/cpu/config.h"

namespace raddle::cpu {

using Isa = CpuIsa;

const char* to_string(Isa isa);
/// Whether this library contains it, and this CPU and operating system can run it. Linux grants
/// tile registers on request: the first call requests them for all threads of the process.
bool supported(Isa isa);
/// The instruction set that `wanted` names, or the best supported one where it is null or empty.
/// Raises ValueError for a name that is unknown or that this CPU cannot run.
Isa choose_isa(const char* wanted);
/// choose_isa of RADDLE_CPU_ISA, once a process.
Isa selected_isa();

/// Whether this processor reads memory faster with prefetches into the L2 cache than into the L1:
/// AMD's do.
bool prefetch_into_l2();

/// CPUs of the calling thread's affinity mask, ascending.
std::vector<i32> allowed_cpus();

/// A limit on CPU time, as a number of CPUs; 0 where there is none.
struct CpuQuota {
  double cpus = 0;
  std::string source;  ///< the file that sets it
};

/// The tightest quota of this process's control group and its ancestors, version 1 or 2.
/// `root` is put before every path that is read, for tests.
CpuQuota cgroup_quota(const std::string& root = "");

/// Number of threads: RADDLE_NUM_THREADS, else the CPUs of the affinity mask, bounded by the quota
/// rounded up. Evaluated once, and once more in a forked child. Raises ValueError for a bad
/// RADDLE_NUM_THREADS.
i32 default_threads();
/// Has default_threads look again.
void forget_default_threads();

/// RADDLE_PIN: 1 pins each worker to one CPU of the mask; 0 or unset leaves them to the system.
bool pinning_wanted();

/// Instruction set and number of threads, and where they come from.
struct Report {
  std::string isa, isa_reason;
  std::vector<std::string> supported_isas;
  i32 threads = 0;
  std::string threads_reason;
  i32 affinity_cpus = 0, online_cpus = 0;
  CpuQuota quota;
  bool pinned = false;
};

/// Raises ValueError for a bad RADDLE_CPU_ISA or RADDLE_NUM_THREADS.
Report report();

}  // namespace raddle::cpu
