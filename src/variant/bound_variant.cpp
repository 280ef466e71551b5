#include "variant/bound_variant.h"

#include <algorithm>
#include <array>

#include "device/cpu/isa.h"
#include "jit/cpu_stages.h"
#include "jit/gpu_description.h"
#include "jit/host_compiler.h"
#include "plan/heuristics.h"
#include "raddle/engine/core/span.h"
#include "raddle/engine/variant/composition.h"
#include "raddle/engine/variant/fold_masks.h"
#include "raddle/error.h"
#include "variant/index_checks.h"

namespace raddle {
namespace {

using Join = jit::MaskNode::Join;

bool has_host_compiler() {
  try {
    return !jit::host_compiler().path.empty();
  } catch (const CompileError&) {
    return false;
  }
}

/// How many elements a value has.
i64 count(const MemberValue& value) {
  i64 n = 1;
  for (const i64 extent : shape_of(value)) n *= extent;
  return n;
}

}  // namespace

const VariantOps& BoundVariant::find_ops(const Variant& variant) {
  if (variant.source) {
    const std::string isa = cpu::to_string(cpu::selected_isa());
    if (gpu_arch_.empty() || has_host_compiler()) return jit::compile_stages(*variant.source, isa);
    try {
      return jit::compile_stages(*variant.source, isa);  // the cache may have it
    } catch (const CompileError&) {
      return jit::describe_on_gpu(*variant.source, gpu_arch_);
    }
  }
  const CpuKernels& kernels = cpu::kernels(cpu::selected_isa());
  std::string known;
  for (i32 i = 0; i < kernels.num_variants; ++i) {
    if (variant.name == kernels.variants[i].name) return kernels.variants[i];
    known += (i ? ", " : "") + std::string(kernels.variants[i].name);
  }
  fail<ValueError>("variant: no variant is named '", variant.name, "'; expected one of ", known);
}

BoundVariant::BoundVariant(const AttentionSpec& spec, const std::string& gpu_arch)
    : spec_{spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk,   spec.head_dim_vo,
            spec.k_extends_v,  spec.dtype,        spec.stored_dtype()},
      gpu_arch_(gpu_arch) {
  for (const Variant& v : spec.variant) add(v);
  check();
  if (spec.fuse && !parts_.empty())
    fused_ = &jit::compile_stages(source(), cpu::to_string(cpu::selected_isa()));
  bind();
}

BoundVariant::BoundVariant(const BoundVariant& other)
    : spec_(other.spec_),
      gpu_arch_(other.gpu_arch_),
      unknown_masks_(other.unknown_masks_),
      parts_(other.parts_),
      memory_(other.memory_),  // members point to values that both copies share
      masks_(other.masks_),
      fused_(other.fused_) {
  bind();
}

void BoundVariant::add(const Variant& variant) {
  const bool first = masks_.empty();
  if (variant.kind != Variant::Kind::leaf || find_ops(variant).mask) {
    add_mask(variant);
    if (!first) masks_.push_back({Join::all_of, 0});
  } else {
    add_part(variant);
  }
}

void BoundVariant::add_mask(const Variant& variant) {
  if (variant.kind == Variant::Kind::leaf) {
    if (!find_ops(variant).mask)
      fail<ValueError>("variant: '", variant.name, "' is no mask; only masks combine with & and |");
    masks_.push_back({Join::leaf, add_part(variant)});
    return;
  }
  if (variant.masks.empty())
    fail<ValueError>("variant: an & or | of no masks; expected at least one");
  const Join join = variant.kind == Variant::Kind::all_of ? Join::all_of : Join::any_of;
  for (std::size_t i = 0; i < variant.masks.size(); ++i) {
    add_mask(variant.masks[i]);
    if (i > 0) masks_.push_back({join, 0});
  }
}

std::size_t BoundVariant::add_part(const Variant& variant) {
  Part part;
  part.ops = &find_ops(variant);
  part.source = variant.source;
  if (part.ops->mask && !part.ops->coverage && variant.source && !gpu_arch_.empty() &&
      part.ops->type == part.ops->name)
    unknown_masks_ += (unknown_masks_.empty() ? "" : ", ") + variant.name;
  const auto same = std::count_if(parts_.begin(), parts_.end(), [&](const Part& p) {
    return std::string(p.ops->name) == part.ops->name;
  });
  part.name = variant.name + (same ? "#" + std::to_string(same + 1) : "");
  part.slot = memory_.size();
  memory_.resize(part.slot +
                 static_cast<std::size_t>(slot_bytes(part.ops->bytes)) / sizeof(VariantSlot));
  part.members.resize(static_cast<std::size_t>(part.ops->num_members));
  for (std::size_t m = 0; m < part.members.size(); ++m) {
    const auto found = variant.members.find(part.ops->members[m].name);
    const std::string argument = part.name + "." + part.ops->members[m].name;
    if (found == variant.members.end())
      fail<ValueError>(argument, " has no value; expected ",
                       jit::describe(part.ops->members[m].type));
    check_on_host(found->second, argument, "host memory: only params of a run lie on a GPU");
    assign(part, m, found->second, argument);
  }
  for (const auto& [name, value] : variant.members) {
    const Member* end = part.ops->members + part.ops->num_members;
    if (std::none_of(part.ops->members, end, [&](const Member& m) { return name == m.name; }))
      fail<ValueError>("variant '", part.name, "' has no member '", name, "'");
  }
  if (part.source)
    if (auto traced = std::make_shared<const TracedFunction>(*part.source); traced->has_indices())
      part.traced = std::move(traced);
  parts_.push_back(std::move(part));
  return parts_.size() - 1;
}

void BoundVariant::assign(Part& part, std::size_t member, const MemberValue& value,
                          const std::string& argument) {
  const Member& m = part.ops->members[member];
  check_extents(m, value, argument);
  // Indices are clamped into the tensor: there must be something to clamp them to.
  if (part.source && m.type.rank > 0 && count(value) == 0)
    fail<ValueError>(argument, " is empty; expected at least one element");
  part.members[member] = bind_member(m, value, argument);
  write_member(self(part), m, part.members[member]);
}

void BoundVariant::check_extents(const Member& member, const MemberValue& value,
                                 const std::string& argument) const {
  const std::vector<std::int64_t> shape = shape_of(value);
  if (shape.size() != static_cast<std::size_t>(member.type.rank)) return;  // bind_member refuses it
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::string where =
        argument + (shape.size() > 1 ? ", dimension " + std::to_string(d) + "," : "");
    const i64 n = shape[d];
    const Extent extent = member.extents.of[d];
    if (extent == Extent::qo_heads && n != spec_.qo_heads)
      fail<ValueError>(where, " has ", n, " elements; expected one a query head, ", spec_.qo_heads);
    if (extent == Extent::kv_heads && n != spec_.kv_heads)
      fail<ValueError>(where, " has ", n, " elements; expected one a KV head, ", spec_.kv_heads);
    if (extent == Extent::half_head_dim && 2 * n > spec_.head_dim)
      fail<ValueError>(where, " has ", n, " rotating pairs: rotary_dim is ", 2 * n,
                       "; expected at most head_dim = ", spec_.head_dim);
  }
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
  for (const jit::MaskNode& node : masks_) {
    depth += node.join == Join::leaf ? 1 : -1;
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
  const auto add_stage = [&](const BoundStage& stage) {
    append(stages_.query, stages_.num_query, stage.ops->query, stage);
    append(stages_.key, stages_.num_key, stage.ops->key, stage);
    append(stages_.value, stages_.num_value, stage.ops->value, stage);
    append(stages_.output, stages_.num_output, stage.ops->output, stage);
    if (stage.ops->sink) stages_.sink = stage;
    if (stage.ops->scan == Scan::sum) stages_.scan = Scan::sum;
  };
  const auto add_logits = [&](const BoundStage& stage) {
    append(stages_.logits, stages_.num_logits, stage.ops->logits, stage);
  };
  const auto add_step = [&](MaskStep::Kind kind, const BoundStage& stage) {
    stages_.mask[stages_.num_mask++] = MaskStep{kind, stage};
  };
  if (fused_) {
    const BoundStage whole{fused_, memory_.data()};
    add_stage(whole);
    add_logits(whole);
    if (fused_->mask) add_step(MaskStep::Kind::leaf, whole);
    return;
  }
  for (const Part& part : parts_) add_stage({part.ops, self(part)});
  for (const Scan scan : {Scan::softmax, Scan::sum})  // as in Composition
    for (const Part& part : parts_)
      if (part.ops->scan == scan) add_logits({part.ops, self(part)});
  for (const jit::MaskNode& node : masks_) {
    if (node.join == Join::leaf)
      add_step(MaskStep::Kind::leaf, {parts_[node.part].ops, self(parts_[node.part])});
    else
      add_step(node.join == Join::all_of ? MaskStep::Kind::all_of : MaskStep::Kind::any_of, {});
  }
}

jit::CompositionSource BoundVariant::source() const {
  jit::CompositionSource source;
  for (const Part& part : parts_)
    source.parts.push_back({part.source ? part.source->name : part.ops->type,
                            part.source ? "" : part.ops->name, part.source});
  source.masks = masks_;
  return source;
}

i32 BoundVariant::read_bytes() const {
  return raddle::read_bytes(spec_.head_dim, spec_.head_dim_vo, spec_.k_extends_v, spec_.kv_dtype);
}

std::vector<Capture> BoundVariant::captures() const {
  std::vector<Capture> captures;
  for (const Part& part : parts_)
    for (std::size_t m = 0; m < part.members.size(); ++m) {
      const Member& member = part.ops->members[m];
      if (member.type.rank == 0) continue;
      const std::size_t at =
          part.slot * sizeof(VariantSlot) + static_cast<std::size_t>(member.offset);
      std::visit(
          [&](const auto& x) {
            if constexpr (!std::is_same_v<std::decay_t<decltype(x)>, double>) {
              if (!x.is_on_host()) return;
              captures.push_back(
                  {at, x.data(), x.size() * sizeof(x.front()), x.owner(), member.extents.of[0]});
              if (!member.type.hull) return;
              const auto entries = static_cast<std::size_t>(hull_size(static_cast<i64>(x.size())));
              const auto& hull = part.members[m].hull;
              captures.push_back(
                  {at + sizeof(void*), hull.get(), entries * sizeof(x.front()), hull});
            }
          },
          part.members[m].value);
    }
  return captures;
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
    for (std::size_t i = 0; i < part.members.size(); ++i) {
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
      if (scope == ParamScope::plan)
        check_on_host(value, "params: '" + name + "'",
                      "host memory: plan reads members of masks there");
      else if (member.type.hull)
        check_on_host(value, "params: '" + name + "'",
                      "host memory: minima and maxima of a SpanTensor are computed there");
      if (member.extents.of[0] == Extent::half_head_dim &&
          shape_of(value) != shape_of(part.members[i].value))
        fail<ValueError>("params: '", name, "' has ", count(value), " elements; expected ",
                         count(part.members[i].value));
      return assign(part, i, value, "params: '" + name + "'");
    }
  }
  fail<ValueError>("params: no member is named '", name, "'; the spec's variant has ",
                   known.empty() ? "none" : known);
}

