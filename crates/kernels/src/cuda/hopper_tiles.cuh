// Tiles of the Hopper kernels: the state of a shared-memory pipeline, and stores from accumulators.
#pragma once
#include "hopper.cuh"
#include "shared_memory.cuh"

// Stage and phase parity of a circular buffer of STAGES tiles.
template <int STAGES> struct Ring {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// 4×4 transpose within a quad: lane t holds word t of chunks 0..3, and afterwards all four words of chunk t.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const u32 got = __shfl_xor_sync(~0u, odd ? w[j] : w[j + 1], 1);
        if (odd) w[j] = got;
        else w[j + 1] = got;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u32 got = __shfl_xor_sync(~0u, high ? w[j] : w[j + 2], 2);
        if (high) w[j] = got;
        else w[j + 2] = got;
    }
}

// Stores two rows (r = 0, 1) of an accumulator [64, N], each times a factor, as bf16 in 16-byte accesses. A null row
// is not stored. `keep` is all ones, or 0 to store zeros whatever the accumulator holds.
template <int N>
__device__ __forceinline__ void store_rows(const float (&c)[N / 2], bf16* row0, bf16* row1, float f0, float f1,
                                           i32 channels, u32 keep0 = ~0u, u32 keep1 = ~0u) {
    const i32 t = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bf16* row = r ? row1 : row0;
        const float f = r ? f1 : f0;
#pragma unroll
        for (int n = 0; n < N / 8; n += 4) {
            u32 w[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                w[j] = pack_bf16(c[(n + j) * 4 + r * 2] * f, c[(n + j) * 4 + r * 2 + 1] * f) & (r ? keep1 : keep0);
            transpose_quad(w);
            if (row && (n + t) * 8 < channels)
                *reinterpret_cast<uint4*>(row + (n + t) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// Zeroes the rows of a tile [ROWS, 64·COLUMNS] from `rows` on: TMA filled them from a neighbouring sequence, and they
// may be NaN. Every warpgroup that reads the tile calls it; `self` is the thread's index in its warpgroup.
template <int ROWS, int COLUMNS> __device__ __forceinline__ void zero_rows(u32 at, i32 rows, int self) {
    for (i32 x = max(rows, 0) * 8 + self; x < ROWS * 8; x += 128) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) st_shared_v4(at + c * ROWS * 128 + x * 16, 0, 0, 0, 0);
    }
    fence_proxy_async();
}
