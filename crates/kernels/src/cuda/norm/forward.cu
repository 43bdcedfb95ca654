#include "amax.cuh"
#include "args/norm_forward.cuh"
#include "norm/common.cuh"

// Σ (x − µ)² of the first `count` columns of a chunk, in order.
template <class T>
__device__ __forceinline__ void add_squares(
    float& total, const Packed<T>& x, float mean, i32 count = VecWidth<T>::count
) {
    constexpr int V = VecWidth<T>::count;
    float v[V];
    unpack(x, v);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float d = i < count ? v[i] - mean : 0.0f;
        total = __fmaf_rn(d, d, total);
    }
}

template <class T> __device__ __forceinline__ void add_all(float& total, const Packed<T>& x) {
    constexpr int V = VecWidth<T>::count;
    float v[V];
    unpack(x, v);
#pragma unroll
    for (int i = 0; i < V; i++) total += v[i];
}

// x + residual, rounded to the element type: what is stored is what is normalized.
template <class T> __device__ __forceinline__ Packed<T> added(const Packed<T>& x, const Packed<T>& residual) {
    constexpr int V = VecWidth<T>::count;
    float v[V], r[V];
    unpack(x, v);
    unpack(residual, r);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] += r[i];
    return pack(v);
}

// (x − µ)·r·g (+ b) of one chunk.
template <class T>
__device__ __forceinline__ Packed<T> normal(
    const Packed<T>& x, const Packed<T>& gamma, const Packed<T>& beta, float mean, float r, float one, bool bias
) {
    constexpr int V = VecWidth<T>::count;
    float v[V], g[V], b[V];
    unpack(x, v);
    unpack(gamma, g);
    unpack(beta, b);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = __fmul_rn((v[i] - mean) * r, g[i] + one);
    if (bias) {
#pragma unroll
        for (int i = 0; i < V; i++) v[i] += b[i];
    }
    return pack(v);
}

__device__ __forceinline__ void store_statistics(const NormForwardArgs& a, i64 row, float mean, float r) {
    if (a.mean) reinterpret_cast<float*>(a.mean)[row] = mean;
    reinterpret_cast<float*>(a.rstd)[row] = r;
}

// ADD: normalizes sum = x + residual, which is stored, too; x, residual and sum have the same strides. Then many short
// blocks are fastest, otherwise few persistent ones: the former need few registers, the latter few instructions, so
// unpacked values are recomputed or kept. WITH_AMAX: raises the amax of y.
template <class T, int CHUNKS, bool ADD, int STAGES, bool WITH_AMAX = false>
__device__ __forceinline__ void forward(const NormForwardArgs& a) {
    constexpr int V = VecWidth<T>::count;
    // Two sums of a row, double-buffered.
    __shared__ Pair shared[2][2][32];
    const u32 lanes = a.lanes, team = threadIdx.x / lanes, lane = threadIdx.x - team * lanes;
    const u32 teams = blockDim.x / lanes;
    const i64 step = i64(gridDim.x) * teams;
    const bool centred = a.flags & CENTRED;
    Ring<T, ADD ? 2 : 1, CHUNKS, STAGES> ring;
    auto column = [&](int c) { return i32(c * lanes + lane) * V; };
    auto has = [&](int c) { return column(c) < a.width; };
    auto prefetch = [&](i64 row) {
        if (row < a.rows) {
            const i64 from = place(row, a.inner).start(a.x_outer, a.x_inner);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                if (!has(c)) continue;
                ring.prefetch(0, c, reinterpret_cast<const T*>(a.x) + from + column(c));
                if (ADD) ring.prefetch(1, c, reinterpret_cast<const T*>(a.residual) + from + column(c));
            }
        }
        ring.commit();
    };
    i64 row = i64(blockIdx.x) * teams + team;
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
        ring.next();
        prefetch(row + s * step);
    }
    ring.stage = 0;

    Packed<T> gamma[CHUNKS], beta[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        gamma[c] = beta[c] = {};
        if (has(c)) gamma[c] = load_chunk<T>(a.gamma, column(c));
        if (has(c) && a.beta) beta[c] = load_chunk<T>(a.beta, column(c));
    }
    // All teams of a block run equally many iterations, the last perhaps without a row, because they synchronize in
    // the reductions.
    u32 turn = 0;
    float most = 0.0f;
    for (i64 base = i64(blockIdx.x) * teams; base < a.rows; base += step, row += step, turn ^= 1) {
        const bool live = row < a.rows;
        const Place p = place(live ? row : 0, a.inner);
        const i64 from = p.start(a.x_outer, a.x_inner);
        Packed<T> held[CHUNKS];
        ring.wait();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            held[c] = {};
            if (!live || !has(c)) continue;
            held[c] = ring.take(0, c);
            if (ADD) held[c] = added(held[c], ring.take(1, c));
        }
        prefetch(row + (STAGES - 1) * step);
        ring.next();
        if (ADD && live) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                if (has(c)) store_chunk(a.sum, from + column(c), held[c]);
        }
        Pair sums = {0.0f, 0.0f};
        float mean = 0.0f;
        if (centred) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) add_all(sums.x, held[c]);
            mean = team_sums(sums, lanes, team, shared[turn][0] + (team * lanes >> 5)).x / float(a.width);
            if (ADD) {
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) opaque(held[c]);
            }
        }
        sums = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (has(c)) add_squares(sums.x, held[c], mean);
        if (ADD) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) opaque(held[c]), opaque(gamma[c]), opaque(beta[c]);
        }
        sums = team_sums(sums, lanes, team, shared[turn][1] + (team * lanes >> 5));
        const float r = 1.0f / sqrtf(sums.x / float(a.width) + a.eps);
        if (!live) continue;
        const i64 to = p.start(a.y_outer, a.y_inner);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (has(c)) {
                const Packed<T> y = normal(held[c], gamma[c], beta[c], mean, r, a.one, a.beta != 0);
                store_chunk(a.y, to + column(c), y);
                if (WITH_AMAX) most = packed_amax(most, y);
            }
        if (lane == 0) store_statistics(a, row, mean, r);
    }
    if (WITH_AMAX) block_atomic_amax(a.amax, most);
}

