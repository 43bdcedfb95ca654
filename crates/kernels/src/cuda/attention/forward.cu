// Forward pass with mma.sync (FlashAttention): a warp has 16·MT queries of one head, and a block streams the keys they
// see, BN at a time, with an online softmax. Keys and values are double-buffered by cp.async. Scores and outputs stay
// in registers: the accumulator of q·kᵀ has the layout of the A fragments of p·v.
#include "attention/common.cuh"

template <int DQ, int DV, int MT, int BN, int WARPS> struct Forward {
    // By how much (in log2) a running maximum may lag behind: sums are rescaled only when it grows by more.
    static constexpr float LAG = RESCALE_THRESHOLD(8.0f);
    static constexpr int BM = WARPS * MT * 16, THREADS = WARPS * 32;
    static constexpr int Q_BYTES = BM * DQ * 2, K_BYTES = BN * DQ * 2, V_BYTES = BN * DV * 2;
    static constexpr int STAGE = K_BYTES + V_BYTES, BYTES = PLACE + Q_BYTES + 2 * STAGE;

    static __device__ __forceinline__ void run(const AttentionArgs& a) {
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
            top[m][0] = top[m][1] = NEG_INF;
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
                    for (int m = 0; m < MT; m++) ldmatrix(x[m], k_step(q_at, k) + m * 16 * DQ * 2);
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
            // New maxima, then exponentials; earlier sums are rescaled to the new maximum.
            float shrink[MT][2];
            bool moved = false;
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float x = fmaxf(s[m][0][r * 2], s[m][0][r * 2 + 1]);
#pragma unroll
                    for (int n = 1; n < BN / 8; n++) x = fmaxf(x, fmaxf(s[m][n][r * 2], s[m][n][r * 2 + 1]));
                    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                    const float old = top[m][r];
                    const bool up = (x - old) * a.factor > LAG;
                    x = up ? x : old;
                    moved |= up;
                    // Until a query has seen a key its maximum is -inf, and -inf - -inf would be NaN.
                    const float origin = x == NEG_INF ? 0.0f : x * a.factor;
                    shrink[m][r] = up ? fast_exp2(old * a.factor - origin) : 1.0f;
                    top[m][r] = x;
                    float total = 0.0f;
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const float y = fast_exp2(fmaf(s[m][n][r * 2 + e], a.factor, -origin));
                            s[m][n][r * 2 + e] = y;
                            total += y;
                        }
                    sum[m][r] = fmaf(sum[m][r], shrink[m][r], total);
                }
            if (__any_sync(~0u, moved)) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < DV / 8; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) o[m][n][e] *= shrink[m][e >> 1];
            }
            {
                const u32 v_at = b_fragment_trans<DV>(at + K_BYTES, lane);
#pragma unroll
                for (int k = 0; k < BN / 16; k++) {
                    u32 x[MT][4];
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int h = 0; h < 4; h++)
                            x[m][h] = pack_probs(s[m][2 * k + (h >> 1)][(h & 1) * 2],
                                                   s[m][2 * k + (h >> 1)][(h & 1) * 2 + 1]);
#pragma unroll
                    for (int n = 0; n < DV / 16; n++) {
                        u32 y[4];
                        ldmatrix_trans(y, k_step(v_at, n) + k * 16 * DV * 2);
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            mma(o[m][2 * n], x[m], y[0], y[1]);
                            mma(o[m][2 * n + 1], x[m], y[2], y[3]);
                        }
                    }
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
                const float most = top[m][r] == NEG_INF ? NEG_INF : top[m][r] * a.factor;
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

#define FORWARD(NAME, DQ, DV, MT, BN, WARPS, BLOCKS)                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) ELEMENT_NAME(NAME)(const __grid_constant__ AttentionArgs a) { \
        Forward<DQ, DV, MT, BN, WARPS>::run(a);                                                         \
    }

FORWARD(attention_forward_64, 64, 64, 2, 128, 4, 2)
FORWARD(attention_forward_128, 128, 128, 2, 64, 4, 2)
FORWARD(attention_forward_192, 192, 128, 2, 32, 4, 2)
FORWARD(attention_forward_256, 256, 256, 1, 32, 4, 2)
