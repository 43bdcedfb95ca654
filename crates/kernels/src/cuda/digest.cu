// Digests: sums of mixed words modulo 2^64. Integers add up to the same bits in any order, so blocks add atomically.
#include "args/digest.cuh"
#include "prelude.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;

__device__ __forceinline__ u64 mix(u64 word) {
    u64 x = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The first term of the sum, in place of what was there.
extern "C" __global__ void digest_start(const DigestArgs p) { *reinterpret_cast<u64*>(p.out) = p.start; }

extern "C" __global__ void __launch_bounds__(THREADS) digest_words(const DigestArgs p) {
    u64 sum = 0;
    const i64 threads = i64(gridDim.x) * THREADS, thread = i64(blockIdx.x) * THREADS + threadIdx.x;
    i64 done = 0; // Words that are read in pairs.
    if (p.vectorized) {
        const ulonglong2* x = reinterpret_cast<const ulonglong2*>(p.x);
        const i64 pairs = p.bytes / 16;
        auto add = [&](const ulonglong2& pair, i64 i) {
            u64 shift = u64(2 * i + 1) * p.gamma;
            sum += mix(pair.x + shift) + mix(pair.y + shift + p.gamma);
        };
        i64 i = thread;
        for (; i + (UNROLL - 1) * threads < pairs; i += UNROLL * threads) {
            ulonglong2 held[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) held[u] = x[i + u * threads];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) add(held[u], i + u * threads);
        }
        for (; i < pairs; i += threads) add(x[i], i);
        done = 2 * pairs;
    }
    // Unaligned addresses, and the words at the end: byte by byte.
    const u8* bytes = reinterpret_cast<const u8*>(p.x);
    for (i64 w = done + thread; w * 8 < p.bytes; w += threads) {
        u64 word = 0;
        for (int b = 0; b < 8 && w * 8 + b < p.bytes; b++) word |= u64(bytes[w * 8 + b]) << (8 * b);
        sum += mix(word + u64(w + 1) * p.gamma);
    }
    // Over the lanes of a warp, then over warps.
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    __shared__ u64 sums[THREADS / 32];
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < THREADS / 32; w++) sum += sums[w];
    atomicAdd(reinterpret_cast<u64*>(p.out), sum);
}
