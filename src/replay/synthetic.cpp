#include "replay/synthetic.h"

#include "raddle/error.h"
#include "replay/parallel.h"

namespace raddle::replay {

template <class T>
void fill_row(const RowId& id, i32 head_dim, T* out) {
  const RowKey key = row_key(id);
  // Groups of eight: a trip count that the compiler knows is what lets it vectorise at -O2.
  i32 e = 0;
  for (; e + 8 <= head_dim; e += 8) {
    for (i32 i = 0; i < 8; ++i) {
      out[e + i] = from_float<T>(element(key, static_cast<u32>(e + i)));
    }
  }
  for (; e < head_dim; ++e) out[e] = from_float<T>(element(key, static_cast<u32>(e)));
}

template void fill_row(const RowId&, i32, float*);
template void fill_row(const RowId&, i32, f16*);
template void fill_row(const RowId&, i32, bf16*);

void fill(Stream stream, const Rows& rows, const TensorRef& out) {
  if (out.rank != 3 || out.stride[2] != 1) {
    fail<ValueError>("out has rank ", out.rank, "; expected [rows, heads, D], contiguous in D");
  }
  const i32 heads = static_cast<i32>(out.shape[1]);
  const i32 head_dim = static_cast<i32>(out.shape[2]);
  dispatch_dtype(out.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(out.shape[0], [&](i64 r) {
      T* row = static_cast<T*>(out.data) + r * out.stride[0];
      const i64 owner = rows.prompts.owner(stream, rows.request[r], rows.position[r]);
      for (i32 h = 0; h < heads; ++h) {
        fill_row({rows.seed, stream, rows.layer, owner, rows.position[r], h}, head_dim,
                 row + h * out.stride[1]);
      }
    });
  });
}

}  // namespace raddle::replay
