// Rotary position embedding of interleaved pairs.
#pragma once

#include "raddle/engine/variant/rope.h"

RADDLE_ENGINE_BEGIN

using RopeInterleaved = RopeOf<Pairs::interleaved>;
RADDLE_VARIANT(RopeInterleaved, "rope_interleaved", RADDLE_ROPE_MEMBERS(RopeInterleaved));

RADDLE_ENGINE_END
