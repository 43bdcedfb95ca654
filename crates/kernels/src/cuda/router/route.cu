// Top-k routing: the experts of each token, their probabilities, and the gradient.
#include "args/router_route.cuh"
#include "router/common.cuh"

template <int V, class T> __device__ __forceinline__ void top_k(const TopKArgs& a) {
    const i32 lane = threadIdx.x & 31;
    const i64 t = i64(blockIdx.x) * Block<V>::warps + (threadIdx.x >> 5);
    if (t >= a.tokens) return;
    float x[V];
    load_row(reinterpret_cast<const T*>(a.scores) + t * a.experts, a.experts, x);
    if (a.minus) {
        const float* minus = reinterpret_cast<const float*>(a.minus);
#pragma unroll
        for (int s = 0; s < V; s++)
            if (s * 32 + lane < a.experts) x[s] -= minus[s * 32 + lane];
    }
    u32 key[V];
    keys_of(x, a.experts, key);
    i32 mine = -1;
    for (i32 j = 0; j < a.k; j++) {
        const i32 won = take_best(key);
        if (lane == j) mine = won;
    }
    if (lane < a.k) reinterpret_cast<i32*>(a.index)[t * a.k + lane] = mine;
}
ROUTER_KERNEL(top_k, top_k, TopKArgs, 4, float, f32)
ROUTER_KERNEL(top_k, top_k, TopKArgs, 8, float, f32)
ROUTER_KERNEL(top_k, top_k, TopKArgs, 32, float, f32)


// Group-limited routing: zeroes the keys of experts outside the best `keep` groups. A group's score is the sum of its
// best `each` selection scores. Group g is held as column g.
template <int V>
__device__ __forceinline__ void keep_groups(const RouteArgs& a, const float (&selection)[V], u32 (&key)[V]) {
    const i32 lane = threadIdx.x & 31, size = a.experts / a.groups;
    u32 of[V], group[V];
#pragma unroll
    for (int s = 0; s < V; s++) group[s] = 0;
#pragma unroll 1
    for (i32 g = 0; g < a.groups; g++) {
#pragma unroll
        for (int s = 0; s < V; s++) {
            const i32 c = s * 32 + lane;
            of[s] = c >= g * size && c < (g + 1) * size ? key[s] : 0u;
        }
        float sum = 0.0f;
#pragma unroll 1
        for (i32 j = 0; j < a.best; j++) sum += at_column(selection, take_best(of));
#pragma unroll
        for (int s = 0; s < V; s++)
            if (s * 32 + lane == g) group[s] = order(sum);
    }
    u32 stay = 0;
#pragma unroll 1
    for (i32 j = 0; j < a.keep; j++) {
        const i32 first = take_best(group) * size;
#pragma unroll
        for (int s = 0; s < V; s++) {
            const i32 c = s * 32 + lane;
            if (c >= first && c < first + size) stay |= 1u << s;
        }
    }
#pragma unroll
    for (int s = 0; s < V; s++)
        if (!(stay >> s & 1)) key[s] = 0;
}

// Top-k of a row: lane j gets the j-th expert.
template <int V> __device__ __forceinline__ i32 choose(const RouteArgs& a, const float (&x)[V]) {
    const i32 lane = threadIdx.x & 31;
    u32 key[V];
    if (a.bias || a.groups) {
        float selection[V];
        if (a.score == SOFTMAX) {
            float sum;
            exponentials(x, a.experts, selection, sum);
#pragma unroll
            for (int s = 0; s < V; s++) selection[s] /= sum;
        } else {
#pragma unroll
            for (int s = 0; s < V; s++) selection[s] = alone(a.score, x[s]);
        }
        if (a.bias) {
            const float* bias = reinterpret_cast<const float*>(a.bias);
#pragma unroll
            for (int s = 0; s < V; s++)
                if (s * 32 + lane < a.experts) selection[s] += bias[s * 32 + lane];
            keys_of(selection, a.experts, key);
        } else {
            // Without a bias the order is that of the logits, which rounding has not made equal.
            keys_of(x, a.experts, key);
        }
        if (a.groups) keep_groups(a, selection, key);
    } else {
        keys_of(x, a.experts, key);
    }
    i32 mine = -1;
#pragma unroll 1
    for (i32 j = 0; j < a.k; j++) {
        const i32 won = take_best(key);
        if (lane == j) mine = won;
    }
    return mine;
}

