// Attention in f32 with FMA instructions, forward and backward: TILE × TILE tiles in shared memory, 128 threads.
// Thread (y, x) of 8 × 16 has rows y·R.. of a tile of scores at columns x, x+16, ..; and of a tile of outputs the same
// rows at channels 4·x.. of every 64. Masks and softmax are those of the 16-bit kernels.
#include "attention/common.cuh"

template <int D, int TILE> struct GenericAttention {
    static constexpr int R = TILE / 8, C = TILE / 16, N = D / 64;
    // Row pitches, in elements, that spread eight rows over all banks.
    static constexpr int LD = D + 4, LS = TILE + 1;
    static constexpr int ROWS = TILE * LD, BLOCK = TILE * LS;

    static __device__ __forceinline__ void fill(float* to, const float* from, i64 step, i32 rows, i32 channels) {
        for (int at = threadIdx.x; at < TILE * D; at += 128) {
            const int row = at / D, c = at % D;
            to[row * LD + c] = row < rows && c < channels ? from[row * step + c] : 0.0f;
        }
    }
    // s[row, column] = Σ_c left[row, c]·right[column, c]
    static __device__ __forceinline__ void product(float (&s)[R][C], const float* left, const float* right, int y,
                                                   int x) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++) s[r][c] = 0.0f;
