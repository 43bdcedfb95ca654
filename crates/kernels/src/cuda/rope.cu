// Rotary position embedding, in place: (u, v) → (u·cos a − v·sin a, v·cos a + u·sin a). A token whose position is
// outside the tables is reported and left unchanged.
#include "args/rope.cuh"

enum Flag : u32 { INVERSE = 1, VECTORIZED = 2, VECTORIZED_TABLES = 4 };


__device__ __forceinline__ void rotate(float& u, float& v, float c, float s) {
    const float a = u * c - v * s;
    v = v * c + u * s;
    u = a;
}

// Row of the tables for a token, or −1, which is reported.
__device__ __forceinline__ i32 position(const RopeArgs& a, i64 token) {
    i32 p = reinterpret_cast<const i32*>(a.positions)[token];
    if (p >= 0 && p < a.places) return p;
    fault(a.fault, FAULT_ID);
    return -1;
}

// Quotient and remainder, in 32 bits where they suffice, because 64-bit division is slow.
__device__ __forceinline__ i64 divide(i64 n, i32 by, i32& rest) {
    if ((n >> 32) == 0) {
        rest = u32(n) % u32(by);
        return u32(n) / u32(by);
    }
    rest = n % by;
    return n / by;
}

// Four elements of a row of `width`: 8 or 16 bytes.
template <class E>
__device__ __forceinline__ void read4(const E* row, i32 at, i32 width, bool vectorized, float (&to)[4]) {
    if (vectorized && at + 4 <= width) {
        const u64 four = *reinterpret_cast<const u64*>(row + at);
        to[0] = low_of<E>(u32(four)), to[1] = high_of<E>(u32(four));
        to[2] = low_of<E>(u32(four >> 32)), to[3] = high_of<E>(u32(four >> 32));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = at + i < width ? to_f32(row[at + i]) : 0.0f;
}
__device__ __forceinline__ void read4(const float* row, i32 at, i32 width, bool vectorized, float (&to)[4]) {
    unpack(load_guarded(row, at, width, vectorized), to);
}
template <class E>
__device__ __forceinline__ void write4(E* row, i32 at, i32 width, bool vectorized, const float (&from)[4]) {
    if (vectorized && at + 4 <= width) {
        *reinterpret_cast<u64*>(row + at) =
            u64(pack_pair<E>(from[0], from[1])) | u64(pack_pair<E>(from[2], from[3])) << 32;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (at + i < width) row[at + i] = from_f32<E>(from[i]);
}
__device__ __forceinline__ void write4(float* row, i32 at, i32 width, bool vectorized, const float (&from)[4]) {
    store_guarded(row, at, width, vectorized, pack(from));
}

#define HEADS 4

// A thread has V pairs of up to HEADS heads of a token: cos and sin are read once for all of them, and all loads are
// in flight together. PAIRS: channels 2i and 2i + 1 form a pair, otherwise i and i + half.
template <class T, bool PAIRS> __device__ __forceinline__ void rope(const RopeArgs& a) {
    constexpr int V = VecWidth<T>::count;
    i32 chunk, group;
    i64 token = divide(i64(blockIdx.x) * blockDim.x + threadIdx.x, a.chunks, chunk);
    token = divide(token, a.groups, group);
    if (token >= a.tokens) return;
    const i32 p = position(a, token);
    if (p < 0) return;
    const i32 at = chunk * V;
    const bool vectorized = a.flags & VECTORIZED;
    T* base = reinterpret_cast<T*>(a.x) + token * a.token_stride + i64(group) * HEADS * a.head_stride;
    const i32 heads = min(a.heads - group * HEADS, HEADS);

    Packed<T> first[HEADS], second[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h >= heads) continue;
        const T* x = base + h * a.head_stride;
        first[h] = PAIRS ? load_guarded(x, 2 * at, 2 * a.half, vectorized) : load_guarded(x, at, a.half, vectorized);
        second[h] = PAIRS ? load_guarded(x, 2 * at + V, 2 * a.half, vectorized) : load_guarded(x + a.half, at, a.half, vectorized);
    }
    float c[V], s[V];
    const i64 table = i64(p) * a.half;
#pragma unroll
    for (int i = 0; i < V; i += 4) {
        float four[4];
        const bool vectorized_tables = a.flags & VECTORIZED_TABLES;
        unpack(load_guarded(reinterpret_cast<const float*>(a.cos) + table, at + i, a.half, vectorized_tables), four);
#pragma unroll
        for (int j = 0; j < 4; j++) c[i + j] = four[j];
        unpack(load_guarded(reinterpret_cast<const float*>(a.sin) + table, at + i, a.half, vectorized_tables), four);
#pragma unroll
        for (int j = 0; j < 4; j++) s[i + j] = a.flags & INVERSE ? -four[j] : four[j];
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h >= heads) continue;
        float u[V], v[V];
        unpack(first[h], u);
        unpack(second[h], v);
        if (PAIRS) {
#pragma unroll
            for (int i = 0; i < V; i += 2) {
                rotate(u[i], u[i + 1], c[i / 2], s[i / 2]);
                rotate(v[i], v[i + 1], c[V / 2 + i / 2], s[V / 2 + i / 2]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < V; i++) rotate(u[i], v[i], c[i], s[i]);
        }
        T* x = base + h * a.head_stride;
        if (PAIRS) {
            store_guarded(x, 2 * at, 2 * a.half, vectorized, pack(u));
            store_guarded(x, 2 * at + V, 2 * a.half, vectorized, pack(v));
        } else {
            store_guarded(x, at, a.half, vectorized, pack(u));
            store_guarded(x + a.half, at, a.half, vectorized, pack(v));
        }
    }
}

// From interleaved pairs to halves (inverse: back) channels move across the whole head, so that a head is read before
// any of it is written: `lanes` threads of one warp have a head, four pairs each.
template <class T> __device__ __forceinline__ void rope_across(const RopeArgs& a) {
    const u32 lane = threadIdx.x & (a.lanes - 1);
    i32 head;
    const i64 token =
        divide(i64(blockIdx.x) * (blockDim.x / a.lanes) + threadIdx.x / a.lanes, a.heads, head);
    const i32 p = token < a.tokens ? position(a, token) : -1;
    const i32 at = lane * 4;
    const bool live = p >= 0 && at < a.half, vectorized = a.flags & VECTORIZED, inverse = a.flags & INVERSE;
    T* x = reinterpret_cast<T*>(a.x) + token * a.token_stride + head * a.head_stride;
    // In memory, pairs are (u₀, v₀, u₁, v₁), (u₂, ...); halves are (u₀ ... u₃), (v₀ ...).
    float one[4], two[4], u[4], v[4];
    if (live) {
        float c[4], s[4];
        const i64 table = i64(p) * a.half;
        const bool vectorized_tables = a.flags & VECTORIZED_TABLES;
        unpack(load_guarded(reinterpret_cast<const float*>(a.cos) + table, at, a.half, vectorized_tables), c);
        unpack(load_guarded(reinterpret_cast<const float*>(a.sin) + table, at, a.half, vectorized_tables), s);
        if (inverse) {
            read4(x, at, a.half, vectorized, u);
            read4(x + a.half, at, a.half, vectorized, v);
        } else {
            read4(x, 2 * at, 2 * a.half, vectorized, one);
            read4(x, 2 * at + 4, 2 * a.half, vectorized, two);
            u[0] = one[0], v[0] = one[1], u[1] = one[2], v[1] = one[3];
            u[2] = two[0], v[2] = two[1], u[3] = two[2], v[3] = two[3];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) rotate(u[i], v[i], c[i], inverse ? -s[i] : s[i]);
    }
    __syncwarp();
    if (!live) return;
    if (inverse) {
        one[0] = u[0], one[1] = v[0], one[2] = u[1], one[3] = v[1];
        two[0] = u[2], two[1] = v[2], two[2] = u[3], two[3] = v[3];
        write4(x, 2 * at, 2 * a.half, vectorized, one);
        write4(x, 2 * at + 4, 2 * a.half, vectorized, two);
    } else {
        write4(x, at, a.half, vectorized, u);
        write4(x + a.half, at, a.half, vectorized, v);
    }
}

// The same for heads wider than a warp handles: one block to a head, through shared memory, f32 [2·half].
template <class T> __device__ __forceinline__ void rope_across_long(const RopeArgs& a) {
    extern __shared__ float rotated[];
    i32 head;
    const i64 token = divide(blockIdx.x, a.heads, head);
    const i32 p = position(a, token);
    if (p < 0) return;
    const bool inverse = a.flags & INVERSE;
    T* x = reinterpret_cast<T*>(a.x) + token * a.token_stride + head * a.head_stride;
    const float* cos = reinterpret_cast<const float*>(a.cos) + i64(p) * a.half;
    const float* sin = reinterpret_cast<const float*>(a.sin) + i64(p) * a.half;
    for (i32 i = threadIdx.x; i < a.half; i += blockDim.x) {
        const i32 pair = 2 * i, other = i + a.half;
        float u = to_f32(x[inverse ? i : pair]), v = to_f32(x[inverse ? other : pair + 1]);
        rotate(u, v, cos[i], inverse ? -sin[i] : sin[i]);
        rotated[inverse ? pair : i] = u;
        rotated[inverse ? pair + 1 : other] = v;
    }
    __syncthreads();
    for (i32 i = threadIdx.x; i < 2 * a.half; i += blockDim.x) x[i] = from_f32<T>(rotated[i]);
}

#define KERNELS(T, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 2) rope_halves_##NAME(const RopeArgs a) { rope<T, false>(a); } \
    extern "C" __global__ void __launch_bounds__(256, 2) rope_pairs_##NAME(const RopeArgs a) { rope<T, true>(a); }   \
    extern "C" __global__ void __launch_bounds__(256) rope_across_##NAME(const RopeArgs a) { rope_across<T>(a); } \
    extern "C" __global__ void __launch_bounds__(256) rope_across_long_##NAME(const RopeArgs a) {                 \
        rope_across_long<T>(a);                                                                                   \
    }

FOR_EACH_TYPE(KERNELS)
