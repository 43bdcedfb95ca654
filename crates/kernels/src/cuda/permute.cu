// Moves rows between token order and expert order. A thread has one or a few 16-byte chunks of a row; chunks are
// numbered row by row.
#include "args/permute.cuh"

constexpr int THREADS = 256;

// A 16-byte chunk from element `at`.
template <class E> __device__ __forceinline__ Packed<E> load_chunk(const E* from, i64 at) {
    return *reinterpret_cast<const Packed<E>*>(from + at);
}
template <class E> __device__ __forceinline__ void store_chunk(E* to, i64 at, const Packed<E>& p) {
    *reinterpret_cast<Packed<E>*>(to + at) = p;
}

// Chunks of a thread whose loads are in flight together.
constexpr int IN_FLIGHT = 4;

// out[r] = x[source[r] / k]; zeros for rows without a source.
template <class E> __device__ __forceinline__ void gather_rows(const MoveArgs& a) {
    constexpr int N = VecWidth<E>::count;
    const E* x = reinterpret_cast<const E*>(a.x);
    E* out = reinterpret_cast<E*>(a.out);
    const i32* source = reinterpret_cast<const i32*>(a.source);
    const u32 first = blockIdx.x * (THREADS * IN_FLIGHT) + threadIdx.x;
    // The row of x, or ~0 without a source and past the end.
    auto row_of = [&](u32 i) {
        const u32 selection = i < a.chunks ? u32(source[i / a.per_row]) : ~0u;
        return selection < a.selections ? selection / a.k : ~0u;
    };
    if (a.vectorized) {
        u32 row[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) row[u] = row_of(first + u * THREADS);
        Packed<E> p[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            p[u] = {};
            if (row[u] != ~0u) p[u] = load_chunk(x, i64(row[u]) * a.width + (first + u * THREADS) % a.per_row * N);
        }
        // Rows are whole chunks, so a chunk's number is its position.
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (first + u * THREADS < a.chunks) store_chunk(out, i64(first + u * THREADS) * N, p[u]);
        return;
    }
#pragma unroll 1
    for (u32 i = first; i < a.chunks && i < first + IN_FLIGHT * THREADS; i += THREADS) {
        const u32 row = row_of(i);
        const i32 at = i32(i % a.per_row) * N, last = min(at + N, a.width);
        E* to = out + i64(i / a.per_row) * a.width;
#pragma unroll 1
        for (i32 c = at; c < last; c++) to[c] = row == ~0u ? E{} : x[i64(row) * a.width + c];
    }
}
#define GATHER(E, NAME)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) gather_rows_##NAME(const MoveArgs a) { gather_rows<E>(a); }
GATHER(u32, 4)
GATHER(u16, 2)
GATHER(u8, 1)

// Selections of a token that are handled together.
constexpr int SELECTIONS_AT_ONCE = 8;

// Zeroes rows without a source: a warp checks 32 of them.
template <class E> __device__ __forceinline__ void clear_rows(const MoveArgs& a) {
    constexpr int N = VecWidth<E>::count;
    const i32 lane = threadIdx.x & 31;
    const u32 first = (blockIdx.x - a.movers) * THREADS + (threadIdx.x - lane);
    const bool mine = first + lane < a.n;
    const u32 selection = mine ? u32(reinterpret_cast<const i32*>(a.source)[first + lane]) : 0;
    u32 nobody = __ballot_sync(~0u, mine && selection >= a.selections);
    for (; nobody != 0; nobody &= nobody - 1) {
        E* row = reinterpret_cast<E*>(a.out) + i64(first + __ffs(nobody) - 1) * a.width;
        if (a.vectorized) {
            for (i32 at = lane * N; at < a.width; at += 32 * N) store_chunk(row, at, Packed<E>{});
        } else {
            for (i32 at = lane; at < a.width; at += 32) row[at] = E{};
        }
    }
}

// out[rows[t, j]] = x[t]; rows without a source become zeros.
template <class E> __device__ __forceinline__ void moe_permute(const MoveArgs& a) {
    constexpr int N = VecWidth<E>::count;
    if (blockIdx.x >= a.movers) {
        clear_rows<E>(a);
        return;
    }
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.chunks) return;
    const u32 t = i / a.per_row;
    const i32 at = i32(i % a.per_row) * N;
    const E* x = reinterpret_cast<const E*>(a.x) + i64(t) * a.width;
    E* out = reinterpret_cast<E*>(a.out);
    const i32* rows = reinterpret_cast<const i32*>(a.rows) + i64(t) * a.k;
    if (a.vectorized) {
        const Packed<E> p = load_chunk(x, at);
        for (u32 j = 0; j < a.k; j += SELECTIONS_AT_ONCE) {
            u32 row[SELECTIONS_AT_ONCE];
#pragma unroll
            for (int u = 0; u < SELECTIONS_AT_ONCE; u++) row[u] = j + u < a.k ? u32(rows[j + u]) : ~0u;
#pragma unroll
            for (int u = 0; u < SELECTIONS_AT_ONCE; u++)
                if (row[u] < a.n) store_chunk(out, i64(row[u]) * a.width + at, p);
        }
        return;
    }
