// Forward pass for Hopper (as FlashAttention-3): persistent blocks of one producer warpgroup, which loads tiles by
// TMA, and WGS consumer warpgroups of 64 queries each. A consumer issues the GEMMs q·kᵀ of the next tile and p·v of
// the last one together, and computes the softmax of the next while p·v runs. Named barriers order the consumers, so
// that one's softmax overlaps with another's GEMMs. Short sequences, whose tiles begin and end often, have four
// consumers and tiles of 64 keys.
//
// Without a soft cap the scale must be positive.
#pragma once
#include "attention/hopper_forward_load.cuh"
#include "attention/hopper_softmax.cuh"
#include "wgmma.cuh"

template <int DQ, int DV, int WGS, int BN, int STAGES, int Q, bool CAP>
struct HopperForward : HopperForwardLoad<DQ, DV, WGS, BN, STAGES, Q> {
    using Load = HopperForwardLoad<DQ, DV, WGS, BN, STAGES, Q>;
    using Bars = typename Load::Bars;
    using Softmax = HopperSoftmax<DV, BN, CAP, 0>;
    using Load::free;
    static constexpr int BM = Load::BM, V_COLUMNS = Load::V_COLUMNS;
    static constexpr u32 Q_BYTES = Load::Q_BYTES, K_BYTES = Load::K_BYTES, V_BYTES = Load::V_BYTES;
    static constexpr u32 Q_AT = Load::Q_AT, K_AT = Load::K_AT, V_AT = Load::V_AT;
    // s = q·kᵀ
    static __device__ __forceinline__ void scores(float (&s)[BN / 2], u32 q, u32 k) {
        wgmma_abt<BN, DQ>(s, q, BM * 128, k, BN * 128);
    }
    static __device__ __forceinline__ void pack(u32 (&p)[BN / 4], const float (&s)[BN / 2]) {
#pragma unroll
        for (int i = 0; i < BN / 4; i++) p[i] = pack_probs(s[2 * i], s[2 * i + 1]);
    }

    static __device__ __forceinline__ void consume(const HopperArgs& m, u32 base, Bars bars) {
        const AttentionArgs& a = m.a;
        const int wg = warpgroup() - 1;
        Ring<STAGES> k, v;
        Ring<Q> q;
        const i32 n = rounds(m);
        if (wg == WGS - 1) named_barrier_arrive(1, 256);
#pragma unroll 1
        for (i32 round = 0; round < n; round++) {
            const i32 index = tile_of(m, round);
            if (index < 0) continue;
            HopperTile p = hopper_tile(m, index, a.heads, BM, true);
            Load::bounds(a, p);
            const i32 w0 = p.first + wg * 64;
            float o[DV / 2];
            typename Softmax::Rows rows = {{NEG_INF, NEG_INF}, {0.0f, 0.0f}};
            if (p.from < p.to) {
                const u32 q_at = base + Q_AT + q.stage * Q_BYTES + wg * 8192;
                const i32 w1 = min(w0 + 63, p.q_len - 1);
                const i32 mine = w1 < w0 ? p.from : min(max(p.hi(a, w1) / BN, p.from), p.to - 1);
                float shrink[2];
                // Values past the end of a packed sequence belong to the next one.
                auto blank = [&](i32 tile) {
                    if (a.items && p.k_len - tile * BN < BN) {
                        zero_rows<BN, V_COLUMNS>(base + V_AT + v.stage * V_BYTES, p.k_len - tile * BN, tid() & 127);
                        named_barrier_sync(8 + wg, 128);
                    }
                };
                mbarrier_wait(bars.q_full(q.stage), q.phase);
                // Tiles that none of this warpgroup's queries see: it only releases them, and passes its turn on.
#pragma unroll 1
                for (i32 tile = p.to - 1; tile > mine; tile--) {
                    mbarrier_wait(bars.k_full(k.stage), k.phase);
                    free(bars.k_free(k.stage));
                    k.next();
                    mbarrier_wait(bars.v_full(v.stage), v.phase);
                    free(bars.v_free(v.stage));
                    v.next();
                    named_barrier_sync(1 + wg, 256);
                    named_barrier_arrive(1 + (wg + 1) % WGS, 256);
                }
                u32 x[BN / 4];
                {
                    float s[BN / 2];
                    mbarrier_wait(bars.k_full(k.stage), k.phase);
                    wgmma_fence();
                    scores(s, q_at, base + K_AT + k.stage * K_BYTES);
                    wgmma_commit();
                    wgmma_wait<0>();
                    fence_operand(s);
                    free(bars.k_free(k.stage));
                    k.next();
                    Softmax::online_softmax(a, p, mine, w0, s, rows, shrink, a.factor);
                    pack(x, s);
                }
                int add = 0;
#pragma unroll 1
                for (i32 tile = mine - 1; tile >= p.from; tile--) {
                    float s[BN / 2];
                    mbarrier_wait(bars.k_full(k.stage), k.phase);
                    named_barrier_sync(1 + wg, 256);
                    wgmma_fence();
                    fence_operand(o);
                    scores(s, q_at, base + K_AT + k.stage * K_BYTES);
                    wgmma_commit();
                    mbarrier_wait(bars.v_full(v.stage), v.phase);
                    blank(tile + 1);
                    wgmma_ab<DV, BN>(o, x, base + V_AT + v.stage * V_BYTES, add);
                    add = 1;
                    wgmma_commit();
                    named_barrier_arrive(1 + (wg + 1) % WGS, 256);
                    wgmma_wait<1>();
                    fence_operand(s);
                    free(bars.k_free(k.stage));
                    k.next();
                    const bool moved = Softmax::online_softmax(a, p, tile, w0, s, rows, shrink, a.factor);
                    schedule_fence(rows.sum[0] + rows.sum[1]);
                    wgmma_wait<0>();
                    fence_operand(o);
                    fence_operand(x);
                    free(bars.v_free(v.stage));
                    v.next();
                    pack(x, s);
                    if (moved) {
#pragma unroll
                        for (int i = 0; i < DV / 2; i++) o[i] *= shrink[(i >> 1) & 1];
                    }
                }
                free(bars.q_free(q.stage));
                q.next();
                mbarrier_wait(bars.v_full(v.stage), v.phase);
                blank(p.from);
                wgmma_fence();
                fence_operand(o);
                wgmma_ab<DV, BN>(o, x, base + V_AT + v.stage * V_BYTES, add);
                wgmma_commit();
                wgmma_wait<0>();
                fence_operand(o);
                free(bars.v_free(v.stage));
                v.next();
            }
            if constexpr (DV > 128) {
                // Recomputed here, rather than kept in registers throughout.
                asm volatile("" : "+r"(round));
                p = hopper_tile(m, tile_of(m, round), a.heads, BM, true);
            }
            Softmax::finish(a, p, w0, o, rows, a.factor, 1.0f);
        }
    }

    static __device__ __forceinline__ void run(const HopperArgs& m) { forward_block<HopperForward, WGS, STAGES, Q, DV>(m); }
};

// Channels of keys and of values, consumer warpgroups, keys of a tile, key stages, query stages, soft cap.
#define HOPPER_FORWARD(NAME, ...)                                                                              \
    extern "C" __global__ void __launch_bounds__(HopperForward<__VA_ARGS__>::THREADS, 1)                        \
        NAME(const __grid_constant__ HopperArgs m) {                                                               \
        HopperForward<__VA_ARGS__>::run(m);                                                                    \
    }
