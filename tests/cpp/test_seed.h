// The seed of what a test draws: RADDLE_TEST_SEED, or a fresh one.
#pragma once

#include <cstdlib>
#include <random>
#include <string>

#include "raddle/engine/core/config.h"

namespace raddle {

inline u32 test_seed() {
  const char* given = std::getenv("RADDLE_TEST_SEED");
  return given ? static_cast<u32>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
}

/// What a failure prints, so that the test can be repeated.
inline std::string seed_text(u32 seed) { return "RADDLE_TEST_SEED=" + std::to_string(seed); }

}  // namespace raddle
