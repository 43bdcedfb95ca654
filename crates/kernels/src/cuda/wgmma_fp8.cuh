// sm_90a only: warpgroup matrix multiply-accumulate in FP8, m64nNk32.
//
// acc[64, N] (+)= a[64, 32]·b[N, 32]ᵀ; b is E4M3 in shared memory, a is E4M3 or E5M2, in shared memory (`ss`) or in
// registers (`rs`), each of which holds four neighbours of a row: of row g from 4·t on, of row g + 8, and of both from
// 16 + 4·t on (g = lane / 4, t = lane % 4). Accumulators as in wgmma.cuh. The tensor core keeps about 14 bits of a sum
// of FP8 products.
#pragma once
#include "wgmma.cuh"

// R: accumulator registers of a thread, N / 2; A..F: the operand numbers that follow them.
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
