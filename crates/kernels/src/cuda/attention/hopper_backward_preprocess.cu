// Kernels around the Hopper backward kernel: bounds of k and v, per-query preprocessing, and the conversion of
// fixed-point dq to bf16.
#include "attention/hopper_common.cuh"
#include "hopper_tiles.cuh"

// bounds[batch·kv heads][chunk of 128 tokens] = largest |k|, largest |v|². NaN is ignored here: it propagates through
// lse and out.
template <int D> __device__ __forceinline__ void hopper_bounds(const HopperArgs& m) {
    constexpr int LANES = D / 8, ROWS = 256 / LANES;
    const AttentionArgs& a = m.a;
    __shared__ float parts[16];
    if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<i32*>(m.next_tile) = 0;
    const i32 chunks = m.chunks, pair = blockIdx.x / chunks, chunk = blockIdx.x - pair * chunks;
    const i32 kv_heads = a.heads / a.group, batch = pair / kv_heads, head = pair - batch * kv_heads;
    const i32 lane = threadIdx.x % LANES, row = threadIdx.x / LANES, c = lane * 8;
    float most_k = 0.0f, most_v = 0.0f;
#pragma unroll
    for (i32 i = 0; i < 128 / ROWS; i++) {
        const i32 token = m.k_from + chunk * 128 + i * ROWS + row;
        float x[8] = {}, y[8] = {};
        if (token < m.k_to) {
            if (c < a.d_qk) load(row_at<bf16>(a.k, batch, token, head) + c, x);
            if (c < a.d_v) load(row_at<bf16>(a.v, batch, token, head) + c, y);
        }
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            most_k = fmaxf(most_k, fabsf(x[e]));
            sum = fmaf(y[e], y[e], sum);
        }
#pragma unroll
        for (int d = LANES / 2; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        most_v = fmaxf(most_v, sum);
    }
    most_k = warp_max(most_k);
    most_v = warp_max(most_v);
    if ((threadIdx.x & 31) == 0) {
        parts[threadIdx.x >> 5] = most_k;
        parts[8 + (threadIdx.x >> 5)] = most_v;
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        float x = 0.0f;
        for (int w = 0; w < 8; w++) x = fmaxf(x, parts[threadIdx.x * 8 + w]);
        reinterpret_cast<float*>(m.bounds)[blockIdx.x * 2 + threadIdx.x] = x;
    }
}
#define ROWS_KERNEL(NAME, ...)                                                                   \
    extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ HopperArgs m) {   \
        __VA_ARGS__(m);                                                                          \
    }
ROWS_KERNEL(attention_hopper_bounds_64_bf16, hopper_bounds<64>)
ROWS_KERNEL(attention_hopper_bounds_128_bf16, hopper_bounds<128>)
ROWS_KERNEL(attention_hopper_bounds_256_bf16, hopper_bounds<256>)

// 128 rows of a head to a block: lse_log2 = lse·log2 e (+inf for -inf and past the end) and delta = Σ dout·out; with
// fixed-point dq (PER_HEAD is false) also the steps, and zeros in dq_accum. Of 16 rows, those that a thread of the
// backward kernel needs are adjacent: row 8·h + 2·t + e is at 4·t + 2·h + e. Steps are in order. Stored as 64
// lse_log2, 64 deltas, 64 steps. v has up to D channels, dq_accum W.
template <int D, int W, bool PER_HEAD> __device__ __forceinline__ void hopper_prepare(const HopperArgs& m) {
    constexpr int LANES = D / 8, ROWS = 256 / LANES;
    const AttentionArgs& a = m.a;
    if (past_last_tile(a)) return;
    __shared__ float most[16];
    const HopperTile p = hopper_tile(m, blockIdx.x, a.heads, 128, false);
    float most_k = 0.0f, most_v = 0.0f;
    if constexpr (!PER_HEAD) {
        const float* bounds = reinterpret_cast<const float*>(m.bounds) +
                              i64(p.batch * (a.heads / a.group) + p.kv_head) * m.chunks * 2;
        float x = 0.0f;
        // Even threads reduce bounds of keys, odd ones of values.
        for (i32 i = threadIdx.x; i < m.chunks * 2; i += 256) x = fmaxf(x, bounds[i]);
#pragma unroll
        for (int d = 16; d > 1; d >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
        if ((threadIdx.x & 31) < 2) most[(threadIdx.x & 1) * 8 + (threadIdx.x >> 5)] = x;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < 8; w++) most_k = fmaxf(most_k, most[w]), most_v = fmaxf(most_v, most[8 + w]);
    }
    const i32 lane = threadIdx.x % LANES, c = lane * 8;
    const i64 base = (i64(p.batch) * a.heads + p.head) * m.padded + p.row;
    if constexpr (!PER_HEAD) {
        int4* zeros = reinterpret_cast<int4*>(reinterpret_cast<i32*>(m.dq_accum) + (base + p.first) * W) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < 128 * W / 1024; i++) zeros[i * 256] = make_int4(0, 0, 0, 0);
    }
    // Rows whose loads are in flight together.
    constexpr int BATCH = 128 / ROWS < 4 ? 128 / ROWS : 4;
    Packed<bf16> out[BATCH], dout[BATCH];
