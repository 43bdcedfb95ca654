// sm_90a only: TMA, mbarriers, named barriers and register reallocation, one function for each PTX instruction.
//
// TMA (cp.async.bulk.tensor) copies a box of a strided tensor to shared memory and completes transactions on an
// mbarrier. WGMMA reads its B operand, and its A operand unless that is in registers, from shared memory through
// 64-bit matrix descriptors. All tiles here are columns of 64 bf16 channels: rows of 128 bytes on 1024-byte
// boundaries, in which 16-byte chunk c of row r lies at c ^ (r % 8), as TMA's 128-byte swizzle writes them.
#pragma once
#include "args/tensor_map.cuh"


__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives at the same mbarrier of another block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 bar, u32 block) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(bar),
        "r"(block)
        : "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}
// A store to, and an arrival at an mbarrier of, a block of the cluster: what was stored before the arrival is visible to
// the threads of that block whose `mbarrier_wait_cluster` it ends.
__device__ __forceinline__ void st_shared_cluster(u32 at, u32 block, u32 x) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.u32 [there], %2;\n"
        "}\n" ::"r"(at),
        "r"(block), "r"(x)
        : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 bar, u32 block) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(bar),
        "r"(block)
        : "memory");
}
__device__ __forceinline__ void mbarrier_wait_cluster(u32 bar, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
        "@p bra.uni done;\n"
        "bra.uni again;\n"
        "done:\n"
        "}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Synchronizes all threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra.uni done;\n"
        "bra.uni again;\n"
        "done:\n"
        "}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Loads the box at (channel, token, head, batch).
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 bar, i32 c, i32 t, i32 h, i32 b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::
            "r"(to),
        "l"(&map), "r"(bar), "r"(c), "r"(t), "r"(h), "r"(b)
        : "memory");
}
// How long data stay in the L2 cache: the encoding of createpolicy's fractional policies over all of an access.
#define L2_EVICT_FIRST 0x12f0000000000000ull
#define L2_EVICT_LAST 0x14f0000000000000ull
// tma_load of data that L2 evicts before other data.
__device__ __forceinline__ void tma_load_evict_first(u32 to, const TensorMap& map, u32 bar, i32 c, i32 t, i32 h, i32 b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c), "r"(t), "r"(h), "r"(b), "l"(L2_EVICT_FIRST)
        : "memory");
}
// Accesses to what a block itself wrote or will read again, evicted from L2 after other data.
__device__ __forceinline__ float4 load_evict_last(const float4* from) {
    float4 x;
    asm volatile("ld.global.L2::cache_hint.v4.f32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from), "l"(L2_EVICT_LAST)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_evict_last(float4* to, float x, float y, float z, float w) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w),
                 "l"(L2_EVICT_LAST)
                 : "memory");
}
// Loads the box into the same address of both blocks of a cluster of two; each block's mbarrier counts the bytes that
// arrive there.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap& map, u32 bar, i32 c, i32 t, i32 h, i32 b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c), "r"(t), "r"(h), "r"(b), "h"(u16(3))
        : "memory");
}
// Copies contiguous bytes, a multiple of 16.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
// Copies bytes from shared memory to that of another block of the cluster, whose mbarrier counts them.
__device__ __forceinline__ void bulk_copy_to_block(u32 to, u32 from, u32 bytes, u32 bar, u32 block) {
    asm volatile(
        "{\n"
        ".reg .b32 there, done;\n"
        "mapa.shared::cluster.u32 there, %0, %4;\n"
        "mapa.shared::cluster.u32 done, %3, %4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, [done];\n"
        "}\n" ::"r"(to),
        "r"(from), "r"(bytes), "r"(bar), "r"(block)
        : "memory");
}
// Makes generic-proxy stores to shared memory visible to the async proxy (WGMMA, TMA).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
// Stores four 8×8 matrices to shared memory; lanes address rows as in ldmatrix.
__device__ __forceinline__ void stmatrix(u32 at, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x), "r"(y), "r"(z),
                 "r"(w)
                 : "memory");
}

// Orders register accesses before the wgmma.mma_async instructions that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N committed wgmma groups are pending.
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving accesses to an accumulator or operand of wgmma across this point.
template <int N> __device__ __forceinline__ void fence_operand(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> __device__ __forceinline__ void fence_operand(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Keeps ptxas from hoisting a wgmma wait above arithmetic that is meant to overlap with it: ends the basic block with
// a branch that depends on the arithmetic's result `x`, which is never negative.
__device__ __forceinline__ void schedule_fence(float x) {
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.lt.f32 q, %0, 0f00000000;\n"
        "vote.sync.any.pred p, q, 0xffffffff;\n"
        "@!p bra.uni on;\n"
        "nanosleep.u32 0;\n"
        "on:\n"
        "}\n" ::"f"(x)
        : "memory");
}

// A value that is equal in all threads of a warp, in a form from which the compiler can tell.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
// Index of this thread's warpgroup.
__device__ __forceinline__ int warpgroup() { return uniform(int(threadIdx.x >> 7)); }

// Descriptor of a K-major tile: rows run along the summed axis in 128-byte swizzled columns, 8 rows are 1024 bytes.
__device__ __forceinline__ u64 desc_k_major(u32 at) {
    return u64((at & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
// Descriptor of an MN-major tile, which is summed over its rows: the next 64 channels lie `column` bytes on, the next
// 8 rows 1024.
__device__ __forceinline__ u64 desc_mn_major(u32 at, u32 column) {
    return u64((at & 0x3ffff) >> 4) | u64(column >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