#pragma unroll 1
    for (u32 j = 0; j < a.k; j++) {
        const u32 row = u32(rows[j]);
        if (row >= a.n) continue;
#pragma unroll 1
        for (i32 c = at; c < min(at + N, a.width); c++) out[i64(row) * a.width + c] = x[c];
    }
}
#define SPREAD(E, NAME)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) moe_permute_##NAME(const MoveArgs a) { moe_permute<E>(a); }
SPREAD(u32, 4)
SPREAD(u16, 2)
SPREAD(u8, 1)

// N elements of a row from `at` as f32, one or two chunks; 0 past the end.
template <class T, int N> __device__ __forceinline__ void numbers(const T* row, i32 at, i32 width, bool vectorized, float (&to)[N]) {
    constexpr int V = VecWidth<T>::count;
#pragma unroll
    for (int half = 0; half < N / V; half++) {
        float v[V];
        unpack(load_guarded(row, at + half * V, width, vectorized), v);
#pragma unroll
        for (int c = 0; c < V; c++) to[half * V + c] = v[c];
    }
}
template <class T, int N> __device__ __forceinline__ void put_numbers(T* row, i32 at, i32 width, bool vectorized, const float (&from)[N]) {
    constexpr int V = VecWidth<T>::count;
#pragma unroll
    for (int half = 0; half < N / V; half++) {
        float v[V];
#pragma unroll
        for (int c = 0; c < V; c++) v[c] = from[half * V + c];
        store_guarded(row, at + half * V, width, vectorized, pack(v));
    }
}

// out[r] = weights[source[r]]·x[source[r] / k]; zeros for rows without a source.
template <class X, class O> __device__ __forceinline__ void moe_unpermute_backward(const MoveArgs& a) {
    constexpr int N = VecWidth<O>::count;
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.chunks) return;
    const u32 r = i / a.per_row, selection = u32(reinterpret_cast<const i32*>(a.source)[r]);
    const i32 at = i32(i % a.per_row) * N;
    float v[N] = {};
    if (selection < a.selections) {
        const float weight = reinterpret_cast<const float*>(a.weights)[selection];
        numbers(reinterpret_cast<const X*>(a.x) + i64(selection / a.k) * a.width, at, a.width, a.vectorized, v);
#pragma unroll
        for (int c = 0; c < N; c++) v[c] *= weight;
    }
    put_numbers(reinterpret_cast<O*>(a.out) + i64(r) * a.width, at, a.width, a.vectorized, v);
}
#define WEIGHTED(X, O, NAME)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) moe_unpermute_backward_##NAME(const MoveArgs a) {               \
        moe_unpermute_backward<X, O>(a);                                                                                  \
    }
WEIGHTED(float, float, f32)
WEIGHTED(bf16, bf16, bf16)
WEIGHTED(float, bf16, mixed)

// Adds weight·x, or x, to a sum.
template <bool WEIGHED, class X, int N>
__device__ __forceinline__ void accumulate(float (&sum)[N], const Packed<X>& p, float weight) {
    float v[N];
    unpack(p, v);
#pragma unroll
    for (int c = 0; c < N; c++) sum[c] = WEIGHED ? fmaf(weight, v[c], sum[c]) : sum[c] + v[c];
}

// out[t] = Σ_j x[rows[t, j]]·(weights[t, j]), in the order of j.
template <class X, class O, bool WEIGHED> __device__ __forceinline__ void moe_unpermute(const MoveArgs& a) {
    constexpr int N = VecWidth<X>::count;
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.chunks) return;
    const u32 t = i / a.per_row;
    const i32 at = i32(i % a.per_row) * N;
    const X* x = reinterpret_cast<const X*>(a.x);
    const i32* rows = reinterpret_cast<const i32*>(a.rows) + i64(t) * a.k;
    const float* weights = reinterpret_cast<const float*>(a.weights) + i64(t) * a.k;
    float sum[N] = {};
    if (a.vectorized) {
        for (u32 j = 0; j < a.k; j += SELECTIONS_AT_ONCE) {
            u32 row[SELECTIONS_AT_ONCE];
            Packed<X> p[SELECTIONS_AT_ONCE];
#pragma unroll
            for (int u = 0; u < SELECTIONS_AT_ONCE; u++) row[u] = j + u < a.k ? u32(rows[j + u]) : ~0u;
#pragma unroll
            for (int u = 0; u < SELECTIONS_AT_ONCE; u++)
                if (row[u] < a.from) p[u] = load_chunk(x, i64(row[u]) * a.width + at);
#pragma unroll
            for (int u = 0; u < SELECTIONS_AT_ONCE; u++)
                if (row[u] < a.from) accumulate<WEIGHED>(sum, p[u], WEIGHED ? weights[j + u] : 1.0f);
        }
    } else {
#pragma unroll 1
        for (u32 j = 0; j < a.k; j++) {
            const u32 row = u32(rows[j]);
            if (row >= a.from) continue;
            accumulate<WEIGHED>(sum, load_guarded(x + i64(row) * a.width, at, a.width, false), WEIGHED ? weights[j] : 1.0f);
        }
    }
    put_numbers(reinterpret_cast<O*>(a.out) + i64(t) * a.width, at, a.width, a.vectorized, sum);
}
#define SUM(X, O, NAME)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) moe_unpermute_##NAME(const MoveArgs a) {                   \
        if (a.weights) moe_unpermute<X, O, true>(a);                                                                    \
        else moe_unpermute<X, O, false>(a);                                                                             \
    }
