// Raddle's public C++ API: a spec, an Attention made from it, plans, runs.
//
//   raddle::AttentionSpec spec;
//   spec.num_qo_heads = 32; spec.num_kv_heads = 8; spec.head_dim_qk = spec.head_dim_vo = 128;
//   spec.variant = {raddle::causal()};
//   raddle::Attention attention(spec);   // or Attention(spec, raddle::DeviceId::cuda(0))
//   auto plan = attention.plan(raddle::paged_kv(args));
//   attention.run(*plan, run_args);     // once a layer; a plan serves all layers
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "raddle/engine/plan/bounds.h"
#include "raddle/layout.h"
#include "raddle/tensor.h"
#include "raddle/variant.h"

namespace raddle {

/// The widest heads: those of MLA with absorbed weights, of DeepSeek.
constexpr i32 max_head_dim_qk = 576, max_head_dim_vo = 512;

struct AttentionSpec {
  i32 num_qo_heads = 1;
  i32 num_kv_heads = 1;
  i32 head_dim_qk = 128;          ///< a multiple of 8, at most max_head_dim_qk
  i32 head_dim_vo = 128;          ///< a multiple of 8, at most max_head_dim_vo
  DType dtype = DType::bfloat16;  ///< of Q, K, V and O
  /// Of K and V, where they are quantised: one of the 8-bit dtypes. Default: dtype.
  std::optional<DType> kv_dtype;
  std::vector<Variant> variant;  ///< empty: plain attention
  std::optional<float> scale;    ///< softmax scale; default 1/√head_dim_qk
  bool batch_invariant = false;
  /// A key is its value's row followed by its row of K, which so has k_columns() columns: MLA whose
  /// latents and rotary keys are tensors of their own. Each part has its tensor's scale.
  bool k_extends_v = false;
  /// Compile the composition as one functor, with the same bits: one pass over the logits instead
  /// of one a part. Needs a C++ compiler unless it is in the cache.
  bool fuse = false;

  i32 group_size() const { return num_qo_heads / num_kv_heads; }
  float softmax_scale() const;
  /// Columns of K as it lies in memory.
  i32 k_columns() const { return head_dim_qk - (k_extends_v ? head_dim_vo : 0); }
  /// Of K and V as they lie in memory.
  DType stored_dtype() const { return kv_dtype.value_or(dtype); }
};

using Params = std::map<std::string, MemberValue>;  ///< "softcap.cap" -> value

struct PlanOptions {
  /// 0: the worker pool's threads; on a GPU as many thread blocks as fit on it at once.
  i32 num_workers = 0;
  Schedule schedule = Schedule::automatic;
  Params params;  ///< plan members that differ from the spec's ("window.left")
  /// GPUs: the CUstream (cudaStream_t) that the plan's arrays go up on; null: the default stream.
  void* stream = nullptr;
};

struct ReserveOptions : PlanOptions {
  /// GPUs: plans are made there, of DeviceLayouts: the planner kernel is compiled and its memory
  /// taken now. With max_levels 2 it discovers prefixes. On a CPU this changes nothing.
  bool device_lengths = false;
};

class Backend;
class BoundVariant;
class GpuBackend;
class PlanArrays;
class PlanOnDevice;

/// How a batch will be computed: an immutable value without scratch, shared freely.
class Plan {
 public:
  Plan(LayoutPtr layout, std::shared_ptr<const PlanArrays> arrays,
       std::shared_ptr<const BoundVariant> origin, std::shared_ptr<const BoundVariant> variant,
       std::vector<Range> positions, std::shared_ptr<const PlanOnDevice> on_device,
       bool is_reserved, bool arrays_suffice);
  ~Plan();
  const PlanView& view() const { return view_; }
  const PlanArrays& arrays() const;
  const Layout& layout() const { return *layout_; }
  /// The composition with this plan's members, and the one of the Attention that made it.
  const BoundVariant& variant() const { return *variant_; }
  const std::shared_ptr<const BoundVariant>& variant_ptr() const { return variant_; }
  const BoundVariant& origin() const { return *origin_; }
  /// Hull of the positions of each request's rows and keys; empty where no variant asks.
  const std::vector<Range>& positions() const { return positions_; }
  /// What kernels read, and how they run it.
  const PlanOnDevice& on_device() const { return *on_device_; }
  /// Where it can be run.
  DeviceId device() const;
  /// Whether a kernel made it, of lengths that the host does not know: then view() is empty.
  bool made_on_device() const;
  /// Whether its runs write the marks of a timeline (RunArgs::timeline).
  bool marks_timelines() const;
  /// Whether a reservation holds it: then q, out and lse may have more rows than the layout; those
  /// beyond are not touched.
  bool is_reserved() const { return is_reserved_; }
  /// Whether the captured arrays of the spec's run members hold all that this batch indexes.
  bool arrays_suffice() const { return arrays_suffice_; }
  /// Planned cost of the heaviest queue over the mean, contraction included.
  double balance() const;
  /// Estimated microseconds until the last worker is done, by the planner's cost model: what plans
  /// of the same spec and device are compared by, no prediction of a run on this machine.
  double estimated_us() const;
  /// Which schedule, tile shapes and kernels were chosen, and why: text for people.
  std::string explain() const;

