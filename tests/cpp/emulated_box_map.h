// A tensor map as the emulated driver makes it and emulated bulk copies read it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace raddle::emulated {

/// In the 128 bytes of the real one.
struct BoxMap {
  std::byte* data;
  std::int32_t element_bytes, swizzled;
  std::uint64_t size[4];    ///< elements
  std::uint64_t stride[3];  ///< bytes from one row, head, page to the next
  std::int32_t box[4];      ///< elements
};
static_assert(sizeof(BoxMap) <= 128);

}  // namespace raddle::emulated
