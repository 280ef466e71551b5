// A composition of variants with values for its members, ready for planner and kernels.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "jit/source.h"
#include "raddle/attention.h"
#include "raddle/engine/plan/bounds.h"
#include "raddle/engine/variant/stages.h"
#include "variant/batch_checks.h"
#include "variant/member.h"
#include "variant/traced_function.h"

namespace raddle {

/// Raises ValueError where a spec cannot be computed, whatever its variant.
void check_spec(const AttentionSpec& spec);

/// Which members a set of parameters may change.
enum class ParamScope { plan, run };

/// Whether a captured array is a batch's, which an update of a reservation may bring anew.
constexpr bool is_of_batch(Extent extent) {
  return extent == Extent::request_offsets || extent == Extent::mask_bytes;
}

/// A piece of a composition's struct in memory, as aligned as any of them must be.
struct alignas(16) VariantSlot {
  u8 bytes[16];
};

/// A captured array that a composition's struct points to.
struct Capture {
  std::size_t offset;  ///< of the pointer in the struct
  const void* data;
  std::size_t bytes;
  std::shared_ptr<const void> owner;  ///< of `data`
  Extent extent = Extent::any;        ///< of its first dimension
};

/// Functors with their members' values. A value: parameters make a changed copy.
class BoundVariant {
 public:
  /// Resolves shipped names against the table of the selected ISA, compiles what is source, and
  /// checks that the composition is one.
  explicit BoundVariant(const AttentionSpec& spec) : BoundVariant(spec, "") {}
  /// For a GPU of that architecture, where variants that are source need no host compiler: without
  /// one the host does not know their coverage, and takes every tile for partial.
  BoundVariant(const AttentionSpec& spec, const std::string& gpu_arch);
  BoundVariant(const BoundVariant& other);
  BoundVariant& operator=(const BoundVariant&) = delete;

  /// A copy with some members changed. Raises ValueError where a name is unknown, or belongs to the
  /// other scope, or where a value on a GPU is needed on the host.
  std::shared_ptr<const BoundVariant> with(const Params& params, ParamScope scope) const;

  const Stages& stages() const { return stages_; }
  bool has_output() const { return stages_.num_output > 0; }
  /// Conservative coverage of the whole mask expression.
  KvSpan kv_span(const Tile& tile) const;
  Coverage coverage(const Tile& tile) const;
  /// Whether both compute the same: sizes, parts, values of all members.
  bool same_as(const BoundVariant& other) const;
  bool has_masks() const { return stages_.num_mask > 0; }
  /// The mask, where there is one alone; else null. A planner asks it twice a tile.
  const BoundStage* only_mask() const {
    return stages_.num_mask == 1 ? &stages_.mask[0].stage : nullptr;
  }
  /// Names of the masks whose coverage the host does not know; empty: it knows all of them.
  const std::string& unknown_masks() const { return unknown_masks_; }
  /// Refuses what an update of a reservation may not change: plan members other than arrays of a
  /// batch, and arrays larger than those of any batch within the maxima.
  void check_of_batch(const Params& params, const Maxima& maxima) const;
  /// Refuses values of plan members, or of run members, that a batch cannot have. `positions` may
  /// be empty unless needs_positions().
  void check_batch(const Batch& batch, MemberTime time) const;
  /// Which captured array of a plan or run member is too short for what a batch indexes, and why;
  /// nothing where all suffice. Lengths must be known. What lies on a GPU has extents, and values
  /// that the host does not know: indices computed from them count as inside.
  std::optional<std::string> find_short_array(const LayoutView& layout, MemberTime time) const;
  /// The name of a part of the user's own that changes keys, or values; empty: there is none. Parts
  /// that come with Raddle turn keys, so that a factor of keys is one of logits.
  std::string own_part_of_keys() const;
  std::string own_part_of_values() const;
  /// Whether a run member must suit the positions of a batch.
  bool needs_positions() const;
  /// What a kernel of this composition is compiled from.
  jit::CompositionSource source() const;
  /// The struct of source()'s Composition, with all members' values.
  const void* memory() const { return memory_.data(); }
  i32 memory_bytes() const { return static_cast<i32>(memory_.size() * sizeof(VariantSlot)); }
  /// The arrays on the host that it points to: a GPU needs copies of its own.
  std::vector<Capture> captures() const;
  /// Bytes of one key and value of a KV head that a kernel reads.
  i32 read_bytes() const;

 private:
  struct Part {
    std::string name;  ///< "softcap"; a second one is "softcap#2"
    const VariantOps* ops;
    std::shared_ptr<const VariantSource> source;   ///< null: shipped
    std::size_t slot;                              ///< of the variant's struct in memory_
    std::vector<BoundMember> members;              ///< own what captured tensors point to
    std::shared_ptr<const TracedFunction> traced;  ///< null: it indexes no captured array
  };

  const VariantOps& find_ops(const Variant& variant);
  void add(const Variant& variant);
  void add_mask(const Variant& variant);
  std::size_t add_part(const Variant& variant);
  void* self(const Part& part) { return &memory_[part.slot]; }
  void assign(Part& part, std::size_t member, const MemberValue& value,
              const std::string& argument);
  void check_extents(const Member& member, const MemberValue& value,
                     const std::string& argument) const;
  void change(const std::string& name, const MemberValue& value, ParamScope scope);
  void check() const;
  void bind();

  struct Sizes {
    i32 qo_heads, kv_heads, head_dim, head_dim_vo;
    bool k_extends_v;
    DType dtype, kv_dtype;
    bool operator==(const Sizes&) const = default;
  } spec_;
  std::string gpu_arch_, unknown_masks_;
  std::vector<Part> parts_;
  std::vector<VariantSlot> memory_;  ///< the parts' structs, as Composition lays them out
  std::vector<jit::MaskNode> masks_;
  const VariantOps* fused_ =
      nullptr;  ///< the composition as one functor, where the spec asks for it
  Stages stages_{};
};

}  // namespace raddle
