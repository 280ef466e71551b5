// What variants traced from Python functions are written with: the contract, integer arithmetic as
// Python defines it, and intervals for coverage.
#pragma once

#include "raddle/engine/core/span.h"
#include "raddle/engine/variant/contract.h"
#include "raddle/engine/variant/native.h"
