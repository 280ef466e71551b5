// The copies of a layout on devices. Backends define them; a layout only keeps them.
#pragma once

#include <memory>

namespace raddle {

class LayoutCopies;

/// An empty set of copies.
std::shared_ptr<LayoutCopies> make_layout_copies();

}  // namespace raddle
