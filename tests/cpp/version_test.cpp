#include "raddle/version.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

TEST(Version, HasThreeParts) {
  const std::string version = raddle::version();
  EXPECT_EQ(std::count(version.begin(), version.end(), '.'), 2) << version;
}
