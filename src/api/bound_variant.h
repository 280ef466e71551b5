// A composition of variants with values for its members, ready for planner and kernels.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "raddle/attention.h"
#include "raddle/engine/variant/stages.h"

namespace raddle {

/// Raises ValueError where a spec cannot be computed, whatever its variant.
void check_spec(const AttentionSpec& spec);

/// Which members a set of parameters may change.
enum class ParamScope { plan, run };

/// Functors with their members' values. A value: parameters make a changed copy.
class BoundVariant {
 public:
  /// Resolves names against the table of the selected ISA and checks that the composition is one.
  explicit BoundVariant(const AttentionSpec& spec);
  BoundVariant(const BoundVariant& other);
  BoundVariant& operator=(const BoundVariant&) = delete;

  /// A copy with some members changed. Raises ValueError where a name is unknown, or belongs to the
  /// other scope.
  std::shared_ptr<const BoundVariant> with(const Params& params, ParamScope scope) const;

  const Stages& stages() const { return stages_; }
  /// Conservative coverage of the whole mask expression.
  KvSpan kv_span(const Tile& tile) const;
  Coverage coverage(const Tile& tile) const;
  /// Whether both compute the same: sizes, parts, values of all members.
  bool same_as(const BoundVariant& other) const;
  bool has_masks() const { return stages_.num_mask > 0; }
  /// Refuses what a batch of `requests` requests, shared levels or not, cannot have.
  void check_batch(i32 requests, bool shared_levels) const;

 private:
  struct Part {
    std::string name;  ///< "softcap"; a second one is "softcap#2"
    const VariantOps* ops;
    std::vector<u64> memory;          ///< the variant's struct
    std::vector<MemberValue> values;  ///< by member; owns what captured tensors point to
  };
  enum class MaskJoin { leaf, all_of, any_of };
  struct MaskNode {
    MaskJoin join;
    std::size_t part;
    bool operator==(const MaskNode&) const = default;
  };

  void add(const Variant& variant);
  void add_mask(const Variant& variant);
  std::size_t add_part(const Variant& variant);
  void assign(Part& part, std::size_t member, const MemberValue& value,
              const std::string& argument) const;
  void check_extent(const Member& member, const MemberValue& value,
                    const std::string& argument) const;
  void change(const std::string& name, const MemberValue& value, ParamScope scope);
  void check() const;
  void bind();

  struct Sizes {
    i32 qo_heads, kv_heads, head_dim, head_dim_vo;
    DType dtype;
    bool operator==(const Sizes&) const = default;
  } spec_;
  std::vector<Part> parts_;
  std::vector<MaskNode> masks_;  ///< postfix
  Stages stages_{};
};

}  // namespace raddle
