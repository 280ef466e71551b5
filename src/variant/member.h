// Values of variants' members: checked, converted, written into the variant's struct.
#pragma once

#include <memory>
#include <string>

#include "raddle/variant.h"

namespace raddle {

/// A member's value, and what was made of it: a SpanTensor's pyramid, which copies share, and the
/// order of its elements.
struct BoundMember {
  MemberValue value = 0.0;
  std::shared_ptr<const void> hull = nullptr;
  std::int32_t order = 0;
};

/// The value as the member holds it: integers become floats where floats are asked for, narrow
/// integers wide ones. Raises TypeError, naming `argument`, where the value is of another kind. An
/// array on a GPU stays there as it is: it must have the member's own elements, whose values are
/// not checked.
BoundMember bind_member(const Member& member, const MemberValue& value,
                        const std::string& argument);

/// Raises ValueError, naming `argument`, where a value on the host is not what a member's check
/// asks for.
void check_value(Check check, const MemberValue& value, const std::string& argument);

/// Writes a bound value into a variant's struct. The struct points to the value's memory.
void write_member(void* self, const Member& member, const BoundMember& bound);

/// The extents of a value; empty for a scalar.
std::vector<std::int64_t> shape_of(const MemberValue& value);

/// Where a value lies; a scalar lies on the host.
DeviceId device_of(const MemberValue& value);

/// Raises ValueError, naming `argument`, where a value lies on a GPU; `expected` says what to do.
void check_on_host(const MemberValue& value, const std::string& argument, const char* expected);

}  // namespace raddle
