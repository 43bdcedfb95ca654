// LayerNorm and RMSNorm: y = (x − µ)·r·g (+ b), r = 1/√(mean((x − µ)²) + eps), µ = 0 for RMSNorm.
//
// A team of `lanes` threads (a power of two) has a row: part of a warp for heads, a block for wide rows. Each
// thread keeps its 16-byte chunks in registers between the statistics and the result, so x is read once. Which
// thread has which column follows from the width alone: the bits do not depend on strides or alignment.

enum Flag : u32 { CENTRED = 1, WIDE = 2, WIDE_GAIN = 4 };

// Row `r` of groups of `inner` rows, found once for all views.
struct Place {
    i64 outer, inner;
    __device__ __forceinline__ i64 start(i64 outer_stride, i64 inner_stride) const {
        return outer * outer_stride + inner * inner_stride;
    }
};
__device__ __forceinline__ Place place(i64 row, i64 inner) {
    if (inner == 1) return {row, 0};
    // 64-bit division costs more than the rest of a short row.
    if (((row | inner) >> 32) == 0) return {u32(row) / u32(inner), u32(row) % u32(inner)};
    return {row / inner, row % inner};
}

__device__ __forceinline__ float team_sum(float x, u32 lanes, float* shared) {
    if (lanes > 32) return block_sum(x, shared);
    for (u32 d = lanes >> 1; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
// Two sums at the price of one. `shared`: 64 floats.
__device__ __forceinline__ void team_sums(float& x, float& y, u32 lanes, float* shared) {
    for (u32 d = min(lanes, 32) >> 1; d > 0; d >>= 1) {
        x += __shfl_xor_sync(~0u, x, d);
        y += __shfl_xor_sync(~0u, y, d);
    }
    if (lanes <= 32) return;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __syncthreads();
    if (lane == 0) shared[warp] = x, shared[32 + warp] = y;
    __syncthreads();
    u32 warps = lanes >> 5;
    x = warp_sum(lane < warps ? shared[lane] : 0.0f);
    y = warp_sum(lane < warps ? shared[32 + lane] : 0.0f);
}

struct ForwardArgs {
    u64 x, residual, sum, y, gamma, beta, mean, rstd;
    i64 x_outer, x_inner, y_outer, y_inner;
    i64 rows, inner;
    i32 width;
    u32 lanes, flags;
    float eps, one;
    u32 unused;
};

// y = (x − µ)·r·g (+ b) for one chunk.
template <class T>
__device__ __forceinline__ void normalise(
    const ForwardArgs& a, const Packed<T>& x, T* y, i32 at, float mean, float r
) {
    constexpr int V = Wide<T>::count;
    float v[V], g[V];
    unpack(x, v);
    unpack(fetch(reinterpret_cast<const T*>(a.gamma), at, a.width, a.flags & WIDE_GAIN), g);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = __fmul_rn((v[i] - mean) * r, g[i] + a.one);
    if (a.beta) {
        float b[V];
        unpack(fetch(reinterpret_cast<const T*>(a.beta), at, a.width, a.flags & WIDE_GAIN), b);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] += b[i];
    }
    put(y, at, a.width, a.flags & WIDE, pack(v));
}

// Σ (x − µ)² of one chunk, in order of the columns; those beyond the end do not count.
template <class T>
__device__ __forceinline__ void add_squares(float& total, const Packed<T>& x, i32 at, i32 width, float mean) {
    constexpr int V = Wide<T>::count;
    float v[V];
    unpack(x, v);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float d = at + i < width ? v[i] - mean : 0.0f;
        total = __fmaf_rn(d, d, total);
    }
}

template <class T> __device__ __forceinline__ void add_all(float& total, const Packed<T>& x) {
    constexpr int V = Wide<T>::count;
    float v[V];
    unpack(x, v);
#pragma unroll
    for (int i = 0; i < V; i++) total += v[i];
}

// x + residual, rounded to the element type: what is stored is what is normalised.
template <class T> __device__ __forceinline__ Packed<T> added(const Packed<T>& x, const Packed<T>& residual) {
    constexpr int V = Wide<T>::count;
    float v[V], r[V];
    unpack(x, v);
    unpack(residual, r);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] += r[i];
    return pack(v);
}