 private:
  LayoutPtr layout_;
  std::shared_ptr<const PlanArrays> arrays_;
  std::shared_ptr<const BoundVariant> origin_, variant_;
  std::vector<Range> positions_;
  std::shared_ptr<const PlanOnDevice> on_device_;
  bool is_reserved_, arrays_suffice_;
  PlanView view_;
};

using PlanPtr = std::shared_ptr<const Plan>;

/// A page table as the levels that were chosen for it, or as the single one that it is.
struct SharedPrefixes {
  LayoutPtr layout;
  std::string reason;  ///< what was shared and what that is worth, or why nothing is: for people
};

/// K and V of one level, and their scales.
struct KvRef {
  TensorRef k, v;
  ScaleRef k_scale{}, v_scale{};
};

struct RunArgs {
  /// [rows, Hq, Dqk], or of a plan whose B requests have L rows each [B, L, Hq, Dqk] with any
  /// strides; then out and lse are [B, L, Hq, Dvo] and [B, L, Hq].
  TensorRef q;
  std::vector<KvRef> kv;  ///< one pair for all levels, or one a level
  TensorRef out;          ///< [rows, Hq, Dvo] in the spec's dtype; fp32 when return_state
  TensorRef lse;          ///< [rows, Hq] fp32; data null: not wanted
  bool return_state =
      false;                ///< (O, LSE) without sink and output parts, O in fp32, for merge_states
  bool lse_base_2 = false;  ///< LSE is written as a logarithm to base 2, not as a natural one
  /// Rows of O beyond the batch's, which tensors of a reservation's run may have, become 0, of LSE
  /// -inf; else they are left as they are.
  bool zero_unused_rows = false;
  std::optional<float> scale;
  const Params* params = nullptr;  ///< run members that differ from the spec's
  void* stream = nullptr;          ///< GPUs: the CUstream to run on; null: the default stream
  /// GPUs: [workers, marks, 2] of 32 bits, zero, to write what each worker did when; see
  /// Attention.run of the Python package. Data null: nothing is written.
  TensorRef timeline;
};

/// Measured work of the last run on this thread's Attention call.
struct RunStats {
  std::vector<double> busy_us;  ///< of each worker thread of a CPU; empty for a GPU
};

/// Room for any plan within maxima at addresses that never change, with scratch of its own: what a
/// graph captured from a run of it is replayed for. Graphs and all that they read must not outlive
/// it, and none of them may run while another one does.
class Reservation {
 public:
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  const Maxima& maxima() const;
  DeviceId device() const;
  /// Bytes of plan and scratch; the layout's arrays come on top, with the first update.
  std::size_t bytes() const;
  /// Empty where the layout is within the maxima; else what is not.
  std::string misfit(const Layout& layout) const;
  /// Plans `layout`; runs on `stream` after it, and replays of their graphs, compute it. Raises
  /// ValueError where it does not fit, where its page size or levels are not the first one's, and
  /// where it has arrays (explicit positions …) that no layout before the first captured run had,
  /// or the values of that run's variant do not suit it; then the plan before stays in force.
  /// `params`: plan members that are arrays of a batch, as packed_mask's are; they lie at addresses
  /// that stay, so that graphs read them, too. Others are the reservation's.
  void update(const LayoutPtr& layout, void* stream = nullptr, const Params& params = {});
  /// The same for lengths that only the device knows: one kernel plans on `stream`, which may be
  /// capturing, then at every replay again. The host copies nothing and waits for nothing. The
  /// layout's arrays are read until the last run, and graphs that captured them keep the layout.
  /// What the arrays should not hold makes an empty plan, or is taken for no keys: see check.
  /// Raises ValueError where the reservation was not made with device_lengths, or the layout's
  /// shapes exceed its maxima.
  void update(const DeviceLayoutPtr& layout, void* stream = nullptr);
  /// Waits for `stream`; raises ValueError where lengths or tables on the device were bad since the
  /// last check. Where plans are made on the host there is nothing to wait for.
  void check(void* stream = nullptr) const;
  /// The plan in force. Raises ValueError before the first update.
  PlanPtr plan() const;

