// Element-wise kernels over contiguous tensors in 16-byte vectors. A thread issues all its loads before its stores:
// that keeps enough bytes in flight to saturate memory bandwidth, and makes in-place operation correct.
#include "args/elementwise.cuh"
#include "philox.cuh"
#include "vec.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;

template <class A, class B> constexpr int group_of() {
    return 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));
}
template <int N> __device__ __forceinline__ i64 group_start(int u) {
    return ((i64(blockIdx.x) * UNROLL + u) * THREADS + threadIdx.x) * N;
}


// All of this block's vectors are inside the tensor, and aligned.
template <int N> __device__ __forceinline__ bool full_block(i64 n, bool vectorized) {
    return vectorized && (i64(blockIdx.x) + 1) * (UNROLL * THREADS * N) <= n;
}

// out = f(a): f(values of one vector, index of the first).
template <int N, class A, class D, class F>
__device__ __forceinline__ void map_group(const Vec<A, N>& x, D* out, i64 at, i64 n, bool vectorized, F f) {
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = to_f32(x.at[i]);
    f(v, at);
    Vec<D, N> y;
#pragma unroll
    for (int i = 0; i < N; i++) y.at[i] = from_f32<D>(v[i]);
    store_guarded<N>(out, at, n, vectorized, y);
}
template <class A, class D, class F> __device__ __forceinline__ void map(u64 from, u64 to, i64 n, bool vectorized, F f) {
    constexpr int N = group_of<A, D>();
    const A* a = reinterpret_cast<const A*>(from);
    D* out = reinterpret_cast<D*>(to);
    if (full_block<N>(n, vectorized)) {
        Vec<A, N> x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) x[u] = load_vec<N>(a, group_start<N>(u));
#pragma unroll
        for (int u = 0; u < UNROLL; u++) map_group<N>(x[u], out, group_start<N>(u), n, true, f);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < UNROLL; u++) {
        i64 at = group_start<N>(u);
        if (at < n) map_group<N>(load_guarded<N>(a, at, n, vectorized), out, at, n, vectorized, f);
    }
}

// out = f(a, b) element by element; out has the type of a.
template <int N, class A, class B, class F>
__device__ __forceinline__ void map2_group(const Vec<A, N>& x, const Vec<B, N>& y, A* out, i64 at, i64 n, bool vectorized,
                                           F f) {
    Vec<A, N> z;
#pragma unroll
    for (int i = 0; i < N; i++) z.at[i] = from_f32<A>(f(to_f32(x.at[i]), to_f32(y.at[i])));
    store_guarded<N>(out, at, n, vectorized, z);
}
template <class A, class B, class F> __device__ __forceinline__ void map2(const MapArgs& p, F f) {
    constexpr int N = group_of<A, B>();
    const A* a = reinterpret_cast<const A*>(p.a);
    const B* b = reinterpret_cast<const B*>(p.b);
    A* out = reinterpret_cast<A*>(p.out);
    if (full_block<N>(p.n, p.vectorized)) {
        Vec<A, N> x[UNROLL];
        Vec<B, N> y[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            x[u] = load_vec<N>(a, group_start<N>(u));
            y[u] = load_vec<N>(b, group_start<N>(u));
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) map2_group<N>(x[u], y[u], out, group_start<N>(u), p.n, true, f);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < UNROLL; u++) {
        i64 at = group_start<N>(u);
        if (at >= p.n) break;
        map2_group<N>(load_guarded<N>(a, at, p.n, p.vectorized), load_guarded<N>(b, at, p.n, p.vectorized), out, at, p.n, p.vectorized, f);
    }
}

// tanh accurate to a few ulp: (1 − e)/(1 + e) with e = exp(−2|x|), and near zero, where that cancels, an odd
// polynomial. NaN stays NaN; ±∞ give ±1.
__device__ __forceinline__ float tanh_of(float x) {
    float a = fabsf(x);
    float e = __expf(-2.0f * a);
    float far = __fdividef(1.0f - e, 1.0f + e);
    float z = x * x;
    float q = 0.0022695017f;
    q = __fmaf_rn(q, z, -0.008323187f);
    q = __fmaf_rn(q, z, 0.021762503f);
    q = __fmaf_rn(q, z, -0.05395846f);
    q = __fmaf_rn(q, z, 0.133333f);
    q = __fmaf_rn(q, z, -0.33333334f);
    float near = __fmaf_rn(a * z, q, a);
    return copysignf(a < 0.625f ? near : far, x);
}

