#include "raddle/support.h"

#include <cmath>
#include <cstddef>
#include <functional>
#include <numeric>

#include "backend/kv_tensors.h"
#include "device/cpu/isa.h"
#include "device/cuda/memory.h"
#include "raddle/attention.h"
#include "raddle/error.h"

namespace raddle {
namespace {

/// Zeroed memory where a feature is tried.
class Memory {
 public:
  Memory(DeviceId device, std::size_t bytes) {
    if (device.kind == DeviceId::Kind::cpu) {
      host_.resize(bytes);
      return;
    }
    const cuda::Device& gpu = cuda::Device::get(device.ordinal);
    const cuda::ContextScope context(gpu);
    block_ = cuda::DevicePool::of(gpu).take(bytes, nullptr, "a tensor");
    cuda::clear(block_, 0, bytes, nullptr);
  }
  void* data() { return host_.empty() ? block_.data() : host_.data(); }
  /// After a run on the default stream: what went wrong there shows.
  void wait(DeviceId device) {
    if (device.kind == DeviceId::Kind::cpu) return;
    const cuda::ContextScope context(cuda::Device::get(device.ordinal));
    std::byte first;
    cuda::download(&first, block_, 0, 1, nullptr);
  }

 private:
  std::vector<std::byte> host_;
  cuda::Block block_;
};

/// Two requests with 3 and 2 keys and one query row each.
LayoutPtr small_layout() {
  static const i32 qo[] = {0, 1, 2}, kv[] = {0, 3, 5};
  return ragged_kv({.qo_indptr = IndexRef(qo, 3), .kv_indptr = IndexRef(kv, 3)});
}

PagedArgs small_pages(i32 page_size) {
  static const i32 qo[] = {0, 1, 2}, pages[] = {0, 3, 5}, indices[] = {4, 3, 2, 1, 0},
                   len[] = {3, 2};
  PagedArgs args;
  args.qo_indptr = IndexRef(qo, 3);
  args.page_indptr = IndexRef(pages, 3);
  args.page_indices = IndexRef(indices, 5);
  args.kv_len = IndexRef(len, 2);
  args.page_size = page_size;
  return args;
}

LayoutPtr small_blocks(bool bits, bool explicit_blocks) {
  static const i32 indptr[] = {0, 2, 4}, indices[] = {0, 2, 1, 2}, pos[] = {0, 4, 2, 4},
                   first[] = {0, 1, 0, 0}, count[] = {2, 1, 2, 2};
  static const u8 mask[] = {0xff};
  BlockSparseArgs args;
  args.block_cols = 2;
  args.indptr = IndexRef(indptr, 3);
  args.indices = IndexRef(indices, 4);
  args.num_rows = 2;
  args.num_cols = explicit_blocks ? -1 : 5;
  if (bits) {
    args.mask_bits = mask;
    args.mask_bytes = 1;
  }
  if (explicit_blocks) {
    args.block_pos = IndexRef(pos, 4);
    args.block_first = IndexRef(first, 4);
    args.block_count = IndexRef(count, 4);
  }
  return block_sparse(args);
}

LayoutPtr small_cascade() {
  static const i32 qo[] = {0, 2}, qo_each[] = {0, 1, 2}, pages[] = {0, 2}, indices[] = {0, 1},
                   len[] = {2}, own[] = {0, 1, 2}, own_indices[] = {2, 3}, own_len[] = {1, 1},
                   begin[] = {2, 2};
  PagedArgs shared, rest;
  shared.qo_indptr = IndexRef(qo, 2);
  shared.page_indptr = IndexRef(pages, 2);
  shared.page_indices = IndexRef(indices, 2);
  shared.kv_len = IndexRef(len, 1);
  shared.page_size = rest.page_size = 1;
  rest.qo_indptr = IndexRef(qo_each, 3);
  rest.page_indptr = IndexRef(own, 3);
  rest.page_indices = IndexRef(own_indices, 2);
  rest.kv_len = IndexRef(own_len, 2);
  rest.kv_begin = IndexRef(begin, 2);
  return cascade({paged_kv(shared), paged_kv(rest)});
}

LayoutPtr small_tree() {
  static const i32 parents[] = {-1, -1};
  TokenTreeArgs args;
  static_cast<PagedArgs&>(args) = small_pages(1);
  args.parents = IndexRef(parents, 2);
  return token_tree(args).layout;
}

/// A value for every shipped variant, by name; a variant without one here has no row, and a test
/// says so.
Variant sample(const std::string& name) {
  if (name == "window") return sliding_window(2);
  if (name == "softcap") return soft_cap(30.0f);
  if (name == "sinks") return sinks({0.0f, 0.1f, 0.2f, 0.3f});
  if (name == "sigmoid") return sigmoid(-1.0f);
  if (name == "packed_mask") return packed_mask({7, 3}, {0, 1, 2});
  if (name.starts_with("rope_tables")) {
    const Array<float> table(std::vector<float>(3 * 4, 0.5f), {3, 4});
    return rope_tables({table, table, {0}, name == "rope_tables_interleaved"});
  }
  if (name == "alibi") return alibi(alibi_slopes(4));
  if (name == "rope" || name == "rope_interleaved") {
    RopeArgs args;
    args.rotary_dim = 8;
    args.interleaved = name == "rope_interleaved";
    return rope(args);
  }
  Variant v;
  v.name = name;
  return v;
}

/// The features, tried one after another on a device.
class Trials {
 public:
  explicit Trials(DeviceId device) : device_(device) {
    add_specs();
    add_variants();
    add_layouts();
  }
  std::vector<Support> rows;