 private:
  friend class Attention;
  struct State;
  explicit Reservation(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

using ReservationPtr = std::shared_ptr<Reservation>;

/// The smallest of several reservations that `layout` fits, as in Listing 1 of the FlashInfer
/// paper; it is not updated. Raises ValueError where it fits none.
ReservationPtr select(const std::vector<ReservationPtr>& reservations, const Layout& layout);

class Attention {
 public:
  /// Raises ValueError for a spec that the device cannot compute, DeviceError where there is no
  /// such device, and CompileError where its kernel does not compile. On a GPU two kernels are
  /// compiled, unless the cache has them: the one of short queries is waited for here, the other by
  /// the first plan with long queries, or by a reservation that allows them. Either raises
  /// CompileError then.
  explicit Attention(const AttentionSpec& spec, DeviceId device = {});
  ~Attention();
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  const AttentionSpec& spec() const { return spec_; }
  DeviceId device() const;
  /// False for a scan that is no softmax: its results have no log-sum-exp.
  bool has_lse() const;
  PlanPtr plan(const LayoutPtr& layout, const PlanOptions& options = {}) const;
  /// The page table of `args` (without kv_begin, qo_rows and min_prefix) as a cascade that reads
  /// leading pages once for the requests that share them, several levels deep, where the planner's
  /// costs say that this pays; else as it is. Takes time linear in the entries of the table, and
  /// plans once or twice; `options` as of the plan that will be made. On the host only.
  SharedPrefixes share_prefixes(const PagedArgs& args, const PlanOptions& options = {}) const;
  /// options.params are plan members of all its plans.
  ReservationPtr reserve(const Maxima& maxima, const ReserveOptions& options = {}) const;
  /// Thread-safe. CPU: concurrent calls use scratch of their own. GPU: the tensors lie there, the
  /// call launches one kernel on args.stream and waits for nothing; each stream has scratch of its
  /// own, the per-thread default stream one a thread. A stream may be destroyed before plans that
  /// ran on it.
  void run(const Plan& plan, const RunArgs& args, RunStats* stats = nullptr) const;

 private:
  AttentionSpec spec_;
  std::shared_ptr<const BoundVariant> variant_;
  std::shared_ptr<const Backend> backend_;
  std::shared_ptr<const GpuBackend> gpu_;  ///< which that is on a GPU; null on a CPU
};

/// Upper bound of the scratch that any plan within `maxima` needs, whichever of the device's
/// kernels runs it; attained by some plan of some variant.
/// num_workers 0: the device's default.
std::size_t workspace_bytes(const AttentionSpec& spec, i32 num_workers, const Maxima& maxima,
                            DeviceId device = {});

/// a ⊕ b, element by element: O [rows, H, D] fp32, LSE [rows, H] fp32. Tensors lie together; on a
/// GPU one kernel is launched on `stream`, and nothing waits.
void merge_state(const TensorRef& o_a, const TensorRef& lse_a, const TensorRef& o_b,
                 const TensorRef& lse_b, const TensorRef& out, const TensorRef& lse,
                 void* stream = nullptr);

/// ⊕ over n states: O [n, rows, H, D], LSE [n, rows, H]. With `finish`, sinks and output parts of
/// that spec are applied to the result (rows count as tokens 0 … of one request).
void merge_states(const TensorRef& o, const TensorRef& lse, const TensorRef& out,
                  const TensorRef& lse_out, const AttentionSpec* finish = nullptr,
                  void* stream = nullptr);

/// The same of uneven numbers of states: O [states, H, D], LSE [states, H], and row r is the ⊕ of
/// the states indptr[r] to indptr[r + 1], of none an empty state. `indptr` [rows + 1] lies where
/// the states do, int32 on a GPU, which reads it when the kernel runs: bounds outside of the states
/// count as the nearest ones there, and are refused on the host. Results lie apart from the states.
void merge_states(const TensorRef& o, const TensorRef& lse, const IndexRef& indptr,
                  const TensorRef& out, const TensorRef& lse_out,
                  const AttentionSpec* finish = nullptr, void* stream = nullptr);

/// The ISA that kernels run on ("avx512"), after RADDLE_CPU_ISA; and the number of worker threads.
std::string cpu_isa();
i32 cpu_threads();

}  // namespace raddle
