// The copies of a layout on devices. What they are is the backends' matter: a layout only keeps
// them.
#pragma once

#include <memory>

namespace raddle {

class LayoutCopies;

/// None yet.
std::shared_ptr<LayoutCopies> make_layout_copies();

}  // namespace raddle
