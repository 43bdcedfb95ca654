// Activation functions of the MLP, plain and gated, forward and backward. Gated input is [rows, 2·width]: the first
// half goes through the activation, the second is the linear gate. Without a gate a tensor is one row of any length.
#include "activation.cuh"
#include "amax.cuh"
#include "args/activation.cuh"

// The 16-byte chunk of this thread: its row and first column. Without a gate there is one row.
template <class T, bool GATED> struct Chunk {
    i64 row, at;
    bool live;
    __device__ __forceinline__ Chunk(const ActArgs& a) {
        const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x, per_row = (a.width + VecWidth<T>::count - 1) / VecWidth<T>::count;
        live = i < a.rows * per_row;
        if (!GATED) {
            row = 0;
            at = i;
        } else {
            // In 32 bits, because 64-bit division would cost as much as the rest; the host refuses more chunks than
            // that.
            row = u32(i) / u32(per_row);
            at = u32(i) % u32(per_row);
        }
        at *= VecWidth<T>::count;
    }
    // Columns from `at` to the end of the row, at most a chunk.
    __device__ __forceinline__ i32 left(const ActArgs& a) const { return min(a.width - at, i64(VecWidth<T>::count)); }
};

// amax of the first `left` elements.
template <class T> __device__ __forceinline__ float chunk_amax(const Packed<T>& p, i32 left) {
    constexpr int V = VecWidth<T>::count;
    if (left >= V) return packed_amax(0.0f, p);
    float v[V], m = 0.0f;
    unpack(p, v);
#pragma unroll
    for (int i = 0; i < V; i++) m = i < left ? fmaxf(m, fabsf(v[i])) : m;
    return m;
}

// `forward` and `backward` return the amax of what they wrote; the compiler drops it where it is not used.
template <class T, class Curve, bool GATED> __device__ __forceinline__ float forward(const ActArgs& a) {
    constexpr int V = VecWidth<T>::count;
    const Chunk<T, GATED> c(a);
    if (!c.live) return 0.0f;
    const Curve curve(a);
    const i32 left = c.left(a);
    const T* x = reinterpret_cast<const T*>(a.x) + c.row * (GATED ? 2 : 1) * a.width + c.at;
    Packed<T> first = load_guarded(x, 0, left, a.vectorized), second;
    if (GATED) second = load_guarded(x + a.width, 0, left, a.vectorized);
    float v[V], u[V];
    unpack(first, v);
    if (GATED) unpack(second, u);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = GATED ? curve.value(v[i]) * curve.gate(u[i]) : curve.value(v[i]);
    const Packed<T> y = pack(v);
    store_guarded(reinterpret_cast<T*>(a.out) + c.row * a.width + c.at, 0, left, a.vectorized, y);
    return chunk_amax(y, left);
}

// dx = act'(x)·dy; gated: dx₁ = act'(x₁)·gate(x₂)·dy, dx₂ = act(x₁)·gate'(x₂)·dy.
template <class T, class Curve, bool GATED> __device__ __forceinline__ float backward(const ActArgs& a) {
    constexpr int V = VecWidth<T>::count;
    const Chunk<T, GATED> c(a);
    if (!c.live) return 0.0f;
    const Curve curve(a);
    const i32 left = c.left(a);
    const i64 place = c.row * (GATED ? 2 : 1) * a.width + c.at;
    const T* x = reinterpret_cast<const T*>(a.x) + place;
    T* dx = reinterpret_cast<T*>(a.out) + place;
    Packed<T> first = load_guarded(x, 0, left, a.vectorized), second;
    if (GATED) second = load_guarded(x + a.width, 0, left, a.vectorized);
    Packed<T> back = load_guarded(reinterpret_cast<const T*>(a.dy) + c.row * a.width + c.at, 0, left, a.vectorized);
    float v[V], u[V], dy[V];
    unpack(first, v);
    if (GATED) unpack(second, u);
    unpack(back, dy);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float value, slope = curve.slope(v[i], value);
        if (GATED) {
            v[i] = slope * curve.gate(u[i]) * dy[i];
            u[i] = curve.gate_slope(u[i], value * dy[i]);
        } else {
            v[i] = slope * dy[i];
        }
    }
    const Packed<T> first_dx = pack(v);
    store_guarded(dx, 0, left, a.vectorized, first_dx);
    float m = chunk_amax(first_dx, left);
    if (GATED) {
        const Packed<T> second_dx = pack(u);
        store_guarded(dx + a.width, 0, left, a.vectorized, second_dx);
        m = fmaxf(m, chunk_amax(second_dx, left));
    }
    return m;
}