__device__ __forceinline__ void keep_statistics(const ForwardArgs& a, i64 row, float mean, float r) {
    if (a.mean) reinterpret_cast<float*>(a.mean)[row] = mean;
    reinterpret_cast<float*>(a.rstd)[row] = r;
}

// ADD: sum = x + residual first; x, residual and sum are laid out alike.
template <class T, int CHUNKS, bool ADD> __device__ __forceinline__ void forward(const ForwardArgs& a) {
    constexpr int V = Wide<T>::count;
    __shared__ float shared[32];
    const u32 lanes = a.lanes, lane = threadIdx.x & (lanes - 1);
    const u32 teams = blockDim.x / lanes;
    i64 row = i64(blockIdx.x) * teams + threadIdx.x / lanes;
    // A team without a row takes part in the sums of its warp, and writes nothing.
    const bool live = row < a.rows;
    if (!live) row = a.rows - 1;
    const Place p = place(row, a.inner);
    const i64 from = p.start(a.x_outer, a.x_inner);
    const bool wide = a.flags & WIDE;

    Packed<T> held[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        held[c] = fetch(reinterpret_cast<const T*>(a.x) + from, i32(c * lanes + lane) * V, a.width, wide);
    if (ADD) {
        Packed<T> other[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            other[c] =
                fetch(reinterpret_cast<const T*>(a.residual) + from, i32(c * lanes + lane) * V, a.width, wide);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            held[c] = added(held[c], other[c]);
            if (live) put(reinterpret_cast<T*>(a.sum) + from, i32(c * lanes + lane) * V, a.width, wide, held[c]);
        }
    }

    float mean = 0.0f, squares = 0.0f;
    if (a.flags & CENTRED) {
        float total = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) add_all(total, held[c]);
        mean = team_sum(total, lanes, shared) / float(a.width);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) forget(held[c]);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) add_squares(squares, held[c], i32(c * lanes + lane) * V, a.width, mean);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) forget(held[c]);
    const float r = 1.0f / sqrtf(team_sum(squares, lanes, shared) / float(a.width) + a.eps);
    if (!live) return;
    T* y = reinterpret_cast<T*>(a.y) + p.start(a.y_outer, a.y_inner);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        i32 at = i32(c * lanes + lane) * V;
        if (at < a.width) normalise(a, held[c], y, at, mean, r);
    }
    if (lane == 0) keep_statistics(a, row, mean, r);
}

// Rows too wide for the registers of a block: read once for each sum and once more for the result.
template <class T, bool ADD> __device__ __forceinline__ void forward_long(const ForwardArgs& a) {
    constexpr int V = Wide<T>::count;
    __shared__ float shared[32];
    const i64 row = blockIdx.x;
    const i32 first = threadIdx.x * V, step = blockDim.x * V;
    const Place p = place(row, a.inner);
    const i64 from = p.start(a.x_outer, a.x_inner);
    const bool wide = a.flags & WIDE;
    const T* x = reinterpret_cast<const T*>(a.x) + from;
    if (ADD) {
        const T* residual = reinterpret_cast<const T*>(a.residual) + from;
        T* sum = reinterpret_cast<T*>(a.sum) + from;
        for (i32 at = first; at < a.width; at += step)
            put(sum, at, a.width, wide, added(fetch(x, at, a.width, wide), fetch(residual, at, a.width, wide)));
        // Each thread reads what it wrote itself.
        x = sum;
    }
    float mean = 0.0f, squares = 0.0f;
    if (a.flags & CENTRED) {
        float total = 0.0f;
        for (i32 at = first; at < a.width; at += step) add_all(total, fetch(x, at, a.width, wide));
        mean = block_sum(total, shared) / float(a.width);
    }
    for (i32 at = first; at < a.width; at += step)
        add_squares(squares, fetch(x, at, a.width, wide), at, a.width, mean);
    const float r = 1.0f / sqrtf(block_sum(squares, shared) / float(a.width) + a.eps);
    T* y = reinterpret_cast<T*>(a.y) + p.start(a.y_outer, a.y_inner);
    for (i32 at = first; at < a.width; at += step)
        normalise(a, fetch(x, at, a.width, wide), y, at, mean, r);
    if (threadIdx.x == 0) keep_statistics(a, row, mean, r);
}