#pragma unroll
    for (i32 n = 0; n < 128 / ROWS; n++) {
        const i32 r = n * ROWS + i32(threadIdx.x / LANES), i = p.first + r;
        const bool there = i < p.q_len;
        if (n % BATCH == 0) {
#pragma unroll
            for (i32 j = 0; j < BATCH; j++) {
                const i32 at = i + j * ROWS;
                out[j] = dout[j] = {};
                if (at < p.q_len && c < a.d_v) {
                    out[j] = *reinterpret_cast<const Packed<bf16>*>(row_at<bf16>(a.out, p.batch, p.q_start + at, p.head) + c);
                    dout[j] = *reinterpret_cast<const Packed<bf16>*>(row_at<bf16>(a.dout, p.batch, p.q_start + at, p.head) + c);
                }
            }
#pragma unroll
            for (i32 j = 0; j < BATCH; j++) opaque(out[j]), opaque(dout[j]);
        }
        float x[8], y[8];
        unpack(out[n % BATCH], x);
        unpack(dout[n % BATCH], y);
        float sum = 0.0f, norm = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++) sum = fmaf(x[e], y[e], sum), norm = fmaf(y[e], y[e], norm);
#pragma unroll
        for (int d = LANES / 2; d > 0; d >>= 1) {
            sum += __shfl_xor_sync(~0u, sum, d);
            norm += __shfl_xor_sync(~0u, norm, d);
        }
        if (lane == 0) {
            float lse = NEG_INF;
            if (there)
                lse = reinterpret_cast<const float*>(
                    a.lse)[p.batch * a.lse_batch + p.head * a.lse_head + (p.q_start + i) * a.lse_token];
            float* rows = reinterpret_cast<float*>(a.lse_log2) + (base + p.first + (r & ~63)) * 3;
            const i32 at = (r & 48) + ((r & 6) << 1 | (r & 8) >> 2 | (r & 1));
            rows[at] = lse == NEG_INF ? -NEG_INF : lse * LOG2_E;
            rows[64 + at] = sum;
            if constexpr (!PER_HEAD) {
                const float bound = (sqrtf(norm) * sqrtf(most_v) + fabsf(sum)) * most_k;
                // bound < 2^(e + 1), so that sums stay below 2^29.
                const i32 e = i32(__float_as_uint(bound) >> 23) - 127;
                float step = bound > 0.0f ? __uint_as_float(u32(min(max(28 - e, -100), 100) + 127) << 23) : 1.0f;
                // Non-finite inputs make the whole row NaN.
                if (there && (!isfinite(bound) || !isfinite(sum) || isnan(lse) || lse == -NEG_INF))
                    step = __uint_as_float(0x7fffffff);
                rows[128 + (r & 63)] = step;
            }
        }
    }
}
ROWS_KERNEL(attention_hopper_preprocess_64_bf16, hopper_prepare<64, 64, false>)
ROWS_KERNEL(attention_hopper_preprocess_per_head_64_bf16, hopper_prepare<64, 64, true>)
ROWS_KERNEL(attention_hopper_preprocess_128_bf16, hopper_prepare<128, 128, false>)
ROWS_KERNEL(attention_hopper_preprocess_192_bf16, hopper_prepare<128, 192, false>)
ROWS_KERNEL(attention_hopper_preprocess_256_bf16, hopper_prepare<256, 256, false>)

// Converts 128 rows of dq_accum to dq: 64 rows after another, 64 channels after another, 64 × 64 to a warpgroup, in
// the order in which the backward kernel stored its accumulators.
template <int W> __device__ __forceinline__ void hopper_finish(const HopperArgs& m) {
    const AttentionArgs& a = m.a;
    if (past_last_tile(a)) return;
    const HopperTile p = hopper_tile(m, blockIdx.x, a.heads, 128, false);
    const i64 at = (i64(p.batch) * a.heads + p.head) * m.padded + p.row + p.first;
    const int wg = threadIdx.x >> 7, self = threadIdx.x & 127, lane = self & 31, warp = self >> 5;
#pragma unroll 1
    for (int n = 0; n < W / 64; n++) {
        const i32 place = n * 2 + wg, tile = place / (W / 64) * 64, column = place % (W / 64) * 64;
        const i32 inside = warp * 16 + (lane >> 2);
        const int2* from = reinterpret_cast<const int2*>(reinterpret_cast<const i32*>(m.dq_accum) + (at * W + place * 4096)) + self;
        float dq[32];
#pragma unroll
        for (int j = 0; j < 16; j++) unpack_fixed_point(from[j * 128], dq[2 * j], dq[2 * j + 1]);
        bf16* row[2];
        float f[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const i32 i = p.first + tile + inside + r * 8;
            f[r] = a.scale / reinterpret_cast<const float*>(a.lse_log2)[(at + tile) * 3 + 128 + inside + r * 8];
            row[r] = i < p.q_len ? row_at<bf16>(a.dq, p.batch, p.q_start + i, p.head) + column : nullptr;
        }
        store_rows<64>(dq, row[0], row[1], f[0], f[1], a.d_qk - column);
    }
}
ROWS_KERNEL(attention_hopper_convert_dq_64_bf16, hopper_finish<64>)
ROWS_KERNEL(attention_hopper_convert_dq_128_bf16, hopper_finish<128>)
ROWS_KERNEL(attention_hopper_convert_dq_192_bf16, hopper_finish<192>)
ROWS_KERNEL(attention_hopper_convert_dq_256_bf16, hopper_finish<256>)
