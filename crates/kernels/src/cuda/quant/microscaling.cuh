// MXFP8 and NVFP4: scales, rounding and the Hadamard transform, bit for bit as in cpu/quant/{mxfp8,nvfp4,hadamard}.rs. A
// block has a tile of 32 × 32 elements, which holds whole scaling blocks.
#pragma once
#include "args/quant_emulate.cuh"
#include "philox.cuh"
#include "quant/common.cuh"

constexpr int SIDE = 32;
constexpr int THREADS = 256;
constexpr int EACH = SIDE * SIDE / THREADS;
// Scaling blocks in a tile at most: 16 elements each along one axis.
constexpr int MOST = SIDE * SIDE / 16;

struct Shared {
    float tile[SIDE][SIDE + 1];
    u32 most[MOST];
    float factor[MOST], scale[MOST];
    // Scales as stored: E8M0 or E4M3.
    u32 code[MOST];
};

// 2^(code - 127).
__device__ __forceinline__ float power_of(u32 code) { return __uint_as_float(code == 0 ? 0x400000u : code << 23); }

// The smallest E8M0 code whose power of two is not below x ≥ 0, saturated.
__device__ __forceinline__ u32 power_above(float x) {
    const u32 bits = __float_as_uint(x), exponent = bits >> 23, mantissa = bits & 0x7fffffu;
    const bool up = exponent == 0 ? mantissa > 0x400000u : mantissa != 0 && exponent < 0xfe;
    return min(exponent + (up ? 1u : 0u), 0xfeu);
}

// Spacing of E2M1 around a magnitude.
__device__ __forceinline__ float step_at(float x) { return x < 2.0f ? 0.5f : x < 4.0f ? 1.0f : 2.0f; }
// Rounds to E2M1, to nearest even; NaN becomes the largest value.
__device__ __forceinline__ float round_e2m1(float x) {
    if (x != x) return 6.0f;
    const float y = fminf(fabsf(x), 6.0f), step = step_at(y);
    return copysignf(rintf(__fdiv_rn(y, step)) * step, x);
}
// Stochastic rounding: adds a random part of the spacing and truncates.
__device__ __forceinline__ float round_e2m1_stochastic(float x, u32 byte) {
    if (x != x) return 6.0f;
    const float y = fminf(fabsf(x), 6.0f);
    const float moved = __fadd_rn(y, __fmul_rn(float(byte) * 0.00390625f, step_at(y))), step = step_at(moved);
    return copysignf(fminf(floorf(__fdiv_rn(moved, step)) * step, 6.0f), x);
}

// Fixed random signs of the Hadamard transform, one bit each.
__device__ __forceinline__ float sign_of(int i) { return 0xd7e8u >> i & 1 ? -1.0f : 1.0f; }

// Factor that brings NVFP4 block scales of a tensor with this amax into the range of E4M3.
__device__ __forceinline__ float tensor_scale(float amax) {
    const float scale = fminf(__fdiv_rn(448.0f * 6.0f, amax), __uint_as_float(0x7f7fffffu));
    return amax == 0.0f || scale == 0.0f ? 1.0f : scale;
}

// 16-point Hadamard transform of elements `step` apart, divided by 4: signs first, or last in the inverse.
__device__ __forceinline__ void hadamard16(float* x, int step, bool back) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = back ? x[i * step] : x[i * step] * sign_of(i);
#pragma unroll
    for (int half = 1; half < 16; half *= 2)
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (!(i & half)) {
                const float a = v[i], b = v[i + half];
                v[i] = __fadd_rn(a, b);
                v[i + half] = __fsub_rn(a, b);
            }
#pragma unroll
    for (int i = 0; i < 16; i++) x[i * step] = v[i] * (back ? 0.25f * sign_of(i) : 0.25f);
}
__device__ __forceinline__ void hadamard_tile(Shared& s, u32 way, int t, bool back) {
    if (t >= MOST) return;
    if (way == 1)
        hadamard16(&s.tile[t >> 1][(t & 1) * 16], 1, back);
    else
        hadamard16(&s.tile[(t & 1) * 16][t >> 1], SIDE + 1, back);
}

// Coordinates of a thread's element.
struct Position {
    i64 row, column;
    int i, j;
    __device__ __forceinline__ Position(const EmulateArgs& a, u32 block, int t, int k) {
        i = t / SIDE + k * (THREADS / SIDE), j = t % SIDE;
        row = i64(block / a.across) * SIDE + i, column = i64(block % a.across) * SIDE + j;
    }
    __device__ __forceinline__ bool inside(const EmulateArgs& a) const { return row < a.r && column < a.c; }
    // Its scaling block.
    __device__ __forceinline__ int block(const EmulateArgs& a) const {
        return (i >> a.down) * (SIDE >> a.along) + (j >> a.along);
    }
};

