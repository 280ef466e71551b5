#include "variant/member.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include "device/name.h"
#include "jit/source.h"
#include "raddle/engine/core/ordered.h"
#include "raddle/error.h"

namespace raddle {
namespace {

template <class T>
std::optional<Array<T>> convert(const MemberValue& value) {
  return std::visit(
      [](const auto& x) -> std::optional<Array<T>> {
        using X = std::decay_t<decltype(x)>;
        if constexpr (std::is_same_v<X, double>) {
          return std::nullopt;
        } else if constexpr (std::is_same_v<X, Array<T>>) {
          return x;
        } else {
          using From = std::decay_t<decltype(x.front())>;
          if (std::is_floating_point_v<From> || !x.is_on_host()) return std::nullopt;
          std::vector<T> values;
          values.reserve(x.size());
          for (std::size_t i = 0; i < x.size(); ++i) {
            const auto wide = static_cast<i64>(x.data()[i]);
            if constexpr (std::is_integral_v<T>)
              if (wide < static_cast<i64>(std::numeric_limits<T>::min()) ||
                  wide > static_cast<i64>(std::numeric_limits<T>::max()))
                return std::nullopt;
            values.push_back(static_cast<T>(wide));
          }
          return Array<T>(std::move(values), x.shape());
        }
      },
      value);
}

template <class T>
std::optional<BoundMember> bind_tensor(const MemberType& type, const MemberValue& value) {
  const auto array = convert<T>(value);
  if (!array || array->shape().size() != static_cast<std::size_t>(type.rank)) return std::nullopt;
  BoundMember bound{*array};
  if (type.hull) {
    const auto n = static_cast<i64>(array->size());
    std::shared_ptr<T[]> hull(new T[static_cast<std::size_t>(hull_size(n))]);
    build_hull(array->data(), n, hull.get());
    bound.hull = std::move(hull);
    bound.order = find_order(array->data(), n, static_cast<i64>(array->shape().back()));
  }
  return bound;
}

std::optional<BoundMember> try_bind(const MemberType& type, const MemberValue& value) {
  const auto* number = std::get_if<double>(&value);
  switch (type.kind) {
    case MemberKind::float_scalar:
      return number ? std::optional(BoundMember{*number}) : std::nullopt;
    case MemberKind::int_scalar:
      if (!number || *number != std::floor(*number) || std::abs(*number) > 2147483647.0)
        return std::nullopt;
      return BoundMember{*number};
    case MemberKind::float_tensor:
      return bind_tensor<float>(type, value);
    case MemberKind::int_tensor:
      return bind_tensor<std::int32_t>(type, value);
    case MemberKind::uint_tensor:
      return bind_tensor<std::uint32_t>(type, value);
    default:
      return bind_tensor<std::uint8_t>(type, value);
  }
}

template <class T>
void write(void* self, i32 offset, const T& value) {
  std::memcpy(static_cast<u8*>(self) + offset, &value, sizeof(T));
}

std::string found(const MemberValue& value) {
  static constexpr const char* names[] = {"a number", "a float32 array", "an int32 array",
                                          "a uint32 array", "a uint8 array"};
  std::string text = names[value.index()];
  if (value.index() > 0) text += " of rank " + std::to_string(shape_of(value).size());
  if (const DeviceId device = device_of(value); is_gpu(device))
    text += " on '" + name_of(device) + "'";
  return text;
}

}  // namespace

std::vector<std::int64_t> shape_of(const MemberValue& value) {
  return std::visit(
      [](const auto& x) -> std::vector<std::int64_t> {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, double>)
          return {};
        else
          return x.shape();
      },
      value);
}

DeviceId device_of(const MemberValue& value) {
  return std::visit(
      [](const auto& x) -> DeviceId {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, double>)
          return {};
        else
          return x.device();
      },
      value);
}

void check_on_host(const MemberValue& value, const std::string& argument, const char* expected) {
  if (const DeviceId device = device_of(value); is_gpu(device))
    fail<ValueError>(argument, " lies on device '", name_of(device), "'; expected ", expected);
}

void check_value(Check check, const MemberValue& value, const std::string& argument) {
  if (check == Check::any || is_gpu(device_of(value))) return;
  // As the member holds it: a large double is an infinite float.
  const auto one = [check](float x) {
    if (check == Check::logit) return x < std::numeric_limits<float>::infinity();  // no NaN is
    return std::isfinite(x) && (check == Check::finite || x > 0.0f);
  };
  const char* expected = check == Check::logit    ? "a number below infinity"
                         : check == Check::finite ? "a finite number"
                                                  : "a finite number above 0";
  if (const auto* number = std::get_if<double>(&value)) {
    if (!one(static_cast<float>(*number)))
      fail<ValueError>(argument, " is ", *number, "; expected ", expected);
  } else if (const auto* floats = std::get_if<Array<float>>(&value)) {
    for (std::size_t i = 0; i < floats->size(); ++i)
      if (!one(floats->data()[i]))
        fail<ValueError>(argument, " holds ", floats->data()[i], " at ", i, "; expected ", expected,
                         " everywhere");
  }
}

BoundMember bind_member(const Member& member, const MemberValue& value,
                        const std::string& argument) {
  const auto bound = try_bind(member.type, value);
  if (!bound)
    fail<TypeError>(argument, " is ", found(value), "; expected ", jit::describe(member.type),
                    is_gpu(device_of(value)) ? ": kernels read it where it lies" : "");
  for (const i64 extent : shape_of(value))
    if (extent > std::numeric_limits<i32>::max())
      fail<ValueError>(argument, " has an extent of ", extent, "; expected 32-bit extents");
  check_value(member.check, bound->value, argument);
  return *bound;
}

void write_member(void* self, const Member& member, const BoundMember& bound) {
  std::visit(
      [&](const auto& x) {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, double>) {
          if (member.type.kind == MemberKind::int_scalar)
            write(self, member.offset, static_cast<i32>(x));
          else
            write(self, member.offset, static_cast<float>(x));
        } else {
          // As Tensor and SpanTensor lie in memory: address, pyramid and order, extents.
          i32 at = member.offset;
          write(self, at, static_cast<const void*>(x.data()));
          at += static_cast<i32>(sizeof(void*));
          if (member.type.hull) {
            write(self, at, bound.hull.get());
            at += static_cast<i32>(sizeof(void*));
            write(self, at, bound.order);
            at += static_cast<i32>(sizeof(i32));
          }
          for (const i64 extent : x.shape()) {
            write(self, at, static_cast<i32>(extent));
            at += static_cast<i32>(sizeof(i32));
          }
        }
      },
      bound.value);
}

}  // namespace raddle
