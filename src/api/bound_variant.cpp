#include "api/bound_variant.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/cpu/isa.h"
#include "raddle/error.h"

namespace raddle {
namespace {

const VariantOps& find_ops(const std::string& name) {
  const CpuKernels& kernels = cpu::kernels(cpu::selected_isa());
  std::string known;
  for (i32 i = 0; i < kernels.num_variants; ++i) {
    if (name == kernels.variants[i].name) return kernels.variants[i];
    known += (i ? ", " : "") + std::string(kernels.variants[i].name);
  }
  fail<ValueError>("variant: no variant is named '", name, "'; expected one of ", known);
}

const char* describe(MemberKind kind) {
  switch (kind) {
    case MemberKind::float_scalar:
      return "a number";
    case MemberKind::int_scalar:
      return "an integer";
    case MemberKind::float_tensor:
      return "a float32 array";
    case MemberKind::int_tensor:
      return "an int32 array";
    default:
      return "a uint32 array";
  }
}

template <class T>
void write(void* base, i32 offset, const T& value) {
  std::memcpy(static_cast<u8*>(base) + offset, &value, sizeof(T));
}

template <class T>
bool write_tensor(void* base, i32 offset, const MemberValue& value) {
  const auto* array = std::get_if<std::vector<T>>(&value);
  if (!array) return false;
  write(base, offset, Tensor<const T, 1>{array->data(), {static_cast<i32>(array->size())}});
  return true;
}

/// Writes a stored value into the struct; false where the value is of another kind.
bool write_member(void* base, const Member& member, const MemberValue& value) {
  const auto* number = std::get_if<double>(&value);
  switch (member.kind) {
    case MemberKind::float_scalar:
      if (number) write(base, member.offset, static_cast<float>(*number));
      return number != nullptr;
    case MemberKind::int_scalar:
      if (!number || *number != std::floor(*number) || std::abs(*number) > 2147483647.0)
        return false;
      write(base, member.offset, static_cast<i32>(*number));
      return true;
    case MemberKind::float_tensor:
      return write_tensor<float>(base, member.offset, value);
    case MemberKind::int_tensor:
      return write_tensor<std::int32_t>(base, member.offset, value);
    default:
      return write_tensor<std::uint32_t>(base, member.offset, value);
  }
}

i64 length(const MemberValue& value) {
  return std::visit(
      [](const auto& x) -> i64 {
        if constexpr (std::is_same_v<std::decay_t<decltype(x)>, double>)
          return 1;
        else
          return static_cast<i64>(x.size());
      },
      value);
}

}  // namespace

BoundVariant::BoundVariant(const AttentionSpec& spec)
    : spec_{spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.head_dim_vo, spec.dtype} {
  for (const Variant& v : spec.variant) add(v);
  check();
  bind();
}

BoundVariant::BoundVariant(const BoundVariant& other)
    : spec_(other.spec_), parts_(other.parts_), masks_(other.masks_) {
  for (Part& part : parts_)
    for (std::size_t m = 0; m < part.values.size(); ++m) assign(part, m, part.values[m], part.name);
  bind();
}

void BoundVariant::add(const Variant& variant) {
  const bool first = masks_.empty();
  if (variant.kind != Variant::Kind::leaf || find_ops(variant.name).mask) {
    add_mask(variant);
    if (!first) masks_.push_back({MaskJoin::all_of, 0});
  } else {
    add_part(variant);
  }
}

void BoundVariant::add_mask(const Variant& variant) {
  if (variant.kind == Variant::Kind::leaf) {
    if (!find_ops(variant.name).mask)
      fail<ValueError>("variant: '", variant.name, "' is no mask; only masks combine with & and |");
    masks_.push_back({MaskJoin::leaf, add_part(variant)});
    return;
  }
  if (variant.masks.empty())
    fail<ValueError>("variant: an & or | of no masks; expected at least one");
  const MaskJoin join = variant.kind == Variant::Kind::all_of ? MaskJoin::all_of : MaskJoin::any_of;
  for (std::size_t i = 0; i < variant.masks.size(); ++i) {
    add_mask(variant.masks[i]);
    if (i > 0) masks_.push_back({join, 0});
  }
}

std::size_t BoundVariant::add_part(const Variant& variant) {
  Part part;
  part.ops = &find_ops(variant.name);
  const auto same =
      std::count_if(parts_.begin(), parts_.end(), [&](const Part& p) { return p.ops == part.ops; });
  part.name = variant.name + (same ? "#" + std::to_string(same + 1) : "");
  part.memory.resize(static_cast<std::size_t>(part.ops->bytes + 7) / 8);
  part.values.resize(static_cast<std::size_t>(part.ops->num_members));
  for (std::size_t m = 0; m < part.values.size(); ++m) {
    const auto found = variant.members.find(part.ops->members[m].name);
    const std::string argument = part.name + "." + part.ops->members[m].name;
    if (found == variant.members.end())
      fail<ValueError>(argument, " has no value; expected ", describe(part.ops->members[m].kind));
    assign(part, m, found->second, argument);
  }
  for (const auto& [name, value] : variant.members) {
    const Member* end = part.ops->members + part.ops->num_members;
    if (std::none_of(part.ops->members, end, [&](const Member& m) { return name == m.name; }))
      fail<ValueError>("variant '", part.name, "' has no member '", name, "'");
  }
  parts_.push_back(std::move(part));
  return parts_.size() - 1;
}

void BoundVariant::assign(Part& part, std::size_t member, const MemberValue& value,
                          const std::string& argument) const {
  const Member& m = part.ops->members[member];
  check_extent(m, value, argument);
  // Tensors point into `values`, so the value is stored before its address is written.
  MemberValue stored = value;
  part.values[member].swap(stored);
  if (!write_member(part.memory.data(), m, part.values[member])) {
    part.values[member].swap(stored);
    fail<TypeError>(argument, " has the wrong kind; expected ", describe(m.kind));
  }
}

void BoundVariant::check_extent(const Member& member, const MemberValue& value,
                                const std::string& argument) const {
  const i64 n = length(value);
  if (member.extent == Extent::qo_heads && n != spec_.qo_heads)
    fail<ValueError>(argument, " has ", n, " elements; expected one a query head, ",
                     spec_.qo_heads);
  if (member.extent == Extent::kv_heads && n != spec_.kv_heads)
    fail<ValueError>(argument, " has ", n, " elements; expected one a KV head, ", spec_.kv_heads);
  if (member.extent == Extent::half_head_dim && 2 * n > spec_.head_dim)
    fail<ValueError>(argument, " has ", n,
                     " elements; expected at most head_dim / 2 = ", spec_.head_dim / 2);
}

void BoundVariant::check() const {
  std::size_t sinks = 0, sums = 0;
  for (const Part& part : parts_) {
    sinks += part.ops->sink != nullptr;
    sums += part.ops->scan == Scan::sum;
  }
  if (sinks > 1) fail<ValueError>("variant: ", sinks, " parts have a sink; expected at most one");
  if (sums > 1) fail<ValueError>("variant: ", sums, " parts are scans; expected at most one");
  if (sums > 0 && sinks > 0)
    fail<ValueError>("variant: a sink needs a softmax; it cannot be used with a Scan::sum variant");
  if (parts_.size() > static_cast<std::size_t>(max_stages))
    fail<ValueError>("variant: ", parts_.size(), " parts; expected at most ", max_stages);
  i32 depth = 0;
  for (const MaskNode& node : masks_) {
    depth += node.join == MaskJoin::leaf ? 1 : -1;
    if (depth > max_mask_depth)
      fail<ValueError>("variant: masks are nested more than ", max_mask_depth, " deep");
  }
}

void BoundVariant::bind() {
  stages_ = Stages{};
  stages_.scan = Scan::softmax;
  const auto append = [](BoundStage* list, i32& n, bool present, const BoundStage& stage) {
    if (present) list[n++] = stage;
  };
  for (const Part& part : parts_) {
    const BoundStage stage{part.ops, part.memory.data()};
    append(stages_.query, stages_.num_query, part.ops->query, stage);
    append(stages_.key, stages_.num_key, part.ops->key, stage);
    append(stages_.value, stages_.num_value, part.ops->value, stage);
    append(stages_.logits, stages_.num_logits, part.ops->logits, stage);
    append(stages_.output, stages_.num_output, part.ops->output, stage);
    if (part.ops->sink) stages_.sink = stage;
    if (part.ops->scan == Scan::sum) stages_.scan = Scan::sum;
  }
  for (const MaskNode& node : masks_) {
    MaskStep& step = stages_.mask[stages_.num_mask++];
    if (node.join == MaskJoin::leaf)
      step =
          MaskStep{MaskStep::Kind::leaf, {parts_[node.part].ops, parts_[node.part].memory.data()}};
    else
      step = MaskStep{
          node.join == MaskJoin::all_of ? MaskStep::Kind::all_of : MaskStep::Kind::any_of, {}};
  }
}

std::shared_ptr<const BoundVariant> BoundVariant::with(const Params& params,
                                                       ParamScope scope) const {
  auto changed = std::make_shared<BoundVariant>(*this);
  for (const auto& [name, value] : params) changed->change(name, value, scope);
  return changed;
}

void BoundVariant::change(const std::string& name, const MemberValue& value, ParamScope scope) {
  std::string known;
  for (Part& part : parts_) {
    for (std::size_t i = 0; i < part.values.size(); ++i) {
      const Member& member = part.ops->members[i];
      const std::string full = part.name + "." + member.name;
      known += (known.empty() ? "" : ", ") + full;
      if (name != full) continue;
      if (member.time == MemberTime::plan && scope == ParamScope::run)
        fail<ValueError>(
            "params: '", name,
            "' is a plan member, read by the mask; expected in plan(params=…), not in run");
      if (member.time == MemberTime::run && scope == ParamScope::plan)
        fail<ValueError>("params: '", name,
                         "' is a run member; expected in run(params=…), not in plan");
      if (member.extent != Extent::one_or_requests && length(value) != length(part.values[i]))
        fail<ValueError>("params: '", name, "' has ", length(value), " elements; expected ",
                         length(part.values[i]));
      return assign(part, i, value, "params: '" + name + "'");
    }
  }
  fail<ValueError>("params: no member is named '", name, "'; the spec's variant has ",
                   known.empty() ? "none" : known);
}

bool BoundVariant::same_as(const BoundVariant& other) const {
  return spec_ == other.spec_ && masks_ == other.masks_ &&
         std::equal(
             parts_.begin(), parts_.end(), other.parts_.begin(), other.parts_.end(),
             [](const Part& a, const Part& b) { return a.ops == b.ops && a.values == b.values; });
}

KvSpan BoundVariant::kv_span(const Tile& tile) const {
  KvSpan stack[max_mask_depth + 1];
  i32 depth = 0;
  for (i32 i = 0; i < stages_.num_mask; ++i) {
    const MaskStep& step = stages_.mask[i];
    if (step.kind == MaskStep::Kind::leaf) {
      const BoundStage& s = step.stage;
      stack[depth++] =
          s.ops->kv_span ? s.ops->kv_span(s.self, tile) : KvSpan{everything, everything};
      continue;
    }
    --depth;
    KvSpan& a = stack[depth - 1];
    const KvSpan& b = stack[depth];
    if (step.kind == MaskStep::Kind::all_of)
      a = KvSpan{intersect(a.index, b.index), intersect(a.pos, b.pos)};
    else
      a = KvSpan{hull(a.index, b.index), hull(a.pos, b.pos)};
  }
  return depth > 0 ? stack[0] : KvSpan{everything, everything};
}

Coverage BoundVariant::coverage(const Tile& tile) const {
  Coverage stack[max_mask_depth + 1];
  i32 depth = 0;
  for (i32 i = 0; i < stages_.num_mask; ++i) {
    const MaskStep& step = stages_.mask[i];
    if (step.kind == MaskStep::Kind::leaf) {
      const BoundStage& s = step.stage;
      stack[depth++] = s.ops->coverage ? s.ops->coverage(s.self, tile) : Coverage::partial;
      continue;
    }
    --depth;
    // Coverage is ordered empty < partial < full: all-of is at most the lower, any-of at least the
    // higher.
    stack[depth - 1] = step.kind == MaskStep::Kind::all_of
                           ? std::min(stack[depth - 1], stack[depth])
                           : std::max(stack[depth - 1], stack[depth]);
  }
  return depth > 0 ? stack[0] : Coverage::full;
}

void BoundVariant::check_batch(i32 requests, bool shared_levels) const {
  for (const Part& part : parts_)
    for (std::size_t i = 0; i < part.values.size(); ++i) {
      const Member& member = part.ops->members[i];
      const i64 n = length(part.values[i]);
      if (member.extent != Extent::one_or_requests || n == 1) continue;
      if (n != requests)
        fail<ValueError>(part.name, ".", member.name, " has ", n,
                         " elements; expected 1, or one a request, ", requests);
      if (shared_levels)
        fail<ValueError>(
            part.name, ".", member.name,
            " differs by request; expected one value on a layout whose requests share keys");
    }
}

}  // namespace raddle
