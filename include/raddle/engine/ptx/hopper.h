// Hopper's own instructions; or, in a test that emulates a GPU's threads on the host, the functions
// that the emulation has in their place.
#pragma once

#include "raddle/engine/ptx/instructions.h"

#ifndef RADDLE_EMULATED_PTX
#include "raddle/engine/ptx/bulk.h"
#include "raddle/engine/ptx/cluster.h"
#include "raddle/engine/ptx/matrix_store.h"
#include "raddle/engine/ptx/warpgroup.h"
#include "raddle/engine/ptx/wgmma.h"
#endif
