// Checks that parents form a tree.
#pragma once

#include "raddle/engine/core/config.h"

namespace raddle {

/// Raises ValueError unless each of a request's nodes has an earlier one for its parent, or -1.
/// `parents` are one request's; its first node is row `row` of the batch, which the message names.
void check_tree(const i32* parents, i32 nodes, i32 request, i32 row);

}  // namespace raddle
