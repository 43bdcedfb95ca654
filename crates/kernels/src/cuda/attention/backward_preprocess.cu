// Per-row preprocessing of the backward pass (delta = Σ dout·out, lse in base 2), the gradient of the attention sink,
// and zeros for tokens that belong to no sequence.
#include "attention/common.cuh"

// Eight lanes to a row. lse_log2 is lse·log2 e; for a query whose logits were all -inf it becomes +inf, so that every
// exp2(s - lse_log2) is 0.
template <class T> __device__ __forceinline__ void attention_delta(const AttentionArgs& a) {
    const i64 r = (i64(blockIdx.x) * blockDim.x + threadIdx.x) >> 3, inside = a.q_to - a.q_from;
    const i32 lane = threadIdx.x & 7, head = i32(r % a.heads);
    const i64 batch = r / a.heads / inside, token = r / a.heads % inside + a.q_from;
    const bool there = batch < a.batches;
    float sum = 0.0f;
    if (there) {
        const T* x = row_at<T>(a.out, batch, token, head);
        const T* y = row_at<T>(a.dout, batch, token, head);
        constexpr int N = VecWidth<T>::count;
        if ((a.vectorized & W_OUT) && (a.vectorized & W_DOUT) && a.d_v % N == 0) {
            for (i32 c = lane * N; c < a.d_v; c += 8 * N) {
                float u[N], v[N];
                load(x + c, u);
                load(y + c, v);
#pragma unroll
                for (int e = 0; e < N; e++) sum = fmaf(u[e], v[e], sum);
            }
        } else {
            for (i32 c = lane; c < a.d_v; c += 8) sum = fmaf(to_f32(x[c]), to_f32(y[c]), sum);
        }
    }
#pragma unroll
    for (int d = 4; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (there && lane == 0) {
        const i64 at = (batch * a.heads + head) * a.tokens + token;
        const float lse =
            reinterpret_cast<const float*>(a.lse)[batch * a.lse_batch + head * a.lse_head + token * a.lse_token];
        reinterpret_cast<float*>(a.lse_log2)[at] = lse == NEG_INF ? -NEG_INF : lse * LOG2_E;
        reinterpret_cast<float*>(a.delta)[at] = sum;
    }
}

#define ATTENTION_DELTA(T, NAME) \
    extern "C" __global__ void attention_delta_##NAME(const __grid_constant__ AttentionArgs a) { attention_delta<T>(a); }
FOR_EACH_TYPE(ATTENTION_DELTA)

// dsink[head] -= Σ exp(sink - lse)·delta. One block to a head, in f64 and in a fixed order.
extern "C" __global__ void attention_dsink_f32(const __grid_constant__ AttentionArgs a) {
    __shared__ double parts[32];
    const i32 head = blockIdx.x;
    const float sink = reinterpret_cast<const float*>(a.sink)[head] * LOG2_E;
    double sum = 0.0;
    for (i32 b = 0; b < a.batches; b++) {
        const i64 row = (i64(b) * a.heads + head) * a.tokens;
        for (i64 i = a.q_from + threadIdx.x; i < a.q_to; i += blockDim.x) {
            const float lse = reinterpret_cast<const float*>(a.lse_log2)[row + i];
            if (lse != -NEG_INF) sum -= double(exp2f(sink - lse) * reinterpret_cast<const float*>(a.delta)[row + i]);
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double all = 0.0;
        for (u32 w = 0; w < blockDim.x / 32; w++) all += parts[w];
        reinterpret_cast<float*>(a.dsink)[head] += float(all);
    }
}

// Zeroes the rows of tokens outside from..to.
template <class T> __device__ __forceinline__ void attention_zero_gaps(const ZeroGapsArgs& a) {
    const i64 n = (a.tokens - (a.to - a.from)) * a.heads * a.channels;
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += i64(gridDim.x) * blockDim.x) {
        const i64 c = i % a.channels, h = i / a.channels % a.heads, t = i / a.channels / a.heads;
        row_at<T>(a.x, 0, t < a.from ? t : t - a.from + a.to, h)[c] = from_f32<T>(0.0f);
    }
}

#define ATTENTION_ZERO_GAPS(T, NAME) \
    extern "C" __global__ void attention_zero_gaps_##NAME(const __grid_constant__ ZeroGapsArgs a) { attention_zero_gaps<T>(a); }
FOR_EACH_TYPE(ATTENTION_ZERO_GAPS)
