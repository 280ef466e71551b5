// What `raddle replay` calls besides the public API: data from the hash, the fp64 check, which rows
// of a plan are split, and the machine's read bandwidth.

#include <algorithm>

#include "ffi/border.h"
#include "replay/synthetic.h"
#include "replay/verify.h"

namespace raddle::border {
namespace {

using Fields = ffi::Map<ffi::String, ffi::Any>;

template <class T>
T field(const Fields& fields, const char* name) {
  const auto value = fields.at(name).template as<T>();
  if (!value) fail<TypeError>(name, " is ", kind_of(fields.at(name)), "; expected another type");
  return *value;
}

i32 int_field(const Fields& fields, const char* name) {
  return static_cast<i32>(field<std::int64_t>(fields, name));
}

replay::LayerSpec to_layer_spec(const Fields& fields) {
  replay::LayerSpec spec;
  spec.seed = static_cast<u64>(field<std::int64_t>(fields, "seed"));
  spec.layer = int_field(fields, "layer");
  spec.num_qo_heads = int_field(fields, "num_qo_heads");
  spec.num_kv_heads = int_field(fields, "num_kv_heads");
  spec.head_dim = int_field(fields, "head_dim");
  const std::string dtype = field<ffi::String>(fields, "dtype");
  spec.dtype = dtype == "float32"   ? DType::float32
               : dtype == "float16" ? DType::float16
                                    : DType::bfloat16;
  spec.scale = field<double>(fields, "scale");
  spec.window_left = int_field(fields, "window_left");
  spec.soft_cap = field<double>(fields, "soft_cap");
  spec.sinks = field<bool>(fields, "sinks");
  spec.rope.rotary_dim = int_field(fields, "rotary_dim");
  spec.rope.theta = field<double>(fields, "rope_theta");
  if (field<bool>(fields, "rope_scaled")) spec.rope.scaling = RopeScaling{};
  spec.rounds_weights = field<bool>(fields, "rounds_weights");
  return spec;
}

const i32* indices(Arguments& in, const char* name, i64 count) {
  const IndexRef index = in.index(name);
  if (index.is_64bit || index.rank != 1 || index.stride[0] != 1 || index.shape[0] != count) {
    fail<ValueError>(name, " has ", index.shape[0], " entries; expected ", count, " of int32");
  }
  return static_cast<const i32*>(index.data);
}

/// What the requests have in common of which `request` names samples.
replay::SharedPrompts shared_prompts(Arguments& in, const i32* request, i64 count) {
  const i32 block_tokens = in.integer32("block_tokens", 0);
  const IndexRef indptr = in.index("indptr"), blocks = in.index("blocks"),
                 tokens = in.index("tokens");
  if (block_tokens == 0) return {};
  for (const IndexRef* index : {&indptr, &blocks, &tokens})
    if (!index->is_64bit || index->rank != 1 || index->stride[0] != 1)
      fail<TypeError>("indptr, blocks or tokens is not int64 and contiguous");
  const i64 requests = tokens.shape[0];
  if (indptr.shape[0] != requests + 1 || indptr.at(requests) != blocks.shape[0])
    fail<ValueError>("indptr has ", indptr.shape[0], " entries for ", requests, " requests and ",
                     blocks.shape[0], " blocks");
  for (i64 i = 0; i < count; ++i)
    if (request[i] < 0 || requests == 0)
      fail<ValueError>("request[", i, "] is ", request[i], " of ", requests, " requests");
  return {block_tokens, static_cast<i32>(requests), static_cast<const i64*>(indptr.data),
          static_cast<const i64*>(blocks.data), static_cast<const i64*>(tokens.data)};
}

void fill(Arguments& in) {
  const std::string name = in.string("stream");
  const auto seed = static_cast<u64>(in.integer("seed", 0));
  const i32 layer = in.integer32("layer", 0);
  const TensorRef out = in.tensor("out");
  replay::Rows rows{seed, layer, indices(in, "request", out.shape[0]),
                    indices(in, "position", out.shape[0])};
  rows.prompts = shared_prompts(in, rows.request, out.shape[0]);
  const replay::Stream stream = name == "query" ? replay::Stream::query
                                : name == "key" ? replay::Stream::key
                                                : replay::Stream::value;
  replay::fill(stream, rows, out);
}

ffi::Array<double> sinks(Arguments& in) {
  const auto seed = static_cast<u64>(in.integer("seed", 0));
  const i32 layer = in.integer32("layer", 0);
  const i32 heads = in.integer32("heads", 0);
  ffi::Array<double> logits;
  for (i32 h = 0; h < heads; ++h) {
    logits.push_back(static_cast<double>(replay::sink_logit(seed, layer, h)));
  }
  return logits;
}

ffi::Array<Fields> verify(Arguments& in) {
  replay::LayerSpec spec = to_layer_spec(in.map("spec"));
  const TensorRef found = in.tensor("found");
  if (found.dtype != DType::float32 || found.rank != 2 || found.shape[1] != spec.head_dim ||
      found.stride[1] != 1 || spec.head_dim > 256) {
    fail<ValueError>("found is no float32 tensor [samples, ", spec.head_dim, "]");
  }
  const i32* request = indices(in, "request", found.shape[0]);
  const i32* position = indices(in, "position", found.shape[0]);
  const i32* head = indices(in, "head", found.shape[0]);
  spec.prompts = shared_prompts(in, request, found.shape[0]);
  std::vector<replay::Sample> samples;
  for (i64 i = 0; i < found.shape[0]; ++i) {
    const float* row = static_cast<const float*>(found.data) + i * found.stride[0];
    samples.push_back({request[i], position[i], head[i], row});
  }
  ffi::Array<Fields> verdicts;
  for (const replay::Verdict& v : replay::verify(spec, samples)) {
    verdicts.push_back({{"ratio", v.ratio},
                        {"element", static_cast<std::int64_t>(v.element)},
                        {"found", v.found},
                        {"expected", v.expected},
                        {"budget", v.budget}});
  }
  return verdicts;
}

/// split [rows, Hkv]: whether the row's output is composed of several chunks for that KV head.
void split_rows(Arguments& in) {
  const Plan& plan = *in.object<PlanObj>("plan").value;
  const DLTensor* out = in.bytes("split");
  const PlanView& view = plan.view();
  const LayoutView& layout = plan.layout().view();
  const i64 entries = static_cast<i64>(layout.num_rows) * view.num_kv_heads;
  if (!out || out->ndim != 2 || out->shape[0] * out->shape[1] != entries) {
    fail<ValueError>("split is no tensor [", layout.num_rows, ", ", view.num_kv_heads, "]");
  }
  u8* split = static_cast<u8*>(out->data) + out->byte_offset;
  std::fill_n(split, entries, u8{0});
  for (i32 t = 0; t < view.num_query_tiles; ++t) {
    const QueryTile& tile = view.query_tiles[t];
    if (tile.split < 0) continue;
    const i32 last_row = (tile.row_begin + tile.num_rows - 1) / view.group_size;
    for (i32 i = tile.row_begin / view.group_size; i <= last_row; ++i) {
      const i64 row = query_row(layout.levels[tile.level], tile.group, i);
      for (i32 h = 0; h < view.num_kv_heads; ++h)
        if (view.splits[tile.split + h].num_chunks >= 2) split[row * view.num_kv_heads + h] = 1;
    }
  }
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  Exports()
      .def("raddle.replay.fill", fill,
           "stream seed layer out request position block_tokens indptr blocks tokens")
      .def("raddle.replay.sinks", sinks, "seed layer heads")
      .def("raddle.replay.verify", verify,
           "spec found request position head block_tokens indptr blocks tokens")
      .def("raddle.replay.split_rows", split_rows, "plan split");
}

}  // namespace raddle::border
