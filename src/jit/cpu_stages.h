// Variants of the user's own on the CPU: source -> shared library -> stages.
#pragma once

#include "jit/source.h"
#include "raddle/engine/variant/stages.h"

namespace raddle::jit {

/// The stages of one variant for an instruction set ("avx512"): compiled, or from the cache, or
/// from this process's memory. Lives as long as the process. Raises CompileError.
const VariantOps& compile_stages(const VariantSource& source, const std::string& isa);

/// The stages of a whole composition as one functor, without members: its parts have them. The
/// functor's struct is Composition<…>.
const VariantOps& compile_stages(const CompositionSource& composition, const std::string& isa);

/// How many variants this process has compiled rather than found.
int num_compiled();

}  // namespace raddle::jit
