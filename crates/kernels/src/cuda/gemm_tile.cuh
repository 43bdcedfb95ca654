// A tile of c = op(a)·op(b) (+ bias) (+ c) with FMA instructions: any sizes, strides and alignments.
#pragma once
#include "prelude.cuh"

constexpr int SIDE = 64;
constexpr int DEEP = 16;
constexpr int THREADS = 256;
// One column of padding, so that a warp writing down a column of the tile meets no bank twice.
constexpr int PITCH = SIDE + 1;

// tile[p][i] = x(first + i, k0 + p) of an operand with `count` rows of length k, zero outside. `along`: k is the
// contiguous axis in memory. Either way neighbouring threads read neighbouring elements.
template <class T>
__device__ __forceinline__ void load_tile(float (&tile)[DEEP][PITCH], const T* x, i64 ld, bool along, i64 first,
                                          i64 count, i64 k0, i64 k) {
#pragma unroll
    for (int step = 0; step < SIDE * DEEP / THREADS; step++) {
        int e = step * THREADS + threadIdx.x;
        int p = along ? e % DEEP : e / SIDE, i = along ? e / DEEP : e % SIDE;
        i64 row = first + i, deep = k0 + p;
        float v = 0.0f;
        if (row < count && deep < k) v = to_f32(along ? x[row * ld + deep] : x[deep * ld + row]);
        tile[p][i] = v;
    }
}

// An operand with leading dimension `ld`. `along`: k is the contiguous axis.
template <class T> struct Operand {
    const T* at;
    i64 ld;
    bool along;
};

// One block computes the SIDE × SIDE tile of c [m, n] at (row0, column0); a thread has rows ty + 16r and columns tx +
// 16s of it. Each element is one sum over k in ascending order.
template <class T, class C>
__device__ __forceinline__ void gemm_tile(const Operand<T>& a, const Operand<T>& b, i64 row0, i64 column0, i64 m, i64 n,
                                             i64 k, C* c, i64 ldc, const T* bias, bool accumulate) {
    __shared__ float left[DEEP][PITCH], right[DEEP][PITCH];
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (i64 k0 = 0; k0 < k; k0 += DEEP) {
        load_tile(left, a.at, a.ld, a.along, row0, m, k0, k);
        load_tile(right, b.at, b.ld, b.along, column0, n, k0, k);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < DEEP; p++) {
            float x[4], y[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                x[r] = left[p][ty + 16 * r];
                y[r] = right[p][tx + 16 * r];
            }
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
            i64 row = row0 + ty + 16 * r, column = column0 + tx + 16 * s;
            if (row >= m || column >= n) continue;
            C* to = c + row * ldc + column;
            float v = sum[r][s];
            if (bias) v += to_f32(bias[column]);
            if (accumulate) v += to_f32(*to);
            *to = from_f32<C>(v);
        }
}