template <class T> __device__ __forceinline__ void load_tile(const EmulateArgs& a, Shared& s, u32 block, int t) {
    if (t < MOST) s.most[t] = 0;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const Position p(a, block, t, k);
        s.tile[p.i][p.j] =
            p.inside(a) ? to_f32(reinterpret_cast<const T*>(a.x)[p.row * a.stride + p.column]) : 0.0f;
    }
}
// Bits of a magnitude; 0 for NaN.
__device__ __forceinline__ u32 magnitude(float x) {
    const u32 bits = __float_as_uint(x) & 0x7fffffffu;
    return bits > 0x7f800000u ? 0u : bits;
}
__device__ __forceinline__ void measure_blocks(const EmulateArgs& a, Shared& s, u32 block, int t) {
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const Position p(a, block, t, k);
        const u32 m = magnitude(s.tile[p.i][p.j]);
        if (m > 0) atomicMax(&s.most[p.block(a)], m);
    }
}
__device__ __forceinline__ void make_scales(const EmulateArgs& a, Shared& s, int t) {
    if (t >= MOST) return;
    const float amax = __uint_as_float(s.most[t]), greatest = __uint_as_float(0x7f7fffffu);
    if (!a.four) {
        const u32 code = power_above(__fmul_rn(amax, __fdiv_rn(1.0f, fp8_max(a.e5m2))));
        s.factor[t] = power_of(254 - code);
        s.scale[t] = power_of(code);
        s.code[t] = code;
        return;
    }
    const float global = tensor_scale(*reinterpret_cast<const float*>(a.amax));
    const float wanted = __fmul_rn(amax, __fmul_rn(global, 1.0f / 6.0f));
    const u32 code = encode_fp8(0, wanted, 0.0f, 0.0f, 0.0f) & 0xffu;
    const float scale = __fmul_rn(decode_fp8(0, code), __fdiv_rn(1.0f, global));
    s.code[t] = code;
    s.factor[t] = fminf(__fdiv_rn(1.0f, scale), greatest);
    s.scale[t] = scale;
}
// Rounds to the format; with `DEQUANTIZE` multiplies by the scale again.
template <bool DEQUANTIZE> __device__ __forceinline__ void round_tile(const EmulateArgs& a, Shared& s, u32 block, int t) {
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const Position p(a, block, t, k);
        const int b = p.block(a);
        const float x = __fmul_rn(s.tile[p.i][p.j], s.factor[b]);
        float y;
        if (!a.four) {
            y = decode_fp8(a.e5m2, encode_fp8(a.e5m2, x, 0.0f, 0.0f, 0.0f) & 0xffu);
        } else if (!a.stochastic) {
            y = round_e2m1(x);
        } else {
            const u64 at = u64(p.row * a.pitch + p.column);
            u32 words[4];
            philox(a.stream, at / 16, words);
            const u32 low = at & 4 ? words[1] : words[0], high = at & 4 ? words[3] : words[2];
            y = round_e2m1_stochastic(x, (at & 8 ? high : low) >> (at % 4 * 8) & 0xffu);
        }
        s.tile[p.i][p.j] = DEQUANTIZE ? __fmul_rn(y, s.scale[b]) : y;
    }
}
template <class T> __device__ __forceinline__ void store_tile(const EmulateArgs& a, Shared& s, u32 block, int t) {
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const Position p(a, block, t, k);
        if (p.inside(a)) reinterpret_cast<T*>(a.out)[p.row * a.c + p.column] = from_f32<T>(s.tile[p.i][p.j]);
    }
}

// Loads a tile, transforms it if asked to, and rounds it.
template <class T, bool DEQUANTIZE> __device__ __forceinline__ void quantize_tile(const EmulateArgs& a, Shared& s) {
    const int t = threadIdx.x;
    load_tile<T>(a, s, blockIdx.x, t);
    __syncthreads();
    if (a.hadamard) {
        hadamard_tile(s, a.hadamard, t, false);
        __syncthreads();
    }
    measure_blocks(a, s, blockIdx.x, t);
    __syncthreads();
    make_scales(a, s, t);
    __syncthreads();
    round_tile<DEQUANTIZE>(a, s, blockIdx.x, t);
}
// The inverse transform, if the tile was transformed.
__device__ __forceinline__ void transform_back(const EmulateArgs& a, Shared& s) {
    if (!a.hadamard) return;
    __syncthreads();
    hadamard_tile(s, a.hadamard, threadIdx.x, true);
    __syncthreads();
}
