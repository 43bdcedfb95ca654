// FP8 forward pass for Hopper: q, k and v in E4M3 with one scale each, probabilities in E4M3 with the scale 256.
// Scheduling as in hopper_forward.cuh. The tensor core keeps about 14 bits of a sum of FP8 products, so p·v of every
// key tile is a sum of its own, accumulated in f32.
#pragma once
#include "args/attention_fp8.cuh"
#include "attention/hopper_forward_load.cuh"
#include "attention/hopper_softmax.cuh"
#include "quant/common.cuh"
#include "wgmma_fp8.cuh"

// Inverse scale of tensor i: scales are powers of two and follow from its amax.
__device__ __forceinline__ float unit_of(u64 most, int i) {
    return __fdiv_rn(1.0f, scale_of(reinterpret_cast<const float*>(most)[i], 448.0f, 1, __uint_as_float(MaxFinite<bf16>::bits)));
}

template <int D, int WGS, int STAGES, int Q> struct HopperFp8 : HopperForwardLoad<D, D, WGS, 128, STAGES, Q, 128> {
    static constexpr int BN = 128, LIFT = 8;
    using Load = HopperForwardLoad<D, D, WGS, BN, STAGES, Q, 128>;
    using Bars = typename Load::Bars;
    using Softmax = HopperSoftmax<D, BN, false, LIFT>;
    using Load::free;

    // s = q·kᵀ
    static __device__ __forceinline__ void scores(float (&s)[BN / 2], u32 q, u32 k) {
        const u64 l = desc_k_major(q), r = desc_k_major(k);
#pragma unroll
        for (int i = 0; i < D / 32; i++) WgmmaFp8<BN, false>::ss(s, l + i * 2, r + i * 2, i > 0);
    }
    // Thread t of four holds scores of keys 8·n + 2·t and the next; as A operands of FP8 those are four neighbours, so
    // v is stored in the key order that matches (`slot_of` in hopper_fp8.cu).
    static __device__ __forceinline__ void pack(u32 (&p)[BN / 8], const float (&s)[BN / 2]) {
#pragma unroll
        for (int i = 0; i < BN / 8; i++) {
            const int at = i / 4 * 16 + (i & 1) * 2 + (i & 2) * 4;
            p[i] = encode_fp8(0, s[at], s[at + 1], s[at + 4], s[at + 5]);
        }
    }
    // t = p·v of one tile
    static __device__ __forceinline__ void values(float (&t)[D / 2], const u32 (&p)[BN / 8], u32 v) {
        const u64 r = desc_k_major(v);
#pragma unroll
        for (int i = 0; i < BN / 32; i++)
            WgmmaFp8<D, false>::rs(t, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], r + i * 2, i > 0);
    }

    static __device__ __forceinline__ void consume(const HopperArgs& m, u32 base, Bars bars) {
        const AttentionArgs& a = m.a;
        const int wg = warpgroup() - 1;
        // Inverse scales are powers of two, so their product is exact. Where it underflows all logits are 0 in f32; a factor
        // of 0 would make those of masked keys, -inf, NaN.
        const float factor = fmaxf(a.factor * (unit_of(m.bounds, 0) * unit_of(m.bounds, 1)), __uint_as_float(0x00800000));
        Ring<STAGES> k, v;
        Ring<Q> q;
        const i32 n = rounds(m);
        if (wg == WGS - 1) named_barrier_arrive(1, 256);
#pragma unroll 1
        for (i32 round = 0; round < n; round++) {
            const i32 index = tile_of(m, round);
            if (index < 0) continue;
            HopperTile p = hopper_tile(m, index, a.heads, Load::BM, true);
            Load::bounds(a, p);
            const i32 w0 = p.first + wg * 64;
            float o[D / 2] = {};
            typename Softmax::Rows rows = {{NEG_INF, NEG_INF}, {0.0f, 0.0f}};
            if (p.from < p.to) {
                const u32 q_at = base + Load::Q_AT + q.stage * Load::Q_BYTES + wg * 8192;
                const i32 w1 = min(w0 + 63, p.q_len - 1);
                const i32 mine = w1 < w0 ? p.from : min(max(p.hi(a, w1) / BN, p.from), p.to - 1);
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
                u32 x[BN / 8];
                float shrink[2], t[D / 2];
                {
                    float s[BN / 2];
                    mbarrier_wait(bars.k_full(k.stage), k.phase);
                    wgmma_fence();
                    scores(s, q_at, base + Load::K_AT + k.stage * Load::K_BYTES);
                    wgmma_commit();
                    wgmma_wait<0>();
                    fence_operand(s);
                    free(bars.k_free(k.stage));
                    k.next();
                    Softmax::online_softmax(a, p, mine, w0, s, rows, shrink, factor);
                    pack(x, s);
                }
#pragma unroll 1
                for (i32 tile = mine - 1; tile >= p.from; tile--) {
                    float s[BN / 2];
                    mbarrier_wait(bars.k_full(k.stage), k.phase);
                    named_barrier_sync(1 + wg, 256);
                    wgmma_fence();
                    scores(s, q_at, base + Load::K_AT + k.stage * Load::K_BYTES);
                    wgmma_commit();
                    mbarrier_wait(bars.v_full(v.stage), v.phase);
                    values(t, x, base + Load::V_AT + v.stage * Load::V_BYTES);
                    wgmma_commit();
                    named_barrier_arrive(1 + (wg + 1) % WGS, 256);
                    wgmma_wait<1>();
                    fence_operand(s);
                    free(bars.k_free(k.stage));
                    k.next();
                    const bool moved = Softmax::online_softmax(a, p, tile, w0, s, rows, shrink, factor);
                    schedule_fence(rows.sum[0] + rows.sum[1]);
                    wgmma_wait<0>();
                    fence_operand(t);
                    fence_operand(x);
                    free(bars.v_free(v.stage));
                    v.next();
                    pack(x, s);
#pragma unroll
                    for (int i = 0; i < D / 2; i++) o[i] += t[i];
                    if (moved) {
#pragma unroll
                        for (int i = 0; i < D / 2; i++) o[i] *= shrink[(i >> 1) & 1];
                    }
                }
                free(bars.q_free(q.stage));
                q.next();
                mbarrier_wait(bars.v_full(v.stage), v.phase);
                wgmma_fence();
                values(t, x, base + Load::V_AT + v.stage * Load::V_BYTES);
                wgmma_commit();
                wgmma_wait<0>();
                fence_operand(t);
                free(bars.v_free(v.stage));
                v.next();
#pragma unroll
                for (int i = 0; i < D / 2; i++) o[i] += t[i];
            }
            Softmax::finish(a, p, w0, o, rows, factor, unit_of(m.bounds, 2) * (1.0f / (1 << LIFT)));
        }
    }

    static __device__ __forceinline__ void run(const HopperArgs& m) { forward_block<HopperFp8, WGS, STAGES, Q, D>(m); }
};
