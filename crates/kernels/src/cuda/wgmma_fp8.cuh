// HOPPER ONLY: products of bytes by a warpgroup, 32 of them along the sum at a time.
//
// acc[64, N] (+)= a[64, 32]·b[N, 32]ᵀ, b from shared memory in E4M3, a in E4M3 or E5M2: `both` from shared memory too, `left`
// from registers, of which each holds four neighbours of a row: of row g from 4·t on, of row g + 8, and of both from 16 + 4·t on
// (g = lane / 4, t = lane % 4). Accumulators as in hopper_product.cuh. The matrix unit keeps about 14 bits of a sum.
#pragma once
#include "wgmma.cuh"

// R: numbers of N columns that a thread holds; A..F: the six that follow.
#define WGMMA_FP8(N, R, A, B, C, D, E, F, E5, TYPE)                                                                   \
    template <> struct WgmmaFp8<N, E5> {                                                                             \
        static __device__ __forceinline__ void ss(float (&c)[R], u64 a, u64 b, int add) {                          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE ".e4m3 {" REGS_##R "}, %" #A ", %"  \
                         #B ", p, 1, 1;\n}\n"                                                                        \
                         : ACC_##R(c)                                                                               \
                         : "l"(a), "l"(b), "r"(add));                                                                \
        }                                                                                                            \
        static __device__ __forceinline__ void rs(float (&c)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPE ".e4m3 {" REGS_##R "}, {%" #A ",%"  \
                         #B ",%" #C ",%" #D "}, %" #E ", p, 1, 1;\n}\n"                                              \
                         : ACC_##R(c)                                                                               \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));                                    \
        }                                                                                                            \
    };
WGMMA_FP8(64, 32, 32, 33, 34, 35, 36, 37, false, "e4m3")
WGMMA_FP8(128, 64, 64, 65, 66, 67, 68, 69, false, "e4m3")
WGMMA_FP8(192, 96, 96, 97, 98, 99, 100, 101, false, "e4m3")
WGMMA_FP8(256, 128, 128, 129, 130, 131, 132, 133, false, "e4m3")
WGMMA_FP8(128, 64, 64, 65, 66, 67, 68, 69, true, "e5m2")
WGMMA_FP8(192, 96, 96, 97, 98, 99, 100, 101, true, "e5m2")
WGMMA_FP8(256, 128, 128, 129, 130, 131, 132, 133, true, "e5m2")
