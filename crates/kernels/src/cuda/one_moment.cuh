// Optimizer steps with one moment over a list of tensors.
#pragma once
#include "multi_tensor.cuh"

// Block `block` of a tensor: update(x, g, held) changes the master weight x and returns the new moment.
template <class P, class A, class F>
__device__ __forceinline__ void one_moment(const TensorEntry& e, u32 block, u32 seed, F update) {
    const P masters(e);
    const A first(e.first, e.first_scales);
    const float* grad = reinterpret_cast<const float*>(e.grad);
    bool vectorized = ((e.master | e.weight | e.grad | e.first) & 15) == 0;
    i64 base = i64(block) * UPDATES;
    if (!vectorized || base + UPDATES > e.n) {
        for (i64 from = base; from < min(base + UPDATES, e.n); from += THREADS) {
            i64 at = from + threadIdx.x;
            bool there = at < e.n;
            float x = 0.0f, b = 0.0f;
            if (there) {
                x = masters.get(at);
                b = update(x, grad[at], first.get(at));
                masters.set(at, x);
            }
            first.set(at, there, b, A::packed ? dice_of(seed, x, b) : 0);
        }
        return;
    }
    constexpr int N = A::N, AHEAD = 2;
#pragma unroll 1
    for (int k = 0; k < UPDATES / (N * THREADS); k += AHEAD) {
        typename P::template Raw<N> p[AHEAD];
        Vec<float, N> g[AHEAD];
        typename A::Raw b[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            i64 at = base + ((k + u) * THREADS + threadIdx.x) * N;
            p[u] = masters.template load<N>(at);
            g[u] = load_vec<N>(grad, at);
            b[u] = first.load(at);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            i64 at = base + ((k + u) * THREADS + threadIdx.x) * N;
            Vec<float, N> x;
            float y[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                x.at[i] = P::open(p[u], i);
                y[i] = update(x.at[i], g[u].at[i], A::open(b[u], i));
            }
            masters.store(at, x);
            float scale = first.settle(at, y);
            Vec<typename A::Code, N> c;
#pragma unroll
            for (int i = 0; i < N; i++)
                c.at[i] = A::code(y[i], scale, A::packed ? dice_of(seed, x.at[i], y[i]) : 0);
            first.store(at, c);
        }
    }
}
