// Token counts per expert, token dropping, auxiliary loss weights and expert biases.
#include "args/router_counts.cuh"
#include "router/common.cuh"
#include "router/select.cuh"

// counts i64 [E] = 0
extern "C" __global__ void __launch_bounds__(256) counts_clear(const TokenCountArgs a) {
    const i32 e = blockIdx.x * 256 + threadIdx.x;
    if (e < a.experts) reinterpret_cast<i64*>(a.counts)[e] = 0;
}

// One thread to a row.
extern "C" __global__ void __launch_bounds__(256) count_tokens(const TokenCountArgs a) {
    __shared__ u32 bins[1024];
    for (i32 e = threadIdx.x; e < a.experts; e += 256) bins[e] = 0;
    __syncthreads();
    const i64 t = i64(blockIdx.x) * 256 + threadIdx.x;
    if (t < a.tokens && (!a.segments || reinterpret_cast<const i32*>(a.segments)[t] >= 0)) {
        const i32* row = reinterpret_cast<const i32*>(a.index) + t * a.k;
#pragma unroll 4
        for (i32 j = 0; j < a.k; j++) {
            const i32 e = row[j];
            if (e >= a.experts)
                fault(a.fault, FAULT_EXPERT);
            else if (e >= 0)
                atomicAdd(&bins[e], 1u);
        }
    }
    __syncthreads();
    for (i32 e = threadIdx.x; e < a.experts; e += 256)
        if (bins[e]) atomicAdd(reinterpret_cast<u64*>(a.counts) + e, u64(bins[e]));
}


// One block to an expert, which visits its entries (token·k + slot) in order. Dropping by position removes those
// beyond the capacity at once; dropping by probability lists them first.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) drop_over_capacity(const DropArgs a) {
    __shared__ u32 shared[32];
    const i32 expert = blockIdx.x;
    i32* index = reinterpret_cast<i32*>(a.index);
    float* probs = reinterpret_cast<float*>(a.probs);
    const i64* counts = reinterpret_cast<const i64*>(a.counts);
    const i64 n = counts[expert];
    if (n <= a.capacity) return;
    // At most the number of entries, which is below 2³¹.
    const u32 capacity = u32(a.capacity);
    auto drop = [&](i64 i) { index[i] = -1, probs[i] = 0.0f; };
    u32 before;
    block_scan(i32(threadIdx.x) < expert ? u32(counts[threadIdx.x]) : 0, shared, before);
    u32* list = reinterpret_cast<u32*>(a.list) + before;
    u32 seen = 0, more;
#pragma unroll 1
    for (i64 base = 0; base < a.entries; base += 4 * BLOCK_THREADS) {
        const i64 from = base + 4 * i64(threadIdx.x);
        bool hit[4];
        u32 hits = 0;
#pragma unroll
        for (int q = 0; q < 4; q++) {
            hit[q] = from + q < a.entries && index[from + q] == expert;
            hits += hit[q];
        }
        u32 rank = seen + block_scan(hits, shared, more);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            if (!hit[q]) continue;
            if (a.by_probability)
                list[rank] = u32(from + q);
            else if (rank >= capacity)
                drop(from + q);
            rank++;
        }
        seen += more;
    }
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<u64*>(a.dropped), u64(n - a.capacity));
    if (!a.by_probability) return;
    // The list is complete.
    __syncthreads();
    u32 left;
    const u32 last = select(n, capacity - 1, [&](i64 i) { return order(probs[list[i]]); }, left);
    seen = 0;
#pragma unroll 1
    for (i64 base = 0; base < n; base += BLOCK_THREADS) {
        const i64 i = base + threadIdx.x;
        const u32 key = i < n ? order(probs[list[i]]) : 0;
        const u32 rank = seen + block_scan(i < n && key == last, shared, more);
        if (i < n && (key < last || (key == last && rank > left))) drop(list[i]);
        seen += more;
    }
}

// Σ over a block of 1024 threads in a fixed order, in every thread; `shared`: 32 of T.
template <class T> __device__ __forceinline__ T block_total(T x, T* shared) {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    if (lane == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    x = shared[lane];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}


// One block. In f64 as on the CPU: counts reach millions and are squared.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) aux_loss_weights(const AuxLossWeightsArgs a) {
    __shared__ i64 whole[32];
    __shared__ double parts[32];
    const i64* counts = reinterpret_cast<const i64*>(a.counts);
    const float* sums = reinterpret_cast<const float*>(a.sums);
    float* weights = reinterpret_cast<float*>(a.weights);
    i64 total = 0;
    for (i64 i = threadIdx.x; i < a.cells; i += BLOCK_THREADS) total += counts[i];
    total = block_total(total, whole);
    const double steps = a.steps ? double(*reinterpret_cast<const float*>(a.steps)) : 1.0, k = double(a.k);
    const double all = double(total) / steps / k, mean = all / double(a.count), scale = double(a.factor) * double(a.experts);
    double loss = 0.0;
    auto weigh = [&](i64 i, double squared) {
        const double each = squared == 0.0 ? 0.0 : scale / (k * squared);
        const double weight = each * (double(counts[i]) / steps);
        weights[i] = float(weight);
        loss += weight * double(sums[i]);
    };
    if (a.by_tokens) {
        // One warp to a segment.
        const i32 lane = threadIdx.x & 31;
        for (i64 s = threadIdx.x >> 5; s < a.count; s += BLOCK_THREADS / 32) {
            i64 own = 0;
            for (i32 e = lane; e < a.experts; e += 32) own += counts[s * a.experts + e];
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) own += __shfl_xor_sync(~0u, own, d);
            const double tokens = double(own) / steps / k;
            for (i32 e = lane; e < a.experts; e += 32) weigh(s * a.experts + e, all * tokens);
        }
    } else {
        for (i64 i = threadIdx.x; i < a.cells; i += BLOCK_THREADS) weigh(i, mean * mean);
    }
    loss = block_total(loss, parts);
    if (threadIdx.x == 0) *reinterpret_cast<float*>(a.loss) += float(loss);
}


// One block, one thread to an expert. Compares integers, because a mean would be rounded.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) update_expert_bias(const ExpertBiasArgs a) {
    __shared__ i64 whole[32];
    const bool mine = i32(threadIdx.x) < a.experts;
    i64* counts = reinterpret_cast<i64*>(a.counts);
    const i64 count = mine ? counts[threadIdx.x] : 0, total = block_total(count, whole);
    if (!mine) return;
    float* bias = reinterpret_cast<float*>(a.bias) + threadIdx.x;
    if (total != count * a.experts) *bias += total > count * a.experts ? a.rate : -a.rate;
    counts[threadIdx.x] = 0;
}
