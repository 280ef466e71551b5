// Rotary position embedding of interleaved pairs by given cosines and sines.
#pragma once

#include "raddle/engine/variant/rope_tables.h"

RADDLE_ENGINE_BEGIN

using RopeTablesInterleaved = RopeTablesOf<Pairs::interleaved>;
RADDLE_VARIANT(RopeTablesInterleaved, "rope_tables_interleaved",
               RADDLE_ROPE_TABLES_MEMBERS(RopeTablesInterleaved));

RADDLE_ENGINE_END