#define FORWARD(T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(128, 12) norm_short_##T(const ForwardArgs a) {                       \
        forward<T##_t, 1, false>(a);                                                                              \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(128, 12) add_norm_short_##T(const ForwardArgs a) {                   \
        forward<T##_t, 1, true>(a);                                                                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024) norm_held_##T(const ForwardArgs a) {                       \
        forward<T##_t, 4, false>(a);                                                                              \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024) add_norm_held_##T(const ForwardArgs a) {                   \
        forward<T##_t, 4, true>(a);                                                                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024, 1) norm_long_##T(const ForwardArgs a) {                       \
        forward_long<T##_t, false>(a);                                                                            \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024, 1) add_norm_long_##T(const ForwardArgs a) {                   \
        forward_long<T##_t, true>(a);                                                                             \
    }

// With ŷ = (x − µ)·r and d = dy·g: dx = r·(d − [mean(d)] − ŷ·mean(d·ŷ)) (+ residual), the bracket for LayerNorm
// only. dγ = Σ dy·ŷ and dβ = Σ dy over rows: each block sums rows that the shape alone gives it, in order, into
// its row of the parts, f32 [groups, width]; norm_sum_parts adds these up in order.
struct BackwardArgs {
    u64 x, gamma, mean, rstd, dy, residual, dx, gamma_parts, beta_parts;
    i64 x_outer, x_inner, dy_outer, dy_inner, dx_outer, dx_inner;
    i64 rows, inner;
    i32 width;
    u32 lanes, flags;
    float one;
};

template <class T>
__device__ __forceinline__ void read_row(
    const BackwardArgs& a, i64 row, i32 at, Packed<T>& x, Packed<T>& dy
) {
    const Place p = place(row, a.inner);
    const bool wide = a.flags & WIDE;
    x = fetch(reinterpret_cast<const T*>(a.x) + p.start(a.x_outer, a.x_inner), at, a.width, wide);
    dy = fetch(reinterpret_cast<const T*>(a.dy) + p.start(a.dy_outer, a.dy_inner), at, a.width, wide);
}

// Sums of one chunk into Σ d and Σ d·ŷ of the row. Columns beyond the end have dy = 0.
template <class T>
__device__ __forceinline__ void add_products(
    float& total, float& along, const Packed<T>& x, const Packed<T>& dy, const Packed<T>& gamma, float one,
    float mean, float r
) {
    constexpr int V = Wide<T>::count;
    float xs[V], dys[V], gs[V];
    unpack(x, xs);
    unpack(dy, dys);
    unpack(gamma, gs);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float d = dys[i] * (gs[i] + one);
        total += d;
        along += d * ((xs[i] - mean) * r);
    }
}

template <class T>
__device__ __forceinline__ Packed<T> input_gradient(
    const Packed<T>& x, const Packed<T>& dy, const Packed<T>& gamma, float one, float mean, float r, float total,
    float along, bool add, const Packed<T>& residual
) {
    constexpr int V = Wide<T>::count;
    float xs[V], dys[V], gs[V], more[V];
    unpack(x, xs);
    unpack(dy, dys);
    unpack(gamma, gs);
    unpack(residual, more);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float hat = (xs[i] - mean) * r;
        float dx = r * (dys[i] * (gs[i] + one) - total - hat * along);
        xs[i] = add ? dx + more[i] : dx;
    }
    return pack(xs);
}