void BoundVariant::check_of_batch(const Params& params, const Maxima& maxima) const {
  for (const Part& part : parts_)
    for (i32 i = 0; i < part.ops->num_members; ++i) {
      const Member& member = part.ops->members[i];
      const Extent extent = member.extents.of[0];
      const auto found = params.find(part.name + "." + member.name);
      if (member.type.rank > 0 && is_of_batch(extent)) {
        if (found != params.end() && extent == Extent::mask_bytes &&
            count(found->second) > most_mask_bytes(maxima))
          fail<ValueError>("params: '", found->first, "' has ", count(found->second),
                           " bytes; expected at most max_mask_bytes = ", most_mask_bytes(maxima),
                           " of the reservation");
      } else if (found != params.end() && member.time == MemberTime::plan) {
        fail<ValueError>("params: '", found->first,
                         "' is the reservation's, for graphs keep it; expected it in "
                         "reserve(params=…), and in update arrays of a batch alone, such as those "
                         "of a packed mask");
      }
    }
}

bool BoundVariant::same_as(const BoundVariant& other) const {
  const auto same_member = [](const BoundMember& a, const BoundMember& b) {
    return a.value == b.value;
  };
  return spec_ == other.spec_ && masks_ == other.masks_ && fused_ == other.fused_ &&
         std::equal(parts_.begin(), parts_.end(), other.parts_.begin(), other.parts_.end(),
                    [&](const Part& a, const Part& b) {
                      return a.ops == b.ops &&
                             std::equal(a.members.begin(), a.members.end(), b.members.begin(),
                                        b.members.end(), same_member);
                    });
}

