// Backward pass for dq with mma.sync: a warp has 16·MT queries of one head, and a block streams the keys they see, BN
// at a time: s = q·kᵀ, dp = dout·vᵀ, ds = exp(s - lse)·(dp - delta), dq += ds·k.
#include "attention/common.cuh"

template <int DQ, int DV, int MT, int BN, int WARPS> struct Queries {
    static constexpr int BM = WARPS * MT * 16, THREADS = WARPS * 32;
    static constexpr int Q_BYTES = BM * DQ * 2, D_BYTES = BM * DV * 2;
    static constexpr int K_BYTES = BN * DQ * 2, V_BYTES = BN * DV * 2;
    static constexpr int STAGE = K_BYTES + V_BYTES, BYTES = PLACE + Q_BYTES + D_BYTES + 2 * STAGE;

    static __device__ __forceinline__ void run(const AttentionArgs& a) {
        if (past_last_tile(a)) return;
        const Place& p = query_tile(a, BM, BN);
        const u32 base = shared_address(attention_shared) + PLACE;

        // Tiles are double-buffered.
        auto place_of = [&](i32 tile) { return base + Q_BYTES + D_BYTES + u32((tile ^ p.from) & 1) * STAGE; };
        auto load_guarded = [&](i32 tile) {
            const u32 at = place_of(tile);
            const i32 k0 = tile * BN;
            load_tile<BN, DQ, THREADS, false>(at, row_at<element>(a.k, p.batch, p.k_start + k0, p.kv_head), a.k.token,
                                       p.k_len - k0, a.d_qk, a.vectorized & W_K);
            load_tile<BN, DV, THREADS, false>(at + K_BYTES, row_at<element>(a.v, p.batch, p.k_start + k0, p.kv_head), a.v.token,
                                       p.k_len - k0, a.d_v, a.vectorized & W_V);
        };
        if (p.from < p.to) {
            load_tile<BM, DQ, THREADS, false>(base, row_at<element>(a.q, p.batch, p.q_start + p.first, p.head), a.q.token,
                                       p.q_len - p.first, a.d_qk, a.vectorized & W_Q);
            load_tile<BM, DV, THREADS, false>(base + Q_BYTES, row_at<element>(a.dout, p.batch, p.q_start + p.first, p.head),
                                       a.dout.token, p.q_len - p.first, a.d_v, a.vectorized & W_DOUT);
            load_guarded(p.from);
            cp_async_commit();
        }

        const int begin = tid();
        const i32 row0 = p.first + (begin >> 5) * (MT * 16) + ((begin & 31) >> 2);
        float weights[MT][2], delta[MT][2], dq[MT][DQ / 8][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // Rows past the end read the last row's values; they are not stored.
                const i64 at = (i64(p.batch) * a.heads + p.head) * a.tokens + p.q_start +
                               min(row0 + m * 16 + r * 8, p.q_len - 1);
                weights[m][r] = reinterpret_cast<const float*>(a.lse_log2)[at];
                delta[m][r] = reinterpret_cast<const float*>(a.delta)[at];
            }
#pragma unroll
            for (int n = 0; n < DQ / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) dq[m][n][e] = 0.0f;
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
            if (k0 > far || k0 + BN <= near) continue;

            const u32 at = place_of(tile);
            float s[MT][BN / 8][4], dp[MT][BN / 8][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) s[m][n][e] = dp[m][n][e] = 0.0f;
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
            {
                const u32 d_at = a_fragment<DV>(base + Q_BYTES, lane, warp * MT * 16);
                const u32 v_at = b_fragment<DV>(at + K_BYTES, lane);
#pragma unroll
                for (int k = 0; k < DV / 16; k++) {
                    u32 x[MT][4];
#pragma unroll
                    for (int m = 0; m < MT; m++) ldmatrix(x[m], k_step(d_at, k) + m * 16 * DV * 2);
#pragma unroll
                    for (int n = 0; n < BN / 16; n++) {
                        u32 y[4];
                        ldmatrix(y, k_step(v_at, k) + n * 16 * DV * 2);
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            mma(dp[m][2 * n], x[m], y[0], y[1]);
                            mma(dp[m][2 * n + 1], x[m], y[2], y[3]);
                        }
                    }
                }
            }
            if (a.outer > 0.0f) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const float h = fast_tanh(s[m][n][e] * a.inner);
                            const float y = fast_exp2(fmaf(a.outer, h, -weights[m][e >> 1]));
                            dp[m][n][e] = y * (dp[m][n][e] - delta[m][e >> 1]) * fmaf(-h, h, 1.0f);
                        }
            } else {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < BN / 8; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const float y = fast_exp2(fmaf(s[m][n][e], a.inner, -weights[m][e >> 1]));
                            dp[m][n][e] = y * (dp[m][n][e] - delta[m][e >> 1]);
                        }
            }
            if (k0 < p.lo(a, w1) || k0 + BN - 1 > p.hi(a, w0)) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const i32 i = w0 + m * 16 + r * 8 + g;
                        const i32 lo = p.lo(a, i) - k0 - t, hi = p.hi(a, i) - k0 - t;
#pragma unroll
                        for (int n = 0; n < BN / 8; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (n * 8 + e < lo || n * 8 + e > hi) dp[m][n][r * 2 + e] = 0.0f;
                    }
            }
            {
                const u32 k_at = b_fragment_trans<DQ>(at, lane);
#pragma unroll
                for (int k = 0; k < BN / 16; k++) {
                    u32 x[MT][4];
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int h = 0; h < 4; h++)
                            x[m][h] = pack_pair<element>(dp[m][2 * k + (h >> 1)][(h & 1) * 2],
                                                dp[m][2 * k + (h >> 1)][(h & 1) * 2 + 1]);
#pragma unroll
                    for (int n = 0; n < DQ / 16; n++) {
                        u32 y[4];
                        ldmatrix_trans(y, k_step(k_at, n) + k * 16 * DQ * 2);
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            mma(dq[m][2 * n], x[m], y[0], y[1]);
                            mma(dq[m][2 * n + 1], x[m], y[2], y[3]);
                        }
                    }
                }
            }
        }

        const int end = tid(), g = (end & 31) >> 2, c0 = (end & 3) * 2;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const i32 i = p.first + (end >> 5) * (MT * 16) + m * 16 + r * 8 + g;
                if (i >= p.q_len) continue;
                element* row = row_at<element>(a.dq, p.batch, p.q_start + i, p.head);
                const bool blind = p.lo(a, i) > p.hi(a, i);
#pragma unroll
                for (int n = 0; n < DQ / 8; n++) {
                    const float x = blind ? 0.0f : dq[m][n][r * 2] * a.scale;
                    const float y = blind ? 0.0f : dq[m][n][r * 2 + 1] * a.scale;
                    store_pair(row, n * 8 + c0, a.d_qk, a.vectorized & W_DQ, x, y);
                }
            }
    }
};

#define QUERIES(NAME, DQ, DV, MT, BN, WARPS, BLOCKS)                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) ELEMENT_NAME(NAME)(const __grid_constant__ AttentionArgs a) { \
        Queries<DQ, DV, MT, BN, WARPS>::run(a);                                                                  \
    }

QUERIES(attention_backward_queries_64, 64, 64, 2, 32, 4, 3)
QUERIES(attention_backward_queries_128, 128, 128, 2, 32, 4, 2)
QUERIES(attention_backward_queries_192, 192, 128, 1, 32, 4, 2)
QUERIES(attention_backward_queries_256, 256, 256, 1, 16, 4, 1)
