// Two requests decode one token each over a paged KV cache, with Gemma 2's soft cap.
#include <raddle/attention.h>
#include <raddle/error.h>

#include <cstdio>
#include <vector>

namespace {

constexpr int num_qo_heads = 8, num_kv_heads = 2, head_dim = 64, page_size = 16, num_pages = 8;

/// Numbers between -1 and 1, the same in every run.
std::vector<float> numbers(std::size_t count, unsigned seed) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
  }
  return values;
}

void decode() {
  using raddle::DType, raddle::TensorRef;

  raddle::AttentionSpec spec;
  spec.num_qo_heads = num_qo_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.head_dim_qk = spec.head_dim_vo = head_dim;
  spec.dtype = DType::float32;
  spec.variant = {raddle::soft_cap(30.0f), raddle::causal()};
  const raddle::Attention attention(spec);

  // Request 0 has 40 keys on pages 7, 2 and 5, request 1 has 17 on pages 0 and 1.
  const std::vector<int> qo_indptr{0, 1, 2}, page_indptr{0, 3, 5}, page_indices{7, 2, 5, 0, 1},
      kv_len{40, 17};
  raddle::PagedArgs pages;
  pages.qo_indptr = {qo_indptr.data(), 3};
  pages.page_indptr = {page_indptr.data(), 3};
  pages.page_indices = {page_indices.data(), 5};
  pages.kv_len = {kv_len.data(), 2};
  pages.page_size = page_size;

  const auto plan = attention.plan(raddle::paged_kv(pages));  // once a step

  const std::size_t pool_size = std::size_t{num_pages} * page_size * num_kv_heads * head_dim;
  std::vector<float> q = numbers(2 * num_qo_heads * head_dim, 1), out(q.size());
  std::vector<float> k = numbers(pool_size, 2), v = numbers(pool_size, 3);
  std::vector<float> lse(2 * num_qo_heads);
  const auto pool = [](std::vector<float>& x) {
    return TensorRef::contiguous(x.data(), DType::float32, num_pages, page_size, num_kv_heads,
                                 head_dim);
  };
  raddle::RunArgs args;
  args.q = TensorRef::contiguous(q.data(), DType::float32, 2, num_qo_heads, head_dim);
  args.kv = {{pool(k), pool(v)}};
  args.out = TensorRef::contiguous(out.data(), DType::float32, 2, num_qo_heads, head_dim);
  args.lse = TensorRef::contiguous(lse.data(), DType::float32, 2, num_qo_heads);

  attention.run(*plan, args);  // once a layer; a plan serves all layers

  double checksum = 0.0;
  for (const float x : out) checksum += static_cast<double>(x) * static_cast<double>(x);
  for (const float x : lse) checksum += static_cast<double>(x);
  std::printf("checksum %.3f\n\n%s\n", checksum, plan->explain().c_str());
}

}  // namespace

int main() {
  try {
    decode();
  } catch (const raddle::ValueError& error) {  // and raddle::TypeError: bad arguments, by name
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
