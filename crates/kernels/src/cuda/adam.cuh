// One Adam step over a list of tensors.
#pragma once
#include "multi_tensor.cuh"

struct AdamFactors {
    float beta1, new1, beta2, new2, eps, bias1, bias2, clip, lr, inside, beside;
};

// Bias correction by division, or (INVERSES) by products with `bias1` and `bias2` already inverted: steps on packed
// moments move so few bytes that divisions would bound them.
template <bool INVERSES> __device__ __forceinline__ void adam_element(const AdamFactors& f, float& p, float g, float& m, float& v) {
    g = __fadd_rn(__fmul_rn(g, f.clip), __fmul_rn(f.inside, p));
    m = __fadd_rn(__fmul_rn(f.beta1, m), __fmul_rn(f.new1, g));
    v = __fadd_rn(__fmul_rn(f.beta2, v), __fmul_rn(__fmul_rn(f.new2, g), g));
    float root = __fsqrt_rn(INVERSES ? __fmul_rn(v, f.bias2) : __fdiv_rn(v, f.bias2));
    float mean = INVERSES ? __fmul_rn(m, f.bias1) : __fdiv_rn(m, f.bias1);
    float update = __fdiv_rn(mean, __fadd_rn(root, f.eps));
    update = __fadd_rn(update, __fmul_rn(f.beside, p));
    p = __fsub_rn(p, __fmul_rn(f.lr, update));
}

// What Adam quantizes of the new weights: nothing.
struct NoQuantizedWeight {
    static constexpr bool wanted = false;
    __device__ __forceinline__ NoQuantizedWeight(const TensorEntry&, bool) {}
    template <class P, int N> __device__ __forceinline__ void take(i64, const Vec<float, N>&) {}
    template <class P> __device__ __forceinline__ void take_one(i64, float) {}
    __device__ __forceinline__ void atomic_amax(const TensorEntry&) const {}
    template <class P> static __device__ __forceinline__ void requantize_unchanged(const AdamArgs&) {}
};

template <class P, class A, class B, class T> __device__ __forceinline__ void adam(const AdamArgs& a) {
    const float* s = reinterpret_cast<const float*>(a.scalars);
    if (!is_number(s[GRAD_NORM])) {
        T::template requantize_unchanged<P>(a);
        return;
    }
    const int index = entry_of(a, blockIdx.x);
    const TensorEntry& e = a.list[index];
    float wd = __fmul_rn(s[WEIGHT_DECAY], e.wd_mult);
    AdamFactors f = {a.beta1,  a.new1,  a.beta2, a.new2,
                     a.eps,    s[BIAS1], s[BIAS2], s[CLIP],
                     __fmul_rn(s[LR], e.lr_mult), a.decoupled ? 0.0f : wd, a.decoupled ? wd : 0.0f};
    if (A::packed) f.bias1 = __fdiv_rn(1.0f, f.bias1), f.bias2 = __fdiv_rn(1.0f, f.bias2);
    u32 seed = seed_of(s[STEPS_DONE]);
    const P masters(e);
    const A first(e.first, e.first_scales);
    const B second(e.second, e.second_scales);
    const float* grad = reinterpret_cast<const float*>(e.grad);
    T taken(e, blockIdx.x == a.start[index]);
    bool vectorized = ((e.master | e.weight | e.grad | e.first | e.second | (T::wanted ? e.fp8 : 0)) & 15) == 0;
    i64 base = i64(blockIdx.x - a.start[index]) * UPDATES;
    if (!vectorized || base + UPDATES > e.n) {
        // Unaligned tensors, and the last block of each: one element a thread. All threads of a warp take part,
        // because packed moments reduce over it.
        for (i64 from = base; from < min(base + UPDATES, e.n); from += THREADS) {
            i64 at = from + threadIdx.x;
            bool there = at < e.n;
            float x = 0.0f, m = 0.0f, v = 0.0f;
            if (there) {
                x = masters.get(at), m = first.get(at), v = second.get(at);
                adam_element<A::packed>(f, x, grad[at], m, v);
                masters.set(at, x);
                taken.template take_one<P>(at, x);
            }
            u32 dice = A::packed ? dice_of(seed, x, m) : 0;
            first.set(at, there, m, dice);
            second.set(at, there, v, rotate16(dice));
        }
        taken.atomic_amax(e);
        return;
    }
    constexpr int N = A::N, AHEAD = 2;
#pragma unroll 1
    for (int k = 0; k < UPDATES / (N * THREADS); k += AHEAD) {
        typename P::template Raw<N> p[AHEAD];
        Vec<float, N> g[AHEAD];
        typename A::Raw m[AHEAD];
        typename B::Raw v[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            i64 at = base + ((k + u) * THREADS + threadIdx.x) * N;
            p[u] = masters.template load<N>(at);
            g[u] = load_vec<N>(grad, at);
            m[u] = first.load(at);
            v[u] = second.load(at);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            i64 at = base + ((k + u) * THREADS + threadIdx.x) * N;
            Vec<float, N> x;
            float y[N], z[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                x.at[i] = P::open(p[u], i), y[i] = A::open(m[u], i), z[i] = B::open(v[u], i);
                adam_element<A::packed>(f, x.at[i], g[u].at[i], y[i], z[i]);
            }
            masters.store(at, x);
            taken.template take<P>(at, x);
            float scale1 = first.settle(at, y), scale2 = second.settle(at, z);
            Vec<typename A::Code, N> c;
            Vec<typename B::Code, N> d;
#pragma unroll
            for (int i = 0; i < N; i++) {
                u32 dice = A::packed ? dice_of(seed, x.at[i], y[i]) : 0;
                c.at[i] = A::code(y[i], scale1, dice);
                d.at[i] = B::code(z[i], scale2, rotate16(dice));
            }
            first.store(at, c);
            second.store(at, d);
        }
    }
    taken.atomic_amax(e);
}