#pragma unroll 4
        for (int k = 0; k < D; k += 4) {
            float4 u[R], v[C];
#pragma unroll
            for (int r = 0; r < R; r++) u[r] = *reinterpret_cast<const float4*>(left + (y * R + r) * LD + k);
#pragma unroll
            for (int c = 0; c < C; c++) v[c] = *reinterpret_cast<const float4*>(right + (x + 16 * c) * LD + k);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < C; c++) {
                    s[r][c] = fmaf(u[r].x, v[c].x, s[r][c]);
                    s[r][c] = fmaf(u[r].y, v[c].y, s[r][c]);
                    s[r][c] = fmaf(u[r].z, v[c].z, s[r][c]);
                    s[r][c] = fmaf(u[r].w, v[c].w, s[r][c]);
                }
        }
    }
    // sums[row, channel] += Σ_k block[row, k]·right[k, channel]
    static __device__ __forceinline__ void gather(float (&sums)[R][N][4], const float* block, const float* right, int y,
                                                  int x) {
#pragma unroll 4
        for (int k = 0; k < TILE; k++) {
            float u[R];
#pragma unroll
            for (int r = 0; r < R; r++) u[r] = block[(y * R + r) * LS + k];
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float4 v = *reinterpret_cast<const float4*>(right + k * LD + n * 64 + x * 4);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    sums[r][n][0] = fmaf(u[r], v.x, sums[r][n][0]);
                    sums[r][n][1] = fmaf(u[r], v.y, sums[r][n][1]);
                    sums[r][n][2] = fmaf(u[r], v.z, sums[r][n][2]);
                    sums[r][n][3] = fmaf(u[r], v.w, sums[r][n][3]);
                }
            }
        }
    }
    static __device__ __forceinline__ void clear(float (&sums)[R][N][4]) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[r][n][e] = 0.0f;
    }
    static __device__ __forceinline__ void write(float* row, const float (&sums)[N][4], float factor, bool none, int x,
                                                 i32 channels) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const i32 c = n * 64 + x * 4 + e;
                if (c < channels) row[c] = none ? 0.0f : sums[n][e] * factor;
            }
    }
    // A product as a logit times log2 e, and the derivative of the soft cap there.
    static __device__ __forceinline__ float score(const AttentionArgs& a, float s, float& slope) {
        slope = 1.0f;
        if (a.outer > 0.0f) {
            const float h = tanhf(s * a.inner);
            slope = fmaf(-h, h, 1.0f);
            return a.outer * h;
        }
        return s * a.inner;
    }
    // Reductions over the 16 threads of a row.
    static __device__ __forceinline__ float row_max(float x) {
#pragma unroll
        for (int d = 8; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
        return x;
    }
    static __device__ __forceinline__ float row_sum(float x) {
#pragma unroll
        for (int d = 8; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
        return x;
    }

    static __device__ __forceinline__ void forward(const AttentionArgs& a) {
        if (past_last_tile(a)) return;
        const Place p = place(a, blockIdx.x, a.heads, TILE, true);
        const int y = threadIdx.x >> 4, x = threadIdx.x & 15;
        float* q = reinterpret_cast<float*>(attention_shared);
        float *k = q + ROWS, *v = k + ROWS, *probs = v + ROWS;
        const i32 last = min(p.first + TILE, p.q_len) - 1;
        const i32 from = p.lo(a, p.first) / TILE, to = (p.hi(a, last) + TILE) / TILE;
        float sums[R][N][4], top[R], sum[R];
        clear(sums);
#pragma unroll
        for (int r = 0; r < R; r++) top[r] = NEG_INF, sum[r] = 0.0f;
        fill(q, row_at<float>(a.q, p.batch, p.q_start + p.first, p.head), a.q.token, p.q_len - p.first, a.d_qk);
        for (i32 tile = from; tile < to; tile++) {
            const i32 k0 = tile * TILE;
            __syncthreads();
            fill(k, row_at<float>(a.k, p.batch, p.k_start + k0, p.kv_head), a.k.token, p.k_len - k0, a.d_qk);
            fill(v, row_at<float>(a.v, p.batch, p.k_start + k0, p.kv_head), a.v.token, p.k_len - k0, a.d_v);
            __syncthreads();
            float s[R][C];
            product(s, q, k, y, x);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const i32 i = p.first + y * R + r, lo = p.lo(a, i), hi = p.hi(a, i);
                float most = top[r], slope;
#pragma unroll
                for (int c = 0; c < C; c++) {
                    const i32 j = k0 + x + 16 * c;
                    s[r][c] = j < lo || j > hi ? NEG_INF : score(a, s[r][c], slope);
                    most = fmaxf(most, s[r][c]);
                }
                most = row_max(most);
                const float origin = most == NEG_INF ? 0.0f : most, shrink = exp2f(top[r] - origin);
                float total = 0.0f;
#pragma unroll
                for (int c = 0; c < C; c++) {
                    const float e = exp2f(s[r][c] - origin);
                    probs[(y * R + r) * LS + x + 16 * c] = round_prob(e);
                    total += e;
                }
                sum[r] = fmaf(sum[r], shrink, total);
                top[r] = most;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sums[r][n][e] *= shrink;
            }
            __syncthreads();
            gather(sums, probs, v, y, x);
        }
        const float sink = a.sink ? reinterpret_cast<const float*>(a.sink)[p.head] * LOG2_E : NEG_INF;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const i32 i = p.first + y * R + r;
            const float total = row_sum(sum[r]);
            float lse, share;
            finalize_softmax(top[r], total, sink, lse, share);
            if (i >= p.q_len) continue;
            if (x == 0)
                reinterpret_cast<float*>(
                    a.lse)[p.batch * a.lse_batch + p.head * a.lse_head + (p.q_start + i) * a.lse_token] = lse;
            write(row_at<float>(a.out, p.batch, p.q_start + i, p.head), sums[r], share, p.lo(a, i) > p.hi(a, i), x, a.d_v);
        }
    }

    // p and ds of one (query, key) pair, 0 where the query does not see the key.
    static __device__ __forceinline__ void slope_of(const AttentionArgs& a, const Place& p, i32 i, i32 j, float weight,
                                                    float delta, float& s, float& dp) {
        float slope;
        const float e = exp2f(score(a, s, slope) - weight), d = e * (dp - delta) * slope;
        const bool seen = i < p.q_len && j >= p.lo(a, i) && j <= p.hi(a, i);
        s = seen ? e : 0.0f;
        dp = seen ? d : 0.0f;
    }

    static __device__ __forceinline__ void keys(const AttentionArgs& a) {
        if (past_last_tile(a)) return;
        const Place p = place(a, blockIdx.x, a.heads / a.group, TILE, false);
        const int y = threadIdx.x >> 4, x = threadIdx.x & 15;
        float* k = reinterpret_cast<float*>(attention_shared);
        float *v = k + ROWS, *q = v + ROWS, *dout = q + ROWS, *probs = dout + ROWS, *slopes = probs + BLOCK;
        const i32 last = min(p.first + TILE, p.k_len) - 1;
        const i32 from = max(p.first - p.off - a.right, 0) / TILE;
        const i32 to = (min(last - p.off + a.left, p.q_len - 1) + TILE) / TILE;
        float dk[R][N][4], dv[R][N][4];
        clear(dk);
        clear(dv);
        fill(k, row_at<float>(a.k, p.batch, p.k_start + p.first, p.head), a.k.token, p.k_len - p.first, a.d_qk);
        fill(v, row_at<float>(a.v, p.batch, p.k_start + p.first, p.head), a.v.token, p.k_len - p.first, a.d_v);
        for (i32 head = p.head * a.group; head < (p.head + 1) * a.group; head++) {
            const i64 row = (i64(p.batch) * a.heads + head) * a.tokens + p.q_start;
            for (i32 tile = from; tile < to; tile++) {
                const i32 q0 = tile * TILE;
                __syncthreads();
                fill(q, row_at<float>(a.q, p.batch, p.q_start + q0, head), a.q.token, p.q_len - q0, a.d_qk);
                fill(dout, row_at<float>(a.dout, p.batch, p.q_start + q0, head), a.dout.token, p.q_len - q0, a.d_v);
                __syncthreads();
                float s[R][C], dp[R][C];
                product(s, k, q, y, x);
                product(dp, v, dout, y, x);
#pragma unroll
                for (int c = 0; c < C; c++) {
                    const i32 i = q0 + x + 16 * c;
                    const i64 at = row + min(i, p.q_len - 1);
                    const float weight = reinterpret_cast<const float*>(a.lse_log2)[at];
                    const float delta = reinterpret_cast<const float*>(a.delta)[at];
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        slope_of(a, p, i, p.first + y * R + r, weight, delta, s[r][c], dp[r][c]);
                        probs[(y * R + r) * LS + x + 16 * c] = s[r][c];
                        slopes[(y * R + r) * LS + x + 16 * c] = dp[r][c];
                    }
                }
                __syncthreads();
                gather(dv, probs, dout, y, x);
                gather(dk, slopes, q, y, x);
            }
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            const i32 j = p.first + y * R + r;
            if (j >= p.k_len) continue;
            write(row_at<float>(a.dk, p.batch, p.k_start + j, p.head), dk[r], a.scale, false, x, a.d_qk);
            write(row_at<float>(a.dv, p.batch, p.k_start + j, p.head), dv[r], 1.0f, false, x, a.d_v);
        }
    }

    static __device__ __forceinline__ void queries(const AttentionArgs& a) {
        if (past_last_tile(a)) return;
        const Place p = place(a, blockIdx.x, a.heads, TILE, true);
        const int y = threadIdx.x >> 4, x = threadIdx.x & 15;
        float* q = reinterpret_cast<float*>(attention_shared);
        float *dout = q + ROWS, *k = dout + ROWS, *v = k + ROWS, *slopes = v + ROWS;
        const i32 last = min(p.first + TILE, p.q_len) - 1;
        const i32 from = p.lo(a, p.first) / TILE, to = (p.hi(a, last) + TILE) / TILE;
        const i64 row = (i64(p.batch) * a.heads + p.head) * a.tokens + p.q_start;
        float dq[R][N][4], weight[R], delta[R];
        clear(dq);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const i64 at = row + min(p.first + y * R + r, p.q_len - 1);
            weight[r] = reinterpret_cast<const float*>(a.lse_log2)[at];
            delta[r] = reinterpret_cast<const float*>(a.delta)[at];
        }
        fill(q, row_at<float>(a.q, p.batch, p.q_start + p.first, p.head), a.q.token, p.q_len - p.first, a.d_qk);
        fill(dout, row_at<float>(a.dout, p.batch, p.q_start + p.first, p.head), a.dout.token, p.q_len - p.first, a.d_v);
        for (i32 tile = from; tile < to; tile++) {
            const i32 k0 = tile * TILE;
            __syncthreads();
            fill(k, row_at<float>(a.k, p.batch, p.k_start + k0, p.kv_head), a.k.token, p.k_len - k0, a.d_qk);
            fill(v, row_at<float>(a.v, p.batch, p.k_start + k0, p.kv_head), a.v.token, p.k_len - k0, a.d_v);
            __syncthreads();
            float s[R][C], dp[R][C];
            product(s, q, k, y, x);
            product(dp, dout, v, y, x);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < C; c++) {
                    slope_of(a, p, p.first + y * R + r, k0 + x + 16 * c, weight[r], delta[r], s[r][c], dp[r][c]);
                    slopes[(y * R + r) * LS + x + 16 * c] = dp[r][c];
                }
            __syncthreads();
            gather(dq, slopes, k, y, x);
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            const i32 i = p.first + y * R + r;
            if (i >= p.q_len) continue;
            write(row_at<float>(a.dq, p.batch, p.q_start + i, p.head), dq[r], a.scale, p.lo(a, i) > p.hi(a, i), x, a.d_qk);
        }
    }
};

#define GENERIC_ATTENTION(D, TILE)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128)                                                        \
        attention_forward_##D##_f32(const __grid_constant__ AttentionArgs a) {                                   \
        GenericAttention<D, TILE>::forward(a);                                                                          \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(128)                                                        \
        attention_backward_keys_##D##_f32(const __grid_constant__ AttentionArgs a) {                             \
        GenericAttention<D, TILE>::keys(a);                                                                             \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(128)                                                        \
        attention_backward_queries_##D##_f32(const __grid_constant__ AttentionArgs a) {                          \
        GenericAttention<D, TILE>::queries(a);                                                                          \
    }

GENERIC_ATTENTION(64, 32)
GENERIC_ATTENTION(128, 32)
GENERIC_ATTENTION(256, 16)
