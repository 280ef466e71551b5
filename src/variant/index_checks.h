// Finds captured arrays that are shorter than what a traced function indexes for a batch.
#pragma once

#include <optional>
#include <string>

#include "raddle/engine/layout/layout.h"
#include "variant/traced_function.h"

namespace raddle {

/// The pairs of a batch, and what its masks keep of them.
struct IndexedBatch {
  const LayoutView& layout;
  i32 num_qo_heads;
  /// Dropped pairs cannot be wrong: a score is only asked for what masks keep. Null: all pairs
  /// count, as they do for a mask itself.
  const void* masks = nullptr;
  Coverage (*coverage)(const void* masks, const Tile& pairs) = nullptr;
};

/// Why the arrays are too short; nothing where they suffice. They are too short where the function,
/// for some pair of the batch, depends on an element that is not there: an index beyond the end, or
/// below minus the length. An index whose interval is not known, and one whose element has no
/// influence there (guarded by & or where), are clamped. Takes one evaluation of the indices where
/// all lie inside for all requests, and allocates nothing then.
std::optional<std::string> find_short_array(const std::string& name, const TracedFunction& function,
                                            const TracedMember* members, const IndexedBatch& batch);

/// The same for all pairs of a box: sequences of equal lengths, with positions from 0.
std::optional<std::string> find_short_array(const std::string& name, const TracedFunction& function,
                                            const TracedMember* members, const Tile& pairs);

}  // namespace raddle
