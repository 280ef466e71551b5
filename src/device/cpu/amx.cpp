#include "device/cpu/amx.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace raddle::cpu {

bool amx_allowed() {
#if defined(__x86_64__)
  static const bool allowed = [] {
    // Leaf 7: AMX-BF16 and AMX-TILE. Neither gcc 12's nor clang's __builtin_cpu_supports knows them
    // everywhere.
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & 1u << 22) == 0 || (d & 1u << 24) == 0)
      return false;
    constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
    return ::syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return allowed;
#else
  return false;
#endif
}

}  // namespace raddle::cpu