// AHEAD: the next row is on its way while this one is summed.
template <class T, int CHUNKS, bool LAYER, bool AHEAD>
__device__ __forceinline__ void backward(const BackwardArgs& a) {
    constexpr int V = Wide<T>::count;
    // Teams of a block are added up here; only rows of up to two warps' chunks have more than one.
    __shared__ float shared[CHUNKS * 32 * V > 64 ? CHUNKS * 32 * V : 64];
    // Without rows ahead the team is a whole block of 512: known here, it saves registers for addresses.
    const u32 lanes = AHEAD ? a.lanes : 512, lane = threadIdx.x & (lanes - 1);
    const u32 teams = AHEAD ? blockDim.x / lanes : 1, team = AHEAD ? threadIdx.x / lanes : 0;
    const bool wide = a.flags & WIDE;
    const i64 step = i64(gridDim.x) * teams;
    float dgamma[CHUNKS][V] = {}, dbeta[LAYER ? CHUNKS : 1][V] = {};
    Packed<T> gamma[CHUNKS], x[CHUNKS], dy[CHUNKS], next_x[CHUNKS], next_dy[CHUNKS], residual[CHUNKS];
    // The gain waits in registers only where there are enough of them.
    auto gain = [&](int c) {
        return fetch(
            reinterpret_cast<const T*>(a.gamma), i32(c * lanes + lane) * V, a.width, a.flags & WIDE_GAIN
        );
    };
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (AHEAD) gamma[c] = gain(c);
        next_x[c] = next_dy[c] = residual[c] = {};
    }
    i64 row = i64(blockIdx.x) * teams + team;
    if (AHEAD && row < a.rows) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) read_row(a, row, i32(c * lanes + lane) * V, next_x[c], next_dy[c]);
    }
    // All teams of a block take equally many turns, the last ones perhaps without a row: they meet in the sums.
    for (i64 base = i64(blockIdx.x) * teams; base < a.rows; base += step, row += step) {
        const bool live = row < a.rows;
        const i64 after = row + step;
        float mean = 0.0f, r = 0.0f;
        if (live) {
            if (LAYER) mean = reinterpret_cast<const float*>(a.mean)[row];
            r = reinterpret_cast<const float*>(a.rstd)[row];
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const i32 at = i32(c * lanes + lane) * V;
            if (AHEAD) {
                x[c] = next_x[c], dy[c] = next_dy[c];
                next_x[c] = next_dy[c] = {};
                if (after < a.rows) read_row(a, after, at, next_x[c], next_dy[c]);
            } else {
                x[c] = dy[c] = {};
                if (live) read_row(a, row, at, x[c], dy[c]);
            }
        }
        const i64 to = place(row, a.inner).start(a.dx_outer, a.dx_inner);
        auto read_residual = [&](int c) {
            return fetch(
                reinterpret_cast<const T*>(a.residual) + to, i32(c * lanes + lane) * V, a.width, wide
            );
        };
        if (AHEAD && a.residual && live) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) residual[c] = read_residual(c);
        }
        float total = 0.0f, along = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            float xs[V], dys[V];
            unpack(x[c], xs);
            unpack(dy[c], dys);
#pragma unroll
            for (int i = 0; i < V; i++) {
                dgamma[c][i] += dys[i] * ((xs[i] - mean) * r);
                if (LAYER) dbeta[c][i] += dys[i];
            }
            add_products(total, along, x[c], dy[c], AHEAD ? gamma[c] : gain(c), a.one, mean, r);
        }
        team_sums(total, along, lanes, shared);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) forget(x[c]), forget(dy[c]);
        if (AHEAD) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) forget(gamma[c]);
        }
        total = LAYER ? total / float(a.width) : 0.0f;
        along = along / float(a.width);
        if (live) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                if (!AHEAD && a.residual) residual[c] = read_residual(c);
                put(reinterpret_cast<T*>(a.dx) + to, i32(c * lanes + lane) * V, a.width, wide,
                    input_gradient(
                        x[c], dy[c], AHEAD ? gamma[c] : gain(c), a.one, mean, r, total, along, a.residual != 0,
                        residual[c]
                    ));
            }
        }
    }

    const i64 part = i64(blockIdx.x) * a.width;
#pragma unroll
    for (int which = 0; which < (LAYER ? 2 : 1); which++) {
        float* out = reinterpret_cast<float*>(which ? a.beta_parts : a.gamma_parts) + part;
        if (teams == 1) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    i32 at = i32(c * lanes + lane) * V + i;
                    if (at < a.width) out[at] = which ? dbeta[LAYER ? c : 0][i] : dgamma[c][i];
                }
            }
            continue;
        }
        for (u32 turn = 0; turn < teams; turn++) {
            __syncthreads();
            if (team != turn) continue;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    u32 at = (c * lanes + lane) * V + i;
                    float part = which ? dbeta[LAYER ? c : 0][i] : dgamma[c][i];
                    shared[at] = turn == 0 ? part : shared[at] + part;
                }
            }
        }
        __syncthreads();
        for (i32 at = threadIdx.x; at < a.width; at += blockDim.x) out[at] = shared[at];
    }
}