SUM(float, float, f32)
SUM(bf16, bf16, bf16)
SUM(bf16, float, mixed)

// out[t, j] = <x[rows[t, j]], dy[t]>, the gradient of the routing probabilities. A warp has SELECTIONS_AT_ONCE
// selections of a token; its lanes stride over the chunks of their rows. dy is at `source`; `chunks` counts warps.
template <class X, class D> __device__ __forceinline__ void moe_unpermute_dprobs(const MoveArgs& a) {
    constexpr int N = VecWidth<X>::count;
    const i32 lane = threadIdx.x & 31;
    const u32 groups = (a.k + SELECTIONS_AT_ONCE - 1) / SELECTIONS_AT_ONCE,
              unit = blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
    if (unit >= a.chunks) return;
    const u32 t = unit / groups, first = unit % groups * SELECTIONS_AT_ONCE;
    const X* x = reinterpret_cast<const X*>(a.x);
    const D* dy = reinterpret_cast<const D*>(a.source) + i64(t) * a.width;
    const i32* rows = reinterpret_cast<const i32*>(a.rows) + i64(t) * a.k;
    u32 row[SELECTIONS_AT_ONCE];
#pragma unroll
    for (int u = 0; u < SELECTIONS_AT_ONCE; u++) row[u] = first + u < a.k ? u32(rows[first + u]) : ~0u;
    float sum[SELECTIONS_AT_ONCE] = {};
#pragma unroll 1
    for (i32 at = lane * N; at < a.width; at += 32 * N) {
        float d[N];
        Packed<X> p[SELECTIONS_AT_ONCE];
        if (a.vectorized) {
#pragma unroll
            for (int u = 0; u < SELECTIONS_AT_ONCE; u++) {
                p[u] = {};
                if (row[u] < a.from) p[u] = load_chunk(x, i64(row[u]) * a.width + at);
            }
        } else {
#pragma unroll
            for (int u = 0; u < SELECTIONS_AT_ONCE; u++) {
                p[u] = {};
                if (row[u] < a.from) p[u] = load_guarded(x + i64(row[u]) * a.width, at, a.width, false);
            }
        }
        numbers(dy, at, a.width, a.vectorized, d);
#pragma unroll
        for (int u = 0; u < SELECTIONS_AT_ONCE; u++) {
            float v[N];
            unpack(p[u], v);
#pragma unroll
            for (int c = 0; c < N; c++) sum[u] = fmaf(v[c], d[c], sum[u]);
        }
    }
    float* out = reinterpret_cast<float*>(a.out) + i64(t) * a.k;
#pragma unroll
    for (int u = 0; u < SELECTIONS_AT_ONCE; u++) {
        const float total = warp_sum(sum[u]);
        // A selection without a row gets 0, whatever dy holds.
        if (lane == u && first + u < a.k) out[first + u] = row[u] < a.from ? total : 0.0f;
    }
}
#define PRODUCTS(X, D, NAME)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) moe_unpermute_dprobs_##NAME(const MoveArgs a) {               \
        moe_unpermute_dprobs<X, D>(a);                                                                                     \
    }
PRODUCTS(float, float, f32)
PRODUCTS(bf16, bf16, bf16)
PRODUCTS(bf16, float, mixed)

// out[i] = x[source[i]], 32-bit words.
extern "C" __global__ void __launch_bounds__(THREADS) gather_values(const MoveArgs a) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= a.n) return;
    const u32 from = u32(reinterpret_cast<const i32*>(a.source)[i]);
    reinterpret_cast<u32*>(a.out)[i] = from < a.from ? reinterpret_cast<const u32*>(a.x)[from] : 0;
}
