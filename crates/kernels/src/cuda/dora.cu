// DoRA: squared norms of rows, factors of rows, and columns scaled by them. A warp has a row; sums have a fixed order.
#include "args/dora.cuh"
#include "vec.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ i64 row_of_warp() { return i64(blockIdx.x) * WARPS + (threadIdx.x >> 5); }

// out[r] = Σ x[r, c]²
template <class T> __device__ __forceinline__ void row_squares(const RowSquaresArgs& a) {
    constexpr int N = VecWidth<T>::count;
    const i64 row = row_of_warp();
    if (row >= a.rows) return;
    const T* x = reinterpret_cast<const T*>(a.x) + row * a.width;
    float sum = 0.0f;
#pragma unroll 4
    for (i64 at = (threadIdx.x & 31) * N; at < a.width; at += 32 * N) {
        const Vec<T, N> v = load_guarded<N>(x, at, a.width, a.vectorized);
#pragma unroll
        for (int i = 0; i < N; i++) sum = fmaf(to_f32(v.at[i]), to_f32(v.at[i]), sum);
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) reinterpret_cast<float*>(a.out)[row] = sum;
}

// out[g, o] = Σᵢ b[i]·(2s·u[i] + s²·Σⱼ gram[i, j]·b[j]); the Gram matrix is symmetric, so that lanes read along its rows.
template <class T> __device__ __forceinline__ void update_squares(const DoraUpdateArgs& a) {
    const i64 row = row_of_warp();
    if (row >= a.groups * a.n) return;
    const i64 group = row / a.n, o = row - group * a.n;
    const T* b = reinterpret_cast<const T*>(a.b) + group * a.stride + o * a.r;
    const float* u = reinterpret_cast<const float*>(a.u) + row * a.r;
    const float* gram = reinterpret_cast<const float*>(a.gram) + group * a.r * a.r;
    float sum = 0.0f;
#pragma unroll 1
    for (i64 i = threadIdx.x & 31; i < a.r; i += 32) {
        float product = 0.0f;
#pragma unroll 4
        for (i64 j = 0; j < a.r; j++) product = fmaf(gram[j * a.r + i], to_f32(b[j]), product);
        sum = fmaf(to_f32(b[i]) * a.scale, 2.0f * u[i] + a.scale * product, sum);
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) reinterpret_cast<float*>(a.out)[row] = sum;
}

// One thread to a row of the weight: norm = r(w)·(v / w), factor = m / norm.
template <class T> __device__ __forceinline__ void row_factor(const DoraFactorArgs& a) {
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= a.groups * a.n) return;
    const i64 g = at / a.n, o = at - g * a.n;
    const float base = reinterpret_cast<const float*>(a.base)[g * a.base_stride + o];
    const float update = reinterpret_cast<const float*>(a.update)[g * a.update_stride + o];
    const float m = to_f32(reinterpret_cast<const T*>(a.m)[g * a.m_stride + o]);
    const float w = sqrtf(base), v = sqrtf(fmaxf(base + update, 0.0f));
    const float norm = w > 0.0f ? to_f32(from_f32<T>(w)) * (v / w) : v;
    reinterpret_cast<float*>(a.factor)[g * a.factor_stride + o] = norm > 0.0f ? m / norm : 0.0f;
    reinterpret_cast<float*>(a.inv_norm)[g * a.inv_stride + o] = norm > 0.0f ? 1.0f / norm : 0.0f;
}

// The segment of a row, or -1 in gaps; 0 without segments.
__device__ __forceinline__ i32 segment_of(const ColumnScaleArgs& a, i64 row) {
    if (!a.offsets) return 0;
    const i32* offsets = reinterpret_cast<const i32*>(a.offsets);
    i32 low = -1, high = i32(a.experts);
    while (high - low > 1) {
        const i32 middle = (low + high) >> 1;
        if (offsets[middle] <= row) low = middle;
        else high = middle;
    }
    return low >= 0 && row < i64(offsets[low]) + reinterpret_cast<const i32*>(a.counts)[low] ? low : -1;
}

