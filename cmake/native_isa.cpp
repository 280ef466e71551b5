// Prints the best instruction set of the machine that it is built on, as the library would choose it. CMakeLists.txt
// runs it where RADDLE_ISAS names "native".
#include <cstdio>

#include "device/cpu/topology.h"

namespace raddle::cpu {
bool built(Isa) { return true; }
CpuQuota cgroup_quota(const std::string&) { return {}; }
}  // namespace raddle::cpu

int main() { std::puts(raddle::cpu::to_string(raddle::cpu::choose_isa(nullptr))); }
