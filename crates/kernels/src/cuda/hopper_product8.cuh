// HOPPER ONLY: products of bytes by a warpgroup, 32 of them along the sum at a time.
//
// acc[64, N] (+)= a[64, 32]·b[N, 32]ᵀ, both from shared memory, b in E4M3, a in E4M3 or E5M2; accumulators as in
// hopper_product.cuh. The matrix unit keeps about 14 bits of a sum.

#define PRODUCT8(N, R, A, B, C, E5, TYPE)                                                                            \
    template <> struct Product8<N, E5> {                                                                             \
        static __device__ __forceinline__ void both(float (&c)[R], u64 a, u64 b, int add) {                          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE ".e4m3 {" NAMES_##R "}, %" #A ", %"  \
                         #B ", p, 1, 1;\n}\n"                                                                        \
                         : SUMS_##R(c)                                                                               \
                         : "l"(a), "l"(b), "r"(add));                                                                \
        }                                                                                                            \
    };
PRODUCT8(128, 64, 64, 65, 66, false, "e4m3")
PRODUCT8(192, 96, 96, 97, 98, false, "e4m3")
PRODUCT8(256, 128, 128, 129, 130, false, "e4m3")
PRODUCT8(128, 64, 64, 65, 66, true, "e5m2")
PRODUCT8(192, 96, 96, 97, 98, true, "e5m2")
PRODUCT8(256, 128, 128, 129, 130, true, "e5m2")
