// Backward pass for dk and dv with mma.sync: a warp has 16·MT keys of one key head, and a block streams every query of
// the group's heads that sees them, BM at a time, in a fixed order.
//
// Scores are computed transposed, sᵀ = k·qᵀ and dpᵀ = v·doutᵀ, so that their accumulators are already the A fragments
// of dv += pᵀ·dout and dk += dsᵀ·q, with p = exp(s - lse) and ds = p·(dp - delta). For wide heads the channels of dk
// and dv are split into PARTS, which different blocks accumulate.
#include "attention/common.cuh"

template <int DQ, int DV, int MT, int BM, int WARPS, int PARTS> struct Keys {
    static constexpr int BN = WARPS * MT * 16, THREADS = WARPS * 32;
    static constexpr int K_BYTES = BN * DQ * 2, V_BYTES = BN * DV * 2;
    static constexpr int Q_BYTES = BM * DQ * 2, D_BYTES = BM * DV * 2;
    static constexpr int STAGE = Q_BYTES + D_BYTES + BM * 8, BYTES = PLACE + K_BYTES + V_BYTES + 2 * STAGE;
    static constexpr int CQ = DQ / PARTS, CV = DV / PARTS;
    static_assert(STAGE % 128 == 0, "tiles start on 128 bytes");
    static_assert(PARTS == 1 || (CQ % 64 == 0 && CV % 64 == 0), "parts start on 128 bytes");

    static __device__ __forceinline__ void run(const AttentionArgs& a) {
        if (past_last_tile(a)) return;
        const int part = blockIdx.x % PARTS;
        const Place& p = key_tile(a, blockIdx.x / PARTS, BN, BM);
        const u32 base = shared_address(attention_shared) + PLACE;

        float dk[MT][CQ / 8][4], dv[MT][CV / 8][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int n = 0; n < CQ / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) dk[m][n][e] = 0.0f;
#pragma unroll
            for (int n = 0; n < CV / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) dv[m][n][e] = 0.0f;
        }

        // Tiles are numbered through all heads of the group, and double-buffered.
        auto place_of = [&](i32 turn) { return base + K_BYTES + V_BYTES + u32(turn & 1) * STAGE; };
        auto load_guarded = [&](i32 turn) {
            const u32 at = place_of(turn);
            const i32 tiles = p.to - p.from, head = p.head * a.group + turn / tiles;
            const i32 q0 = (p.from + turn % tiles) * BM, rows = p.q_len - q0;
            load_tile<BM, DQ, THREADS, false>(at, row_at<element>(a.q, p.batch, p.q_start + q0, head), a.q.token, rows, a.d_qk,
                                       a.vectorized & W_Q);
            load_tile<BM, DV, THREADS, false>(at + Q_BYTES, row_at<element>(a.dout, p.batch, p.q_start + q0, head), a.dout.token,
                                       rows, a.d_v, a.vectorized & W_DOUT);
            const int self = tid();
            if (self < 2 * BM) {
                const i32 i = self % BM;
                const bool there = i < rows;
                const float* x = reinterpret_cast<const float*>(self < BM ? a.lse_log2 : a.delta) +
                                 ((i64(p.batch) * a.heads + head) * a.tokens + p.q_start + q0);
                cp_async_4(at + Q_BYTES + D_BYTES + self * 4, there ? x + i : x, there ? 4 : 0);
            }
        };

        if (p.from < p.to) {
            load_tile<BN, DQ, THREADS, false>(base, row_at<element>(a.k, p.batch, p.k_start + p.first, p.head), a.k.token,
                                       p.k_len - p.first, a.d_qk, a.vectorized & W_K);
            load_tile<BN, DV, THREADS, false>(base + K_BYTES, row_at<element>(a.v, p.batch, p.k_start + p.first, p.head), a.v.token,
                                       p.k_len - p.first, a.d_v, a.vectorized & W_V);
            load_guarded(0);
            cp_async_commit();
        }
#pragma unroll 1
        for (i32 turn = 0; turn < (p.to - p.from) * a.group; turn++) {
            cp_async_wait_all();
            __syncthreads();
            if (turn + 1 < (p.to - p.from) * a.group) {
                load_guarded(turn + 1);
                cp_async_commit();
            }
            const u32 at = place_of(turn);
            const i32 q0 = (p.from + turn % (p.to - p.from)) * BM;
            // Queries near..=far see some of this warp's keys.
            const int self = tid(), lane = self & 31, warp = self >> 5, g = lane >> 2, t = (lane & 3) * 2;
            const i32 w0 = p.first + warp * (MT * 16), w1 = min(w0 + MT * 16, p.k_len) - 1;
            const i32 near = w0 - p.off - a.right, far = w1 < w0 ? -1 : w1 - p.off + a.left;
            if (q0 > far || q0 + BM <= near) continue;  // no query of the tile sees this warp's keys

            float s[MT][BM / 8][4], dp[MT][BM / 8][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < BM / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) s[m][n][e] = dp[m][n][e] = 0.0f;
            {
                const u32 k_at = a_fragment<DQ>(base, lane, warp * MT * 16), q_at = b_fragment<DQ>(at, lane);
#pragma unroll
                for (int k = 0; k < DQ / 16; k++) {
                    u32 x[MT][4];
#pragma unroll
                    for (int m = 0; m < MT; m++) ldmatrix(x[m], k_step(k_at, k) + m * 16 * DQ * 2);
#pragma unroll
                    for (int n = 0; n < BM / 16; n++) {
                        u32 y[4];
                        ldmatrix(y, k_step(q_at, k) + n * 16 * DQ * 2);
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            mma(s[m][2 * n], x[m], y[0], y[1]);
                            mma(s[m][2 * n + 1], x[m], y[2], y[3]);
                        }
                    }
                }
            }
            {
                const u32 v_at = a_fragment<DV>(base + K_BYTES, lane, warp * MT * 16);
                const u32 d_at = b_fragment<DV>(at + Q_BYTES, lane);
#pragma unroll
                for (int k = 0; k < DV / 16; k++) {
                    u32 x[MT][4];
#pragma unroll
                    for (int m = 0; m < MT; m++) ldmatrix(x[m], k_step(v_at, k) + m * 16 * DV * 2);
#pragma unroll
                    for (int n = 0; n < BM / 16; n++) {
                        u32 y[4];
                        ldmatrix(y, k_step(d_at, k) + n * 16 * DV * 2);
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            mma(dp[m][2 * n], x[m], y[0], y[1]);
                            mma(dp[m][2 * n + 1], x[m], y[2], y[3]);
                        }
                    }
                }
            }
            const float2* weights =
                reinterpret_cast<const float2*>(attention_shared + PLACE + (at - base) + Q_BYTES + D_BYTES) + (lane & 3);
            const float2* delta = weights + BM / 2;
            if (a.outer > 0.0f) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < BM / 8; n++) {
                        const float2 w = weights[n * 4], d = delta[n * 4];
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const float h = fast_tanh(s[m][n][e] * a.inner);
                            const float y = fast_exp2(fmaf(a.outer, h, -(e & 1 ? w.y : w.x)));
                            s[m][n][e] = y;
                            dp[m][n][e] = y * (dp[m][n][e] - (e & 1 ? d.y : d.x)) * fmaf(-h, h, 1.0f);
                        }
                    }
            } else {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int n = 0; n < BM / 8; n++) {
                        const float2 w = weights[n * 4], d = delta[n * 4];
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const float y = fast_exp2(fmaf(s[m][n][e], a.inner, -(e & 1 ? w.y : w.x)));
                            s[m][n][e] = y;
                            dp[m][n][e] = y * (dp[m][n][e] - (e & 1 ? d.y : d.x));
                        }
                    }
            }
            if (q0 < w1 - p.off - a.right || q0 + BM - 1 > min(w0 - p.off + a.left, p.q_len - 1)) {
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        // Queries that see this key, relative to this thread's first query of the tile.
                        const i32 j = w0 + m * 16 + r * 8 + g - p.off;
                        const i32 lo = j - a.right - q0 - t, hi = min(j + a.left, p.q_len - 1) - q0 - t;
#pragma unroll
                        for (int n = 0; n < BM / 8; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (n * 8 + e < lo || n * 8 + e > hi) s[m][n][r * 2 + e] = dp[m][n][r * 2 + e] = 0.0f;
                    }
            }
            {
                const u32 d_at = b_fragment_trans<DV>(at + Q_BYTES, lane) + part * (CV * 2);
#pragma unroll
                for (int k = 0; k < BM / 16; k++) {
                    u32 x[MT][4];
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int h = 0; h < 4; h++)
                            x[m][h] = pack_pair<element>(s[m][2 * k + (h >> 1)][(h & 1) * 2],
                                                s[m][2 * k + (h >> 1)][(h & 1) * 2 + 1]);
#pragma unroll
                    for (int n = 0; n < CV / 16; n++) {
                        u32 y[4];
                        ldmatrix_trans(y, k_step(d_at, n) + k * 16 * DV * 2);
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            mma(dv[m][2 * n], x[m], y[0], y[1]);
                            mma(dv[m][2 * n + 1], x[m], y[2], y[3]);
                        }
                    }
                }
            }
            {
                const u32 q_at = b_fragment_trans<DQ>(at, lane) + part * (CQ * 2);
#pragma unroll
                for (int k = 0; k < BM / 16; k++) {
                    u32 x[MT][4];
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int h = 0; h < 4; h++)
                            x[m][h] = pack_pair<element>(dp[m][2 * k + (h >> 1)][(h & 1) * 2],
                                                dp[m][2 * k + (h >> 1)][(h & 1) * 2 + 1]);
#pragma unroll
                    for (int n = 0; n < CQ / 16; n++) {
                        u32 y[4];
                        ldmatrix_trans(y, k_step(q_at, n) + k * 16 * DQ * 2);
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            mma(dk[m][2 * n], x[m], y[0], y[1]);
                            mma(dk[m][2 * n + 1], x[m], y[2], y[3]);
                        }
                    }
                }
            }
        }

        const int end = tid(), g = (end & 31) >> 2, t = (end & 3) * 2;
        const i32 w0 = p.first + (end >> 5) * (MT * 16);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const i32 j = w0 + m * 16 + r * 8 + g;
                if (j >= p.k_len) continue;
                element* row = row_at<element>(a.dk, p.batch, p.k_start + j, p.head);
