// Online softmax of the Hopper forward kernels: mask, exponentials with running maxima and sums, and the final
// normalization. A warpgroup has 64 queries and BN keys at a time.
#pragma once
#include "attention/hopper_common.cuh"
#include "hopper_tiles.cuh"

// LIFT: probabilities are held times 2^LIFT.
template <int DV, int BN, bool CAP, int LIFT> struct HopperSoftmax {
    // By how much (in log2) a running maximum may lag behind: sums are rescaled only when it grows by more.
    static constexpr float LAG = RESCALE_THRESHOLD(8.0f);

    // First query of this thread.
    static __device__ __forceinline__ i32 row_of(i32 w0, int self) {
        return w0 + ((self >> 5) & 3) * 16 + ((self & 31) >> 2);
    }

    struct Rows {
        float top[2], sum[2];
    };
    // Turns scores into exponentials, where `factor` maps a score to a logit times log2 e, and updates the queries'
    // maxima and sums. Returns whether earlier sums must be multiplied by `shrink`. w0: first query of the warpgroup.
    static __device__ __forceinline__ bool online_softmax(const AttentionArgs& a, const Place& p, i32 tile, i32 w0,
                                                  float (&s)[BN / 2], Rows& rows, float (&shrink)[2], float factor) {
        if constexpr (CAP) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++) s[i] = a.outer * fast_tanh(a.inner * s[i]);
        }
        const i32 k0 = tile * BN, w1 = min(w0 + 63, p.q_len - 1);
        if (k0 < p.lo(a, w1) || k0 + BN - 1 > p.hi(a, w0)) {
            const i32 self = tid(), t = (self & 3) * 2, i0 = row_of(w0, self);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const i32 lo = p.lo(a, i0 + r * 8) - k0 - t, hi = p.hi(a, i0 + r * 8) - k0 - t;
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (n * 8 + e < lo || n * 8 + e > hi) s[n * 4 + r * 2 + e] = NEG_INF;
            }
        }
        bool moved = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = s[r * 2], y = s[r * 2 + 1];
#pragma unroll
            for (int n = 1; n < BN / 8; n++) {
                x = fmaxf(x, s[n * 4 + r * 2]);
                y = fmaxf(y, s[n * 4 + r * 2 + 1]);
            }
            x = fmaxf(x, y);
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            const float old = rows.top[r];
            const bool up = (x - old) * factor > LAG;
            x = up ? x : old;
            moved |= up;
            // Until a query has seen a key its maximum is -inf, and -inf - -inf would be NaN.
            const float origin = x == NEG_INF ? 0.0f : x * factor;
            shrink[r] = up ? fast_exp2(old * factor - origin) : 1.0f;
            const float from = origin - float(LIFT);
            rows.top[r] = x;
            float total = 0.0f, other = 0.0f;
#pragma unroll
            for (int n = 0; n < BN / 8; n++) {
                s[n * 4 + r * 2] = fast_exp2(fmaf(s[n * 4 + r * 2], factor, -from));
                s[n * 4 + r * 2 + 1] = fast_exp2(fmaf(s[n * 4 + r * 2 + 1], factor, -from));
                total += s[n * 4 + r * 2];
                other += s[n * 4 + r * 2 + 1];
            }
            rows.sum[r] = fmaf(rows.sum[r], shrink[r], total + other);
        }
        return __any_sync(~0u, moved);
    }

    // Stores lse and outputs of this thread's queries, from accumulators `o` in units of `unit`.
    static __device__ __forceinline__ void finish(const AttentionArgs& a, const HopperTile& p, i32 w0, const float (&o)[DV / 2],
                                                  const Rows& rows, float factor, float unit) {
        // The sink is one more logit, without a value.
        const float sink = a.sink ? reinterpret_cast<const float*>(a.sink)[p.head] * LOG2_E : NEG_INF;
        const i32 self = tid(), i0 = row_of(w0, self);
        bf16* row[2];
        float share[2];
        u32 keep[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const i32 i = i0 + r * 8;
            float total = rows.sum[r], lse;
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            finalize_softmax(rows.top[r] == NEG_INF ? NEG_INF : rows.top[r] * factor, total * (1.0f / (1 << LIFT)), sink, lse,
                     share[r]);
            share[r] *= unit;
            row[r] = nullptr;
            if (i < p.q_len) {
                if ((self & 3) == 0)
                    reinterpret_cast<float*>(a.lse)[p.batch * a.lse_batch + p.head * a.lse_head +
                                                    (p.q_start + i) * a.lse_token] = lse;
                row[r] = row_at<bf16>(a.out, p.batch, p.q_start + i, p.head);
            }
            // A query that sees no key gets zeros, whatever masked keys left in the accumulator.
            keep[r] = p.lo(a, i) > p.hi(a, i) ? 0u : ~0u;
        }
        store_rows<DV>(o, row[0], row[1], share[0], share[1], a.d_v, keep[0], keep[1]);
    }
};
