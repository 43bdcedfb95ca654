// With ŷ = (x − µ)·r and d = dy·g: dx = r·(d − [mean(d)] − ŷ·mean(d·ŷ)) (+ residual), the bracket for LayerNorm only.
// dγ = Σ dy·ŷ and dβ = Σ dy over rows: each block sums rows that follow from the shape alone, in order, into its row
// of the partial sums, f32 [groups, width].
#include "args/norm_backward.cuh"
#include "norm/common.cuh"

// Adds one chunk to Σ d and Σ d·ŷ of the row. Columns past the end have dy = 0.
template <class T>
__device__ __forceinline__ void add_products(
    Pair& sums, const Packed<T>& x, const Packed<T>& dy, const Packed<T>& gamma, float one, float mean, float r
) {
    constexpr int V = VecWidth<T>::count;
    float xs[V], dys[V], gs[V];
    unpack(x, xs);
    unpack(dy, dys);
    unpack(gamma, gs);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float d = dys[i] * (gs[i] + one);
        sums.x += d;
        sums.y += d * ((xs[i] - mean) * r);
    }
}

// `means` of d (0 for RMSNorm) and of d·ŷ.
template <class T>
__device__ __forceinline__ Packed<T> input_gradient(
    const Packed<T>& x, const Packed<T>& dy, const Packed<T>& gamma, float one, float mean, float r, Pair means,
    bool add, const Packed<T>& residual
) {
    constexpr int V = VecWidth<T>::count;
    float xs[V], dys[V], gs[V], more[V];
    unpack(x, xs);
    unpack(dy, dys);
    unpack(gamma, gs);
    unpack(residual, more);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float hat = (xs[i] - mean) * r;
        float dx = r * (dys[i] * (gs[i] + one) - means.x - hat * means.y);
        xs[i] = add ? dx + more[i] : dx;
    }
    return pack(xs);
}

template <class T, int CHUNKS, bool LAYER, int STAGES>
__device__ __forceinline__ void backward(const NormBackwardArgs& a) {
    constexpr int V = VecWidth<T>::count;
    __shared__ Pair shared[2][32];
    const u32 lanes = a.lanes, team = threadIdx.x / lanes, lane = threadIdx.x - team * lanes;
    const u32 teams = blockDim.x / lanes;
    const i64 step = i64(gridDim.x) * teams;
    Ring<T, 3, CHUNKS, STAGES> ring;
    auto column = [&](int c) { return i32(c * lanes + lane) * V; };
    auto has = [&](int c) { return column(c) < a.width; };
    auto prefetch = [&](i64 row) {
        if (row < a.rows) {
            const Place p = place(row, a.inner);
            const T* x = reinterpret_cast<const T*>(a.x) + p.start(a.x_outer, a.x_inner);
            const T* dy = reinterpret_cast<const T*>(a.dy) + p.start(a.dy_outer, a.dy_inner);
            const T* residual = reinterpret_cast<const T*>(a.residual) + p.start(a.dx_outer, a.dx_inner);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                if (!has(c)) continue;
                ring.prefetch(0, c, x + column(c));
                ring.prefetch(1, c, dy + column(c));
                if (a.residual) ring.prefetch(2, c, residual + column(c));
            }
        }
        ring.commit();
    };
    float mean = 0.0f, r = 0.0f, next_mean = 0.0f, next_r = 0.0f;
    auto read_statistics = [&](i64 row) {
        next_mean = next_r = 0.0f;
        if (row >= a.rows) return;
        if (LAYER) next_mean = reinterpret_cast<const float*>(a.mean)[row];
        next_r = reinterpret_cast<const float*>(a.rstd)[row];
    };
    i64 row = i64(blockIdx.x) * teams + team;
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
        ring.next();
        prefetch(row + s * step);
    }
    ring.stage = 0;
    read_statistics(row);

    float dgamma[CHUNKS][V] = {}, dbeta[LAYER ? CHUNKS : 1][V] = {};
    Packed<T> gamma[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        gamma[c] = {};
        if (has(c)) gamma[c] = load_chunk<T>(a.gamma, column(c));
    }
    // All teams of a block run equally many iterations, the last perhaps without a row, because they synchronize in
    // the reductions.
    u32 turn = 0;
    for (i64 base = i64(blockIdx.x) * teams; base < a.rows; base += step, row += step, turn ^= 1) {
        const bool live = row < a.rows;
        mean = next_mean, r = next_r;
        read_statistics(row + step);
        Packed<T> x[CHUNKS], dy[CHUNKS], residual[CHUNKS];
        ring.wait();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            x[c] = dy[c] = residual[c] = {};
            if (!live || !has(c)) continue;
            x[c] = ring.take(0, c), dy[c] = ring.take(1, c);
            if (a.residual) residual[c] = ring.take(2, c);
        }
        prefetch(row + (STAGES - 1) * step);
        ring.next();
        Pair sums = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            float x1[V], dy1[V];
            unpack(x[c], x1);
            unpack(dy[c], dy1);
