#pragma once

namespace raddle {

// The version of the library, "major.minor.patch".
const char* version();

}  // namespace raddle
