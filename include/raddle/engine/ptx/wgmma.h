// Hopper's matrix instructions (sm_90a). A warpgroup, four warps, multiplies a 64 × 16 matrix A by
// a 16 × n matrix B and adds to C, while it goes on with other instructions: products between a
// `products_begin` and a `products_end` are a group, and groups complete in order.
//
// B lies in shared memory; A there or in registers. A thread must not touch C, nor registers that
// hold A, from the product's issue until a wait that covers its group; shared memory that a product
// reads must not change until then. Fragments of a warp are those of mma.h: its rows are 16 of the
// 64, and C holds n / 8 of mma.h's 16 × 8 results beside one another.
#pragma once

#include "raddle/engine/core/dtype.h"

RADDLE_ENGINE_BEGIN

namespace ptx {

/// Which neighbours of a matrix in shared memory lie side by side: those along k, the dimension
/// that a product sums over, or those along the other.
enum class Major : i32 { k = 0, other = 1 };

/// Where a matrix begins in shared memory, and how its 8 × 8 parts follow one another: the lower
/// half of a descriptor. The upper half, rows of 128 bytes and eight of them 1,024 bytes apart, is
/// the same for all, so that walking a matrix adds to one register.
struct SharedMatrix {
  u32 low;
  RADDLE_DEVICE u64 bits() const { return static_cast<u64>(1u << 30 | 1024 >> 4) << 32 | low; }
};

/// A matrix stored in rows of 128 bytes whose 16-byte chunk i of row r lies at chunk i ^ (r % 8),
/// as bulk copies with a swizzle of 128 bytes write it; `address` is a multiple of 16, and its row
/// 0 of 1,024. Eight rows take 1,024 bytes. Major::other: the next 64 elements of the dimension
/// that is not k begin `next_columns` bytes on.
RADDLE_DEVICE SharedMatrix swizzled_matrix(u32 address, u32 next_columns = 16) {
  return {(address & 0x3ffff) >> 4 | (next_columns >> 4) << 16};
}

/// The matrix that begins `bytes`, a multiple of 16, further on.
RADDLE_DEVICE SharedMatrix operator+(SharedMatrix matrix, u32 bytes) {
  return {matrix.low + (bytes >> 4)};
}

/// What a warpgroup says before products, of registers that it has written itself and of C's first
/// use: the products see them. Belongs directly before every group, or the compiler waits for each
/// product.
RADDLE_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes a group.
RADDLE_DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Says behind a wait that another product's c, which it covers, may be read from here on: the
/// compiler does not know that products write c, and no read may move above the wait.
template <i32 fragments>
RADDLE_DEVICE void products_read(float (&c)[fragments][4]) {
  RADDLE_UNROLL
  for (i32 i = 0; i < 4 * fragments; ++i) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}

/// Waits until at most `pending` groups, the newest, are under way; c may be read from here on.
template <i32 pending, i32 fragments>
RADDLE_DEVICE void products_wait(float (&c)[fragments][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  products_read(c);
}

// One instruction a function: multiply(c, a, b, keep, T{}) for n = 8, 16, 32, 64, 128, 192 and
// 256, with n / 2 numbers of C a thread. A lies in shared memory or in four registers; if `keep` is
// 0, C begins at 0. PTX numbers its operands, so every n spells its own: C, then A, B, keep, and
// the matrices' majors.

#define RADDLE_C4 "%0, %1, %2, %3"
#define RADDLE_C8 \
  RADDLE_C4       \
  ", "            \
  "%4, %5, %6, %7"
#define RADDLE_C16 \
  RADDLE_C8        \
  ", "             \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define RADDLE_C32 \
  RADDLE_C16       \
  ", "             \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RADDLE_C64                                                                 \
  RADDLE_C32                                                                       \
  ", "                                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", "                                                                             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RADDLE_C96                                                                          \
  RADDLE_C64                                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RADDLE_C128                                                                            \
  RADDLE_C96                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "   \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"
#define RADDLE_OUT4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define RADDLE_OUT8(i) RADDLE_OUT4(i), RADDLE_OUT4(i + 1)
#define RADDLE_OUT16(i) RADDLE_OUT8(i), RADDLE_OUT8(i + 2)
#define RADDLE_OUT32(i) RADDLE_OUT16(i), RADDLE_OUT16(i + 4)
#define RADDLE_OUT64(i) RADDLE_OUT32(i), RADDLE_OUT32(i + 8)
#define RADDLE_OUT96(i) RADDLE_OUT64(i), RADDLE_OUT32(i + 16)
#define RADDLE_OUT128(i) RADDLE_OUT96(i), RADDLE_OUT32(i + 24)

#define RADDLE_PRODUCT(n, T, size, operands, keep_at)                                            \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep_at                                              \
  ", 0;\n"                                                                                       \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #T "." #T " {" RADDLE_C##size "}, " operands \
                                                                                  ";\n}"

#define RADDLE_MULTIPLY(n, T, size, shared, shared_keep, registers, registers_keep)               \
  template <Major major_a, Major major_b>                                                         \
  RADDLE_DEVICE void multiply(float(&c)[size / 4][4], SharedMatrix a, SharedMatrix b, i32 keep,   \
                              T) {                                                                \
    asm volatile(RADDLE_PRODUCT(n, T, size, shared, shared_keep)                                  \
                 : RADDLE_OUT##size(0)                                                            \
                 : "l"(a.bits()), "l"(b.bits()), "r"(keep), "n"(static_cast<i32>(major_a)),       \
                   "n"(static_cast<i32>(major_b))                                                 \
                 : "memory");                                                                     \
  }                                                                                               \
  template <Major major_b>                                                                        \
  RADDLE_DEVICE void multiply(float(&c)[size / 4][4], const u32(&a)[4], SharedMatrix b, i32 keep, \
                              T) {                                                                \
    asm volatile(RADDLE_PRODUCT(n, T, size, registers, registers_keep)                            \
                 : RADDLE_OUT##size(0)                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(keep),          \
                   "n"(static_cast<i32>(major_b))                                                 \
                 : "memory");                                                                     \
  }

#define RADDLE_MULTIPLY_BOTH(...)       \
  RADDLE_MULTIPLY_OF(bf16, __VA_ARGS__) \
  RADDLE_MULTIPLY_OF(f16, __VA_ARGS__)
#define RADDLE_MULTIPLY_OF(T, n, ...) RADDLE_MULTIPLY(n, T, __VA_ARGS__)

RADDLE_MULTIPLY_BOTH(8, 4, "%4, %5, keep, 1, 1, %7, %8", "%6",
                     "{%4, %5, %6, %7}, %8, keep, 1, 1, %10", "%9")
RADDLE_MULTIPLY_BOTH(16, 8, "%8, %9, keep, 1, 1, %11, %12", "%10",
                     "{%8, %9, %10, %11}, %12, keep, 1, 1, %14", "%13")
RADDLE_MULTIPLY_BOTH(32, 16, "%16, %17, keep, 1, 1, %19, %20", "%18",
                     "{%16, %17, %18, %19}, %20, keep, 1, 1, %22", "%21")
RADDLE_MULTIPLY_BOTH(64, 32, "%32, %33, keep, 1, 1, %35, %36", "%34",
                     "{%32, %33, %34, %35}, %36, keep, 1, 1, %38", "%37")
RADDLE_MULTIPLY_BOTH(128, 64, "%64, %65, keep, 1, 1, %67, %68", "%66",
                     "{%64, %65, %66, %67}, %68, keep, 1, 1, %70", "%69")
RADDLE_MULTIPLY_BOTH(192, 96, "%96, %97, keep, 1, 1, %99, %100", "%98",
                     "{%96, %97, %98, %99}, %100, keep, 1, 1, %102", "%101")
RADDLE_MULTIPLY_BOTH(256, 128, "%128, %129, keep, 1, 1, %131, %132", "%130",
                     "{%128, %129, %130, %131}, %132, keep, 1, 1, %134", "%133")

#undef RADDLE_MULTIPLY_OF
#undef RADDLE_MULTIPLY_BOTH
#undef RADDLE_MULTIPLY
#undef RADDLE_PRODUCT
#undef RADDLE_OUT128
#undef RADDLE_OUT96
#undef RADDLE_OUT64
#undef RADDLE_OUT32
#undef RADDLE_OUT16
#undef RADDLE_OUT8
#undef RADDLE_OUT4
#undef RADDLE_C128
#undef RADDLE_C96
#undef RADDLE_C64
#undef RADDLE_C32
#undef RADDLE_C16
#undef RADDLE_C8
#undef RADDLE_C4

}  // namespace ptx

RADDLE_ENGINE_END
