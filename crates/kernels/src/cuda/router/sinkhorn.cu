// Sinkhorn normalization, and quantile balancing.
#include "args/router_sinkhorn.cuh"
#include "router/common.cuh"
#include "router/select.cuh"

// d1 = 1, done = 0. One block.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) sinkhorn_begin(const SinkhornArgs a) {
    if (i32(threadIdx.x) < a.experts) reinterpret_cast<float*>(a.d1)[threadIdx.x] = 1.0f;
    if (threadIdx.x == 0) *reinterpret_cast<i32*>(a.done) = 0;
}

// d0 of a block's rows, and its partial column sums of d0·C, C = exp(logits).
template <int V, class T> __device__ __forceinline__ void sinkhorn_rows(const SinkhornArgs& a) {
    constexpr int WARPS = Block<V>::warps;
    __shared__ double sums[WARPS][V * 32];
    if (*reinterpret_cast<const i32*>(a.done)) return;
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 first = (i64(blockIdx.x) * WARPS + warp) * a.rows;
    const float* d1 = reinterpret_cast<const float*>(a.d1);
    double column[V] = {};
#pragma unroll 1
    for (i64 t = first; t < min(first + a.rows, a.tokens); t++) {
        float c[V];
        load_row(reinterpret_cast<const T*>(a.logits) + t * a.experts, a.experts, c);
        double sum = 0.0;
#pragma unroll
        for (int s = 0; s < V; s++) {
            c[s] = expf(c[s]);
            if (s * 32 + lane < a.experts) sum += double(c[s] * d1[s * 32 + lane]);
        }
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        const float d0 = float(1.0 / (double(a.tokens) * (sum + 1e-8)));
        if (lane == 0) reinterpret_cast<float*>(a.d0)[t] = d0;
#pragma unroll
        for (int s = 0; s < V; s++) column[s] += double(d0 * c[s]);
    }
#pragma unroll
    for (int s = 0; s < V; s++) sums[warp][s * 32 + lane] = column[s];
    __syncthreads();
    for (i32 c = threadIdx.x; c < a.experts; c += Block<V>::threads) {
        double total = 0.0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w][c];
        reinterpret_cast<double*>(a.parts)[i64(blockIdx.x) * a.experts + c] = total;
    }
}
ROUTER_KERNELS(sinkhorn_rows, sinkhorn_rows, SinkhornArgs)

// d1 from the partial sums, and whether it has converged. One block.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) sinkhorn_columns(const SinkhornArgs a) {
    __shared__ double moved[32];
    if (*reinterpret_cast<const i32*>(a.done)) return;
    const i32 e = threadIdx.x;
    double change = 0.0;
    if (e < a.experts) {
        const double* parts = reinterpret_cast<const double*>(a.parts) + e;
        double sum = 0.0;
#pragma unroll 8
        for (i64 b = 0; b < a.blocks; b++) sum += parts[b * a.experts];
        float* d1 = reinterpret_cast<float*>(a.d1) + e;
        const float next = float(1.0 / (double(a.experts) * (sum + 1e-8)));
        change = double(fabsf(next - *d1));
        *d1 = next;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) change += __shfl_xor_sync(~0u, change, d);
    if ((e & 31) == 0) moved[e >> 5] = change;
    __syncthreads();
    if (e == 0) {
        double total = 0.0;
        for (int w = 0; w < 32; w++) total += moved[w];
        // NaN stops the iteration as well.
        if (!(total / double(a.experts) > 1e-4)) *reinterpret_cast<i32*>(a.done) = 1;
    }
}

template <int V, class T> __device__ __forceinline__ void sinkhorn_write(const SinkhornArgs& a) {
    const i32 lane = threadIdx.x & 31;
    const i64 t = i64(blockIdx.x) * Block<V>::warps + (threadIdx.x >> 5);
    if (t >= a.tokens) return;
    float c[V];
    load_row(reinterpret_cast<const T*>(a.logits) + t * a.experts, a.experts, c);
    const float d0 = reinterpret_cast<const float*>(a.d0)[t];
    const float* d1 = reinterpret_cast<const float*>(a.d1);
    float* out = reinterpret_cast<float*>(a.out) + t * a.experts;
#pragma unroll
    for (int s = 0; s < V; s++)
        if (s * 32 + lane < a.experts) out[s * 32 + lane] = d1[s * 32 + lane] * expf(c[s]) * d0;
}
ROUTER_KERNELS(sinkhorn_write, sinkhorn_write, SinkhornArgs)


// alpha[t] = the (k+1)-th largest of logits - beta.
template <int V, class T> __device__ __forceinline__ void quantile_rows(const QuantileArgs& a) {
    const i32 lane = threadIdx.x & 31;
    const i64 t = i64(blockIdx.x) * Block<V>::warps + (threadIdx.x >> 5);
    if (t >= a.tokens) return;
    float x[V];
    load_row(reinterpret_cast<const T*>(a.logits) + t * a.experts, a.experts, x);
#pragma unroll
    for (int s = 0; s < V; s++)
        if (s * 32 + lane < a.experts) x[s] -= reinterpret_cast<const float*>(a.beta)[s * 32 + lane];
    u32 key[V];
    keys_of(x, a.experts, key);
#pragma unroll 1
    for (i32 j = 0; j < a.k; j++) take_best(key);
    const float alpha = at_column(x, take_best(key));
    if (lane == 0) reinterpret_cast<float*>(a.alpha)[t] = alpha;
}
ROUTER_KERNELS(quantile_rows, quantile_rows, QuantileArgs)

// One block to an expert's column of logits - alpha.
template <class T> __device__ __forceinline__ void quantile_columns(const QuantileArgs& a) {
    const T* x = reinterpret_cast<const T*>(a.logits) + blockIdx.x;
    const float* alpha = reinterpret_cast<const float*>(a.alpha);
    u32 left;
    const u32 key = select(a.tokens, a.place, [&](i64 t) { return order(to_f32(x[t * a.experts]) - alpha[t]); }, left);
    if (threadIdx.x == 0) reinterpret_cast<float*>(a.estimate)[blockIdx.x] += unordered(key);
}
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) quantile_columns_f32(const QuantileArgs a) { quantile_columns<float>(a); }
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) quantile_columns_bf16(const QuantileArgs a) { quantile_columns<bf16>(a); }
