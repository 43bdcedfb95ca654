// LayerNorm and RMSNorm: y = (x − µ)·r·g (+ b), r = 1/√(mean((x − µ)²) + eps), µ = 0 for RMSNorm.
//
// A team of `lanes` threads has a row: a part of a warp (a power of two) for rows as short as heads, full warps
// otherwise. Each thread has CHUNKS 16-byte chunks of it. Persistent blocks loop over rows and prefetch the next ones
// by cp.async into shared memory, each thread its own chunks, so that no synchronization is needed to read them. Which
// thread has which column follows from the width alone: results do not depend on strides or alignment.
#pragma once
#include "prelude.cuh"

// That needs rows of aligned 16-byte chunks. Other rows, and rows too wide for registers, have kernels that read a row
// again for each of its sums.

enum Flag : u32 { CENTRED = 1, VECTORIZED = 2, VECTORIZED_GAIN = 4 };

// Row index split into groups of `inner` rows, once for all views.
struct Place {
    i64 outer, inner;
    __device__ __forceinline__ i64 start(i64 outer_stride, i64 inner_stride) const {
        return outer * outer_stride + inner * inner_stride;
    }
};
__device__ __forceinline__ Place place(i64 row, i64 inner) {
    if (inner == 1) return {row, 0};
    // 64-bit division would cost more than the rest of a short row.
    if (((row | inner) >> 32) == 0) return {u32(row) / u32(inner), u32(row) % u32(inner)};
    return {row / inner, row % inner};
}

// Two sums over a team, in every thread of it, in a fixed order. `shared` belongs to this team and this iteration, two
// floats per warp. It is double-buffered: what was written two iterations ago has been read, because all have
// synchronized since.
struct Pair {
    float x, y;
};
__device__ __forceinline__ Pair team_sums(Pair p, u32 lanes, u32 team, Pair* shared) {
#pragma unroll 1
    for (u32 d = min(lanes, 32u) >> 1; d > 0; d >>= 1) {
        p.x += __shfl_xor_sync(~0u, p.x, d);
        p.y += __shfl_xor_sync(~0u, p.y, d);
    }
    if (lanes <= 32) return p;
    const u32 lane = threadIdx.x & 31, warps = lanes >> 5, warp = (threadIdx.x >> 5) - team * warps;
    if (lane == 0) shared[warp] = p;
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(lanes) : "memory");
    p = {0.0f, 0.0f};
    if (warps <= 4) {
#pragma unroll 1
        for (u32 w = 0; w < warps; w++) p.x += shared[w].x, p.y += shared[w].y;
        return p;
    }
    if (lane < warps) p = shared[lane];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        p.x += __shfl_xor_sync(~0u, p.x, d);
        p.y += __shfl_xor_sync(~0u, p.y, d);
    }
    return p;
}

template <class T> __device__ __forceinline__ Packed<T> load_chunk(u64 base, i64 at) {
    return *reinterpret_cast<const Packed<T>*>(reinterpret_cast<const T*>(base) + at);
}
template <class T> __device__ __forceinline__ void store_chunk(u64 base, i64 at, const Packed<T>& p) {
    *reinterpret_cast<Packed<T>*>(reinterpret_cast<T*>(base) + at) = p;
}

// The prefetch buffer: each thread's own chunks of TENSORS rows, STAGES deep.
extern __shared__ uint4 waiting[];

template <class T, int TENSORS, int CHUNKS, int STAGES> struct Ring {
    u32 stage = 0;
    __device__ __forceinline__ static uint4* slot(u32 stage, int tensor, int c) {
        return waiting + ((stage * TENSORS + tensor) * CHUNKS + c) * blockDim.x + threadIdx.x;
    }
    // Prefetches into the stage used last; `next` advances.
    __device__ __forceinline__ void prefetch(int tensor, int c, const T* from) const {
        const u32 to = u32(__cvta_generic_to_shared(slot(stage == 0 ? STAGES - 1 : stage - 1, tensor, c)));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
    __device__ __forceinline__ static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    // Waits until the oldest stage has arrived.
    __device__ __forceinline__ static void wait() {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    }
    __device__ __forceinline__ Packed<T> take(int tensor, int c) const {
        const uint4 v = *slot(stage, tensor, c);
        return {{v.x, v.y, v.z, v.w}};
    }
    __device__ __forceinline__ void next() { stage = stage + 1 == STAGES ? 0 : stage + 1; }
};