#pragma unroll
            for (int i = 0; i < V; i++) {
                dgamma[c][i] += dy1[i] * ((x1[i] - mean) * r);
                if (LAYER) dbeta[c][i] += dy1[i];
            }
            add_products(sums, x[c], dy[c], gamma[c], a.one, mean, r);
        }
        sums = team_sums(sums, lanes, team, shared[turn] + (team * lanes >> 5));
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) opaque(x[c]), opaque(dy[c]), opaque(gamma[c]);
        const Pair means = {LAYER ? sums.x / float(a.width) : 0.0f, sums.y / float(a.width)};
        if (!live) continue;
        const i64 to = place(row, a.inner).start(a.dx_outer, a.dx_inner);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (has(c))
                store_chunk(
                    a.dx, to + column(c),
                    input_gradient(x[c], dy[c], gamma[c], a.one, mean, r, means, a.residual != 0, residual[c])
                );
    }

    // Sums of the teams, in order, through the pipeline's shared memory.
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float* all = reinterpret_cast<float*>(waiting);
    const u32 share = lanes * CHUNKS * V;
#pragma unroll
    for (int which = 0; which < (LAYER ? 2 : 1); which++) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int i = 0; i < V; i++)
                all[(which * teams + team) * share + column(c) + i] = which ? dbeta[LAYER ? c : 0][i] : dgamma[c][i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int which = 0; which < (LAYER ? 2 : 1); which++) {
        float* out = reinterpret_cast<float*>(which ? a.beta_parts : a.gamma_parts) + i64(blockIdx.x) * a.width;
        for (i32 at = threadIdx.x; at < a.width; at += blockDim.x) {
            float sum = 0.0f;
#pragma unroll 4
            for (u32 t = 0; t < teams; t++) sum += all[(which * teams + t) * share + at];
            out[at] = sum;
        }
    }
}

template <class T>
__device__ __forceinline__ void read_row(const NormBackwardArgs& a, i64 row, i32 at, Packed<T>& x, Packed<T>& dy) {
    const Place p = place(row, a.inner);
    const bool vectorized = a.flags & VECTORIZED;
    x = load_guarded(reinterpret_cast<const T*>(a.x) + p.start(a.x_outer, a.x_inner), at, a.width, vectorized);
    dy = load_guarded(reinterpret_cast<const T*>(a.dy) + p.start(a.dy_outer, a.dy_inner), at, a.width, vectorized);
}

