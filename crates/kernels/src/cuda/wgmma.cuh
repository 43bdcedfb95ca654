// sm_90a only: warpgroup matrix multiply-accumulate (wgmma.mma_async) in bf16, m64nNk16.
//
// acc[64, N] (+)= a[64, 16]·b[16, N]. TA, TB: the operand is MN-major. Thread (warp w, g = lane / 4, t = 2·(lane % 4))
// holds rows 16·w + g and 16·w + g + 8, columns 8·n + t and the next: acc[4·n + 2·r + e]. `ss` takes A from shared
// memory, `rs` from registers.
#pragma once
#include "hopper.cuh"

// The accumulator registers: as the instruction's text names them, and as constraints. Eight to a line.
#define REGS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define REGS_16 REGS_8 "," "%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS_24 REGS_16 "," "%16,%17,%18,%19,%20,%21,%22,%23"
#define REGS_32 REGS_24 "," "%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS_40 REGS_32 "," "%32,%33,%34,%35,%36,%37,%38,%39"
#define REGS_48 REGS_40 "," "%40,%41,%42,%43,%44,%45,%46,%47"
#define REGS_56 REGS_48 "," "%48,%49,%50,%51,%52,%53,%54,%55"
#define REGS_64 REGS_56 "," "%56,%57,%58,%59,%60,%61,%62,%63"
#define REGS_72 REGS_64 "," "%64,%65,%66,%67,%68,%69,%70,%71"
#define REGS_80 REGS_72 "," "%72,%73,%74,%75,%76,%77,%78,%79"
#define REGS_88 REGS_80 "," "%80,%81,%82,%83,%84,%85,%86,%87"
#define REGS_96 REGS_88 "," "%88,%89,%90,%91,%92,%93,%94,%95"
#define REGS_104 REGS_96 "," "%96,%97,%98,%99,%100,%101,%102,%103"
#define REGS_112 REGS_104 "," "%104,%105,%106,%107,%108,%109,%110,%111"
#define REGS_120 REGS_112 "," "%112,%113,%114,%115,%116,%117,%118,%119"
#define REGS_128 REGS_120 "," "%120,%121,%122,%123,%124,%125,%126,%127"
#define ACC8(c, i)                                                                                                  \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]),      \
        "+f"(c[i + 7])
#define ACC_8(c) ACC8(c, 0)
#define ACC_16(c) ACC_8(c), ACC8(c, 8)
#define ACC_24(c) ACC_16(c), ACC8(c, 16)
#define ACC_32(c) ACC_24(c), ACC8(c, 24)
#define ACC_40(c) ACC_32(c), ACC8(c, 32)
#define ACC_48(c) ACC_40(c), ACC8(c, 40)
#define ACC_56(c) ACC_48(c), ACC8(c, 48)
#define ACC_64(c) ACC_56(c), ACC8(c, 56)
#define ACC_72(c) ACC_64(c), ACC8(c, 64)
#define ACC_80(c) ACC_72(c), ACC8(c, 72)
#define ACC_88(c) ACC_80(c), ACC8(c, 80)
#define ACC_96(c) ACC_88(c), ACC8(c, 88)
#define ACC_104(c) ACC_96(c), ACC8(c, 96)
#define ACC_112(c) ACC_104(c), ACC8(c, 104)
#define ACC_120(c) ACC_112(c), ACC8(c, 112)
#define ACC_128(c) ACC_120(c), ACC8(c, 120)

// R: accumulator registers of a thread, N / 2; A..G: the operand numbers that follow them.
#define WGMMA(N, R, A, B, C, D, E, F, G)                                                                           \
    template <> struct Wgmma<N> {                                                                                  \
        template <int TA, int TB> static __device__ __forceinline__ void ss(float (&c)[R], u64 a, u64 b, int add) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS_##R "}, %" #A ", %" #B    \
                         ", p, 1, 1, %" #D ", %" #E ";\n}\n"                                                         \
                         : ACC_##R(c)                                                                               \
                         : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));                                              \
        }                                                                                                            \
        template <int TB>                                                                                            \
        static __device__ __forceinline__ void rs(float (&c)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F ", 0;\n"                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS_##R "}, {%" #A ",%" #B    \
                         ",%" #C ",%" #D "}, %" #E ", p, 1, 1, %" #G ";\n}\n"                                        \
                         : ACC_##R(c)                                                                               \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(TB));                           \
        }                                                                                                            \
    };
template <int N> struct Wgmma;
template <int N, bool E5> struct WgmmaFp8;
WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

// `N` registers of an accumulator, as an accumulator of its own.
template <int N> __device__ __forceinline__ float (&part(float& at))[N] { return reinterpret_cast<float(&)[N]>(at); }

// acc[64, N] = x·yᵀ over D channels; both tiles are K-major columns of 64 channels, `x_column` and `y_column` bytes
// each.
template <int N, int D>
__device__ __forceinline__ void wgmma_abt(float (&c)[N / 2], u32 x, u32 x_column, u32 y, u32 y_column) {
    const u64 l = desc_k_major(x), r = desc_k_major(y);
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        Wgmma<N>::template ss<0, 0>(c, l + (((i >> 2) * x_column + (i & 3) * 32) >> 4),
                                        r + (((i >> 2) * y_column + (i & 3) * 32) >> 4), i > 0);
}
// acc[64, D] (+)= p[64, ROWS]·y[ROWS, D], p in registers. More than 128 channels take two instructions.
template <int D, int ROWS>
__device__ __forceinline__ void wgmma_ab(float (&c)[D / 2], const u32 (&p)[ROWS / 4], u32 y, int add) {
    constexpr int FIRST = D > 128 ? 128 : D;
    const u64 r = desc_mn_major(y, ROWS * 128);
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
        const u64 at = r + ((i * 2048) >> 4);
        const int more = i > 0 ? 1 : add;
        Wgmma<FIRST>::template rs<1>(part<FIRST / 2>(c[0]), p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], at,
                                         more);
        if constexpr (D > 128)
            Wgmma<D - 128>::template rs<1>(part<D / 2 - 64>(c[64]), p[4 * i], p[4 * i + 1], p[4 * i + 2],
                                               p[4 * i + 3], at + ((2 * ROWS * 128) >> 4), more);
    }
}
// acc[64, N] = xᵀ·y over ROWS rows; x is one column of 64 channels.
template <int N, int ROWS> __device__ __forceinline__ void wgmma_atb(float (&c)[N / 2], u32 x, u32 y) {
    const u64 l = desc_mn_major(x, ROWS * 128), r = desc_mn_major(y, ROWS * 128);
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        Wgmma<N>::template ss<1, 1>(c, l + ((i * 2048) >> 4), r + ((i * 2048) >> 4), i > 0);
}
