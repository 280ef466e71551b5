// Matrix instructions of a warp: 8 × 8 matrices of 16-bit elements from shared memory, and the
// product of a 16 × 16 by a 16 × 8 matrix. sm_75 multiplies half of that at a time, and no bf16.
//
// Fragments, for lane = 4·g + t: A holds {(g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)}, each
// with its right-hand neighbour in the upper half; B holds {(2t, g), (2t + 8, g)}, each with the
// element below; C holds {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}.
#pragma once

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// A generic pointer into shared memory as the address that instructions on it take.
RADDLE_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

/// Four 8 × 8 matrices; lane 8·i + r gives the shared address of row r of matrix i, and gets of
/// each matrix elements (g, 2t) and (g, 2t + 1).
RADDLE_DEVICE void load_matrices(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

/// The same, transposed: the lane gets elements (2t, g) and (2t + 1, g).
RADDLE_DEVICE void load_matrices_transposed(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

#if __CUDA_ARCH__ >= 800
/// C += A · B, accumulated in fp32.
RADDLE_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

RADDLE_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
/// Columns 0–7 of A by rows 0–7 of B, then the others.
RADDLE_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
  const u32 b[2] = {b0, b1};
  RADDLE_UNROLL
  for (i32 i = 0; i < 2; ++i)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
}
#endif

}  // namespace ptx

RADDLE_ENGINE_END
