// Epilogue of the Hopper grouped GEMMs.
//
// A warp has 16 rows of a tile, four lanes of which hold 8 columns of a row. Eight rows of 128 bytes at a time go
// through shared memory, so that full cache lines are written, while TMA and the other warpgroup continue.
#pragma once
#include "grouped/hopper_load.cuh"

template <class Load> struct GroupedStore : Load {
    static constexpr int BM = Load::BM, BN = Load::BN, BUFFERS = Load::STAGING / 1024;
    static constexpr bool IS_FP8 = Load::IS_FP8;

    // First row of this thread's accumulator fragment in the tile; the other is 8 below.
    static __device__ __forceinline__ i32 row_of(const GroupedTile& t, int wg) {
        return t.m * BM + wg * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
    }

    // Slab `p` of a warp's results: eight rows, of which the lane then has 16 bytes of row lane / 8 and of the one
    // four below. `put(at)` stores the lane's elements at `at`, `take(q, x)` receives those of row 4·q + lane / 8.
    template <class Put, class Take> static __device__ __forceinline__ void piece(int p, int turn, Put put, Take take) {
        const u32 at = shared_address(grouped_shared) + Load::STAGING_AT + ((threadIdx.x >> 5) - 4) * Load::STAGING +
                       (p % BUFFERS) * 1024;
        put(at);
        __syncwarp();
        const int row = (threadIdx.x & 31) >> 3, unit = threadIdx.x & 7;
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const int r = row + 4 * q;
            uint4 x;
            ld_shared_v4(at + r * 128 + ((unit ^ (turn == 1 ? r : (r & 3) << 1)) << 4), x.x, x.y, x.z, x.w);
            take(q, x);
        }
        // With two buffers a slab is reused two slabs later, behind the next __syncwarp.
        if (BUFFERS == 1) __syncwarp();
    }

    // y = acc·left·right + bias, in the segment's own rows only.
    static __device__ __forceinline__ void store_output(const GroupedHopperArgs& g, const GroupedTile& t, int wg,
                                                        float (&c)[BN / 2], float left = 1.0f, float right = 1.0f) {
        const i32 n0 = t.n * BN, lane = threadIdx.x & 31;
        if (!IS_FP8 && g.bias) {
            const bf16* bias = reinterpret_cast<const bf16*>(g.bias) + (i64(t.segment) * g.width + n0);
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
                const i32 column = j * 8 + (threadIdx.x & 3) * 2;
                if (n0 + column < g.width) {
                    const u32 two = *reinterpret_cast<const u32*>(bias + column);
                    c[4 * j] += low_bf16(two);
                    c[4 * j + 1] += high_bf16(two);
                    c[4 * j + 2] += low_bf16(two);
                    c[4 * j + 3] += high_bf16(two);
                }
            }
        }
        const i32 first = t.m * BM + wg * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane >> 3), below = t.rows - first;
        const i32 width = g.width - n0 - (lane & 7) * 8;
        bf16* to = reinterpret_cast<bf16*>(g.out) + ((t.first + first) * g.row + n0 + (lane & 7) * 8);
        // Lane l addresses row l % 8 of matrix l / 8 for stmatrix.
        const u32 own = (lane & 7) * 128, unit = lane >> 3, turn = lane & 7;
