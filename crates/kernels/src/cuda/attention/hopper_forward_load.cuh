// Producer of the Hopper forward kernels: shared-memory layout, and the order of TMA loads.
#pragma once
#include "attention/hopper_common.cuh"
#include "hopper_tiles.cuh"

// Q: query stages. WIDTH: channels of a 128-byte column, 64 of bf16; or 128 of FP8, and then v is transposed,
// [channel, token].
template <int DQ, int DV, int WGS, int BN, int STAGES, int Q, int WIDTH = 64> struct HopperForwardLoad {
    static constexpr bool V_TRANSPOSED = WIDTH == 128;
    static constexpr int BM = WGS * 64, COLUMNS = (DQ + WIDTH - 1) / WIDTH, V_COLUMNS = (DV + WIDTH - 1) / WIDTH;
    // The producer is a warpgroup that gives its registers to the consumers (setmaxnreg).
    static constexpr int THREADS = (WGS + 1) * 128;
    static constexpr u32 Q_BYTES = BM * COLUMNS * 128, K_BYTES = BN * COLUMNS * 128,
                         V_BYTES = V_TRANSPOSED ? DV * 128 : BN * V_COLUMNS * 128;
    static constexpr u32 Q_AT = 1024, K_AT = Q_AT + Q * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES;
    static constexpr u32 BYTES = V_AT + STAGES * V_BYTES;
    static_assert(BYTES <= 227 * 1024 && (!V_TRANSPOSED || (BN == 128 && DQ <= 128 && DV <= 128)), "shared memory");

    static __device__ __forceinline__ void bounds(const AttentionArgs& a, Place& p) {
        p.from = p.lo(a, p.first) / BN;
        p.to = (p.hi(a, min(p.first + BM, p.q_len) - 1) + BN) / BN;
    }

    struct Bars {
        u32 base;
        __device__ __forceinline__ u32 q_full(u32 s) const { return base + s * 8; }
        __device__ __forceinline__ u32 q_free(u32 s) const { return base + 16 + s * 8; }
        __device__ __forceinline__ u32 k_full(u32 s) const { return base + 32 + s * 8; }
        __device__ __forceinline__ u32 k_free(u32 s) const { return base + 32 + (STAGES + s) * 8; }
        __device__ __forceinline__ u32 v_full(u32 s) const { return base + 32 + (2 * STAGES + s) * 8; }
        __device__ __forceinline__ u32 v_free(u32 s) const { return base + 32 + (3 * STAGES + s) * 8; }
    };

    static __device__ __forceinline__ void produce(const HopperArgs& m, u32 base, Bars bars) {
        const AttentionArgs& a = m.a;
        Ring<STAGES> k, v;
        Ring<Q> q;
        const i32 n = rounds(m);
#pragma unroll 1
        for (i32 round = 0; round < n; round++) {
            const i32 index = tile_of(m, round);
            if (index < 0) continue;
            HopperTile p = hopper_tile(m, index, a.heads, BM, true);
            bounds(a, p);
            if (p.from >= p.to) continue;
            auto keys = [&](i32 tile) {
                mbarrier_wait(bars.k_free(k.stage), k.phase ^ 1);
                mbarrier_arrive_expect_tx(bars.k_full(k.stage), K_BYTES);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    tma_load(base + K_AT + k.stage * K_BYTES + c * BN * 128, m.k, bars.k_full(k.stage), c * WIDTH,
                                p.k_start + tile * BN, p.kv_head, p.batch);
                k.next();
            };
            mbarrier_wait(bars.q_free(q.stage), q.phase ^ 1);
            mbarrier_arrive_expect_tx(bars.q_full(q.stage), Q_BYTES);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                tma_load(base + Q_AT + q.stage * Q_BYTES + c * BM * 128, m.q, bars.q_full(q.stage), c * WIDTH,
                            p.q_start + p.first, p.head, p.batch);
            q.next();
            keys(p.to - 1);
#pragma unroll 1
            for (i32 tile = p.to - 1; tile >= p.from; tile--) {
                if (tile > p.from) keys(tile - 1);
                mbarrier_wait(bars.v_free(v.stage), v.phase ^ 1);
                mbarrier_arrive_expect_tx(bars.v_full(v.stage), V_BYTES);
                if constexpr (V_TRANSPOSED) {
                    tma_load(base + V_AT + v.stage * V_BYTES, m.v, bars.v_full(v.stage), tile * BN, 0, p.kv_head, p.batch);
                } else {
#pragma unroll
                    for (int c = 0; c < V_COLUMNS; c++)
                        tma_load(base + V_AT + v.stage * V_BYTES + c * BN * 128, m.v, bars.v_full(v.stage), c * WIDTH,
                                    p.k_start + tile * BN, p.kv_head, p.batch);
                }
                v.next();
            }
        }
    }

    static __device__ __forceinline__ void free(u32 bar) {
        if ((tid() & 31) == 0) mbarrier_arrive(bar);
    }
};

// Body of a forward kernel K: initializes mbarriers and splits the block into producer and consumers.
template <class K, int WGS, int STAGES, int Q, int DV> __device__ __forceinline__ void forward_block(const HopperArgs& m) {
    const u32 base = shared_address(attention_shared);
    const typename K::Bars bars = {base};
    if (threadIdx.x == 0) {
        for (int s = 0; s < Q; s++) {
            mbarrier_init(bars.q_full(s), 1);
            mbarrier_init(bars.q_free(s), WGS * 4);
        }
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(bars.k_full(s), 1);
            mbarrier_init(bars.v_full(s), 1);
            mbarrier_init(bars.k_free(s), WGS * 4);
            mbarrier_init(bars.v_free(s), WGS * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<WGS == 2 ? (DV > 128 ? 24 : 40) : WGS == 3 ? 32 : 24>();
        if (threadIdx.x == 0) K::produce(m, base, bars);
    } else {
        setmaxnreg_inc<WGS == 2 ? (DV > 128 ? 240 : 232) : WGS == 3 ? 160 : 112>();
        K::consume(m, base, bars);
    }
}
