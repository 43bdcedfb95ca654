// Auxiliary load-balancing loss of the router: statistics of scores, and the gradient.
//
// Scores are summed in 64-bit fixed point in units of 1/unit, so that atomics in any order give the same sum: scores
// are between 0 and 1, and `unit` is the power of two for which a sum over all rows just fits. NaN is flagged
// separately.
#include "args/router_losses.cuh"
#include "router/common.cuh"

extern "C" __global__ void __launch_bounds__(256) balance_clear(const AuxLossArgs a) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= a.cells) return;
    reinterpret_cast<i64*>(a.fixed)[i] = 0;
    reinterpret_cast<i64*>(a.counts)[i] = 0;
    reinterpret_cast<u32*>(a.nan)[i] = 0;
}

extern "C" __global__ void __launch_bounds__(256) balance_total(const AuxLossArgs a) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= a.cells) return;
    const float sum = float(double(reinterpret_cast<const i64*>(a.fixed)[i]) / a.unit);
    reinterpret_cast<float*>(a.sums)[i] = reinterpret_cast<const u32*>(a.nan)[i] ? __int_as_float(0x7fc00000) : sum;
}

// Adds to the statistics of one (segment, expert).
__device__ __forceinline__ void add_cell(const AuxLossArgs& a, i64 cell, float sum, u32 count) {
    if (sum != sum)
        reinterpret_cast<u32*>(a.nan)[cell] = 1;
    else if (sum != 0.0f)
        atomicAdd(reinterpret_cast<u64*>(a.fixed) + cell, u64(__double2ll_rn(double(sum) * a.unit)));
    if (count) atomicAdd(reinterpret_cast<u64*>(a.counts) + cell, u64(count));
}

// Segment of a row, negative where the row does not count.
__device__ __forceinline__ i32 segment_of(const AuxLossArgs& a, i64 t) {
    const i32 segment = reinterpret_cast<const i32*>(a.segments)[t];
    if (segment < a.count) return segment;
    fault(a.fault, FAULT_EXPERT);
    return -1;
}

// Rows of a warp.
constexpr int ROWS = 4;

// A warp accumulates neighbouring rows while they belong to one segment. If a whole block stays in one segment, its
// warps are reduced first.
template <int V, class T> __device__ __forceinline__ void balance(const AuxLossArgs& a) {
    constexpr int WARPS = Block<V>::warps;
    __shared__ float sums[WARPS][V * 32];
    __shared__ u32 counts[WARPS][V * 32];
    __shared__ i32 stayed[WARPS];
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 first = (i64(blockIdx.x) * WARPS + warp) * ROWS;
    float sum[V] = {};
    u32 count[V] = {};
    i32 current = -1;
    bool one = true;
    // Through shared memory: unrolled over V columns, this code would otherwise exist twice.
    auto put_down = [&]() {
#pragma unroll
        for (int s = 0; s < V; s++) {
            sums[warp][s * 32 + lane] = sum[s], counts[warp][s * 32 + lane] = count[s];
            sum[s] = 0.0f, count[s] = 0;
        }
        __syncwarp();
    };
    auto flush = [&]() {
#pragma unroll 1
        for (i32 c = lane; c < a.experts; c += 32)
            add_cell(a, i64(current) * a.experts + c, sums[warp][c], counts[warp][c]);
    };
#pragma unroll 1
    for (i64 t = first; t < min(first + ROWS, a.tokens); t++) {
        const i32 segment = segment_of(a, t);
        if (segment < 0) continue;
        if (segment != current && current >= 0) {
            put_down();
            flush();
            one = false;
        }
        current = segment;
        float x[V], y[V];
        load_row(reinterpret_cast<const T*>(a.logits) + t * a.experts, a.experts, x);
        normalized(a.score, x, a.experts, y);
#pragma unroll
        for (int s = 0; s < V; s++) sum[s] += y[s];
        u32 key[V];
        keys_of(x, a.experts, key);
#pragma unroll 1
        for (i32 j = 0; j < a.k; j++) take_best(key);
        // Selected columns have key 0.
#pragma unroll
        for (int s = 0; s < V; s++) count[s] += key[s] == 0;
    }
    put_down();
    if (lane == 0) stayed[warp] = one ? current : -2;
    __syncthreads();
    i32 common = -1;
    bool alike = true;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (stayed[w] == -1) continue;
        alike = alike && stayed[w] >= 0 && (common < 0 || common == stayed[w]);
        common = stayed[w];
    }
    if (!alike) {
        if (current >= 0) flush();
        return;
    }
    if (common < 0) return;
    for (i32 c = threadIdx.x; c < a.experts; c += Block<V>::threads) {
        float total = 0.0f;
        u32 times = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w][c], times += counts[w][c];
        add_cell(a, i64(common) * a.experts + c, total, times);
    }
}
ROUTER_KERNELS(balance, balance, AuxLossArgs)

template <int V, class T> __device__ __forceinline__ void aux_loss_backward(const AuxLossArgs& a) {
    const i32 lane = threadIdx.x & 31;
    const i64 t = i64(blockIdx.x) * Block<V>::warps + (threadIdx.x >> 5);
    if (t >= a.tokens) return;
    const i32 segment = segment_of(a, t);
    if (segment < 0) return;
    const float* weights = reinterpret_cast<const float*>(a.weights) + i64(segment) * a.experts;
    T* out = reinterpret_cast<T*>(a.dlogits) + t * a.experts;
    float x[V], y[V], w[V], old[V];
    load_row(reinterpret_cast<const T*>(a.logits) + t * a.experts, a.experts, x);
#pragma unroll
    for (int s = 0; s < V; s++) {
        const i32 c = s * 32 + lane;
        w[s] = c < a.experts ? weights[c] : 0.0f;
        old[s] = c < a.experts ? to_f32(out[c]) : 0.0f;
    }
    const float sum = normalized(a.score, x, a.experts, y);
    float mean = 0.0f;
#pragma unroll
    for (int s = 0; s < V; s++) mean += w[s] * y[s];
    mean = warp_sum(mean);
#pragma unroll
    for (int s = 0; s < V; s++) {
        if (s * 32 + lane >= a.experts || x[s] == none()) continue;
        const float d = is_softmax(a.score) ? y[s] * (w[s] - mean) : (w[s] - mean) / sum * slope(a.score, x[s]);
        out[s * 32 + lane] = from_f32<T>(old[s] + d);
    }
}
ROUTER_KERNELS(aux_loss_backward, aux_loss_backward, AuxLossArgs)