#pragma unroll
        for (int p = 0; p < BN / 32; p++) {
            const int n = p / 2 * 8, r = p & 1;
            piece(
                p, 1,
                [&](u32 at) {
#pragma unroll
                    for (int j = 0; j < 8; j += 4) {
                        u32 w[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const int k = (n + j + i) * 4 + r * 2;
                            w[i] = pack_bf16(c[k] * left * right, c[k + 1] * left * right);
                        }
                        stmatrix(at + own + (((unit + j) ^ turn) << 4), w[0], w[1], w[2], w[3]);
                    }
                },
                [&](int q, uint4 x) {
                    if (r * 8 + q * 4 < below && n * 8 < width)
                        put16(to + (r * 8 + q * 4) * g.row + n * 8, x);
                });
        }
    }

    // Slices of a long segment are added in order: a tile waits for the slices before it, which were claimed before it
    // (`GroupedLoad::claim`). Counters of a tile, one for each of PARTS that different warpgroups have.
    template <int PARTS> static __device__ __forceinline__ i32* turn_of(const GroupedHopperArgs& g, const GroupedTile& t, int part) {
        const i32 across = (g.width + BN - 1) / BN, down = (g.height + BM - 1) / BM;
        return reinterpret_cast<i32*>(g.counters) + 1 + (((i64(t.segment) * down + t.m) * across + t.n) * PARTS + part);
    }
    static __device__ __forceinline__ void wait_for_turn(const i32* turn, const GroupedTile& t, int wg) {
        if (t.slice > 0) {
            if ((threadIdx.x & 127) == 0) wait_for(turn, t.slice);
            named_barrier_sync(2 + wg, 128);
        }
    }
    static __device__ __forceinline__ void end_turn(i32* turn, const GroupedTile& t, int wg) {
        if (t.slice + 1 < t.slices) {
            __threadfence();
            named_barrier_sync(2 + wg, 128);
            if ((threadIdx.x & 127) == 0)
                asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(t.slice + 1) : "memory");
        }
    }
    // A tile of which each warpgroup has 64 rows.
    static __device__ __forceinline__ void store_gradient(const GroupedHopperArgs& g, const GroupedTile& t, int wg,
                                                          float (&c)[BN / 2]) {
        i32* turn = turn_of<2>(g, t, wg);
        wait_for_turn(turn, t, wg);
        add_rows(g, t, wg, c);
        end_turn(turn, t, wg);
    }

    // dw = acc (+ dw) of 64 rows of a tile, by a warpgroup. The additions are reductions in the L2 cache, one summand of an
    // element at a time, so that the sum is deterministic.
    static __device__ __forceinline__ void add_rows(const GroupedHopperArgs& g, const GroupedTile& t, int part,
                                                    float (&c)[BN / 2]) {
        const i32 n0 = t.n * BN, lane = threadIdx.x & 31;
        const i32 first = t.m * BM + part * 64 + (threadIdx.x >> 5 & 3) * 16 + (lane >> 3), below = g.height - first;
        const i32 width = g.width - n0 - (lane & 7) * 4;
        float* to = reinterpret_cast<float*>(g.out) + (t.segment * g.matrix + first * g.row + n0 + (lane & 7) * 4);
        const bool adds = g.accumulate || t.slice > 0;
        // Half a warp stores four rows at a time; their 16-byte units are swizzled to different banks.
        const u32 own = (lane >> 2) * 128 + (lane & 1) * 8, unit = (lane & 2) >> 1, place = (lane >> 2 & 3) << 1;
#pragma unroll
        for (int p = 0; p < BN / 16; p++) {
            const int n = p / 2 * 4, r = p & 1;
            piece(
                p, 2,
                [&](u32 at) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int k = (n + j) * 4 + r * 2;
                        store8(at + own + (((j * 2 + unit) ^ place) << 4), c[k], c[k + 1]);
                    }
                },
                [&](int q, uint4 x) {
                    if (r * 8 + q * 4 < below && n * 8 < width) {
                        float* there = to + (r * 8 + q * 4) * g.row + n * 8;
                        if (adds) add_four(there, x);
                        else put16(there, x);
                    }
                });
        }
    }
    // Streaming stores, which do not displace operands that are read again soon.
    static __device__ __forceinline__ void put16(void* to, uint4 x) {
        asm volatile("st.global.cs.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                     : "memory");
    }
    static __device__ __forceinline__ void store8(u32 at, float x, float y) {
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(x), "f"(y) : "memory");
    }
    static __device__ __forceinline__ void add_four(float* to, uint4 x) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(__uint_as_float(x.x)),
                     "f"(__uint_as_float(x.y)), "f"(__uint_as_float(x.z)), "f"(__uint_as_float(x.w))
                     : "memory");
    }
    static __device__ __forceinline__ void wait_for(const i32* turn, i32 value) {
        i32 now;
        while (true) {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
            if (now >= value) return;
            __nanosleep(100);
        }
    }
};