#define BY_ACT(PASS, T, GATED)                                                                                    \
    float m = 0.0f;                                                                                               \
    if (a.act == GELU_TANH) m = PASS<T, GeluTanh<T>, GATED>(a);                                                   \
    else if (a.act == GELU_ERF) m = PASS<T, GeluErf<T>, GATED>(a);                                                \
    else if (a.act == SILU) m = PASS<T, Silu<T>, GATED>(a);                                                       \
    else if (a.act == SQUARED_RELU) m = PASS<T, SquaredRelu<T>, GATED>(a);                                        \
    else if (GATED) m = PASS<T, ClampedSilu<T>, true>(a);

#define KERNEL(FULL_NAME, PASS, T, GATED)                                                                         \
    extern "C" __global__ void __launch_bounds__(256) FULL_NAME(const ActArgs a) { BY_ACT(PASS, T, GATED) (void)m; }
#define WITH_AMAX(FULL_NAME, PASS, T, GATED)                                                                       \
    extern "C" __global__ void __launch_bounds__(256) FULL_NAME(const ActArgs a) {                                \
        BY_ACT(PASS, T, GATED)                                                                                    \
        block_atomic_amax(a.amax, m);                                                                                \
    }

#define KERNELS(T, NAME)                                                                                          \
    KERNEL(act_forward_##NAME, forward, T, false)                                                                 \
    KERNEL(gated_forward_##NAME, forward, T, true)                                                                \
    KERNEL(act_backward_##NAME, backward, T, false)                                                               \
    KERNEL(gated_backward_##NAME, backward, T, true)

FOR_EACH_TYPE(KERNELS)
#ifndef ELEMENT_F16
WITH_AMAX(act_forward_amax, forward, bf16, false)
WITH_AMAX(gated_forward_amax, forward, bf16, true)
WITH_AMAX(act_backward_amax, backward, bf16, false)
WITH_AMAX(gated_backward_amax, backward, bf16, true)
#endif

// dx = act'(x)·dy of [rows, width] with partial column sums (the bias gradient) in f32 [parts, width] at `amax`, of dx
// as it is stored, over part_rows rows each. A lane has V columns; the rows of a part are dealt to the block's warps.
constexpr int COLUMN_WARPS = 8;
// Rows of a warp whose loads are in flight together.
constexpr int COLUMN_AHEAD = 4;

template <class T, class Curve> struct ColumnSlopes {
    static constexpr int V = VecWidth<T>::count;
    const Curve curve;
    const T *x, *dy;
    T* dx;
    float sum[V];

    __device__ __forceinline__ ColumnSlopes(const ActArgs& a, i64 column)
        : curve(a), x(reinterpret_cast<const T*>(a.x) + column), dy(reinterpret_cast<const T*>(a.dy) + column),
          dx(reinterpret_cast<T*>(a.out) + column), sum() {}

    __device__ __forceinline__ Packed<T> one(const Packed<T>& first, const Packed<T>& back) {
        float v[V], d[V];
        unpack(first, v);
        unpack(back, d);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float value;
            v[i] = curve.slope(v[i], value) * d[i];
        }
        const Packed<T> stored = pack(v);
        unpack(stored, v);
#pragma unroll
        for (int i = 0; i < V; i++) sum[i] += v[i];
        return stored;
    }

    // Rows r, r + COLUMN_WARPS, ... below `last`, in 16-byte accesses.
    __device__ __forceinline__ void whole(i64 r, i64 last, i64 width) {
        auto get = [&](const T* from, i64 row) { return *reinterpret_cast<const Packed<T>*>(from + row * width); };
        for (; r + (COLUMN_AHEAD - 1) * COLUMN_WARPS < last; r += COLUMN_AHEAD * COLUMN_WARPS) {
            Packed<T> first[COLUMN_AHEAD], back[COLUMN_AHEAD];
#pragma unroll
            for (int u = 0; u < COLUMN_AHEAD; u++) {
                first[u] = get(x, r + u * COLUMN_WARPS);
                back[u] = get(dy, r + u * COLUMN_WARPS);
            }
#pragma unroll
            for (int u = 0; u < COLUMN_AHEAD; u++)
                *reinterpret_cast<Packed<T>*>(dx + (r + u * COLUMN_WARPS) * width) = one(first[u], back[u]);
        }
#pragma unroll 1
        for (; r < last; r += COLUMN_WARPS)
            *reinterpret_cast<Packed<T>*>(dx + r * width) = one(get(x, r), get(dy, r));
    }

    // The same for the first `left` columns, element by element.
    __device__ __forceinline__ void some(i64 r, i64 last, i64 width, i32 left) {
#pragma unroll 1
        for (; r < last; r += COLUMN_WARPS) {
            const i64 at = r * width;
            store_guarded(dx + at, 0, left, false, one(load_guarded(x + at, 0, left, false), load_guarded(dy + at, 0, left, false)));
        }
    }
};

template <class T, class Curve>
__device__ __forceinline__ void backward_columns(const ActArgs& a, float (*sums)[32 * VecWidth<T>::count]) {
    constexpr int V = VecWidth<T>::count;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 column = (i64(blockIdx.x) * 32 + lane) * V, first = i64(blockIdx.y) * a.part_rows;
    const i64 last = first + a.part_rows < a.rows ? first + a.part_rows : a.rows;
    ColumnSlopes<T, Curve> slopes(a, column);
    if (a.vectorized && column + V <= a.width) slopes.whole(first + warp, last, a.width);
    else if (column < a.width) slopes.some(first + warp, last, a.width, i32(min(a.width - column, i64(V))));
    // Column i of lane l lies at i·32 + l, so that the lanes of a warp use different banks.
#pragma unroll
    for (int i = 0; i < V; i++) sums[warp][i * 32 + lane] = slopes.sum[i];
    __syncthreads();
    float* out = reinterpret_cast<float*>(a.amax) + i64(blockIdx.y) * a.width;
    for (int c = threadIdx.x; c < 32 * V; c += 32 * COLUMN_WARPS) {
        const i64 to = i64(blockIdx.x) * 32 * V + c;
        if (to >= a.width) break;
        const int at = (c % V) * 32 + c / V;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < COLUMN_WARPS; w++) total += sums[w][at];
        out[to] = total;
    }
}

#define COLUMNS(T, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(32 * COLUMN_WARPS, 3) act_backward_dbias_##NAME(const ActArgs a) { \
        __shared__ float sums[COLUMN_WARPS][32 * VecWidth<T>::count];                                                 \
        if (a.act == GELU_TANH) backward_columns<T, GeluTanh<T>>(a, sums);                                        \
        else if (a.act == GELU_ERF) backward_columns<T, GeluErf<T>>(a, sums);                                     \
        else if (a.act == SQUARED_RELU) backward_columns<T, SquaredRelu<T>>(a, sums);                             \
        else backward_columns<T, Silu<T>>(a, sums);                                                               \
    }
FOR_EACH_TYPE(COLUMNS)