// dx of rows too wide for registers, one block to a row.
template <class T, bool LAYER> __device__ __forceinline__ void backward_long(const BackwardArgs& a) {
    constexpr int V = Wide<T>::count;
    __shared__ float shared[64];
    const i64 row = blockIdx.x;
    const i32 first = threadIdx.x * V, step = blockDim.x * V;
    const bool wide = a.flags & WIDE, wide_gain = a.flags & WIDE_GAIN;
    const T* gamma = reinterpret_cast<const T*>(a.gamma);
    const float mean = LAYER ? reinterpret_cast<const float*>(a.mean)[row] : 0.0f;
    const float r = reinterpret_cast<const float*>(a.rstd)[row];
    float total = 0.0f, along = 0.0f;
    Packed<T> x, dy, residual = {};
    for (i32 at = first; at < a.width; at += step) {
        read_row(a, row, at, x, dy);
        add_products(total, along, x, dy, fetch(gamma, at, a.width, wide_gain), a.one, mean, r);
    }
    team_sums(total, along, blockDim.x, shared);
    total = LAYER ? total / float(a.width) : 0.0f;
    along = along / float(a.width);
    const i64 to = place(row, a.inner).start(a.dx_outer, a.dx_inner);
    for (i32 at = first; at < a.width; at += step) {
        read_row(a, row, at, x, dy);
        if (a.residual) residual = fetch(reinterpret_cast<const T*>(a.residual) + to, at, a.width, wide);
        Packed<T> g = fetch(gamma, at, a.width, wide_gain);
        put(reinterpret_cast<T*>(a.dx) + to, at, a.width, wide,
            input_gradient(x, dy, g, a.one, mean, r, total, along, a.residual != 0, residual));
    }
}

// Parts of dγ and dβ of such rows: a thread to a column, blockIdx.y is the group of rows.
template <class T, bool LAYER> __device__ __forceinline__ void backward_long_parts(const BackwardArgs& a) {
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

#define BACKWARD(KIND, LAYER, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) KIND##_backward_short_##T(const BackwardArgs a) {           \
        backward<T##_t, 1, LAYER, true>(a);                                                                       \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(512) KIND##_backward_held_##T(const BackwardArgs a) {            \
        backward<T##_t, 2, LAYER, true>(a);                                                                       \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(512) KIND##_backward_wide_##T(const BackwardArgs a) {            \
        backward<T##_t, LAYER ? 3 : 4, LAYER, false>(a);                                                                \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024, 1) KIND##_backward_long_##T(const BackwardArgs a) {           \
        backward_long<T##_t, LAYER>(a);                                                                           \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) KIND##_backward_parts_##T(const BackwardArgs a) {           \
        backward_long_parts<T##_t, LAYER>(a);                                                                     \
    }

typedef float f32_t;
typedef bf16 bf16_t;
FORWARD(f32)
FORWARD(bf16)
BACKWARD(rms, false, f32)
BACKWARD(rms, false, bf16)
BACKWARD(layer, true, f32)
BACKWARD(layer, true, bf16)

struct PartsArgs {
    u64 parts, out;
    i64 groups, width;
    u32 accumulate, unused;
};

// out[j] (+)= Σ parts[g, j]: a block of 1024 has 32 columns; warp w sums groups w, w + 32, ..., then the warps'
// sums are added in order.
extern "C" __global__ void __launch_bounds__(1024) norm_sum_parts(const PartsArgs a) {
    __shared__ float sums[32][33];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 column = i64(blockIdx.x) * 32 + lane;
    const float* parts = reinterpret_cast<const float*>(a.parts);
    float total = 0.0f;
    if (column < a.width) {
#pragma unroll 8
        for (i64 g = warp; g < a.groups; g += 32) total += parts[g * a.width + column];
    }
    sums[warp][lane] = total;
    __syncthreads();
    if (warp != 0 || column >= a.width) return;
    total = 0.0f;
#pragma unroll
    for (int w = 0; w < 32; w++) total += sums[w][lane];
    float* out = reinterpret_cast<float*>(a.out);
    out[column] = a.accumulate ? out[column] + total : total;
}
