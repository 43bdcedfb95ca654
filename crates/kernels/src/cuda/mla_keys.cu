// Keys of multi-head latent attention, k [tokens, heads, a + b]: concatenates each head's own channels with the
// channels that all heads share (the rotary part), and splits gradients again. One block to a token.
#include "args/mla_keys.cuh"

enum Flag : u32 { VECTORIZED_OWN = 1, VECTORIZED_SHARED = 2 };


constexpr int THREADS = 256;

template <class T> __device__ __forceinline__ void join(const MlaKeysArgs& p) {
    constexpr int V = VecWidth<T>::count;
    const i64 token = blockIdx.x;
    const T* own = reinterpret_cast<const T*>(p.own) + token * p.own_token;
    const T* shared = reinterpret_cast<const T*>(p.shared) + token * p.shared_token;
    T* k = reinterpret_cast<T*>(p.k) + token * p.k_token;
    const i32 own_chunks = (p.a + V - 1) / V, chunks = own_chunks + (p.b + V - 1) / V;
    for (i32 i = threadIdx.x; i < p.heads * chunks; i += THREADS) {
        const i32 head = i / chunks, chunk = i - head * chunks;
        T* to = k + head * p.k_head;
        if (chunk < own_chunks) {
            const bool vectorized = p.flags & VECTORIZED_OWN;
            store_guarded(to, chunk * V, p.a, vectorized, load_guarded(own + head * p.own_head, chunk * V, p.a, vectorized));
        } else {
            const bool vectorized = p.flags & VECTORIZED_SHARED;
            const i32 at = (chunk - own_chunks) * V;
            store_guarded(to + p.a, at, p.b, vectorized, load_guarded(shared, at, p.b, vectorized));
        }
    }
}

// dshared[token] = Σ over heads. A thread sums a chunk of channels over every groups-th head; then one thread a
// channel adds those sums in order.
template <class T> __device__ __forceinline__ void split(const MlaKeysArgs& p) {
    constexpr int V = VecWidth<T>::count;
    __shared__ float sums[THREADS * V];
    const i64 token = blockIdx.x;
    T* own = reinterpret_cast<T*>(p.own) + token * p.own_token;
    T* shared = reinterpret_cast<T*>(p.shared) + token * p.shared_token;
    const T* k = reinterpret_cast<const T*>(p.k) + token * p.k_token;
    const i32 own_chunks = (p.a + V - 1) / V;
    for (i32 i = threadIdx.x; i < p.heads * own_chunks; i += THREADS) {
        const i32 head = i / own_chunks, at = (i - head * own_chunks) * V;
        const bool vectorized = p.flags & VECTORIZED_OWN;
        store_guarded(own + head * p.own_head, at, p.a, vectorized, load_guarded(k + head * p.k_head, at, p.a, vectorized));
    }
    const i32 all = (p.b + V - 1) / V;
    for (i32 first = 0; first < all; first += THREADS) {
        const i32 chunks = min(all - first, THREADS), groups = THREADS / chunks;
        const i32 group = threadIdx.x / chunks, chunk = threadIdx.x - group * chunks;
        if (group < groups) {
            float sum[V] = {};
            for (i32 head = group; head < p.heads; head += groups) {
                float x[V];
                const bool vectorized = p.flags & VECTORIZED_SHARED;
                unpack(load_guarded(k + head * p.k_head + p.a, (first + chunk) * V, p.b, vectorized), x);
#pragma unroll
                for (int i = 0; i < V; i++) sum[i] += x[i];
            }
#pragma unroll
            for (int i = 0; i < V; i++) sums[(group * chunks + chunk) * V + i] = sum[i];
        }
        __syncthreads();
        for (i32 c = threadIdx.x; c < chunks * V; c += THREADS) {
            float sum = 0.0f;
            for (i32 g = 0; g < groups; g++) sum += sums[g * chunks * V + c];
            if (first * V + c < p.b) shared[first * V + c] = from_f32<T>(sum);
        }
        __syncthreads();
    }
}

#define MLA_CONCAT_KEYS(T, NAME) \
    extern "C" __global__ void __launch_bounds__(THREADS) mla_concat_keys_##NAME(const MlaKeysArgs p) { join<T>(p); }
FOR_EACH_TYPE(MLA_CONCAT_KEYS)
#define MLA_SPLIT_KEYS(T, NAME) \
    extern "C" __global__ void __launch_bounds__(THREADS) mla_split_keys_##NAME(const MlaKeysArgs p) { split<T>(p); }
FOR_EACH_TYPE(MLA_SPLIT_KEYS)