template <class A> __device__ __forceinline__ void add(const MapArgs& p) {
    map2<A, A>(p, [](float a, float b) { return a + b; });
}
// x += y: a = out = x, b = y.
template <class X, class Y> __device__ __forceinline__ void add_assign(const MapArgs& p) {
    map2<X, Y>(p, [](float x, float y) { return x + y; });
}
// x = max(x, y): a = out = x, b = y. fmaxf would drop a NaN.
template <class T> __device__ __forceinline__ void max_assign(const MapArgs& p) {
    map2<T, T>(p, [](float x, float y) { return y > x || y != y ? y : x; });
}
template <class T> __device__ __forceinline__ void scale(const MapArgs& p) {
    float factor = p.factor;
    map<T, T>(p.a, p.out, p.n, p.vectorized, [=](auto& v, i64) {
        for (float& x : v) x *= factor;
    });
}
template <class S, class D> __device__ __forceinline__ void cast(const MapArgs& p) {
    map<S, D>(p.a, p.out, p.n, p.vectorized, [](auto&, i64) {});
}
template <class T> __device__ __forceinline__ void softcap_forward(const MapArgs& p) {
    float cap = p.factor;
    map<T, T>(p.a, p.out, p.n, p.vectorized, [=](auto& v, i64) {
        for (float& x : v) x = cap * tanh_of(x / cap);
    });
}
// a = out = dy, b = y: dy·(1 − (y/cap)²), factored so that nothing cancels near the cap.
template <class T> __device__ __forceinline__ void softcap_backward(const MapArgs& p) {
    float cap = p.factor;
    map2<T, T>(p, [=](float dy, float y) {
        float t = y / cap;
        return dy * ((1.0f - t) * (1.0f + t));
    });
}
// out i32: out[i] = i.
__device__ __forceinline__ void iota_i32(const MapArgs& p) {
    i32* out = reinterpret_cast<i32*>(p.out);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const i64 at = group_start<4>(u);
        if (p.vectorized && at + 4 <= p.n) {
            *reinterpret_cast<int4*>(out + at) = make_int4(i32(at), i32(at) + 1, i32(at) + 2, i32(at) + 3);
        } else {
            for (i64 i = at; i < at + 4 && i < p.n; i++) out[i] = i32(i);
        }
    }
}

#define MAP(name, body)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const MapArgs p) { body(p); }
// add_assign_Y_X: the type of y, then that of x.
#ifdef ELEMENT_F16
MAP(add_f16, add<f16>)
MAP(add_assign_f32_f16, (add_assign<f16, float>))
MAP(add_assign_f16_f32, (add_assign<float, f16>))
MAP(add_assign_f16_f16, (add_assign<f16, f16>))
MAP(max_assign_f16, max_assign<f16>)
MAP(scale_f16, scale<f16>)
MAP(softcap_forward_f16, softcap_forward<f16>)
MAP(softcap_backward_f16, softcap_backward<f16>)
#else
MAP(add_f32, add<float>)
MAP(add_bf16, add<bf16>)
MAP(add_assign_f32_f32, (add_assign<float, float>))
MAP(add_assign_f32_bf16, (add_assign<bf16, float>))
MAP(add_assign_bf16_f32, (add_assign<float, bf16>))
MAP(add_assign_bf16_bf16, (add_assign<bf16, bf16>))
MAP(max_assign_f32, max_assign<float>)
MAP(max_assign_bf16, max_assign<bf16>)
MAP(scale_f32, scale<float>)
MAP(scale_bf16, scale<bf16>)
MAP(cast_f32_bf16, (cast<float, bf16>))
MAP(cast_bf16_f32, (cast<bf16, float>))
MAP(cast_f32_f16, (cast<float, f16>))
MAP(cast_f16_f32, (cast<f16, float>))
MAP(cast_f16_bf16, (cast<f16, bf16>))
MAP(cast_bf16_f16, (cast<bf16, f16>))
MAP(iota, iota_i32)
MAP(softcap_forward_f32, softcap_forward<float>)
MAP(softcap_forward_bf16, softcap_forward<bf16>)
MAP(softcap_backward_f32, softcap_backward<float>)
MAP(softcap_backward_bf16, softcap_backward<bf16>)
#endif

// Index of the random word of element `at`: its column in row number rows[·] of the step.
__device__ __forceinline__ u64 dropout_word(const DropoutArgs& p, i64 at) {
    i64 row = p.n >> 32 ? at / p.width : i64(u32(at) / u32(p.width));
    u32 number = reinterpret_cast<const u32*>(p.rows)[row];
    return u64(number) * u64(p.width) + u64(at - row * p.width);
}

// y = x·scale where the element's random word is at least the threshold, else 0. Vectors start at multiples of four:
// where rows do too, four elements share one Philox block; otherwise every element draws its own.
template <class T> __device__ __forceinline__ void dropout(const DropoutArgs& p) {
    const PhiloxStream stream = step_stream(p.stream);
    if (p.width % 4 != 0) {
        constexpr i64 SHARE = i64(16 / sizeof(T)) * UNROLL * THREADS;
        i64 first = i64(blockIdx.x) * SHARE, last = first + SHARE < p.n ? first + SHARE : p.n;
#pragma unroll 1
        for (i64 at = first + threadIdx.x; at < last; at += THREADS) {
            u64 word = dropout_word(p, at);
            u32 words[4];
            philox(stream, word / 4, words);
            u32 low = word & 1 ? words[1] : words[0], high = word & 1 ? words[3] : words[2];
            float kept = to_f32(reinterpret_cast<const T*>(p.x)[at]) * p.scale;
            reinterpret_cast<T*>(p.y)[at] = from_f32<T>((word & 2 ? high : low) < p.threshold ? 0.0f : kept);
        }
        return;
    }
    map<T, T>(p.x, p.y, p.n, p.vectorized, [&](auto& v, i64 at) {
        constexpr int N = sizeof(v) / sizeof(float);
#pragma unroll
        for (int part = 0; part < N / 4; part++) {
            i64 first = at + 4 * part;
            if (first >= p.n) break;
            u32 words[4];
            philox(stream, dropout_word(p, first) / 4, words);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float kept = v[4 * part + i] * p.scale;
                v[4 * part + i] = words[i] < p.threshold ? 0.0f : kept;
            }
        }
    });
}
#define DROPOUT(T, NAME)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) dropout_##NAME(const DropoutArgs p) { dropout<T>(p); }
FOR_EACH_TYPE(DROPOUT)
