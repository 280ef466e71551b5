// Source for just-in-time compilation, assembled from named parts. The result has no include of
// Raddle's: every engine header is written into it once, so that a hash of the text identifies the
// kernel and no include path is needed.
#pragma once

#include <string>
#include <vector>

#include "raddle/engine/variant/stages.h"
#include "raddle/variant.h"

namespace raddle::jit {

/// A variant as source: shipped ones by their engine header, a user's own by its text.
struct Functor {
  std::string type;  ///< the struct's name
  std::string name;  ///< of a shipped variant; empty for a user's own
  std::shared_ptr<const VariantSource> source;
};

/// A mask expression in postfix order over the functors of a composition.
struct MaskNode {
  enum class Join { leaf, all_of, any_of };
  Join join;
  std::size_t part;  ///< of a leaf
  bool operator==(const MaskNode&) const = default;
};

/// What one kernel or stage is compiled from.
struct CompositionSource {
  std::vector<Functor> parts;
  std::vector<MaskNode> masks;
};

/// The engine's type of such elements, in namespace raddle but for "float": "bf16".
const char* type_of(DType dtype);
/// The same as source outside of the engine's namespace has to name it: "raddle::bf16".
std::string qualified_type_of(DType dtype);

/// What a member of that type is, for messages: "an int32 array of rank 2".
std::string describe(const MemberType& type);

/// Raises TypeError where the struct's members are not of the types that `source` says.
void check_members(const VariantSource& source, const VariantOps& ops);

/// Replaces the first occurrence of each `#include "raddle/…"` by the header's text.
std::string amalgamate(const std::string& text);

/// The user's text with #line directives, checks that parts have the contract's signatures, and its
/// member list.
std::string declare(const VariantSource& source);

/// Names of the members that a mask, its spans or its coverage mention, directly or through other
/// functions of the struct.
std::vector<std::string> plan_members(const VariantSource& source);

/// Declarations of all parts, and `using <name> = Composition<…>;`.
std::string declare(const CompositionSource& composition, const std::string& name);

/// That composition as a GPU kernel's `Variant`, which is its parameter: NVRTC must give it the
/// size that the host assumes. `bytes` is 0 where there are no members.
std::string declare_variant(const CompositionSource& composition, i32 bytes);

}  // namespace raddle::jit
