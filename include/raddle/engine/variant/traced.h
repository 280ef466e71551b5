// Everything that the C++ of a traced Python function uses: the contract, integer arithmetic as
// Python defines it, and intervals for coverage.
#pragma once

#include "raddle/engine/core/ordered.h"
#include "raddle/engine/variant/contract.h"
#include "raddle/engine/variant/native.h"