KvSpan BoundVariant::kv_span(const Tile& tile) const {
  const KvSpan all{everything, everything};
  return fold_masks(stages_, all, [&](const BoundStage& s) {
    return s.ops->kv_span ? s.ops->kv_span(s.self, tile) : all;
  });
}

Coverage BoundVariant::coverage(const Tile& tile) const { return coverage_of_masks(stages_, tile); }

void BoundVariant::check_batch(const Batch& batch, MemberTime time) const {
  for (const Part& part : parts_) {
    for (std::size_t i = 0; i < part.members.size(); ++i) {
      const Member& member = part.ops->members[i];
      if (member.time == time && member.extents.of[0] == Extent::one_or_requests)
        check_one_or_requests(part.name + "." + member.name, part.members[i].value, batch);
    }
    if (!part.source) check_shipped(part.ops->name, part.name, part.members, batch, time);
  }
}

std::optional<std::string> BoundVariant::find_short_array(const LayoutView& layout,
                                                          MemberTime time) const {
  for (const Part& part : parts_) {
    // All members of a mask are the plan's, all those of a score the run's.
    if (!part.traced || part.ops->members[0].time != time) continue;
    std::array<TracedMember, max_traced_members> members;
    for (std::size_t n = 0; n < part.traced->members().size(); ++n)
      for (std::size_t m = 0; m < part.members.size(); ++m)
        if (part.traced->members()[n] == part.ops->members[m].name)
          members[n] = {&part.members[m].value, part.members[m].hull.get()};
    IndexedBatch batch{layout, spec_.qo_heads};
    if (time == MemberTime::run && has_masks()) {
      batch.masks = this;
      batch.coverage = [](const void* self, const Tile& tile) {
        return static_cast<const BoundVariant*>(self)->coverage(tile);
      };
    }
    if (auto found = raddle::find_short_array(part.name, *part.traced, members.data(), batch))
      return found;
  }
  return {};
}

std::string BoundVariant::own_part_of_keys() const {
  for (const Part& part : parts_)
    if (part.source && part.ops->key) return part.name;
  return {};
}

std::string BoundVariant::own_part_of_values() const {
  for (const Part& part : parts_)
    if (part.source && part.ops->value) return part.name;
  return {};
}

bool BoundVariant::needs_positions() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) {
    return !part.source && raddle::needs_positions(part.ops->name);
  });
}

}  // namespace raddle
