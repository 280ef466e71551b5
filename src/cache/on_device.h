// The KV cache's functions on a GPU: they launch on a stream and wait for nothing. Views are those
// that the CPU's functions take; pools, rows and results lie on the device, arrays of the host go
// up with the call. A stream that captures a graph is refused where they would: a replay would see
// the arrays of this step.
#pragma once

#include <string>
#include <vector>

#include "device/name.h"
#include "jit/kv_kernels.h"
#include "raddle/engine/kernel/cache/launch.h"
#include "raddle/layout.h"
#include "variant/bound_variant.h"

namespace raddle {

/// A tensor argument with its name.
struct NamedTensor {
  const char* name;
  const TensorRef& tensor;
};

/// Where all of them lie; raises where they don't lie together, or, on a GPU, where their rows are
/// no whole 16-byte units.
DeviceId common_device(const std::vector<NamedTensor>& tensors);

namespace cuda {

/// Where a call's work goes.
struct Target {
  DeviceId device;
  void* stream;
};

/// `dtype` is that of the new rows, `kv_dtype` that of the pool.
void append(const Target& on, const Layout& layout, const AppendView& view, DType dtype,
            DType kv_dtype, const BoundVariant* variant);
/// The same for the `rows` of view.slots; a capture keeps their addresses.
void append(const Target& on, i64 rows, const AppendView& view, DType dtype, DType kv_dtype);
/// `view`'s lists are the host's.
void copy(const Target& on, const CopyView& view, DType kv_dtype);
void accept(const Target& on, const Layout& layout, const AcceptView& view, DType kv_dtype);
/// `dtype` is that of the summary.
void summarize(const Target& on, const Layout& layout, const SummarizeView& view, DType dtype,
               DType kv_dtype);
/// `view.scores` is the call's own.
void select(const Target& on, const Layout& layout, const SelectView& view, DType dtype);
void merge(const Target& on, const MergeView& view, const BoundVariant* finish, i32 group_size);

/// Compiles the kernels of a spec's dtype and variant with NVRTC; needs no GPU. The log tells
/// registers and spills of each. Raises CompileError.
jit::Cubin compile_kv(const AttentionSpec& spec, const std::string& arch);

}  // namespace cuda
}  // namespace raddle
