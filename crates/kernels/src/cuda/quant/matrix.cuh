// FP8 matrices with their scales, and tiles of products of two of them with FMA instructions: any sizes and
// alignments.
#pragma once
#include "args/quant_generic.cuh"
#include "quant/common.cuh"

constexpr int TILE = 128;

// Scale of element (row, column): see `ScalingMode` of the crate.

__device__ __forceinline__ i64 pitch_of(const Fp8Matrix& m) { return (m.c + 15) / 16 * 16; }
__device__ __forceinline__ float scale_at(const Fp8Matrix& m, i64 row, i64 column) {
    const i64 blocks = (m.c + TILE - 1) / TILE;
    const i64 at = m.scaling == 0   ? 0
                   : m.scaling == 1 ? column / TILE * ((m.r + 3) / 4 * 4) + row
                                    : row / TILE * ((blocks + 3) / 4 * 4) + column / TILE;
    return reinterpret_cast<const float*>(m.scale)[at];
}

constexpr int SIDE = 64;
constexpr int DEEP = 16;
constexpr int PITCH = SIDE + 1;

// A range of rows of a matrix.
struct Part {
    Fp8Matrix all;
    i64 first, end;
};

// tile[p][i] = element (first + i, k0 + p) of the range, zero outside it and from column k on.
__device__ __forceinline__ void load_tile(float (&tile)[DEEP][PITCH], const Part& x, i64 first, i64 k0, i64 k) {
#pragma unroll
    for (int step = 0; step < SIDE * DEEP / 256; step++) {
        const int e = step * 256 + threadIdx.x, p = e % DEEP, i = e / DEEP;
        const i64 row = x.first + first + i, deep = k0 + p;
        float v = 0.0f;
        if (row < x.end && deep < k)
            v = decode_fp8(x.all.e5m2, reinterpret_cast<const u8*>(x.all.data)[row * pitch_of(x.all) + deep]) *
                scale_at(x.all, row, deep);
        tile[p][i] = v;
    }
}

// One block: the SIDE × SIDE tile of c = a·bᵀ over columns from..to at (row0, column0); each element is one sum in
// ascending order.
template <class C>
__device__ __forceinline__ void gemm_tile(const Part& a, const Part& b, i64 from, i64 to, i64 row0, i64 column0, C* c,
                                             i64 ldc, const bf16* bias, bool accumulate) {
    __shared__ float left[DEEP][PITCH], right[DEEP][PITCH];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (i64 k0 = from; k0 < to; k0 += DEEP) {
        load_tile(left, a, row0, k0, to);
        load_tile(right, b, column0, k0, to);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < DEEP; p++) {
            float x[4], y[4];
#pragma unroll
            for (int r = 0; r < 4; r++) x[r] = left[p][ty + 16 * r], y[r] = right[p][tx + 16 * r];
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < 4; s++) sum[r][s] = __fmaf_rn(x[r], y[s], sum[r][s]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const i64 row = row0 + ty + 16 * r, column = column0 + tx + 16 * s;
            if (a.first + row >= a.end || b.first + column >= b.end) continue;
            C* to = c + row * ldc + column;
            float v = sum[r][s];
            if (bias) v += to_f32(bias[column]);
            if (accumulate) v += to_f32(*to);
            *to = from_f32<C>(v);
        }
}
