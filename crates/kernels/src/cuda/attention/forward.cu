// Forward pass with mma.sync (FlashAttention): a warp has 16·MT queries of one head, and a block streams the keys they
// see, BN at a time, with an online softmax. Keys and values are double-buffered by cp.async. Scores and outputs stay
// in registers: the accumulator of q·kᵀ has the layout of the A fragments of p·v.
#include "attention/common.cuh"

// KEPT: of q, fragments of so many steps of 16 channels stay in registers.
template <int DQ, int DV, int MT, int BN, int WARPS, int KEPT> struct Forward {
    // By how much (in log2) a running maximum may lag behind: sums are rescaled only when it grows by more.
    static constexpr float LAG = RESCALE_THRESHOLD(8.0f);
    // The maximum (times log2 e) of a query that has seen no key: finite, for -inf - -inf would be NaN.
    static constexpr float NONE = -3.402823466e38f;
    static constexpr int BM = WARPS * MT * 16, THREADS = WARPS * 32;
    static constexpr int Q_BYTES = BM * DQ * 2, K_BYTES = BN * DQ * 2, V_BYTES = BN * DV * 2;
    static constexpr int STAGE = K_BYTES + V_BYTES, BYTES = PLACE + Q_BYTES + 2 * STAGE;

    static __device__ __forceinline__ void run(const AttentionArgs& a) {
        if (past_last_tile(a)) return;
        const Place& p = query_tile(a, BM, BN);
        const u32 base = shared_address(attention_shared) + PLACE;

        float o[MT][DV / 8][4];
        float top[MT][2], sum[MT][2];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int n = 0; n < DV / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[m][n][e] = 0.0f;
            top[m][0] = top[m][1] = NONE;
            sum[m][0] = sum[m][1] = 0.0f;
        }

        // Tiles are double-buffered.
        auto place_of = [&](i32 tile) { return base + Q_BYTES + u32((tile ^ p.from) & 1) * STAGE; };
        auto load_guarded = [&](i32 tile) {
            const u32 at = place_of(tile);
            const i32 k0 = tile * BN;
            load_tile<BN, DQ, THREADS>(at, row_at<element>(a.k, p.batch, p.k_start + k0, p.kv_head), a.k.token,
                                       p.k_len - k0, a.d_qk, a.vectorized & W_K);
            load_tile<BN, DV, THREADS>(at + K_BYTES, row_at<element>(a.v, p.batch, p.k_start + k0, p.kv_head), a.v.token,
                                       p.k_len - k0, a.d_v, a.vectorized & W_V);
        };

        if (p.from < p.to) {
            load_tile<BM, DQ, THREADS>(base, row_at<element>(a.q, p.batch, p.q_start + p.first, p.head), a.q.token,
                                       p.q_len - p.first, a.d_qk, a.vectorized & W_Q);
            load_guarded(p.from);
            cp_async_commit();
        }
        u32 kept[KEPT > 0 ? KEPT : 1][MT][4];
        if constexpr (KEPT > 0) {
            cp_async_wait_all();
            __syncthreads();
            const int self = tid();
            const u32 q_at = a_fragment<DQ>(base, self & 31, (self >> 5) * MT * 16);
#pragma unroll
            for (int k = 0; k < KEPT; k++)
#pragma unroll
                for (int m = 0; m < MT; m++) ldmatrix(kept[k][m], k_step(q_at, k) + m * 16 * DQ * 2);
        }
#pragma unroll 1
        for (i32 tile = p.from; tile < p.to; tile++) {
            cp_async_wait_all();
            __syncthreads();
            if (tile + 1 < p.to) {
                load_guarded(tile + 1);
                cp_async_commit();
            }
            const i32 k0 = tile * BN;
            // Some of this warp's queries see keys near..=far.
            const int self = tid(), lane = self & 31, warp = self >> 5, g = lane >> 2, t = (lane & 3) * 2;
            const i32 w0 = p.first + warp * (MT * 16), w1 = min(w0 + MT * 16, p.q_len) - 1;
            const i32 near = p.lo(a, w0), far = w1 < w0 ? -1 : p.hi(a, w1);
            if (k0 > far || k0 + BN <= near) continue;  // no query of this warp sees a key of the tile

            const u32 at = place_of(tile);
            float s[MT][BN / 8][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) s[m][n][e] = 0.0f;
            {
                const u32 q_at = a_fragment<DQ>(base, lane, warp * MT * 16), k_at = b_fragment<DQ>(at, lane);
#pragma unroll
                for (int k = 0; k < DQ / 16; k++) {
                    u32 x[MT][4];
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        if (k < KEPT) {
#pragma unroll
                            for (int h = 0; h < 4; h++) x[m][h] = kept[k < KEPT ? k : 0][m][h];
                        } else {
                            ldmatrix(x[m], k_step(q_at, k) + m * 16 * DQ * 2);
                        }
                    }
#pragma unroll
                    for (int n = 0; n < BN / 16; n++) {
                        u32 y[4];
                        ldmatrix(y, k_step(k_at, k) + n * 16 * DQ * 2);
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            mma(s[m][2 * n], x[m], y[0], y[1]);
                            mma(s[m][2 * n + 1], x[m], y[2], y[3]);
                        }
                    }
                }
            }
            // The maximum is taken over unscaled products; a scale that is not positive would reverse their order, so
            // it is applied first.
            if (a.outer > 0.0f || !(a.scale > 0.0f)) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            float x = s[m][n][e] * a.inner;
                            s[m][n][e] = a.outer > 0.0f ? a.outer * fast_tanh(x) : x;
                        }
            }
            if (k0 < p.lo(a, w1) || k0 + BN - 1 > p.hi(a, w0)) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const i32 i = w0 + m * 16 + r * 8 + g;
                        // Relative to this thread's first key of the tile.
                        const i32 lo = p.lo(a, i) - k0 - t, hi = p.hi(a, i) - k0 - t;
