// What the router's kernels share. One warp has one token; a lane has experts lane, lane + 32, ..., V of them. Experts
// that do not exist have the logit -inf.
#pragma once
#include "prelude.cuh"

// Fault code of an expert or segment out of range.
constexpr u32 FAULT_EXPERT = 3;

// `ScoreFunction` of the crate.
enum Score : i32 { SOFTMAX_OF_CHOSEN = 0, SOFTMAX = 1, SIGMOID = 2, SQRT_SOFTPLUS = 3 };

// Keeps a sum of scores from being 0.
constexpr float EPS = 1e-20f;

__device__ __forceinline__ float none() { return -__int_as_float(0x7f800000); }

// Warps of a block: V column sums for each warp must fit into shared memory.
template <int V> struct Block {
    static constexpr int warps = V > 8 ? 4 : 8;
    static constexpr int threads = warps * 32;
};

template <int V, class T> __device__ __forceinline__ void load_row(const T* row, i32 experts, float (&x)[V]) {
    const i32 lane = threadIdx.x & 31;
#pragma unroll
    for (int s = 0; s < V; s++) x[s] = s * 32 + lane < experts ? to_f32(row[s * 32 + lane]) : none();
}

// An integer key that orders as x does. NaN has 1; 0 is reserved for selected and absent columns. Both zeros have the
// same key.
__device__ __forceinline__ u32 order(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return x != x ? 1u : bits ^ (u32(i32(bits) >> 31) | 0x80000000u);
}
// The value of a key.
__device__ __forceinline__ float unordered(u32 key) {
    if (key <= 1) return __int_as_float(0x7fc00000);
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// Keys of existing columns; 0 for others.
template <int V> __device__ __forceinline__ void keys_of(const float (&x)[V], i32 experts, u32 (&key)[V]) {
    const i32 lane = threadIdx.x & 31;
#pragma unroll
    for (int s = 0; s < V; s++) key[s] = s * 32 + lane < experts ? order(x[s]) : 0u;
}

// The column of the largest key (the smallest index among equals), in every lane. Its key becomes 0.
template <int V> __device__ __forceinline__ i32 take_best(u32 (&key)[V]) {
    const i32 lane = threadIdx.x & 31;
    u32 best = key[0];
    i32 at = lane;
#pragma unroll
    for (int s = 1; s < V; s++)
        if (key[s] > best) best = key[s], at = s * 32 + lane;
    const u32 most = __reduce_max_sync(~0u, best);
    const i32 won = __reduce_min_sync(~0u, best == most ? at : 0x7fffffff);
#pragma unroll
    for (int s = 0; s < V; s++)
        if (won == s * 32 + lane) key[s] = 0;
    return won;
}

// Column `c` of a row, in every lane.
template <int V> __device__ __forceinline__ float at_column(const float (&x)[V], i32 c) {
    const i32 lane = threadIdx.x & 31;
    float mine = 0.0f;
#pragma unroll
    for (int s = 0; s < V; s++)
        if (s * 32 + lane == c) mine = x[s];
    return __shfl_sync(~0u, mine, c & 31);
}

// σ(x) and 1 - σ(x), without cancellation.
__device__ __forceinline__ float sigmoid(float x, float& rest) {
    const float e = expf(-fabsf(x)), large = 1.0f / (1.0f + e), small = e / (1.0f + e);
    rest = x >= 0.0f ? small : large;
    return x >= 0.0f ? large : small;
}

// Score of one logit; the logit itself where the score function is a softmax.
__device__ __forceinline__ float alone(i32 score, float x) {
    float rest;
    if (score == SIGMOID) return sigmoid(x, rest);
    if (score == SQRT_SOFTPLUS) return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
    return x;
}
// Derivative of the score, where it is not a softmax.
__device__ __forceinline__ float slope(i32 score, float x) {
    float rest, y = sigmoid(x, rest);
    if (score == SIGMOID) return y * rest;
    return (x > 20.0f ? 1.0f : y) / (2.0f * alone(SQRT_SOFTPLUS, x) + EPS);
}

__device__ __forceinline__ bool is_softmax(i32 score) { return score <= SOFTMAX; }

// The row's maximum and Σ exp(x - max), in every lane. y = exp(x - max).
template <int V> __device__ __forceinline__ float exponentials(const float (&x)[V], i32 experts, float (&y)[V], float& sum) {
    const i32 lane = threadIdx.x & 31;
    float most = x[0];
#pragma unroll
    for (int s = 1; s < V; s++) most = fmaxf(most, x[s]);
    most = warp_max(most);
    sum = 0.0f;
#pragma unroll
    for (int s = 0; s < V; s++) {
        y[s] = s * 32 + lane < experts ? expf(x[s] - most) : 0.0f;
        sum += y[s];
    }
    sum = warp_sum(sum);
    return most;
}

// Scores normalized over all experts: a softmax, or each divided by their sum. Returns that sum (1 for a softmax).
template <int V> __device__ __forceinline__ float normalized(i32 score, const float (&x)[V], i32 experts, float (&y)[V]) {
    float sum = 0.0f;
    if (is_softmax(score)) {
        exponentials(x, experts, y, sum);
    } else {
#pragma unroll
        for (int s = 0; s < V; s++) {
            y[s] = alone(score, x[s]);
            sum += y[s];
        }
        sum = warp_sum(sum) + EPS;
    }
#pragma unroll
    for (int s = 0; s < V; s++) y[s] /= sum;
    return is_softmax(score) ? 1.0f : sum;
}

// Instances name_{4,8,32}_{f32,bf16} of the template `body<V, T>`, for up to 32·V experts.
#define ROUTER_KERNEL(name, body, Args, V, T, type)                                                                   \
    extern "C" __global__ void __launch_bounds__(Block<V>::threads) name##_##V##_##type(const Args a) { body<V, T>(a); }
#define ROUTER_KERNELS(name, body, Args)                                                                               \
    ROUTER_KERNEL(name, body, Args, 4, float, f32)                                                                     \
    ROUTER_KERNEL(name, body, Args, 8, float, f32)                                                                     \
    ROUTER_KERNEL(name, body, Args, 32, float, f32)                                                                    \
    ROUTER_KERNEL(name, body, Args, 4, bf16, bf16)                                                                     \
    ROUTER_KERNEL(name, body, Args, 8, bf16, bf16)                                                                     \
    ROUTER_KERNEL(name, body, Args, 32, bf16, bf16)
