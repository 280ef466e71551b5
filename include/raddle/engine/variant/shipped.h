// The table of variants that are compiled ahead. A new shipped variant is one file and one entry
// here.
#pragma once

#include "raddle/engine/variant/alibi.h"
#include "raddle/engine/variant/causal.h"
#include "raddle/engine/variant/packed_mask.h"
#include "raddle/engine/variant/rope.h"
#include "raddle/engine/variant/rope_interleaved.h"
#include "raddle/engine/variant/rope_tables.h"
#include "raddle/engine/variant/rope_tables_interleaved.h"
#include "raddle/engine/variant/sigmoid.h"
#include "raddle/engine/variant/sinks.h"
#include "raddle/engine/variant/softcap.h"
#include "raddle/engine/variant/window.h"

RADDLE_ENGINE_BEGIN

template <class... V>
struct VariantList {};

using ShippedVariants =
    VariantList<Causal, SlidingWindow, PackedMask, SoftCap, Alibi, Sinks, Sigmoid, Rope,
                RopeInterleaved, RopeTables, RopeTablesInterleaved>;

RADDLE_ENGINE_END
