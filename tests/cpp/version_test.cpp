#include "raddle/version.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

TEST(Version, HasThreeParts) {
  const std::string version = raddle::version();
  // 0.1.0, or 0.1.0.dev0 on the way there.
  const auto points = std::count(version.begin(), version.end(), '.');
  EXPECT_EQ(points, version.find(".dev") == std::string::npos ? 2 : 3) << version;
}
