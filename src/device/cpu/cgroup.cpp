// Reads the CPU quota of control groups. A quota may stand at any ancestor of the process's group,
// and a container may see only a part of the hierarchy, mounted anywhere; so the mount table is
// asked.
#include <fstream>
#include <sstream>
#include <string>

#include "device/cpu/topology.h"

namespace raddle::cpu {
namespace {

/// A mounted hierarchy that may hold CPU quotas.
struct Hierarchy {
  bool unified = false;  ///< version 2
  std::string root;      ///< the group that is seen at the mount point
  std::string mount_point;
};

/// Whether `list`, separated by commas, holds `name`.
bool holds(const std::string& list, const std::string& name) {
  return ("," + list + ",").find("," + name + ",") != std::string::npos;
}

/// One line of /proc/self/mountinfo: "id parent dev root mount_point options … - type source
/// super_options".
bool parse_mount(const std::string& line, Hierarchy& found) {
  std::istringstream fields(line);
  std::string skipped, word, type, super_options;
  fields >> skipped >> skipped >> skipped >> found.root >> found.mount_point;
  while (fields >> word && word != "-") {
  }
  fields >> type >> skipped >> super_options;
  found.unified = type == "cgroup2";
  return found.unified || (type == "cgroup" && holds(super_options, "cpu"));
}

/// This process's group in a hierarchy, from /proc/self/cgroup: lines "id:controllers:path".
std::string group_path(const std::string& root, bool unified) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (unified ? controllers.empty() : holds(controllers, "cpu")) return line.substr(second + 1);
  }
  return "/";
}

/// A group's own quota in CPUs; 0: none.
CpuQuota quota_of(const std::string& folder, bool unified) {
  const std::string name = folder + (unified ? "/cpu.max" : "/cpu.cfs_quota_us");
  std::ifstream file(name);
  std::string quota;
  double period = 0;
  file >> quota;
  if (unified) {
    file >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  if (quota.empty() || quota == "max" || quota[0] == '-' || !(period > 0)) return {};
  double time = 0;
  std::istringstream(quota) >> time;
  return CpuQuota{time / period, name};
}

}  // namespace

CpuQuota cgroup_quota(const std::string& root) {
  CpuQuota tightest;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    Hierarchy hierarchy;
    if (!parse_mount(line, hierarchy)) continue;
    std::string path = group_path(root, hierarchy.unified);
    // A container often sees its own group as the mount's root, while the path still counts from
    // the host's.
    if (hierarchy.root != "/" && path.rfind(hierarchy.root, 0) == 0) {
      path.erase(0, hierarchy.root.size());
    }
    for (;;) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      const CpuQuota quota = quota_of(root + hierarchy.mount_point + path, hierarchy.unified);
      if (quota.cpus > 0 && (tightest.cpus == 0 || quota.cpus < tightest.cpus)) tightest = quota;
      if (path.empty()) break;
      path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return tightest;
}

}  // namespace raddle::cpu
