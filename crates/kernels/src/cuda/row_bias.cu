// Weighted bias of each expert's rows, and its gradient. Segment e is counts[e] rows from offsets[e]; offsets ascend.
#include "args/row_bias.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// As in row_bias.rs.
constexpr i64 PART_ROWS = 64;
constexpr i64 MAX_PARTS = 512;

// The last segment that starts at or before a row (empty ones before it start there too), or -1.
__device__ __forceinline__ i32 segment_at(const GroupedBiasArgs& a, i64 row) {
    const i32* offsets = reinterpret_cast<const i32*>(a.offsets);
    i32 low = -1, high = i32(a.experts);
    while (high - low > 1) {
        i32 middle = (low + high) >> 1;
        if (offsets[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}
__device__ __forceinline__ i64 segment_end(const GroupedBiasArgs& a, i32 e) {
    return min(i64(reinterpret_cast<const i32*>(a.offsets)[e]) + reinterpret_cast<const i32*>(a.counts)[e], a.rows);
}

// Rows of a part. They follow from the end of the last segment, so that sums do not depend on the room behind it.
__device__ __forceinline__ i64 part_rows(const GroupedBiasArgs& a) {
    const i64 rows = min(max(i64(reinterpret_cast<const i32*>(a.offsets)[a.experts]), i64(0)), a.rows);
    return max((rows + MAX_PARTS - 1) / MAX_PARTS, PART_ROWS);
}

// The row of this warp and its segment; -1 in gaps and past the end.
__device__ __forceinline__ i32 own_row(const GroupedBiasArgs& a, i64& row) {
    row = i64(blockIdx.x) * WARPS + (threadIdx.x >> 5);
    if (row >= a.rows) return -1;
    i32 e = segment_at(a, row);
    return e >= 0 && row < segment_end(a, e) ? e : -1;
}

__device__ __forceinline__ float row_weight(const GroupedBiasArgs& a, i64 row) {
    return a.weights ? reinterpret_cast<const float*>(a.weights)[row] : 1.0f;
}

// y[r] += weights[r]·bias[e]
template <class T> __device__ __forceinline__ void add_bias(const GroupedBiasArgs& a) {
    constexpr int V = VecWidth<T>::count;
    i64 row;
    const i32 e = own_row(a, row);
    if (e < 0) return;
    const float weight = row_weight(a, row);
    T* y = reinterpret_cast<T*>(a.y) + row * a.width;
    const T* bias = reinterpret_cast<const T*>(a.bias) + i64(e) * a.width;
#pragma unroll 1
    for (i32 at = (threadIdx.x & 31) * V; at < a.width; at += 64 * V) {
        const i32 next = at + 32 * V;
        Packed<T> p[2] = {load_guarded(y, at, a.width, a.vectorized), {}}, q[2] = {load_guarded(bias, at, a.width, a.vectorized), {}};
        if (next < a.width) p[1] = load_guarded(y, next, a.width, a.vectorized), q[1] = load_guarded(bias, next, a.width, a.vectorized);
#pragma unroll
        for (int u = 0; u < 2; u++) {
            float v[V], b[V];
            unpack(p[u], v);
            unpack(q[u], b);
#pragma unroll
            for (int c = 0; c < V; c++) v[c] = fmaf(weight, b[c], v[c]);
            if (u == 0 || next < a.width) store_guarded(y, u ? next : at, a.width, a.vectorized, pack(v));
        }
    }
}

// dweights[r] += <dy[r], bias[e]>
template <class T> __device__ __forceinline__ void weight_gradient(const GroupedBiasArgs& a) {
    constexpr int V = VecWidth<T>::count;
    i64 row;
    const i32 e = own_row(a, row);
    if (e < 0) return;
    const T* dy = reinterpret_cast<const T*>(a.y) + row * a.width;
    const T* bias = reinterpret_cast<const T*>(a.bias) + i64(e) * a.width;
    float sum = 0.0f;
#pragma unroll 2
    for (i32 at = (threadIdx.x & 31) * V; at < a.width; at += 32 * V) {
        float d[V], b[V];
        unpack(load_guarded(dy, at, a.width, a.vectorized), d);
        unpack(load_guarded(bias, at, a.width, a.vectorized), b);
#pragma unroll
        for (int c = 0; c < V; c++) sum = fmaf(d[c], b[c], sum);
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) reinterpret_cast<float*>(a.dweights)[row] += sum;
}

// Rows of a warp whose loads are in flight together.
constexpr int AHEAD = 4;

// Block (b, c): sums of weights[r]·dy[r] over rows b·part_rows().. in the columns of c, for each segment e with rows
// there, to row b + e of `parts`. Parts and segments both ascend, so that no two (b, e) share a row.
template <class T> __device__ __forceinline__ void bias_parts(const GroupedBiasArgs& a, float (*sums)[32 * VecWidth<T>::count]) {
    constexpr int V = VecWidth<T>::count;
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i32 base = i32(blockIdx.y) * 32 * V, at = base + lane * V;
    const i64 each = part_rows(a), begin = i64(blockIdx.x) * each, end = min(begin + each, a.rows);
    const T* dy = reinterpret_cast<const T*>(a.y);
    const i32* offsets = reinterpret_cast<const i32*>(a.offsets);
    for (i32 e = max(segment_at(a, begin), 0); e < i32(a.experts); e++) {
        const i64 start = offsets[e];
        if (start >= end) break;
        const i64 first = max(start, begin), last = min(segment_end(a, e), end);
        if (first >= last) continue;
        float sum[V] = {};
        auto add = [&](const Packed<T>& p, float weight) {
            float d[V];
            unpack(p, d);
#pragma unroll
            for (int c = 0; c < V; c++) sum[c] = fmaf(weight, d[c], sum[c]);
        };
        i64 r = first + warp;
        if (a.vectorized && at + V <= a.width) {
            for (; r + (AHEAD - 1) * WARPS < last; r += AHEAD * WARPS) {
                Packed<T> p[AHEAD];
                float weight[AHEAD];
#pragma unroll
                for (int u = 0; u < AHEAD; u++) {
                    p[u] = *reinterpret_cast<const Packed<T>*>(dy + (r + u * WARPS) * a.width + at);
                    weight[u] = row_weight(a, r + u * WARPS);
                }
#pragma unroll
                for (int u = 0; u < AHEAD; u++) add(p[u], weight[u]);
            }
        }
        if (at < a.width) {
#pragma unroll 1
            for (; r < last; r += WARPS) add(load_guarded(dy + r * a.width, at, a.width, a.vectorized), row_weight(a, r));
        }
        // Column i of lane l lies at i·32 + l, so that the lanes of a warp use different banks.
#pragma unroll
        for (int c = 0; c < V; c++) sums[warp][c * 32 + lane] = sum[c];
        __syncthreads();
        float* out = reinterpret_cast<float*>(a.parts) + (i64(blockIdx.x) + e) * a.width + base;
        for (i32 c = threadIdx.x; c < 32 * V && base + c < a.width; c += THREADS) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += sums[w][c % V * 32 + c / V];
            out[c] = total;
        }
        __syncthreads();
    }
}

// Block (e, c): dbias[e] (+)= the partial sums of its rows, in order, one column to a thread.
extern "C" __global__ void __launch_bounds__(THREADS) row_bias_join(const GroupedBiasArgs a) {
    const i32 e = blockIdx.x, column = i32(blockIdx.y) * THREADS + threadIdx.x;
    if (column >= a.width) return;
    const i64 first = max(i64(reinterpret_cast<const i32*>(a.offsets)[e]), i64(0)), last = segment_end(a, e);
    float total = 0.0f;
    if (first < last) {
        const i64 each = part_rows(a), from = first / each, to = min((last - 1) / each, MAX_PARTS - 1);
        const float* parts = reinterpret_cast<const float*>(a.parts) + e * i64(a.width) + column;
#pragma unroll 16
        for (i64 b = from; b <= to; b++) total += parts[b * a.width];
    }
    float* out = reinterpret_cast<float*>(a.dbias) + e * i64(a.width) + column;
    *out = a.accumulate ? *out + total : total;
}

#define KERNELS(T, NAME)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) row_bias_add_##NAME(const GroupedBiasArgs a) { add_bias<T>(a); } \
    extern "C" __global__ void __launch_bounds__(THREADS) row_bias_weights_##NAME(const GroupedBiasArgs a) {              \
        weight_gradient<T>(a);                                                                                     \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) row_bias_parts_##NAME(const GroupedBiasArgs a) {                \
        __shared__ float sums[WARPS][32 * VecWidth<T>::count];                                                         \
        bias_parts<T>(a, sums);                                                                                    \
    }
KERNELS(float, f32)
KERNELS(bf16, bf16)
