#include "device/cpu/topology.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "device/cpu/isa.h"
#include "raddle/error.h"

namespace raddle::cpu {
namespace {

/// A false root with the files that a control group shows.
class CgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = (std::filesystem::temp_directory_path() / "raddle-XXXXXX").string();
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  CpuQuota quota() const { return cgroup_quota(root_); }
  std::string root_;
};

TEST_F(CgroupTest, NothingMounted) {
  EXPECT_EQ(quota().cpus, 0);
  write("/proc/self/mountinfo", "22 1 0:5 / /proc rw - proc proc rw\n");
  EXPECT_EQ(quota().cpus, 0);
}

TEST_F(CgroupTest, Version2TakesTheTightestAncestor) {
  write("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n");
  write("/proc/self/cgroup", "0::/a/b/c\n");
  write("/sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n");
  EXPECT_EQ(quota().cpus, 0);
  write("/sys/fs/cgroup/a/b/cpu.max", "350000 100000\n");
  write("/sys/fs/cgroup/a/cpu.max", "800000 100000\n");
  EXPECT_DOUBLE_EQ(quota().cpus, 3.5);
  EXPECT_NE(quota().source.find("/a/b/cpu.max"), std::string::npos);
  write("/sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_DOUBLE_EQ(quota().cpus, 0.5);
}

TEST_F(CgroupTest, Version1InAContainerThatSeesItsGroupAsRoot) {
  write("/proc/self/mountinfo",
        "31 20 0:27 /docker/ab /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset\n"
        "32 20 0:28 /docker/ab /sys/fs/cgroup/cpu,cpuacct ro master:1 - cgroup cgroup "
        "rw,cpu,cpuacct\n");
  write("/proc/self/cgroup", "9:cpuset:/other\n4:cpu,cpuacct:/docker/ab/inner\n0::/x\n");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota().cpus, 0);
  write("/sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_quota_us", "250000\n");
  write("/sys/fs/cgroup/cpu,cpuacct/inner/cpu.cfs_period_us", "100000\n");
  EXPECT_DOUBLE_EQ(quota().cpus, 2.5);
}

TEST(Topology, ChoosesAnInstructionSet) {
  EXPECT_EQ(choose_isa("generic"), Isa::generic);
  const Isa best = choose_isa(nullptr);
  EXPECT_EQ(choose_isa(""), best);
  for (const Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx}) {
    EXPECT_EQ(supported(isa), isa <= best && built(isa));
    if (supported(isa)) {
      EXPECT_EQ(choose_isa(to_string(isa)), isa);
    } else {
      EXPECT_THROW(choose_isa(to_string(isa)), ValueError);
    }
  }
}

TEST(Topology, NamesABadInstructionSet) {
  for (const char* value : {"AMX", "AVX2", "neon", "avx"}) {
    try {
      choose_isa(value);
      ADD_FAILURE() << value;
    } catch (const ValueError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("RADDLE_CPU_ISA"), std::string::npos) << text;
      EXPECT_NE(text.find(value), std::string::npos) << text;
      EXPECT_NE(text.find("generic"), std::string::npos) << text;
    }
  }
}

TEST(Topology, ThreadsFitTheMask) {
  unsetenv("RADDLE_NUM_THREADS");
  forget_default_threads();
  EXPECT_GE(default_threads(), 1);
  EXPECT_LE(default_threads(), static_cast<i32>(allowed_cpus().size()));
  setenv("RADDLE_NUM_THREADS", "3", 1);
  EXPECT_LE(default_threads(), static_cast<i32>(allowed_cpus().size())) << "evaluated once";
  forget_default_threads();
  EXPECT_EQ(default_threads(), 3);
  EXPECT_EQ(report().threads, 3);
  EXPECT_EQ(report().threads_reason, "RADDLE_NUM_THREADS");
  unsetenv("RADDLE_NUM_THREADS");
  forget_default_threads();
}

}  // namespace
}  // namespace raddle::cpu