// The given expert of slot `lane`; -1 past the slots, for dropped selections, and, reported, for experts that do not
// exist.
__device__ __forceinline__ i32 given(const RouteArgs& a, i64 t) {
    const i32 lane = threadIdx.x & 31;
    i32 mine = lane < a.k ? reinterpret_cast<const i32*>(a.index)[t * a.k + lane] : -1;
    if (mine >= a.experts) {
        fault(a.fault, FAULT_EXPERT);
        mine = -1;
    }
    return mine;
}

// Probability of each lane's expert, whose logit is v, before scaling; 0 without one. `total`: what scores are divided
// by, unless they are a softmax over all experts.
template <int V>
__device__ __forceinline__ float probability(const RouteArgs& a, const float (&x)[V], i32 mine, float v, float& total) {
    float y[V], score = 0.0f;
    total = 1.0f;
    if (a.score == SOFTMAX) {
        const float most = exponentials(x, a.experts, y, total);
        return mine >= 0 ? expf(v - most) / total : 0.0f;
    }
    if (a.score == SOFTMAX_OF_CHOSEN) {
        const float most = warp_max(v);
        if (mine >= 0) score = expf(v - most);
        total = warp_sum(score);
        return mine >= 0 ? score / total : 0.0f;
    }
    if (mine >= 0) score = alone(a.score, v);
    if (a.normalize) total = warp_sum(score) + EPS;
    return score / total;
}

template <int V, class T> __device__ __forceinline__ void route(const RouteArgs& a) {
    const i32 lane = threadIdx.x & 31;
    const i64 t = i64(blockIdx.x) * Block<V>::warps + (threadIdx.x >> 5);
    if (t >= a.tokens) return;
    const T* row = reinterpret_cast<const T*>(a.logits) + t * a.experts;
    float x[V];
    load_row(row, a.experts, x);
    i32 mine;
    if (a.given) {
        mine = given(a, t);
    } else {
        mine = choose(a, x);
        if (lane < a.k) reinterpret_cast<i32*>(a.index)[t * a.k + lane] = mine;
    }
    float total;
    const float p = probability(a, x, mine, mine >= 0 ? to_f32(row[mine]) : none(), total);
    if (lane < a.k) reinterpret_cast<float*>(a.probs)[t * a.k + lane] = p * a.scale;
}
ROUTER_KERNELS(route, route, RouteArgs)

// `probs` holds gradients of probabilities. Only a softmax over all experts needs the whole row of logits.
template <int V, class T> __device__ __forceinline__ void route_backward(const RouteArgs& a) {
    const i32 lane = threadIdx.x & 31;
    const i64 t = i64(blockIdx.x) * Block<V>::warps + (threadIdx.x >> 5);
    if (t >= a.tokens) return;
    const T* row = reinterpret_cast<const T*>(a.logits) + t * a.experts;
    T* out = reinterpret_cast<T*>(a.dlogits) + t * a.experts;
    const i32 mine = given(a, t);
    float g = mine >= 0 ? a.scale * reinterpret_cast<const float*>(a.probs)[t * a.k + lane] : 0.0f;
    const float v = mine >= 0 ? to_f32(row[mine]) : none();
    const bool all = a.score == SOFTMAX;
    float x[V], y[V], total = 1.0f, mean = 0.0f;
    if (all) {
        load_row(row, a.experts, x);
        const float most = exponentials(x, a.experts, y, total);
        mean = warp_sum(mine >= 0 ? g * (expf(v - most) / total) : 0.0f);
    } else {
        const float p = probability(a, x, mine, v, total);
        if (a.normalize || a.score == SOFTMAX_OF_CHOSEN) mean = warp_sum(mine >= 0 ? g * p : 0.0f);
        g -= mean;
        g = a.score == SOFTMAX_OF_CHOSEN ? p * g : g / total * slope(a.score, v);
        if (v == none()) g = 0.0f;
    }
    // Each expert's gradient is broadcast; the lane with its column adds it.
    float d[V] = {};
    for (i32 j = 0; j < a.k; j++) {
        const i32 c = __shfl_sync(~0u, mine, j);
        const float to = __shfl_sync(~0u, g, j);
#pragma unroll
        for (int s = 0; s < V; s++)
            if (c == s * 32 + lane) d[s] += to;
    }
#pragma unroll
    for (int s = 0; s < V; s++) {
        const i32 c = s * 32 + lane;
        if (c >= a.experts) continue;
        if (all) d[s] = x[s] == none() ? 0.0f : y[s] / total * (d[s] - mean);
        out[c] = from_f32<T>(d[s]);
    }
}
ROUTER_KERNELS(route_backward, route_backward, RouteArgs)
