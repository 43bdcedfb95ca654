// Router z-loss: the squared log-sum-exp of each row of logits, and its gradient.
#include "args/router_losses.cuh"
#include "router/common.cuh"

constexpr int ROWS = 4;

template <int V, class T> __device__ __forceinline__ void z_loss(const ZLossArgs& a) {
    constexpr int WARPS = Block<V>::warps;
    __shared__ double shared[2][WARPS];
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 first = (i64(blockIdx.x) * WARPS + warp) * ROWS;
    double squares = 0.0, rows = 0.0;
#pragma unroll 1
    for (i64 t = first; t < min(first + ROWS, a.tokens); t++) {
        if (reinterpret_cast<const i32*>(a.segments)[t] < 0) continue;
        float x[V], y[V], sum;
        load_row(reinterpret_cast<const T*>(a.logits) + t * a.experts, a.experts, x);
        const float most = exponentials(x, a.experts, y, sum);
        const double lse = double(most + logf(sum));
        squares += lse * lse, rows += 1.0;
    }
    if (lane == 0) shared[0][warp] = squares, shared[1][warp] = rows;
    __syncthreads();
    if (threadIdx.x < 2) {
        double total = 0.0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared[threadIdx.x][w];
        reinterpret_cast<double*>(a.parts)[i64(blockIdx.x) * 2 + threadIdx.x] = total;
    }
}
ROUTER_KERNELS(z_loss, z_loss, ZLossArgs)

// sums += Σ parts, by one block of 512: each thread strides over the parts, then a tree.
extern "C" __global__ void __launch_bounds__(512) z_loss_total(const ZLossArgs a) {
    __shared__ double shared[512];
    const u32 which = threadIdx.x & 1;
    const double* parts = reinterpret_cast<const double*>(a.parts);
    double total = 0.0;
#pragma unroll 4
    for (i64 i = threadIdx.x >> 1; i < a.blocks; i += 256) total += parts[2 * i + which];
    shared[threadIdx.x] = total;
    for (u32 half = 256; half > 1; half >>= 1) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    if (threadIdx.x < 2) reinterpret_cast<double*>(a.sums)[threadIdx.x] += shared[threadIdx.x];
}

template <int V, class T> __device__ __forceinline__ void z_loss_backward(const ZLossArgs& a) {
    const i32 lane = threadIdx.x & 31;
    const i64 t = i64(blockIdx.x) * Block<V>::warps + (threadIdx.x >> 5);
    if (t >= a.tokens || reinterpret_cast<const i32*>(a.segments)[t] < 0) return;
    T* out = reinterpret_cast<T*>(a.dlogits) + t * a.experts;
    float x[V], y[V], old[V], sum;
    load_row(reinterpret_cast<const T*>(a.logits) + t * a.experts, a.experts, x);
#pragma unroll
    for (int s = 0; s < V; s++) old[s] = s * 32 + lane < a.experts ? to_f32(out[s * 32 + lane]) : 0.0f;
    const float scale = float(double(a.factor) / fmax(reinterpret_cast<const double*>(a.sums)[1], 1.0));
    const float most = exponentials(x, a.experts, y, sum);
    const float each = scale * 2.0f * (most + logf(sum));
#pragma unroll
    for (int s = 0; s < V; s++)
        if (s * 32 + lane < a.experts && x[s] != none()) out[s * 32 + lane] = from_f32<T>(old[s] + each * (y[s] / sum));
}
ROUTER_KERNELS(z_loss_backward, z_loss_backward, ZLossArgs)
