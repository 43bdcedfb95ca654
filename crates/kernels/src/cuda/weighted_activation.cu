// Activation functions of expert MLPs whose rows are weighted by routing probabilities. Gated input is [rows,
// 2·width]: the first half goes through the activation, the second is the linear gate.
#include "activation.cuh"
#include "amax.cuh"
#include "args/weighted_activation.cuh"

constexpr int THREADS = 256;

// y = p·act(x₁)·gate(x₂), one chunk to a thread. A row with weight 0 is zeros whatever x holds.
template <class T, class Curve, bool GATED, bool WITH_AMAX> __device__ __forceinline__ void forward(const WeightedArgs& a) {
    constexpr int V = VecWidth<T>::count;
    const u32 per_row = u32(a.width + V - 1) / V, i = blockIdx.x * THREADS + threadIdx.x;
    const i64 row = i / per_row;
    const bool mine = row < a.rows;
    if (!WITH_AMAX && !mine) return;
    const i32 at = i32(i % per_row) * V;
    const float p = mine ? reinterpret_cast<const float*>(a.p)[row] : 0.0f;
    Packed<T> y = {};
    if (p != 0.0f) {
        const Curve curve(a);
        const T* x = reinterpret_cast<const T*>(a.x) + row * (GATED ? 2 : 1) * a.width;
        Packed<T> first = load_guarded(x, at, a.width, a.vectorized), second;
        if (GATED) second = load_guarded(x + a.width, at, a.width, a.vectorized);
        float v[V], u[V];
        unpack(first, v);
        if (GATED) unpack(second, u);
#pragma unroll
        for (int c = 0; c < V; c++) v[c] = p * (GATED ? curve.value(v[c]) * curve.gate(u[c]) : curve.value(v[c]));
        y = pack(v);
    }
    if (mine) store_guarded(reinterpret_cast<T*>(a.out) + row * a.width, at, a.width, a.vectorized, y);
    // Past the end of a row x is 0, and act(0) = 0 for every activation.
    if (WITH_AMAX) block_atomic_amax(a.amax, packed_amax(0.0f, y));
}

// With q = p·dy: dx₁ = act'(x₁)·gate(x₂)·q, dx₂ = act(x₁)·gate'(x₂)·q, dp = Σ act(x₁)·gate(x₂)·dy. One warp to a row.
template <class T, class Curve, bool GATED, bool WITH_AMAX> __device__ __forceinline__ void backward(const WeightedArgs& a) {
    constexpr int V = VecWidth<T>::count;
    const u32 lane = threadIdx.x & 31;
    const i64 row = i64(blockIdx.x) * (THREADS / 32) + (threadIdx.x >> 5);
    const bool mine = row < a.rows;
    if (!WITH_AMAX && !mine) return;
    const Curve curve(a);
    const i64 place = row * (GATED ? 2 : 1) * a.width;
    T* dx = reinterpret_cast<T*>(a.out) + place;
    float sum = 0.0f, most = 0.0f;
    if (mine && reinterpret_cast<const i32*>(a.live)[row] < 0) {
        const Packed<T> zero = {};
        for (i32 at = lane * V; at < a.width; at += 32 * V) {
            store_guarded(dx, at, a.width, a.vectorized, zero);
            if (GATED) store_guarded(dx + a.width, at, a.width, a.vectorized, zero);
        }
    } else if (mine) {
        const float p = reinterpret_cast<const float*>(a.p)[row];
        const T* x = reinterpret_cast<const T*>(a.x) + place;
        const T* dy = reinterpret_cast<const T*>(a.dy) + row * a.width;
#pragma unroll 1
        for (i32 at = lane * V; at < a.width; at += 32 * V) {
            Packed<T> first = load_guarded(x, at, a.width, a.vectorized), second;
            if (GATED) second = load_guarded(x + a.width, at, a.width, a.vectorized);
            const Packed<T> back = load_guarded(dy, at, a.width, a.vectorized);
            float v[V], u[V], d[V];
            unpack(first, v);
            if (GATED) unpack(second, u);
            unpack(back, d);
#pragma unroll
            for (int c = 0; c < V; c++) {
                const float q = p * d[c];
                float value, slope = curve.slope(v[c], value);
                // Past the end dy is 0, and act(0)·gate(0) is finite.
                if (GATED) {
                    const float gate = curve.gate(u[c]);
                    sum = fmaf(value * gate, d[c], sum);
                    v[c] = slope * gate * q;
                    u[c] = curve.gate_slope(u[c], value * q);
                } else {
                    sum = fmaf(value, d[c], sum);
                    v[c] = slope * q;
                }
            }
            first = pack(v);
            store_guarded(dx, at, a.width, a.vectorized, first);
            if (GATED) store_guarded(dx + a.width, at, a.width, a.vectorized, second = pack(u));
            if (WITH_AMAX) most = packed_amax(most, first);
            if (WITH_AMAX && GATED) most = packed_amax(most, second);
        }
    }
    sum = warp_sum(sum);
    if (mine && lane == 0) reinterpret_cast<float*>(a.dp)[row] = sum;
    if (WITH_AMAX) block_atomic_amax(a.amax, most);
}

#define KERNEL(FULL_NAME, PASS, T, GATED, WITH_AMAX, ...)                                                            \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) FULL_NAME(const WeightedArgs a) {                    \
        if (a.act == GELU_TANH) PASS<T, GeluTanh<T>, GATED, WITH_AMAX>(a);                                           \
        else if (a.act == GELU_ERF) PASS<T, GeluErf<T>, GATED, WITH_AMAX>(a);                                        \
        else if (a.act == SILU) PASS<T, Silu<T>, GATED, WITH_AMAX>(a);                                               \
        else if (a.act == SQUARED_RELU) PASS<T, SquaredRelu<T>, GATED, WITH_AMAX>(a);                                \
        else if (GATED) PASS<T, ClampedSilu<T>, true, WITH_AMAX>(a);                                                 \
    }
#define KERNELS(T, NAME)                                                                                           \
    KERNEL(weighted_ungated_##NAME, forward, T, false, false, THREADS)                                               \
    KERNEL(weighted_gated_##NAME, forward, T, true, false, THREADS)                                                \
    KERNEL(weighted_ungated_backward_##NAME, backward, T, false, false, THREADS)                                     \
    KERNEL(weighted_gated_backward_##NAME, backward, T, true, false, THREADS)                                      \
    KERNEL(weighted_ungated_amax_##NAME, forward, T, false, true, THREADS)                                           \
    KERNEL(weighted_gated_amax_##NAME, forward, T, true, true, THREADS)                                            \
    KERNEL(weighted_ungated_backward_amax_##NAME, backward, T, false, true, THREADS, 4)                              \
    KERNEL(weighted_gated_backward_amax_##NAME, backward, T, true, true, THREADS, 4)
KERNELS(float, f32)
KERNELS(bf16, bf16)