#pragma unroll
                        for (int n = 0; n < BN / 8; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (n * 8 + e < lo || n * 8 + e > hi) s[m][n][r * 2 + e] = NEG_INF;
                    }
            }
            // Where a logit of any query exceeds its maximum by more than LAG, maxima are taken anew and sums are
            // rescaled to them: seldom after the first tiles, so that most tiles need no exchange between lanes.
            float most[MT][2];
            bool up = false;
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float x = fmaxf(s[m][0][r * 2], s[m][0][r * 2 + 1]);
#pragma unroll
                    for (int n = 1; n < BN / 8; n++) x = fmaxf(x, fmaxf(s[m][n][r * 2], s[m][n][r * 2 + 1]));
                    most[m][r] = x;
                    up |= fmaf(x, a.factor, -top[m][r]) > LAG;
                }
            if (__any_sync(~0u, up)) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float x = most[m][r];
                        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                        const float old = top[m][r];
                        if (!(fmaf(x, a.factor, -old) > LAG)) continue;
                        top[m][r] = x * a.factor;
                        const float shrink = fast_exp2(old - top[m][r]);
                        sum[m][r] *= shrink;
#pragma unroll
                        for (int n = 0; n < DV / 8; n++) o[m][n][r * 2] *= shrink, o[m][n][r * 2 + 1] *= shrink;
                    }
            }
            // Exponentials of the next 16 keys are computed while these are multiplied.
            u32 x[2][MT][4];
            auto exponentials = [&](int k, int m, int h) {
                const float(&c)[4] = s[m][2 * k + (h >> 1)];
                const int r = h & 1;
                const float y = fast_exp2(fmaf(c[r * 2], a.factor, -top[m][r]));
                const float z = fast_exp2(fmaf(c[r * 2 + 1], a.factor, -top[m][r]));
                sum[m][r] += y + z;
                x[k & 1][m][h] = pack_probs(y, z);
            };
#pragma unroll
            for (int j = 0; j < MT * 4; j++) exponentials(0, j >> 2, j & 3);
            const u32 v_at = b_fragment_trans<DV>(at + K_BYTES, lane);
#pragma unroll
            for (int k = 0; k < BN / 16; k++)
#pragma unroll
                for (int n = 0; n < DV / 16; n++) {
                    u32 y[4];
                    ldmatrix_trans(y, k_step(v_at, n) + k * 16 * DV * 2);
                    if (k + 1 < BN / 16) {
#pragma unroll
                        for (int j = n * (MT * 4) / (DV / 16); j < (n + 1) * (MT * 4) / (DV / 16); j++)
                            exponentials(k + 1, j >> 2, j & 3);
                    }
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma(o[m][2 * n], x[k & 1][m], y[0], y[1]);
                        mma(o[m][2 * n + 1], x[k & 1][m], y[2], y[3]);
                    }
                }
        }

        const int self = tid(), g = (self & 31) >> 2, t = (self & 3) * 2;
        const i32 w0 = p.first + (self >> 5) * (MT * 16);
        // The sink is one more logit, without a value.
        const float sink = a.sink ? reinterpret_cast<const float*>(a.sink)[p.head] * LOG2_E : NEG_INF;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const i32 i = w0 + m * 16 + r * 8 + g;
                float total = sum[m][r];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                if (i >= p.q_len) continue;
                const float most = top[m][r] == NONE && !(total > 0.0f) ? NEG_INF : top[m][r];
                float lse, share;
                finalize_softmax(most, total, sink, lse, share);
                if (t == 0)
                    reinterpret_cast<float*>(a.lse)[p.batch * a.lse_batch + p.head * a.lse_head +
                                                    (p.q_start + i) * a.lse_token] = lse;
                const bool blind = p.lo(a, i) > p.hi(a, i);
                element* row = row_at<element>(a.out, p.batch, p.q_start + i, p.head);
#pragma unroll
                for (int n = 0; n < DV / 8; n++) {
                    const float x = blind ? 0.0f : o[m][n][r * 2] * share;
                    const float y = blind ? 0.0f : o[m][n][r * 2 + 1] * share;
                    store_pair(row, n * 8 + t, a.d_v, a.vectorized & W_OUT, x, y);
                }
            }
    }
};

#ifdef FP8_PROBS  // rounding needs the registers
#define KEPT_STEPS(n) 0
#else
#define KEPT_STEPS(n) n
#endif
#define FORWARD(NAME, DQ, DV, MT, BN, WARPS, KEPT, BLOCKS)                                              \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) ELEMENT_NAME(NAME)(const __grid_constant__ AttentionArgs a) { \
        Forward<DQ, DV, MT, BN, WARPS, KEPT_STEPS(KEPT)>::run(a);                                       \
    }

FORWARD(attention_forward_64, 64, 64, 2, 128, 4, 2, 2)
FORWARD(attention_forward_128, 128, 128, 2, 64, 4, 0, 2)
FORWARD(attention_forward_192, 192, 128, 2, 32, 4, 0, 2)
FORWARD(attention_forward_256, 256, 256, 1, 32, 4, 0, 2)
