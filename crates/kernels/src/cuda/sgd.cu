// SGD with momentum over a list of tensors.
#include "multi_tensor.cuh"

template <class P, class A> __device__ __forceinline__ void sgd(const SgdArgs& a) {
    const float* s = reinterpret_cast<const float*>(a.scalars);
    if (!is_number(s[GRAD_NORM])) return;
    const int index = entry_of(a, blockIdx.x);
    const TensorEntry& e = a.list[index];
    float lr = __fmul_rn(s[LR], e.lr_mult), wd = __fmul_rn(s[WEIGHT_DECAY], e.wd_mult), clip = s[CLIP];
    bool starts = s[STEPS_DONE] == 0.0f;
    u32 seed = seed_of(s[STEPS_DONE]);
    float momentum = starts ? 0.0f : a.momentum, fresh = starts ? 1.0f : a.fresh;
    float lead = a.nesterov ? 1.0f : 0.0f, share = a.nesterov ? a.momentum : 1.0f;
    const P masters(e);
    const A first(e.first, e.first_scales);
    const float* grad = reinterpret_cast<const float*>(e.grad);
    auto update = [&](float& x, float g, float held) {
        float d = __fadd_rn(__fmul_rn(g, clip), __fmul_rn(wd, x));
        // In the first step the buffer is uninitialized and may hold NaN.
        float old = momentum == 0.0f ? 0.0f : __fmul_rn(momentum, held);
        float now = __fadd_rn(old, __fmul_rn(fresh, d));
        x = __fsub_rn(x, __fmul_rn(lr, __fadd_rn(__fmul_rn(lead, d), __fmul_rn(share, now))));
        return now;
    };
    bool vectorized = ((e.master | e.weight | e.grad | e.first) & 15) == 0;
    i64 base = i64(blockIdx.x - a.start[index]) * UPDATES;
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

#define SGD(NAME, MOMENT)                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                 \
        sgd_##NAME(const __grid_constant__ SgdArgs a) { sgd<F32Master, MOMENT>(a); } \
    extern "C" __global__ void __launch_bounds__(THREADS)                 \
        sgd_split_##NAME(const __grid_constant__ SgdArgs a) { sgd<SplitMaster, MOMENT>(a); }
SGD(f32, PlainMoment<float>)
SGD(bf16, PlainMoment<bf16>)
SGD(f16, BlockScaled<First16>)
SGD(fp8, BlockScaled<First8>)