// y = x·factor (+ bias); rows in no segment become zero, whatever x holds.
template <class T> __device__ __forceinline__ void scale_columns(const ColumnScaleArgs& a) {
    constexpr int N = VecWidth<T>::count;
    const i64 row = row_of_warp();
    if (row >= a.rows) return;
    const i32 e = segment_of(a, row);
    const T* x = reinterpret_cast<const T*>(a.x) + row * a.width;
    const T* bias = reinterpret_cast<const T*>(a.bias);
    const float* factor = reinterpret_cast<const float*>(a.factor) + i64(max(e, 0)) * a.width;
    T* y = reinterpret_cast<T*>(a.y) + row * a.width;
#pragma unroll 2
    for (i64 at = (threadIdx.x & 31) * N; at < a.width; at += 32 * N) {
        Vec<T, N> out = {};
        if (e >= 0) {
            const Vec<T, N> v = load_guarded<N>(x, at, a.width, a.vectorized);
            const Vec<float, N> f = load_guarded<N>(factor, at, a.width, a.vectorized);
            Vec<T, N> b = {};
            if (bias) b = load_guarded<N>(bias, at, a.width, a.vectorized);
#pragma unroll
            for (int i = 0; i < N; i++) out.at[i] = from_f32<T>(fmaf(to_f32(v.at[i]), f.at[i], to_f32(b.at[i])));
        }
        store_guarded(y, at, a.width, a.vectorized, out);
    }
}

// dx = dy·factor, products = dy·x·inv_norm; rows in no segment become zero.
template <class T> __device__ __forceinline__ void scale_columns_backward(const ColumnScaleArgs& a) {
    constexpr int N = VecWidth<T>::count;
    const i64 row = row_of_warp();
    if (row >= a.rows) return;
    const i32 e = segment_of(a, row);
    const T* dy = reinterpret_cast<const T*>(a.dy) + row * a.width;
    const T* x = reinterpret_cast<const T*>(a.x) + row * a.width;
    const float* factor = reinterpret_cast<const float*>(a.factor) + i64(max(e, 0)) * a.width;
    const float* inv_norm = reinterpret_cast<const float*>(a.inv_norm) + i64(max(e, 0)) * a.width;
    T* dx = reinterpret_cast<T*>(a.y) + row * a.width;
    T* products = reinterpret_cast<T*>(a.products) + row * a.width;
#pragma unroll 1
    for (i64 at = (threadIdx.x & 31) * N; at < a.width; at += 32 * N) {
        Vec<T, N> scaled = {}, product = {};
        if (e >= 0) {
            const Vec<T, N> d = load_guarded<N>(dy, at, a.width, a.vectorized);
            const Vec<T, N> v = load_guarded<N>(x, at, a.width, a.vectorized);
            const Vec<float, N> f = load_guarded<N>(factor, at, a.width, a.vectorized);
            const Vec<float, N> inv = load_guarded<N>(inv_norm, at, a.width, a.vectorized);
#pragma unroll
            for (int i = 0; i < N; i++) {
                scaled.at[i] = from_f32<T>(to_f32(d.at[i]) * f.at[i]);
                product.at[i] = from_f32<T>(to_f32(d.at[i]) * to_f32(v.at[i]) * inv.at[i]);
            }
        }
        store_guarded(dx, at, a.width, a.vectorized, scaled);
        store_guarded(products, at, a.width, a.vectorized, product);
    }
}

#define KERNELS(T, NAME)                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) row_squares_##NAME(const RowSquaresArgs a) { row_squares<T>(a); }          \
    extern "C" __global__ void __launch_bounds__(THREADS) dora_update_##NAME(const DoraUpdateArgs a) { update_squares<T>(a); }       \
    extern "C" __global__ void __launch_bounds__(THREADS) dora_factor_##NAME(const DoraFactorArgs a) { row_factor<T>(a); }           \
    extern "C" __global__ void __launch_bounds__(THREADS) scale_columns_##NAME(const ColumnScaleArgs a) { scale_columns<T>(a); }     \
    extern "C" __global__ void __launch_bounds__(THREADS) scale_columns_backward_##NAME(const ColumnScaleArgs a) {                   \
        scale_columns_backward<T>(a);                                                                                                \
    }
FOR_EACH_TYPE(KERNELS)