 private:
  void add(const std::string& feature, const std::function<void()>& attempt_it);
  void add_scales();
  void add_specs();
  void add_variants();
  void add_layouts();
  bool on_cpu() const { return device_.kind == DeviceId::Kind::cpu; }
  AttentionSpec small_spec() const;
  /// Plans and runs a problem of five keys whose K and V lie in slots of one head vector each.
  void attempt(const AttentionSpec& spec, const LayoutPtr& layout, bool want_lse = true,
               bool hnd = false, const ScaleRef& scale = {});
  void attempt_spec(const std::function<void(AttentionSpec&)>& change, bool want_lse = true);
  /// A contiguous tensor on the device.
  template <class... N>
  TensorRef there(void* data, DType dtype, N... n) const {
    TensorRef tensor = TensorRef::contiguous(data, dtype, n...);
    tensor.device = device_;
    return tensor;
  }

  DeviceId device_;
};

void Trials::add(const std::string& feature, const std::function<void()>& attempt_it) {
  Support row{feature, on_cpu() ? "cpu" : "cuda", true, ""};
  try {
    attempt_it();
  } catch (const DeviceError&) {
    throw;  // says nothing about the feature; a kernel that does not compile neither
  } catch (const CompileError&) {
    throw;
  } catch (const std::exception& refusal) {
    row.works = false;
    row.reason = refusal.what();
  }
  rows.push_back(row);
}

AttentionSpec Trials::small_spec() const {
  AttentionSpec spec;
  spec.num_qo_heads = 4;
  spec.num_kv_heads = 2;
  spec.head_dim_qk = spec.head_dim_vo = 16;
  spec.dtype = on_cpu() ? DType::float32 : DType::float16;  // GPUs have no float32
  spec.variant = {causal()};
  return spec;
}

void Trials::attempt(const AttentionSpec& spec, const LayoutPtr& layout, bool want_lse, bool hnd,
                     const ScaleRef& scale) {
  const Attention attention(spec, device_);
  const PlanPtr plan = attention.plan(layout);
  constexpr std::size_t bytes = 256 * 64 * sizeof(float);
  Memory q(device_, bytes), k(device_, bytes), v(device_, bytes), out(device_, bytes),
      lse(device_, bytes);
  const DType stored = spec.stored_dtype();
  const auto slots = [&](Memory& x, i32 dim) {
    if (layout->levels()[0].storage != KvStorage::paged)
      return there(x.data(), stored, 6, spec.num_kv_heads, dim);
    return hnd ? there(x.data(), stored, 5, spec.num_kv_heads, 1, dim)
               : there(x.data(), stored, 5, 1, spec.num_kv_heads, dim);
  };
  RunArgs args;
  args.q = there(q.data(), spec.dtype, 2, spec.num_qo_heads, spec.head_dim_qk);
  args.kv = {{slots(k, spec.k_columns()), slots(v, spec.head_dim_vo), scale, scale}};
  args.out = there(out.data(), spec.dtype, 2, spec.num_qo_heads, spec.head_dim_vo);
  if (want_lse) args.lse = there(lse.data(), DType::float32, 2, spec.num_qo_heads);
  attention.run(*plan, args);
  out.wait(device_);
}

void Trials::attempt_spec(const std::function<void(AttentionSpec&)>& change, bool want_lse) {
  AttentionSpec spec = small_spec();
  change(spec);
  attempt(spec, small_layout(), want_lse);
}

void Trials::add_scales() {
  Memory scales(device_, 12 * sizeof(float));
  const ScaleRef by_head = there(scales.data(), DType::float32, 2);
  const auto add_scale = [this](const char* kind, const ScaleRef& scale) {
    add(std::string("scales: ") + kind, [=, this] {
      AttentionSpec spec = small_spec();
      spec.kv_dtype = DType::float8_e4m3fn;
      attempt(spec, small_layout(), true, false, scale);
    });
  };
  add_scale("one per tensor", 0.5f);
  add_scale("one per head", by_head);
  add_scale("one per token and head", there(scales.data(), DType::float32, 6, 2));
  add("scales of K and V that are not quantised: one number",
      [this] { attempt(small_spec(), small_layout(), true, false, 0.5f); });
  add("scales of K and V that are not quantised: one per head",
      [=, this] { attempt(small_spec(), small_layout(), true, false, by_head); });
}

void Trials::add_specs() {
  add("dtype: float32",
      [this] { attempt_spec([](AttentionSpec& s) { s.dtype = DType::float32; }); });
  add("dtype: float16",
      [this] { attempt_spec([](AttentionSpec& s) { s.dtype = DType::float16; }); });
  add("dtype: bfloat16",
      [this] { attempt_spec([](AttentionSpec& s) { s.dtype = DType::bfloat16; }); });
  for (const DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8})
    add(std::string("kv_dtype: ") + name_of(dtype),
        [=, this] { attempt_spec([=](AttentionSpec& s) { s.kv_dtype = dtype; }); });
  add_scales();
  for (const i32 dim : {8, 24, 64, 72, 128, 192, 256, 264, 512, 4, 20, 520})
    add("head_dim: " + std::to_string(dim), [=, this] {
      attempt_spec([=](AttentionSpec& s) { s.head_dim_qk = s.head_dim_vo = dim; });
    });
  add("head_dim_vo different from head_dim",
      [this] { attempt_spec([](AttentionSpec& s) { s.head_dim_vo = 24; }); });
  add("head_dim 192 with head_dim_vo 128", [this] {
    attempt_spec([](AttentionSpec& s) {
      s.head_dim_qk = 192;
      s.head_dim_vo = 128;
    });
  });
  const auto add_mla = [this](const char* name, bool k_extends_v, std::optional<DType> kv_dtype) {
    add(name, [=, this] {
      attempt_spec([=](AttentionSpec& s) {
        s.num_kv_heads = 1;
        s.head_dim_qk = max_head_dim_qk;
        s.head_dim_vo = max_head_dim_vo;
        s.k_extends_v = k_extends_v;
        s.kv_dtype = kv_dtype;
      });
    });
  };
  add_mla("MLA: head_dim 576 with head_dim_vo 512", false, {});
  add_mla("MLA over two caches: k_extends_v", true, {});
  add_mla("MLA with kv_dtype: float8_e4m3fn", false, DType::float8_e4m3fn);
  add_mla("MLA over two caches with kv_dtype: float8_e4m3fn", true, DType::float8_e4m3fn);
  for (const i32 group : {1, 3, 4, 8, 16})
    add("group size: " + std::to_string(group),
        [=, this] { attempt_spec([=](AttentionSpec& s) { s.num_qo_heads = 2 * group; }); });
  add("batch_invariant",
      [this] { attempt_spec([](AttentionSpec& s) { s.batch_invariant = true; }); });
}

void Trials::add_variants() {
  const CpuKernels& kernels = cpu::kernels(cpu::selected_isa());
  for (i32 i = 0; i < kernels.num_variants; ++i) {
    const std::string name = kernels.variants[i].name;
    const bool sum = kernels.variants[i].scan == Scan::sum;
    add("variant: " + name,
        [=, this] { attempt_spec([=](AttentionSpec& s) { s.variant = {sample(name)}; }, !sum); });
    if (kernels.variants[i].mask)
      add("mask in & and |: " + name, [=, this] {
        attempt_spec(
            [=](AttentionSpec& s) { s.variant = {(sample(name) & causal()) | sample(name)}; });
      });
  }
  add("variant: softcap + window + causal (Gemma 2)", [this] {
    attempt_spec([](AttentionSpec& s) {
      s.variant = {soft_cap(50.0f), sliding_window(2), causal()};
    });
  });
  add("variant: sinks + window + causal (gpt-oss)", [this] {
    attempt_spec([](AttentionSpec& s) {
      s.variant = {sample("sinks"), sliding_window(2), causal()};
    });
  });
  add("variant: rope with YaRN scaling", [this] {
    YarnScaling yarn;
    yarn.factor = 4.0;
    RopeArgs args;
    args.rotary_dim = 8;
    args.scaling = yarn;
    attempt_spec([&args](AttentionSpec& s) { s.variant = {rope(args)}; });
  });
  add("return_lse with a Scan::sum variant",
      [this] { attempt_spec([](AttentionSpec& s) { s.variant = {sigmoid()}; }); });
  add("sink with a Scan::sum variant", [this] {
    attempt_spec([](AttentionSpec& s) { s.variant = {sigmoid(), sample("sinks")}; }, false);
  });
  add("two sinks", [this] {
    attempt_spec([](AttentionSpec& s) { s.variant = {sample("sinks"), sample("sinks")}; });
  });
}

void Trials::add_layouts() {
  const AttentionSpec spec = small_spec();
  add("layout: ragged", [=, this] { attempt(spec, small_layout()); });
  add("layout: paged, NHD", [=, this] { attempt(spec, paged_kv(small_pages(1))); });
  add("layout: paged, HND", [=, this] {
    PagedArgs args = small_pages(1);
    args.order = HeadOrder::hnd;
    attempt(spec, paged_kv(args), true, true);
  });
  add("layout: paged, prefixes discovered", [=, this] {
    static const i32 shared[] = {4, 3, 2, 4, 0};
    PagedArgs args = small_pages(1);
    args.page_indices = IndexRef(shared, 5);
    args.min_prefix = 1;
    attempt(spec, paged_kv(args));
  });
  add("layout: block sparse", [=, this] { attempt(spec, small_blocks(false, false)); });
  add("layout: block sparse, mask bits", [=, this] { attempt(spec, small_blocks(true, false)); });
  add("layout: block sparse, explicit blocks",
      [=, this] { attempt(spec, small_blocks(false, true)); });
  add("layout: token tree", [=, this] { attempt(spec, small_tree()); });
  add("layout: cascade", [=, this] { attempt(spec, small_cascade()); });
  add("layout: cascade with batch_invariant", [=, this] {
    AttentionSpec invariant = spec;
    invariant.batch_invariant = true;
    attempt(invariant, small_cascade());
  });
}

}  // namespace

std::vector<Support> support_matrix(DeviceId device) { return Trials(device).rows; }

}  // namespace raddle