// RMSNorm alone: a row for each team, which ends with it. The loads of a block overlap with the stores of others, without
// a prefetch buffer: 1024 threads of an SM have 64 KiB in flight. Same sums as above.
template <class T, int CHUNKS> __device__ __forceinline__ void rms_norm(const NormForwardArgs& a) {
    constexpr int V = VecWidth<T>::count;
    __shared__ Pair shared[32];
    const u32 lanes = a.lanes, team = threadIdx.x / lanes, lane = threadIdx.x - team * lanes;
    const i64 row = i64(blockIdx.x) * (blockDim.x / lanes) + team;
    const bool live = row < a.rows;
    const Place p = place(live ? row : 0, a.inner);
    const i64 from = p.start(a.x_outer, a.x_inner);
    auto column = [&](int c) { return i32(c * lanes + lane) * V; };
    auto has = [&](int c) { return column(c) < a.width; };
    Packed<T> held[CHUNKS], gamma[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        held[c] = {};
        if (live && has(c)) held[c] = load_chunk<T>(a.x, from + column(c));
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        gamma[c] = {};
        if (has(c)) gamma[c] = load_chunk<T>(a.gamma, column(c));
    }
    Pair sums = {0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) add_squares(sums.x, held[c], 0.0f);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) opaque(held[c]);
    sums = team_sums(sums, lanes, team, shared + (team * lanes >> 5));
    const float r = 1.0f / sqrtf(sums.x / float(a.width) + a.eps);
    if (!live) return;
    const i64 to = p.start(a.y_outer, a.y_inner);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        if (has(c)) store_chunk(a.y, to + column(c), normal(held[c], gamma[c], {}, 0.0f, r, a.one, false));
    if (lane == 0) store_statistics(a, row, 0.0f, r);
}

