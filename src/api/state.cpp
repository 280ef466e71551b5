// Composition of states that the caller holds.
#include <algorithm>
#include <optional>

#include "cache/checks.h"
#include "cache/on_device.h"
#include "device/cpu/isa.h"
#include "raddle/attention.h"
#include "raddle/engine/kernel/cache/merge.h"
#include "raddle/error.h"
#include "variant/bound_variant.h"

namespace raddle {
namespace {

void check_state(const std::string& o_name, const TensorRef& o, const std::string& lse_name,
                 const TensorRef& lse, ExpectedShape shape) {
  check_tensor(o_name, o, DType::float32, shape);
  check_strided(lse_name, lse, DType::float32, shape.first(shape.size() - 1));
}

void check_outputs(const std::string& lse_name, const TensorRef& out, const TensorRef& lse,
                   ExpectedShape shape) {
  check_output("out", out, DType::float32, shape);
  check_strided(lse_name, lse, DType::float32, shape.first(shape.size() - 1));
  check_distinct(lse_name, lse);
}

/// Results lie apart from each other, and from every state that they do not replace exactly.
void check_merged(const TensorRef& out, const std::string& lse_name, const TensorRef& lse,
                  const std::vector<NamedTensor>& states) {
  check_apart("out", out, lse_name, lse);
  for (const auto& [name, t] : states)
    for (const auto& [written_name, written] :
         {NamedTensor{"out", out}, NamedTensor{lse_name.c_str(), lse}})
      if (!is_same(written, t)) check_apart(written_name, written, name, t);
}

/// State `n` of a list.
TensorRef nth_of(const TensorRef& list, i64 n) {
  TensorRef one = list;
  one.data = static_cast<char*>(list.data) + n * step(list, 0) * dtype_bytes(list.dtype);
  one.rank = list.rank - 1;
  for (std::size_t i = 0; i < static_cast<std::size_t>(one.rank); ++i) {
    one.shape[i] = list.shape[i + 1];
    one.stride[i] = list.stride[i + 1];
  }
  return one;
}

/// A state [rows, heads], or a list of them with another dimension before.
StatesView view_states(const TensorRef& o, const TensorRef& lse) {
  const bool list = o.rank == 4;
  return StatesView{static_cast<const float*>(o.data),
                    static_cast<const float*>(lse.data),
                    list ? step(o, 0) : 0,
                    step(o, o.rank - 3),
                    step(o, o.rank - 2),
                    list ? step(lse, 0) : 0,
                    step(lse, lse.rank - 2),
                    step(lse, lse.rank - 1)};
}

/// The list from its second state on.
StatesView rest_of(StatesView list) {
  list.o += list.o_state;
  list.lse += list.lse_state;
  return list;
}

MergeView view_merge(const StatesView& first, const StatesView& rest, i64 num_states,
                     const TensorRef& out, const TensorRef& lse) {
  MergeView view{};
  view.first = first;
  view.rest = rest;
  view.num_states = static_cast<i32>(num_states);
  view.out = static_cast<float*>(out.data);
  view.lse_out = static_cast<float*>(lse.data);
  view.out_row = step(out, 0);
  view.out_head = step(out, 1);
  view.lse_out_row = step(lse, 0);
  view.lse_out_head = step(lse, 1);
  view.num_rows = static_cast<i32>(dim(out, 0));
  view.num_heads = static_cast<i32>(dim(out, 1));
  view.dim = static_cast<i32>(dim(out, 2));
  return view;
}

/// Where states and results lie: together, and on a GPU O's rows are whole 16-byte units.
DeviceId device_of_states(const std::vector<NamedTensor>& o, const std::vector<NamedTensor>& lse) {
  const DeviceId device = common_device(o);
  for (const auto& [name, t] : lse)
    if (t.device != device)
      fail<ValueError>(name, " does not lie where ", o.front().name,
                       " does; expected all states on one device");
  return device;
}

/// out[row, head] = states[0] ⊕ states[1] ⊕ … ; then the sink and output parts of `finish`, if
/// given.
void merge_rows(const MergeView& view, const Stages* finish, i32 group_size) {
  const CpuKernels& kernels = cpu::kernels(cpu::selected_isa());
  const i64 bytes = i64{view.num_states} * view.num_heads * view.dim * i64{sizeof(float)};
  share_units(view.num_rows, bytes, [&](i64 begin, i64 end) {
    float sum[kv::max_state_dim];
    for (i64 r = begin; r < end; ++r)
      for (i32 head = 0; head < view.num_heads; ++head) {
        // The outputs may be one of the inputs: they are written when all is read.
        float lse = kv::compose_row(kv::Alone{}, view, r, head, sum);
        if (finish) {
          const i32 row = static_cast<i32>(r), n = view.num_rows;
          kernels.finish_state(*finish, Row{0, row, row, row, head, head / group_size, n, n},
                               view.dim, sum, lse);
        }
        std::copy_n(sum, view.dim, view.out + r * view.out_row + head * view.out_head);
        view.lse_out[r * view.lse_out_row + head * view.lse_out_head] = lse;
      }
  });
}

void check_width(const char* name, const TensorRef& o) {
  if (dim(o, o.rank - 1) > kv::max_state_dim)
    fail<ValueError>(name, " is ", describe(o), "; expected a last dimension of at most ",
                     kv::max_state_dim);
}

/// The variant whose sink and output parts are applied to states of so many heads.
std::optional<BoundVariant> bind_finish(const AttentionSpec* finish, i64 heads) {
  if (!finish) return std::nullopt;
  check_spec(*finish);
  if (finish->num_qo_heads != heads)
    fail<ValueError>("finish has ", finish->num_qo_heads, " query heads; o has ", heads);
  std::optional<BoundVariant> variant(*finish);
  if (variant->stages().scan == Scan::sum)
    fail<ValueError>("finish is a Scan::sum variant; its states are summed, not composed");
  return variant;
}

/// Where each row's states begin, of a host array.
std::vector<i32> checked_indptr(const IndexRef& indptr, i64 states) {
  std::vector<i32> begins;
  i64 before = 0;
  for (i64 i = 0; i < indptr.shape[0]; ++i) {
    const i64 at = indptr.at(i);
    if (at < before || at > states)
      fail<ValueError>("indptr[", i, "] is ", at, "; expected ", before, " to ", states,
                       ", the number of states");
    begins.push_back(static_cast<i32>(before = at));
  }
  return begins;
}

void merge(DeviceId device, void* stream, const MergeView& view,
           const std::optional<BoundVariant>& variant, const AttentionSpec* finish) {
  const i32 group_size = finish ? finish->group_size() : 1;
  if (is_gpu(device))
    return cuda::merge({device, stream}, view, variant ? &*variant : nullptr, group_size);
  merge_rows(view, variant ? &variant->stages() : nullptr, group_size);
}

}  // namespace

void merge_state(const TensorRef& o_a, const TensorRef& lse_a, const TensorRef& o_b,
                 const TensorRef& lse_b, const TensorRef& out, const TensorRef& lse, void* stream) {
  check_state("o_a", o_a, "lse_a", lse_a, {-1, -1, -1});
  const std::vector<i64> shape{dim(o_a, 0), dim(o_a, 1), dim(o_a, 2)};
  check_width("o_a", o_a);
  check_state("o_a", o_a, "lse_a", lse_a, shape);
  check_state("o_b", o_b, "lse_b", lse_b, shape);
  check_outputs("lse", out, lse, shape);
  const DeviceId device = device_of_states({{"o_a", o_a}, {"o_b", o_b}, {"out", out}},
                                           {{"lse_a", lse_a}, {"lse_b", lse_b}, {"lse", lse}});
  check_merged(out, "lse", lse, {{"o_a", o_a}, {"o_b", o_b}, {"lse_a", lse_a}, {"lse_b", lse_b}});
  const MergeView view = view_merge(view_states(o_a, lse_a), view_states(o_b, lse_b), 2, out, lse);
  merge(device, stream, view, std::nullopt, nullptr);
}

void merge_states(const TensorRef& o, const TensorRef& lse, const TensorRef& out,
                  const TensorRef& lse_out, const AttentionSpec* finish, void* stream) {
  check_tensor("o", o, DType::float32, {-1, -1, -1, -1});
  const std::vector<i64> shape{dim(o, 1), dim(o, 2), dim(o, 3)};
  check_width("o", o);
  check_strided("lse", lse, DType::float32, {dim(o, 0), shape[0], shape[1]});
  check_outputs("lse_out", out, lse_out, shape);
  const auto variant = bind_finish(finish, shape[1]);
  const DeviceId device =
      device_of_states({{"o", o}, {"out", out}}, {{"lse", lse}, {"lse_out", lse_out}});
  for (i64 i = 0; i < dim(o, 0); ++i) {
    const TensorRef one = nth_of(o, i), its_lse = nth_of(lse, i);
    check_merged(out, "lse_out", lse_out, {{"o", one}, {"lse", its_lse}});
  }
  const StatesView list = view_states(o, lse);
  const MergeView view =
      view_merge(list, dim(o, 0) > 1 ? rest_of(list) : list, dim(o, 0), out, lse_out);
  merge(device, stream, view, variant, finish);
}

void merge_states(const TensorRef& o, const TensorRef& lse, const IndexRef& indptr,
                  const TensorRef& out, const TensorRef& lse_out, const AttentionSpec* finish,
                  void* stream) {
  check_state("o", o, "lse", lse, {-1, -1, -1});
  check_width("o", o);
  check_state("o", o, "lse", lse, {dim(o, 0), dim(o, 1), dim(o, 2)});
  if (indptr.empty() || indptr.rank != 1 || indptr.shape[0] < 1)
    fail<ValueError>(
        "indptr is not [rows + 1]; expected where each row's states begin, and the end");
  const std::vector<i64> shape{indptr.shape[0] - 1, dim(o, 1), dim(o, 2)};
  check_outputs("lse_out", out, lse_out, shape);
  const auto variant = bind_finish(finish, shape[1]);
  const DeviceId device =
      device_of_states({{"o", o}, {"out", out}}, {{"lse", lse}, {"lse_out", lse_out}});
  if (indptr.device != device)
    fail<ValueError>("indptr does not lie where o does; expected all on one device");
  check_apart("out", out, "lse_out", lse_out);
  for (const auto& [name, t] : {NamedTensor{"o", o}, NamedTensor{"lse", lse}}) {
    check_apart("out", out, name, t);
    check_apart("lse_out", lse_out, name, t);
  }
  const StatesView list = view_states(o, lse);
  MergeView view = view_merge(list, list, dim(o, 0), out, lse_out);
  if (is_gpu(device)) {
    if (indptr.is_64bit || indptr.stride[0] != 1)
      fail<TypeError>("indptr is no contiguous int32 array; expected one on a GPU");
    view.indptr = static_cast<const i32*>(indptr.data);
    return merge(device, stream, view, variant, finish);
  }
  const std::vector<i32> copy = checked_indptr(indptr, dim(o, 0));
  view.indptr = copy.data();
  merge(device, stream, view, variant, finish);
}

}  // namespace raddle
