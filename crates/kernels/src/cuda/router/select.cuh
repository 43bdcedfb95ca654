// Prefix sums and order statistics over a block of 1024 threads.
#pragma once
#include "prelude.cuh"

constexpr int BLOCK_THREADS = 1024;

// Σ of x over the threads before this one, and over all; `shared`: 32 words.
__device__ __forceinline__ u32 block_scan(u32 x, u32* shared, u32& total) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    auto scan = [&](u32 x) {
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const u32 y = __shfl_up_sync(~0u, x, d);
            if (lane >= d) x += y;
        }
        return x;
    };
    const u32 upto = scan(x);
    // All threads have read the previous scan's results.
    __syncthreads();
    if (lane == 31) shared[warp] = upto;
    __syncthreads();
    if (warp == 0) shared[lane] = scan(shared[lane]);
    __syncthreads();
    total = shared[31];
    return (warp ? shared[warp - 1] : 0) + upto - x;
}

// Radix select: of n > place keys get(0), get(1), ... the one at rank `place`, rank 0 being the largest. `left`: how
// many of the keys equal to it come before that rank.
template <class Get> __device__ __forceinline__ u32 select(i64 n, u32 place, Get get, u32& left) {
    __shared__ u32 bins[256];
    __shared__ u32 found[2];
    const u32 lane = threadIdx.x & 31;
    u32 prefix = 0, mask = 0;
    left = place;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) bins[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 4
        for (i64 i = threadIdx.x; i < n; i += BLOCK_THREADS) {
            const u32 key = get(i);
            if ((key & mask) == prefix) atomicAdd(&bins[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            // Lane l has the digits 255 - 8l and the seven below.
            u32 sum = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) sum += bins[255 - 8 * lane - i];
            u32 upto = sum;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const u32 y = __shfl_up_sync(~0u, upto, d);
                if (lane >= d) upto += y;
            }
            if (left < upto && left >= upto - sum) {
                u32 rest = left - (upto - sum), digit = 255 - 8 * lane;
                while (rest >= bins[digit]) rest -= bins[digit--];
                found[0] = digit, found[1] = rest;
            }
        }
        __syncthreads();
        prefix |= found[0] << shift;
        mask |= 255u << shift;
        left = found[1];
    }
    __syncthreads();
    return prefix;
}
