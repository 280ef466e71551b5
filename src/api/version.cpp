#include "raddle/version.h"

namespace raddle {

const char* version() { return RADDLE_VERSION; }

}  // namespace raddle
