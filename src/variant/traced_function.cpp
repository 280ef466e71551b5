#include "variant/traced_function.h"

#include <algorithm>
#include <array>

#include "raddle/engine/core/span.h"
#include "raddle/error.h"
#include "variant/member.h"

namespace raddle {

/// What an operation makes of intervals; null where it has no such operands, or nothing is known.
struct TracedFunction::Arithmetic {
  const char* name;
  IntInterval (*number)(IntInterval, IntInterval);
  FloatInterval (*real)(FloatInterval, FloatInterval);
};

namespace {

constexpr std::array op_names = {"b",     "h",    "q",    "kv",    "score", "const",
                                 "param", "load", "cast", "where", "and",   "or",
                                 "xor",   "not",  "lt",   "le",    "eq"};

Outside most(Outside a, Outside b) { return std::max(a, b); }

/// What is left of `touched` where a condition may choose the other operand.
Outside unless(bool certain, Outside touched) {
  return certain ? touched : std::min(touched, Outside::maybe);
}

/// `decides`: the operand whose certain value makes the other one irrelevant.
Outside of_joined(Truth a, Outside from_a, Truth b, Outside from_b, bool is_and) {
  const auto settles = [is_and](Truth x) { return is_and ? !x.may_hold : !x.may_fail; };
  const auto may_settle = [is_and](Truth x) { return is_and ? x.may_fail : x.may_hold; };
  if (from_a == Outside::never && settles(a)) return Outside::never;
  if (from_b == Outside::never && settles(b)) return Outside::never;
  if (from_a == Outside::never) return unless(!may_settle(a), from_b);
  if (from_b == Outside::never) return unless(!may_settle(b), from_a);
  return most(from_a, from_b);
}

/// An unknown bound is no evidence.
Outside of_index(IntInterval i, i64 extent) {
  if (i.first >= extent || i.last < -extent) return Outside::always;
  const bool above = i.last >= extent && i.last < int_max;
  const bool below = i.first < -extent && i.first > int_min;
  return above || below ? Outside::maybe : Outside::never;
}

template <class T, i32 rank, std::size_t... d>
auto hull_of(const Array<T>& array, const void* pyramid, const IntInterval* index,
             std::index_sequence<d...>) {
  SpanTensor<const T, rank> view{
      array.data(), static_cast<const T*>(pyramid), 0, {static_cast<i32>(array.shape()[d])...}};
  return interval::at(view, index[d]...);
}

template <class T>
auto hull_of(const Array<T>& array, const void* pyramid, const IntInterval* index) {
  switch (array.shape().size()) {
    case 1:
      return hull_of<T, 1>(array, pyramid, index, std::make_index_sequence<1>{});
    case 2:
      return hull_of<T, 2>(array, pyramid, index, std::make_index_sequence<2>{});
    case 3:
      return hull_of<T, 3>(array, pyramid, index, std::make_index_sequence<3>{});
    default:
      return hull_of<T, 4>(array, pyramid, index, std::make_index_sequence<4>{});
  }
}

/// Whether the hull of the elements that are selected is found in few reads, of the host's memory.
template <class T>
bool is_cheap(const Array<T>& array, const void* pyramid, const IntInterval* index) {
  if (!array.is_on_host()) return false;
  if (pyramid || static_cast<i64>(array.size()) <= hull_branch) return true;
  for (std::size_t d = 0; d < array.shape().size(); ++d)
    if (!interval::is_point(index[d])) return false;
  return true;
}

}  // namespace

TracedFunction::Op TracedFunction::parse(const std::string& op) {
  const auto found = std::find(op_names.begin(), op_names.end(), op);
  return static_cast<Op>(found - op_names.begin());
}

const TracedFunction::Arithmetic* TracedFunction::find_arithmetic(const std::string& op) {
  using I = IntInterval;
  using F = FloatInterval;
  namespace in = interval;
  static constexpr std::array known = {
      Arithmetic{"same", [](I a, I) { return a; }, nullptr},
      Arithmetic{"add", in::add, in::add},
      Arithmetic{"sub", in::sub, in::sub},
      Arithmetic{"mul", in::mul, in::mul},
      Arithmetic{"div", nullptr, in::div},
      Arithmetic{"floor_div", in::floor_div, in::floor_div},
      Arithmetic{"floor_mod", in::floor_mod, in::floor_mod},
      Arithmetic{"minimum", in::minimum, in::minimum},
      Arithmetic{"maximum", in::maximum, in::maximum},
      Arithmetic{"and", in::bit_and, nullptr},
      Arithmetic{"or", in::bit_or, nullptr},
      Arithmetic{"xor", in::bit_xor, nullptr},
      Arithmetic{"not", [](I a, I) { return in::bit_not(a); }, nullptr},
      Arithmetic{"shift_left", in::shift_left, nullptr},
      Arithmetic{"shift_right", in::shift_right, nullptr},
      Arithmetic{"neg", [](I a, I) { return in::neg(a); }, [](F a, F) { return in::neg(a); }},
      Arithmetic{"abs", [](I a, I) { return in::abs(a); }, [](F a, F) { return in::abs(a); }},
      Arithmetic{"floor", nullptr, [](F a, F) { return in::floor(a); }},
      Arithmetic{"sqrt", nullptr, [](F a, F) { return in::sqrt(a); }},
      Arithmetic{"exp", nullptr, [](F a, F) { return in::exp(a); }},
      Arithmetic{"exp2", nullptr, [](F a, F) { return in::exp2(a); }},
      Arithmetic{"log", nullptr, [](F a, F) { return in::log(a); }},
      Arithmetic{"log2", nullptr, [](F a, F) { return in::log2(a); }},
  };
  const auto found = std::find_if(known.begin(), known.end(),
                                  [&op](const Arithmetic& each) { return op == each.name; });
  return found == known.end() ? nullptr : &*found;
}

TracedFunction::TracedFunction(const VariantSource& source) {
  if (source.expr.size() > max_traced_nodes) return;
  for (const TracedNode& from : source.expr) {
    Node node{};
    node.op = parse(from.op);
    node.arithmetic = find_arithmetic(from.op);
    node.kind = from.dtype == "bool"  ? Kind::boolean
                : from.dtype == "int" ? Kind::integer
                                      : Kind::real;
    node.value = from.value;
    if (from.args.size() > max_tensor_rank)
      fail<ValueError>("expr: ", from.op, " has ", from.args.size(), " operands; expected at most ",
                       max_tensor_rank);
    for (const i32 arg : from.args) {
      if (arg < 0 || static_cast<std::size_t>(arg) >= nodes_.size())
        fail<ValueError>("expr: ", from.op, " has operand ", arg, "; expected an earlier entry");
      node.args[node.num_args++] = arg;
      node.depends_on |= nodes_[static_cast<std::size_t>(arg)].depends_on;
    }
    if (node.op <= Op::kv) node.depends_on = 1 << static_cast<i32>(node.op);
    if (node.op == Op::load || node.op == Op::param) {
      const auto known = std::find(members_.begin(), members_.end(), from.member);
      node.member = static_cast<i32>(known - members_.begin());
      if (known == members_.end()) members_.push_back(from.member);
    }
    if (node.op == Op::load) loads_.push_back(nodes_.size());
    nodes_.push_back(node);
  }
  if (members_.size() > max_traced_members) loads_.clear();
  mark_indices();
}

void TracedFunction::mark_indices() {
  for (const std::size_t load : loads_)
    for (i32 d = 0; d < nodes_[load].num_args; ++d)
      nodes_[static_cast<std::size_t>(nodes_[load].args[d])].in_index = true;
  for (std::size_t n = nodes_.size(); n-- > 0;)
    for (i32 d = 0; nodes_[n].in_index && d < nodes_[n].num_args; ++d)
      nodes_[static_cast<std::size_t>(nodes_[n].args[d])].in_index = true;
}

bool TracedFunction::may_index_outside(const Tile& tile, const TracedMember* members) const {
  std::array<Value, max_traced_nodes> values;  // NOLINT: each is written before it is read
  evaluate(tile, members, true, values.data());
  return std::any_of(loads_.begin(), loads_.end(),
                     [&](std::size_t n) { return values[n].outside != Outside::never; });
}

Outside TracedFunction::outside(const Tile& tile, const TracedMember* members) const {
  std::array<Value, max_traced_nodes> values;  // NOLINT: each is written before it is read
  evaluate(tile, members, false, values.data());
  return values[nodes_.size() - 1].outside;
}

OutsideIndex TracedFunction::worst_index(const Tile& tile, const TracedMember* members) const {
  std::array<Value, max_traced_nodes> values;  // NOLINT: each is written before it is read
  evaluate(tile, members, true, values.data());
  OutsideIndex worst{};
  i64 farthest = -1;
  for (const std::size_t n : loads_) {
    const Node& load = nodes_[n];
    const auto member = static_cast<std::size_t>(load.member);
    const std::vector<std::int64_t> shape = shape_of(*members[member].value);
    for (i32 d = 0; d < load.num_args; ++d) {
      const Node& index = nodes_[static_cast<std::size_t>(load.args[d])];
      const IntInterval i = values[static_cast<std::size_t>(load.args[d])].number;
      const i64 extent = shape[static_cast<std::size_t>(d)];
      const i64 above = i.last < int_max || i.first >= extent ? i.last - extent : -1;
      const i64 below = i.first > int_min || i.last < -extent ? -extent - i.first - 1 : -1;
      if (std::max(above, below) <= farthest) continue;
      farthest = std::max(above, below);
      worst = {member,
               d,
               extent,
               above >= below ? i.last : i.first,
               (index.depends_on & 1) != 0,
               (index.depends_on & 2) != 0,
               (index.depends_on & 4) != 0,
               (index.depends_on & 8) != 0};
    }
  }
  return worst;
}

void TracedFunction::evaluate(const Tile& tile, const TracedMember* members, bool only_indices,
                              Value* values) const {
  for (std::size_t n = 0; n < nodes_.size(); ++n)
    if (!only_indices || nodes_[n].in_index || nodes_[n].op == Op::load)
      values[n] = compute(nodes_[n], tile, members, values);
}

TracedFunction::Value TracedFunction::constant(const Node& node, double x) {
  Value v = unknown;
  if (node.kind == Kind::integer) v.number = interval::of(static_cast<i32>(x));
  if (node.kind == Kind::real) v.real = interval::of(static_cast<float>(x));
  if (node.kind == Kind::boolean) v.truth = interval::of(x != 0.0);
  return v;
}

TracedFunction::Value TracedFunction::load(const Node& node, const TracedMember& member,
                                           const Value* values) {
  Value v = unknown;
  IntInterval index[max_tensor_rank];
  const auto read = [&](const auto& array) {
    for (i32 d = 0; d < node.num_args; ++d) {
      const Value& at = values[node.args[d]];
      index[d] = at.number;
      v.outside = most(v.outside, most(at.outside, of_index(at.number, array.shape()[d])));
    }
    if (v.outside != Outside::never || !is_cheap(array, member.hull, index)) return;
    const auto hull = hull_of(array, member.hull, index);
    if constexpr (std::is_same_v<std::decay_t<decltype(hull)>, FloatInterval>) {
      v.real = hull;
    } else {
      v.number = hull;
      v.truth = interval::logical_not(interval::equal(hull, interval::of(0)));
    }
  };
  std::visit(
      [&](const auto& value) {
        if constexpr (!std::is_same_v<std::decay_t<decltype(value)>, double>) read(value);
      },
      *member.value);
  return v;
}

TracedFunction::Value TracedFunction::choose(const Value& c, const Value& a, const Value& b) {
  const Outside chosen = !c.truth.may_fail ? a.outside
                         : !c.truth.may_hold
                             ? b.outside
                             : unless(a.outside == b.outside, most(a.outside, b.outside));
  return Value{interval::where(c.truth, a.number, b.number),
               interval::where(c.truth, a.real, b.real), interval::where(c.truth, a.truth, b.truth),
               most(c.outside, chosen)};
}

Truth TracedFunction::compare(Op op, Kind kind, const Value& a, const Value& b) {
  using namespace interval;
  if (kind == Kind::real)
    return op == Op::lt   ? less(a.real, b.real)
           : op == Op::le ? less_equal(a.real, b.real)
                          : equal(a.real, b.real);
  return op == Op::lt   ? less(a.number, b.number)
         : op == Op::le ? less_equal(a.number, b.number)
                        : equal(a.number, b.number);
}

void TracedFunction::join(Op op, const Value& a, const Value& b, Value& v) {
  if (op == Op::bit_xor) v.truth = interval::logical_xor(a.truth, b.truth);
  if (op == Op::bit_not) v.truth = interval::logical_not(a.truth);
  if (op == Op::bit_and) v.truth = interval::logical_and(a.truth, b.truth);
  if (op == Op::bit_or) v.truth = interval::logical_or(a.truth, b.truth);
  if (op == Op::bit_and || op == Op::bit_or)
    v.outside = of_joined(a.truth, a.outside, b.truth, b.outside, op == Op::bit_and);
}

TracedFunction::Value TracedFunction::compute(const Node& node, const Tile& tile,
                                              const TracedMember* members,
                                              const Value* values) const {
  Value v = unknown;
  const Value& a = values[node.args[0]];
  const Value& b = values[node.args[node.num_args > 1 ? 1 : 0]];
  const auto kind = [this, &node] { return nodes_[static_cast<std::size_t>(node.args[0])].kind; };
  for (i32 n = 0; n < node.num_args; ++n) v.outside = most(v.outside, values[node.args[n]].outside);
  switch (node.op) {
    case Op::request:
    case Op::head:
    case Op::q:
    case Op::kv: {
      const Range leaf[] = {tile.request, tile.q_head, tile.q_pos, tile.kv_pos};
      v.number = interval::of(leaf[static_cast<i32>(node.op)]);
      return v;
    }
    case Op::constant:
      return constant(node, node.value);
    case Op::param:
      return constant(node, std::get<double>(*members[node.member].value));
    case Op::load:
      return load(node, members[node.member], values);
    case Op::where:
      return choose(a, b, values[node.args[2]]);
    case Op::cast:
      if (node.kind == Kind::real && kind() == Kind::integer) v.real = interval::to_float(a.number);
      if (node.kind == Kind::integer)
        v.number = kind() == Kind::real ? interval::to_int(a.real) : interval::to_int(a.truth);
      return v;
    case Op::lt:
    case Op::le:
    case Op::eq:
      v.truth = compare(node.op, kind(), a, b);
      return v;
    case Op::bit_and:
    case Op::bit_or:
    case Op::bit_xor:
    case Op::bit_not:
      if (node.kind == Kind::boolean) {
        join(node.op, a, b, v);
        return v;
      }
      break;
    default:
      break;
  }
  if (!node.arithmetic) return v;
  if (node.kind == Kind::integer && node.arithmetic->number)
    v.number = node.arithmetic->number(a.number, b.number);
  if (node.kind == Kind::real && node.arithmetic->real)
    v.real = node.arithmetic->real(a.real, b.real);
  return v;
}

}  // namespace raddle
