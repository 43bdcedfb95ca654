// Vectors of N elements: one access where addresses are aligned (`vectorized`), element by element otherwise and at
// the end.
#pragma once
#include "prelude.cuh"

template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
    T at[N];
};

// Elements at .. at + N − 1 in one access.
template <int N, class T> __device__ __forceinline__ Vec<T, N> load_vec(const T* from, i64 at) {
    return *reinterpret_cast<const Vec<T, N>*>(from + at);
}
template <int N, class T> __device__ __forceinline__ void store_vec(T* to, i64 at, const Vec<T, N>& g) {
    *reinterpret_cast<Vec<T, N>*>(to + at) = g;
}
// The same of n elements; elements past the end are zero and are not stored.
template <int N, class T> __device__ __forceinline__ Vec<T, N> load_guarded(const T* from, i64 at, i64 n, bool vectorized) {
    if (vectorized && at + N <= n) return load_vec<N>(from, at);
    Vec<T, N> g = {};
#pragma unroll
    for (int i = 0; i < N; i++)
        if (at + i < n) g.at[i] = from[at + i];
    return g;
}
template <int N, class T> __device__ __forceinline__ void store_guarded(T* to, i64 at, i64 n, bool vectorized, const Vec<T, N>& g) {
    if (vectorized && at + N <= n) {
        store_vec(to, at, g);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (at + i < n) to[at + i] = g.at[i];
}

// Σ over a block in f64, in a fixed order, in thread 0.
__device__ __forceinline__ double block_total(double x) {
    __shared__ double shared[32];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    double total = 0.0;
    if (threadIdx.x == 0)
        for (u32 w = 0; w < blockDim.x / 32; w++) total += shared[w];
    return total;
}