// Rows of any width and alignment, one block to a row, which is read once for each sum and once more for the result.
template <class T, bool ADD, bool WITH_AMAX = false>
__device__ __forceinline__ void forward_long(const NormForwardArgs& a) {
    constexpr int V = VecWidth<T>::count;
    __shared__ float shared[32];
    const i64 row = blockIdx.x;
    const i32 first = threadIdx.x * V, step = blockDim.x * V;
    const Place p = place(row, a.inner);
    const i64 from = p.start(a.x_outer, a.x_inner);
    const bool vectorized = a.flags & VECTORIZED, vectorized_gain = a.flags & VECTORIZED_GAIN;
    const T* x = reinterpret_cast<const T*>(a.x) + from;
    if (ADD) {
        const T* residual = reinterpret_cast<const T*>(a.residual) + from;
        T* sum = reinterpret_cast<T*>(a.sum) + from;
        for (i32 at = first; at < a.width; at += step)
            store_guarded(sum, at, a.width, vectorized, added(load_guarded(x, at, a.width, vectorized), load_guarded(residual, at, a.width, vectorized)));
        // Each thread reads back what it wrote itself.
        x = sum;
    }
    float mean = 0.0f, squares = 0.0f;
    if (a.flags & CENTRED) {
        float total = 0.0f;
        for (i32 at = first; at < a.width; at += step) add_all(total, load_guarded(x, at, a.width, vectorized));
        mean = block_sum(total, shared) / float(a.width);
    }
    for (i32 at = first; at < a.width; at += step)
        add_squares(squares, load_guarded(x, at, a.width, vectorized), mean, a.width - at);
    const float r = 1.0f / sqrtf(block_sum(squares, shared) / float(a.width) + a.eps);
    T* y = reinterpret_cast<T*>(a.y) + p.start(a.y_outer, a.y_inner);
    float most = 0.0f;
    for (i32 at = first; at < a.width; at += step) {
        Packed<T> g = load_guarded(reinterpret_cast<const T*>(a.gamma), at, a.width, vectorized_gain), b = {};
        if (a.beta) b = load_guarded(reinterpret_cast<const T*>(a.beta), at, a.width, vectorized_gain);
        const Packed<T> z = normal(load_guarded(x, at, a.width, vectorized), g, b, mean, r, a.one, a.beta != 0);
        store_guarded(y, at, a.width, vectorized, z);
        if (!WITH_AMAX) continue;
        float v[V];
        unpack(z, v);
#pragma unroll
        for (int i = 0; i < V; i++) most = at + i < a.width ? fmaxf(most, fabsf(v[i])) : most;
    }
    if (threadIdx.x == 0) store_statistics(a, row, mean, r);
    if (WITH_AMAX) block_atomic_amax(a.amax, most);
}

#define FORWARD(T, NAME, CHUNKS, STAGES)                                                                                     \
    extern "C" __global__ void __launch_bounds__(512) norm_##CHUNKS##_##NAME(const NormForwardArgs a) {                       \
        forward<T, CHUNKS, false, STAGES>(a);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512) add_norm_##CHUNKS##_##NAME(const NormForwardArgs a) {                   \
        forward<T, CHUNKS, true, STAGES>(a);                                                                       \
    }
#define FORWARD_ALL(T, NAME)                                                                                                 \
    FORWARD(T, NAME, 1, 4)                                                                                                   \
    FORWARD(T, NAME, 2, 4)                                                                                                   \
    FORWARD(T, NAME, 3, 3)                                                                                                   \
    FORWARD(T, NAME, 4, 3)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 4) rms_norm_4_##NAME(const NormForwardArgs a) { rms_norm<T, 4>(a); }    \
    extern "C" __global__ void __launch_bounds__(1024, 1) norm_long_##NAME(const NormForwardArgs a) {                         \
        forward_long<T, false>(a);                                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024, 1) add_norm_long_##NAME(const NormForwardArgs a) {                     \
        forward_long<T, true>(a);                                                                                  \
    }

FOR_EACH_TYPE(FORWARD_ALL)

#ifndef ELEMENT_F16
#define WITH_AMAX(CHUNKS, STAGES)                                                                                       \
    extern "C" __global__ void __launch_bounds__(512) norm_##CHUNKS##_amax(const NormForwardArgs a) {                      \
        forward<bf16, CHUNKS, false, STAGES, true>(a);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512) add_norm_##CHUNKS##_amax(const NormForwardArgs a) {                  \
        forward<bf16, CHUNKS, true, STAGES, true>(a);                                                                  \
    }
WITH_AMAX(1, 4)
WITH_AMAX(2, 4)
WITH_AMAX(3, 3)
WITH_AMAX(4, 3)
extern "C" __global__ void __launch_bounds__(1024, 1) norm_long_amax(const NormForwardArgs a) {
    forward_long<bf16, false, true>(a);
}
extern "C" __global__ void __launch_bounds__(1024, 1) add_norm_long_amax(const NormForwardArgs a) {
    forward_long<bf16, true, true>(a);
}
#endif
