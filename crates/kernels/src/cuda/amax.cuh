// amax (largest magnitude) of what a kernel writes.
#pragma once
#include "prelude.cuh"

template <class E> __device__ __forceinline__ float packed_amax(float m, const Packed<E>& p) {
#pragma unroll
    for (int i = 0; i < 4; i++) m = fmaxf(fmaxf(m, fabsf(low_of<E>(p.word[i]))), fabsf(high_of<E>(p.word[i])));
    return m;
}
__device__ __forceinline__ float packed_amax(float m, const Packed<float>& p) {
#pragma unroll
    for (int i = 0; i < 4; i++) m = fmaxf(m, fabsf(__uint_as_float(p.word[i])));
    return m;
}

// amax = max(amax, m) for m ≥ 0 given by its bits, which as integers have the order of the numbers. A stored value
// that is no magnitude (NaN or negative) is replaced. Most threads only read: atomics are issued only for a larger
// value.
__device__ __forceinline__ void atomic_amax(u64 amax, u32 bits) {
    u32* to = reinterpret_cast<u32*>(amax);
    const u32 seen = *reinterpret_cast<volatile u32*>(to);
    const bool nothing = seen > 0x7f800000u;
    if (nothing) atomicCAS(to, seen, bits);
    if (nothing || bits > seen) atomicMax(to, bits);
}

// The same over the block's values of m. All threads of the block must call it.
__device__ __forceinline__ void block_atomic_amax(u64 amax, float m) {
    __shared__ u32 most[32];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 bits = __reduce_max_sync(~0u, __float_as_uint(m));
    if (lane == 0) most[warp] = bits;
    __syncthreads();
    if (warp != 0) return;
    bits = __reduce_max_sync(~0u, lane < blockDim.x >> 5 ? most[lane] : 0u);
    if (lane == 0) atomic_amax(amax, bits);
}