#pragma unroll
                for (int n = 0; n < CQ / 8; n++)
                    store_pair(row, part * CQ + n * 8 + t, a.d_qk, a.vectorized & W_DK, dk[m][n][r * 2] * a.scale,
                               dk[m][n][r * 2 + 1] * a.scale);
                row = row_at<element>(a.dv, p.batch, p.k_start + j, p.head);
#pragma unroll
                for (int n = 0; n < CV / 8; n++)
                    store_pair(row, part * CV + n * 8 + t, a.d_v, a.vectorized & W_DV, dv[m][n][r * 2], dv[m][n][r * 2 + 1]);
            }
    }
};

#define KEYS(NAME, DQ, DV, MT, BM, WARPS, PARTS, BLOCKS)                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) ELEMENT_NAME(NAME)(const __grid_constant__ AttentionArgs a) { \
        Keys<DQ, DV, MT, BM, WARPS, PARTS>::run(a);                                                              \
    }

KEYS(attention_backward_keys_64, 64, 64, 2, 32, 4, 1, 2)
KEYS(attention_backward_keys_128, 128, 128, 1, 64, 4, 1, 2)
KEYS(attention_backward_keys_192, 192, 128, 1, 32, 4, 1, 2)
KEYS(attention_backward_keys_256, 256, 256, 1, 16, 4, 2, 1)