// dx of rows of any width and alignment, one block to a row.
template <class T, bool LAYER> __device__ __forceinline__ void backward_long(const NormBackwardArgs& a) {
    constexpr int V = VecWidth<T>::count;
    __shared__ Pair shared[32];
    const i64 row = blockIdx.x;
    const i32 first = threadIdx.x * V, step = blockDim.x * V;
    const bool vectorized = a.flags & VECTORIZED, vectorized_gain = a.flags & VECTORIZED_GAIN;
    const T* gamma = reinterpret_cast<const T*>(a.gamma);
    const float mean = LAYER ? reinterpret_cast<const float*>(a.mean)[row] : 0.0f;
    const float r = reinterpret_cast<const float*>(a.rstd)[row];
    Pair sums = {0.0f, 0.0f};
    Packed<T> x, dy, residual = {};
    for (i32 at = first; at < a.width; at += step) {
        read_row(a, row, at, x, dy);
        add_products(sums, x, dy, load_guarded(gamma, at, a.width, vectorized_gain), a.one, mean, r);
    }
    sums = team_sums(sums, blockDim.x, 0, shared);
    const Pair means = {LAYER ? sums.x / float(a.width) : 0.0f, sums.y / float(a.width)};
    const i64 to = place(row, a.inner).start(a.dx_outer, a.dx_inner);
    for (i32 at = first; at < a.width; at += step) {
        read_row(a, row, at, x, dy);
        if (a.residual) residual = load_guarded(reinterpret_cast<const T*>(a.residual) + to, at, a.width, vectorized);
        Packed<T> g = load_guarded(gamma, at, a.width, vectorized_gain);
        store_guarded(reinterpret_cast<T*>(a.dx) + to, at, a.width, vectorized,
            input_gradient(x, dy, g, a.one, mean, r, means, a.residual != 0, residual));
    }
}

// Partial sums of dγ and dβ for such rows: one thread to a column, blockIdx.y is the group of rows.
template <class T, bool LAYER> __device__ __forceinline__ void backward_long_parts(const NormBackwardArgs& a) {
    const i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= a.width) return;
    float dgamma = 0.0f, dbeta = 0.0f;
    for (i64 row = blockIdx.y; row < a.rows; row += gridDim.y) {
        const Place p = place(row, a.inner);
        const float x = to_f32(reinterpret_cast<const T*>(a.x)[p.start(a.x_outer, a.x_inner) + at]);
        const float dy = to_f32(reinterpret_cast<const T*>(a.dy)[p.start(a.dy_outer, a.dy_inner) + at]);
        const float mean = LAYER ? reinterpret_cast<const float*>(a.mean)[row] : 0.0f;
        dgamma += dy * ((x - mean) * reinterpret_cast<const float*>(a.rstd)[row]);
        dbeta += dy;
    }
    const i64 part = i64(blockIdx.y) * a.width + at;
    reinterpret_cast<float*>(a.gamma_parts)[part] = dgamma;
    if (LAYER) reinterpret_cast<float*>(a.beta_parts)[part] = dbeta;
}

#define BACKWARD(KIND, LAYER, T, NAME, CHUNKS, STAGES)                                                                       \
    extern "C" __global__ void __launch_bounds__(512, 1) KIND##_backward_##CHUNKS##_##NAME(const NormBackwardArgs a) {        \
        backward<T, CHUNKS, LAYER, STAGES>(a);                                                                     \
    }
#define BACKWARD_ALL(KIND, LAYER, T, NAME)                                                                                   \
    BACKWARD(KIND, LAYER, T, NAME, 1, 4)                                                                                     \
    BACKWARD(KIND, LAYER, T, NAME, 2, 3)                                                                                     \
    BACKWARD(KIND, LAYER, T, NAME, 3, 2)                                                                                     \
    extern "C" __global__ void __launch_bounds__(1024, 1) KIND##_backward_long_##NAME(const NormBackwardArgs a) {             \
        backward_long<T, LAYER>(a);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) KIND##_backward_parts_##NAME(const NormBackwardArgs a) {                \
        backward_long_parts<T, LAYER>(a);                                                                          \
    }

#define BOTH_NORMS(T, NAME) BACKWARD_ALL(rms, false, T, NAME) BACKWARD_ALL(layer, true, T, NAME)
FOR_EACH_TYPE(BOTH_NORMS)
