// Largest magnitudes of what a kernel writes.

__device__ __forceinline__ float largest(float m, const Packed<bf16>& p) {
#pragma unroll
    for (int i = 0; i < 4; i++) m = fmaxf(fmaxf(m, fabsf(low_bf16(p.word[i]))), fabsf(high_bf16(p.word[i])));
    return m;
}
__device__ __forceinline__ float largest(float m, const Packed<float>& p) {
#pragma unroll
    for (int i = 0; i < 4; i++) m = fmaxf(m, fabsf(__uint_as_float(p.word[i])));
    return m;
}

// amax = max(amax, m of every thread of the block), m ≥ 0: as integers, the bits of such numbers are in the same order.
// All threads must come here. Few blocks have anything new to say, so most only look.
__device__ __forceinline__ void raise_together(u64 amax, float m) {
    __shared__ u32 most[32];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 bits = __reduce_max_sync(~0u, __float_as_uint(m));
    if (lane == 0) most[warp] = bits;
    __syncthreads();
    if (warp != 0) return;
    bits = __reduce_max_sync(~0u, lane < blockDim.x >> 5 ? most[lane] : 0u);
    u32* to = reinterpret_cast<u32*>(amax);
    if (lane == 0 && bits > *reinterpret_cast<volatile u32*>(to)) atomicMax(to, bits);
}
