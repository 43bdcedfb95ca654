// Copies of contiguous bytes and between strides. A thread issues all its loads before its stores.
#include "args/copy.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;

__device__ __forceinline__ i64 unit_of(int u) { return (i64(blockIdx.x) * UNROLL + u) * THREADS + threadIdx.x; }


// Copies n contiguous bytes.
extern "C" __global__ void __launch_bounds__(THREADS) copy_bytes(const CopyArgs p) {
    const u8* from = reinterpret_cast<const u8*>(p.from);
    u8* to = reinterpret_cast<u8*>(p.to);
    if (p.vectorized && (i64(blockIdx.x) + 1) * (16 * UNROLL * THREADS) <= p.n) {
        uint4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) x[u] = reinterpret_cast<const uint4*>(from)[unit_of(u)];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) reinterpret_cast<uint4*>(to)[unit_of(u)] = x[u];
        return;
    }
    // Unaligned addresses, or the last block: byte by byte, neighbouring lanes on neighbouring bytes.
    i64 first = i64(blockIdx.x) * (16 * UNROLL * THREADS), last = first + 16 * UNROLL * THREADS;
    if (last > p.n) last = p.n;
#pragma unroll 4
    for (i64 i = first + threadIdx.x; i < last; i += THREADS) to[i] = from[i];
}

// Axes a tensor may have at most.
constexpr int AXES = 5;


template <class I, class Unit> __device__ __forceinline__ void copy_strided(const StridedArgs& p) {
    Unit held[UNROLL];
    i64 to[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        i64 at = unit_of(u);
        to[u] = -1;
        if (at >= p.count) continue;
        I rest = I(at);
        i64 x = 0, y = 0;
        for (int axis = int(p.axes) - 1; axis > 0; axis--) {
            I size = I(p.sizes[axis]), above = rest / size, here = rest - above * size;
            x += i64(here) * p.from_steps[axis];
            y += i64(here) * p.to_steps[axis];
            rest = above;
        }
        held[u] = reinterpret_cast<const Unit*>(p.from)[x + i64(rest) * p.from_steps[0]];
        to[u] = y + i64(rest) * p.to_steps[0];
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (to[u] >= 0) reinterpret_cast<Unit*>(p.to)[to[u]] = held[u];
}

// 32-bit division is several times cheaper than 64-bit division, and almost always enough.
#define COPY(name, Unit)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const StridedArgs p) {                                  \
        if (p.count <= 0x7fffffffll) copy_strided<u32, Unit>(p);                                                       \
        else copy_strided<u64, Unit>(p);                                                                               \
    }
COPY(copy_strided_2, u16)
COPY(copy_strided_4, u32)
COPY(copy_strided_16, uint4)
