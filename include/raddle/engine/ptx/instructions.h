// All instructions of this folder; or those of a test that emulates a GPU's threads on the host.
#pragma once

// Their text must stand before the emulation's.
#include "raddle/engine/core/dtype.h"
#include "raddle/engine/core/tensor_map.h"

#ifdef RADDLE_EMULATED_PTX
#include RADDLE_EMULATED_PTX
#else
#include "raddle/engine/ptx/barrier.h"
#include "raddle/engine/ptx/block.h"
#include "raddle/engine/ptx/convert.h"
#include "raddle/engine/ptx/copy.h"
#include "raddle/engine/ptx/math.h"
#include "raddle/engine/ptx/mma.h"
#include "raddle/engine/ptx/stream.h"
#include "raddle/engine/ptx/thread.h"
#include "raddle/engine/ptx/vote.h"
#endif
