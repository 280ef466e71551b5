#include "raddle/support.h"

#include <cmath>
#include <functional>
#include <numeric>

#include "api/kv_tensors.h"
#include "device/cpu/isa.h"
#include "raddle/attention.h"
#include "raddle/error.h"

namespace raddle {
namespace {

AttentionSpec small_spec() {
  AttentionSpec spec;
  spec.num_qo_heads = 4;
  spec.num_kv_heads = 2;
  spec.head_dim_qk = spec.head_dim_vo = 16;
  spec.dtype = DType::float32;
  spec.variant = {causal()};
  return spec;
}

/// Two requests with 3 and 2 keys and one query row each.
LayoutPtr small_layout() {
  static const i32 qo[] = {0, 1, 2}, kv[] = {0, 3, 5};
  return ragged_kv(IndexRef(qo, 3), IndexRef(kv, 3));
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

/// Plans and runs a problem of five keys whose K and V lie in slots of one head vector each.
void attempt(const AttentionSpec& spec, const LayoutPtr& layout, bool want_lse = true,
             bool hnd = false, const ScaleRef& scale = {}) {
  const Attention attention(spec);
  const PlanPtr plan = attention.plan(layout);
  std::vector<float> q(256 * 64), k(256 * 64), v(256 * 64), out(256 * 64), lse(64);
  const DType stored = spec.stored_dtype();
  const auto slots = [&](std::vector<float>& x, i32 dim) {
    if (layout->levels()[0].storage != KvStorage::paged)
      return TensorRef::contiguous(x.data(), stored, 6, spec.num_kv_heads, dim);
    return hnd ? TensorRef::contiguous(x.data(), stored, 5, spec.num_kv_heads, 1, dim)
               : TensorRef::contiguous(x.data(), stored, 5, 1, spec.num_kv_heads, dim);
  };
  RunArgs args;
  args.q = TensorRef::contiguous(q.data(), spec.dtype, 2, spec.num_qo_heads, spec.head_dim_qk);
  args.kv = {{slots(k, spec.head_dim_qk), slots(v, spec.head_dim_vo), scale, scale}};
  args.out = TensorRef::contiguous(out.data(), spec.dtype, 2, spec.num_qo_heads, spec.head_dim_vo);
  if (want_lse) args.lse = TensorRef::contiguous(lse.data(), DType::float32, 2, spec.num_qo_heads);
  attention.run(*plan, args);
}

void attempt_spec(const std::function<void(AttentionSpec&)>& change, bool want_lse = true) {
  AttentionSpec spec = small_spec();
  change(spec);
  attempt(spec, small_layout(), want_lse);
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

class Table {
 public:
  void add(const std::string& feature, const std::function<void()>& attempt_it) {
    Support row{feature, "cpu", true, ""};
    try {
      attempt_it();
    } catch (const std::exception& refusal) {
      row.works = false;
      row.reason = refusal.what();
    }
    rows.push_back(row);
  }
  std::vector<Support> rows;
};

void add_scales(Table& table) {
  static float ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const auto add = [&table](const char* kind, const ScaleRef& scale) {
    table.add(std::string("scales: ") + kind, [=] {
      AttentionSpec spec = small_spec();
      spec.kv_dtype = DType::float8_e4m3fn;
      attempt(spec, small_layout(), true, false, scale);
    });
  };
  add("one of a tensor", 0.5f);
  add("one a head", TensorRef::contiguous(ones, DType::float32, 2));
  add("one a token and head", TensorRef::contiguous(ones, DType::float32, 6, 2));
  table.add("scales of K and V that are not quantised",
            [] { attempt(small_spec(), small_layout(), true, false, 0.5f); });
}

void add_specs(Table& table) {
  table.add("dtype: float32",
            [] { attempt_spec([](AttentionSpec& s) { s.dtype = DType::float32; }); });
  table.add("dtype: float16",
            [] { attempt_spec([](AttentionSpec& s) { s.dtype = DType::float16; }); });
  table.add("dtype: bfloat16",
            [] { attempt_spec([](AttentionSpec& s) { s.dtype = DType::bfloat16; }); });
  for (const DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2})
    table.add(std::string("kv_dtype: ") + name_of(dtype),
              [=] { attempt_spec([=](AttentionSpec& s) { s.kv_dtype = dtype; }); });
  add_scales(table);
  for (const i32 dim : {8, 24, 64, 72, 128, 192, 256, 4, 20, 264, 512})
    table.add("head_dim: " + std::to_string(dim), [=] {
      attempt_spec([=](AttentionSpec& s) { s.head_dim_qk = s.head_dim_vo = dim; });
    });
  table.add("head_dim_vo different from head_dim",
            [] { attempt_spec([](AttentionSpec& s) { s.head_dim_vo = 24; }); });
  table.add("head_dim 192 with head_dim_vo 128", [] {
    attempt_spec([](AttentionSpec& s) {
      s.head_dim_qk = 192;
      s.head_dim_vo = 128;
    });
  });
  for (const i32 group : {1, 3, 4, 8, 16})
    table.add("group size: " + std::to_string(group),
              [=] { attempt_spec([=](AttentionSpec& s) { s.num_qo_heads = 2 * group; }); });
  table.add("batch_invariant",
            [] { attempt_spec([](AttentionSpec& s) { s.batch_invariant = true; }); });
}

void add_variants(Table& table) {
  const CpuKernels& kernels = cpu::kernels(cpu::selected_isa());
  for (i32 i = 0; i < kernels.num_variants; ++i) {
    const std::string name = kernels.variants[i].name;
    const bool sum = kernels.variants[i].scan == Scan::sum;
    table.add("variant: " + name,
              [=] { attempt_spec([=](AttentionSpec& s) { s.variant = {sample(name)}; }, !sum); });
    if (kernels.variants[i].mask)
      table.add("mask in & and |: " + name, [=] {
        attempt_spec(
            [=](AttentionSpec& s) { s.variant = {(sample(name) & causal()) | sample(name)}; });
      });
  }
  table.add("variant: softcap + window + causal (Gemma 2)", [] {
    attempt_spec([](AttentionSpec& s) {
      s.variant = {soft_cap(50.0f), sliding_window(2), causal()};
    });
  });
  table.add("variant: sinks + window + causal (gpt-oss)", [] {
    attempt_spec([](AttentionSpec& s) {
      s.variant = {sample("sinks"), sliding_window(2), causal()};
    });
  });
  table.add("variant: rope with YaRN scaling", [] {
    YarnScaling yarn;
    yarn.factor = 4.0;
    RopeArgs args;
    args.rotary_dim = 8;
    args.scaling = yarn;
    attempt_spec([&args](AttentionSpec& s) { s.variant = {rope(args)}; });
  });
  table.add("return_lse with a Scan::sum variant",
            [] { attempt_spec([](AttentionSpec& s) { s.variant = {sigmoid()}; }); });
  table.add("sink with a Scan::sum variant", [] {
    attempt_spec([](AttentionSpec& s) { s.variant = {sigmoid(), sample("sinks")}; }, false);
  });
  table.add("two sinks", [] {
    attempt_spec([](AttentionSpec& s) { s.variant = {sample("sinks"), sample("sinks")}; });
  });
}

void add_layouts(Table& table) {
  const AttentionSpec spec = small_spec();
  table.add("layout: ragged", [=] { attempt(spec, small_layout()); });
  table.add("layout: paged, NHD", [=] { attempt(spec, paged_kv(small_pages(1))); });
  table.add("layout: paged, HND", [=] {
    PagedArgs args = small_pages(1);
    args.order = HeadOrder::hnd;
    attempt(spec, paged_kv(args), true, true);
  });
  table.add("layout: paged, prefixes discovered", [=] {
    static const i32 shared[] = {4, 3, 2, 4, 0};
    PagedArgs args = small_pages(1);
    args.page_indices = IndexRef(shared, 5);
    args.min_prefix = 1;
    attempt(spec, paged_kv(args));
  });
  table.add("layout: block sparse", [=] { attempt(spec, small_blocks(false, false)); });
  table.add("layout: block sparse, mask bits", [=] { attempt(spec, small_blocks(true, false)); });
  table.add("layout: block sparse, explicit blocks",
            [=] { attempt(spec, small_blocks(false, true)); });
  table.add("layout: cascade", [=] { attempt(spec, small_cascade()); });
  table.add("layout: cascade with batch_invariant", [=] {
    AttentionSpec invariant = spec;
    invariant.batch_invariant = true;
    attempt(invariant, small_cascade());
  });
}

}  // namespace

std::vector<Support> support_matrix() {
  Table table;
  add_specs(table);
  add_variants(table);
  add_layouts(table);
  return table.rows;
}

}  // namespace raddle
