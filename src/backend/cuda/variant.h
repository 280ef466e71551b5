// A composition's struct as a GPU kernel takes it: by value, captured tensors in device memory.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda/memory.h"
#include "variant/bound_variant.h"

namespace raddle::cuda {

/// A captured array in device memory, kept together with the host's.
struct CapturedArray {
  Capture host;
  std::shared_ptr<const Block> block;
};

class CudaVariant {
 public:
  /// The kernel's parameter.
  void* bytes() const { return const_cast<VariantSlot*>(struct_.data()); }
  /// Before a launch on `stream`.
  void use_on(StreamHandle stream) const {
    for (const auto& array : arrays_) array->block->use_on(stream);
  }

 private:
  friend class BatchArrays;
  friend class CapturedArrays;
  std::vector<VariantSlot> struct_;
  std::vector<std::shared_ptr<const CapturedArray>> arrays_;
};

/// A reservation's memory for the arrays that each batch brings anew, at addresses that graphs
/// keep.
class BatchArrays {
 public:
  BatchArrays() = default;
  /// Room for the arrays that `bound` has, of any batch within `maxima`. Needs a ContextScope.
  BatchArrays(const Device& device, const BoundVariant& bound, const Maxima& maxima,
              StreamHandle stream);
  bool empty() const { return rooms_.empty(); }

  /// Arrays that wait to be sent.
  using Staged = std::vector<std::unique_ptr<Upload>>;
  /// Copies those of `bound` to pinned memory; the device's are not written yet.
  Staged stage(const BoundVariant& bound) const;
  /// Sends them in stream order; returns `bound` with its arrays there. `like` differs from it in
  /// nothing else.
  std::shared_ptr<const CudaVariant> send(const Staged& staged, const BoundVariant& bound,
                                          const CudaVariant& like, StreamHandle stream) const;

 private:
  const Device* device_ = nullptr;
  std::vector<std::shared_ptr<const Block>> rooms_;  ///< by capture; null: not a batch's
};

/// Captured arrays of an attention and its plans and runs. Each goes up once, as long as it is the
/// same array; small ones, which come anew with every run, as long as their contents are the same.
/// Those that lie on the GPU already are none: the struct points to them.
class CapturedArrays {
 public:
  explicit CapturedArrays(const Device& device) : device_(&device) {}

  /// `like`: a variant that this one was made from by changing some members, or null. What is new
  /// goes up on `stream`. Needs a ContextScope.
  std::shared_ptr<const CudaVariant> variant(const BoundVariant& bound, const CudaVariant* like,
                                             StreamHandle stream);

 private:
  std::shared_ptr<const CapturedArray> find(const Capture& capture, const CudaVariant* like);
  std::shared_ptr<const CapturedArray> send(const Capture& capture, StreamHandle stream);

  const Device* device_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const CapturedArray>> recent_;  ///< a ring
  std::size_t next_ = 0;
};

}  // namespace raddle::cuda
