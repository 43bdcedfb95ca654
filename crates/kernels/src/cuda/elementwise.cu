// Simple maps over contiguous tensors, copies between strides, sums of columns and dot products.
//
// Maps work in groups of elements, one 16-byte access each where every address is a multiple of 16 (`wide`), element
// by element otherwise and at the end. A thread asks for all its groups before it writes any of them: enough bytes in
// flight to fill the memory bus, and right in place too.

constexpr int THREADS = 256;
constexpr int UNROLL = 4;

// An IEEE half: only casts know it.
struct alignas(2) f16 {
    u16 bits;
};
__device__ __forceinline__ float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <> __device__ __forceinline__ f16 from_f32<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <class T, int N> struct alignas(sizeof(T) * N) Group {
    T at[N];
};

// Elements at..at+N in one access.
template <int N, class T> __device__ __forceinline__ Group<T, N> whole(const T* from, i64 at) {
    return *reinterpret_cast<const Group<T, N>*>(from + at);
}
// The same of n elements, by any access; what is past the end is zero.
template <int N, class T> __device__ __forceinline__ Group<T, N> fetch(const T* from, i64 at, i64 n, bool wide) {
    if (wide && at + N <= n) return whole<N>(from, at);
    Group<T, N> g = {};
#pragma unroll
    for (int i = 0; i < N; i++)
        if (at + i < n) g.at[i] = from[at + i];
    return g;
}
template <int N, class T> __device__ __forceinline__ void put(T* to, i64 at, i64 n, bool wide, const Group<T, N>& g) {
    if (wide && at + N <= n) {
        *reinterpret_cast<Group<T, N>*>(to + at) = g;
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (at + i < n) to[at + i] = g.at[i];
}

template <class A, class B> constexpr int group_of() {
    return 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));
}
template <int N> __device__ __forceinline__ i64 group_start(int u) {
    return ((i64(blockIdx.x) * UNROLL + u) * THREADS + threadIdx.x) * N;
}

struct MapArgs {
    u64 a, b, out;
    i64 n;
    float factor;
    u32 wide;
};

// Is this block's share whole, and can it be read in groups?
template <int N> __device__ __forceinline__ bool whole_block(i64 n, bool wide) {
    return wide && (i64(blockIdx.x) + 1) * (UNROLL * THREADS * N) <= n;
}

// out = f(a): f(values of one group, index of the first).
template <int N, class A, class D, class F>
__device__ __forceinline__ void map_group(const Group<A, N>& x, D* out, i64 at, i64 n, bool wide, F f) {
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = to_f32(x.at[i]);
    f(v, at);
    Group<D, N> y;
#pragma unroll
    for (int i = 0; i < N; i++) y.at[i] = from_f32<D>(v[i]);
    put<N>(out, at, n, wide, y);
}
template <class A, class D, class F> __device__ __forceinline__ void map(u64 from, u64 to, i64 n, bool wide, F f) {
    constexpr int N = group_of<A, D>();
    const A* a = reinterpret_cast<const A*>(from);
    D* out = reinterpret_cast<D*>(to);
    if (whole_block<N>(n, wide)) {
        Group<A, N> x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) x[u] = whole<N>(a, group_start<N>(u));
#pragma unroll
        for (int u = 0; u < UNROLL; u++) map_group<N>(x[u], out, group_start<N>(u), n, true, f);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < UNROLL; u++) {
        i64 at = group_start<N>(u);
        if (at < n) map_group<N>(fetch<N>(a, at, n, wide), out, at, n, wide, f);
    }
}

// out = f(a, b), element by element; out is of the type of a.
template <int N, class A, class B, class F>
__device__ __forceinline__ void map2_group(const Group<A, N>& x, const Group<B, N>& y, A* out, i64 at, i64 n, bool wide,
                                           F f) {
    Group<A, N> z;
#pragma unroll
    for (int i = 0; i < N; i++) z.at[i] = from_f32<A>(f(to_f32(x.at[i]), to_f32(y.at[i])));
    put<N>(out, at, n, wide, z);
}
template <class A, class B, class F> __device__ __forceinline__ void map2(const MapArgs& p, F f) {
    constexpr int N = group_of<A, B>();
    const A* a = reinterpret_cast<const A*>(p.a);
    const B* b = reinterpret_cast<const B*>(p.b);
    A* out = reinterpret_cast<A*>(p.out);
    if (whole_block<N>(p.n, p.wide)) {
        Group<A, N> x[UNROLL];
        Group<B, N> y[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            x[u] = whole<N>(a, group_start<N>(u));
            y[u] = whole<N>(b, group_start<N>(u));
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) map2_group<N>(x[u], y[u], out, group_start<N>(u), p.n, true, f);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < UNROLL; u++) {
        i64 at = group_start<N>(u);
        if (at >= p.n) break;
        map2_group<N>(fetch<N>(a, at, p.n, p.wide), fetch<N>(b, at, p.n, p.wide), out, at, p.n, p.wide, f);
    }
}

// tanh to a few units in the last place: (1 − e)/(1 + e) with e = exp(−2|x|), and near zero, where that cancels, an
// odd polynomial. NaN stays NaN; ±∞ give ±1.
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
template <class T> __device__ __forceinline__ void scale(const MapArgs& p) {
    float factor = p.factor;
    map<T, T>(p.a, p.out, p.n, p.wide, [=](auto& v, i64) {
        for (float& x : v) x *= factor;
    });
}
template <class S, class D> __device__ __forceinline__ void cast(const MapArgs& p) {
    map<S, D>(p.a, p.out, p.n, p.wide, [](auto&, i64) {});
}
template <class T> __device__ __forceinline__ void softcap_forward(const MapArgs& p) {
    float cap = p.factor;
    map<T, T>(p.a, p.out, p.n, p.wide, [=](auto& v, i64) {
        for (float& x : v) x = cap * tanh_of(x / cap);
    });
}
// a = out = dy, b = y: dy·(1 − (y/cap)²), as a product so that nothing cancels near the cap.
template <class T> __device__ __forceinline__ void softcap_backward(const MapArgs& p) {
    float cap = p.factor;
    map2<T, T>(p, [=](float dy, float y) {
        float t = y / cap;
        return dy * ((1.0f - t) * (1.0f + t));
    });
}

#define MAP(name, body)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const MapArgs p) { body(p); }
MAP(add_f32, add<float>)
MAP(add_bf16, add<bf16>)
// The type of y, then that of x.
MAP(add_assign_f32_f32, (add_assign<float, float>))
MAP(add_assign_f32_bf16, (add_assign<bf16, float>))
MAP(add_assign_bf16_f32, (add_assign<float, bf16>))
MAP(add_assign_bf16_bf16, (add_assign<bf16, bf16>))
MAP(scale_f32, scale<float>)
MAP(scale_bf16, scale<bf16>)
MAP(cast_f32_bf16, (cast<float, bf16>))
MAP(cast_bf16_f32, (cast<bf16, float>))
MAP(cast_f32_f16, (cast<float, f16>))
MAP(cast_f16_f32, (cast<f16, float>))
MAP(cast_f16_bf16, (cast<f16, bf16>))
MAP(cast_bf16_f16, (cast<bf16, f16>))
MAP(softcap_forward_f32, softcap_forward<float>)
MAP(softcap_forward_bf16, softcap_forward<bf16>)
MAP(softcap_backward_f32, softcap_backward<float>)
MAP(softcap_backward_bf16, softcap_backward<bf16>)

struct DropoutArgs {
    u64 x, y, rows;
    i64 n, width;
    u32 key[2];
    u32 lane[2];
    float scale;
    u32 threshold;
    u32 wide;
    u32 pad;
};

// Ten rounds of Philox4x32: words 4·block..4·block+4 of the stream.
__device__ __forceinline__ void philox(u64 block, const DropoutArgs& p, u32 (&words)[4]) {
    u32 a = u32(block), b = u32(block >> 32), c = p.lane[0], d = p.lane[1], k = p.key[0], l = p.key[1];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 x = u64(a) * 0xd2511f53u, y = u64(c) * 0xcd9e8d57u;
        a = u32(y >> 32) ^ b ^ k;
        c = u32(x >> 32) ^ d ^ l;
        b = u32(y);
        d = u32(x);
        k += 0x9e3779b9u;
        l += 0xbb67ae85u;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

// The word of element `at`: its column in the row that has the number rows[·] among all rows of the step.
__device__ __forceinline__ u64 dropout_word(const DropoutArgs& p, i64 at) {
    i64 row = p.n >> 32 ? at / p.width : i64(u32(at) / u32(p.width));
    u32 number = reinterpret_cast<const u32*>(p.rows)[row];
    return u64(number) * u64(p.width) + u64(at - row * p.width);
}

// y = x·scale where the element's word of the stream is at least the threshold, else 0. Groups start at multiples of
// four: where rows do too, each four elements are one block of words. Else every element draws its own.
template <class T> __device__ __forceinline__ void dropout(const DropoutArgs& p) {
    if (p.width % 4 != 0) {
        constexpr i64 SHARE = i64(16 / sizeof(T)) * UNROLL * THREADS;
        i64 first = i64(blockIdx.x) * SHARE, last = first + SHARE < p.n ? first + SHARE : p.n;
#pragma unroll 1
        for (i64 at = first + threadIdx.x; at < last; at += THREADS) {
            u64 word = dropout_word(p, at);
            u32 words[4];
            philox(word / 4, p, words);
            u32 low = word & 1 ? words[1] : words[0], high = word & 1 ? words[3] : words[2];
            float kept = to_f32(reinterpret_cast<const T*>(p.x)[at]) * p.scale;
            reinterpret_cast<T*>(p.y)[at] = from_f32<T>((word & 2 ? high : low) < p.threshold ? 0.0f : kept);
        }
        return;
    }
    map<T, T>(p.x, p.y, p.n, p.wide, [&](auto& v, i64 at) {
        constexpr int N = sizeof(v) / sizeof(float);
#pragma unroll
        for (int part = 0; part < N / 4; part++) {
            i64 first = at + 4 * part;
            if (first >= p.n) break;
            u32 words[4];
            philox(dropout_word(p, first) / 4, p, words);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float kept = v[4 * part + i] * p.scale;
                v[4 * part + i] = words[i] < p.threshold ? 0.0f : kept;
            }
        }
    });
}
extern "C" __global__ void __launch_bounds__(THREADS) dropout_f32(const DropoutArgs p) { dropout<float>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) dropout_bf16(const DropoutArgs p) { dropout<bf16>(p); }

// n bytes from a to out.
extern "C" __global__ void __launch_bounds__(THREADS) copy_bytes(const MapArgs p) {
    const u8* a = reinterpret_cast<const u8*>(p.a);
    u8* out = reinterpret_cast<u8*>(p.out);
    if (whole_block<16>(p.n, p.wide)) {
        uint4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) x[u] = reinterpret_cast<const uint4*>(a)[group_start<1>(u)];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) reinterpret_cast<uint4*>(out)[group_start<1>(u)] = x[u];
        return;
    }
    // Bytes side by side in a warp: base addresses are odd, or the end is near.
    i64 first = i64(blockIdx.x) * (16 * UNROLL * THREADS), last = first + 16 * UNROLL * THREADS;
    if (last > p.n) last = p.n;
#pragma unroll 4
    for (i64 i = first + threadIdx.x; i < last; i += THREADS) out[i] = a[i];
}

// Axes a tensor may have.
constexpr int AXES = 5;

// `sizes[0..axes]`, the last the fastest; all in units of one access.
struct StridedArgs {
    u64 from, to;
    i64 count;
    i64 sizes[AXES];
    i64 from_steps[AXES];
    i64 to_steps[AXES];
    u32 axes;
    u32 pad;
};

template <class I, class Unit> __device__ __forceinline__ void copy_strided(const StridedArgs& p) {
    Unit held[UNROLL];
    i64 to[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        i64 at = group_start<1>(u);
        to[u] = -1;
        if (at >= p.count) continue;
        I rest = I(at);
        i64 x = 0, y = 0;
        for (int axis = int(p.axes) - 1; axis > 0; axis--) {
            I size = I(p.sizes[axis]), above = rest / size, here = rest - above * size;
            x += i64(here) * p.from_steps[axis];
            y += i64(here) * p.to_steps[axis];
            rest = above;
        }
        held[u] = reinterpret_cast<const Unit*>(p.from)[x + i64(rest) * p.from_steps[0]];
        to[u] = y + i64(rest) * p.to_steps[0];
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (to[u] >= 0) reinterpret_cast<Unit*>(p.to)[to[u]] = held[u];
}

// 32-bit division is several times cheaper, and nearly always enough.
#define COPY(name, Unit)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const StridedArgs p) {                                  \
        if (p.count <= 0x7fffffffll) copy_strided<u32, Unit>(p);                                                       \
        else copy_strided<u64, Unit>(p);                                                                               \
    }
COPY(copy_strided_2, u16)
COPY(copy_strided_4, u32)
COPY(copy_strided_16, uint4)

// Sums of columns, first over parts of `part_rows` rows, then over parts. Both orders follow from the shape alone.
struct ColumnArgs {
    u64 x, out;
    i64 rows, n, stride, part_rows;
    u32 accumulate;
    u32 wide;
};

constexpr int WARPS = THREADS / 32;

// One block: 32 lanes of N columns each, the rows of one part dealt out to the warps. out [parts, n].
template <class T> __device__ __forceinline__ void column_parts(const ColumnArgs& p) {
    constexpr int N = Wide<T>::count;
    __shared__ float sums[WARPS][32 * N];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 column = (i64(blockIdx.x) * 32 + lane) * N;
    i64 first = i64(blockIdx.y) * p.part_rows;
    i64 last = first + p.part_rows < p.rows ? first + p.part_rows : p.rows;
    const T* x = reinterpret_cast<const T*>(p.x);
    float sum[N] = {};
    if (column < p.n) {
        i64 r = first + warp;
        for (; r + (UNROLL - 1) * WARPS < last; r += UNROLL * WARPS) {
            Group<T, N> row[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                row[u] = fetch<N>(x + (r + u * WARPS) * p.stride, column, p.n, p.wide);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int i = 0; i < N; i++) sum[i] += to_f32(row[u].at[i]);
        }
        for (; r < last; r += WARPS) {
            Group<T, N> row = fetch<N>(x + r * p.stride, column, p.n, p.wide);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += to_f32(row.at[i]);
        }
    }
    // Column i of lane l at i·32 + l: no two lanes of a warp in one bank.
#pragma unroll
    for (int i = 0; i < N; i++) sums[warp][i * 32 + lane] = sum[i];
    __syncthreads();
    float* out = reinterpret_cast<float*>(p.out) + i64(blockIdx.y) * p.n;
    for (int c = threadIdx.x; c < 32 * N; c += THREADS) {
        i64 to = i64(blockIdx.x) * 32 * N + c;
        if (to >= p.n) break;
        int at = (c % N) * 32 + c / N;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w][at];
        out[to] = p.accumulate ? out[to] + total : total;
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) column_parts_f32(const ColumnArgs p) { column_parts<float>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) column_parts_bf16(const ColumnArgs p) { column_parts<bf16>(p); }

// out (+)= Σ over the rows of x f32 [rows, n], each warp a share of the rows, 32 columns in a block.
extern "C" __global__ void __launch_bounds__(THREADS) column_total(const ColumnArgs p) {
    __shared__ float sums[WARPS][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 column = i64(blockIdx.x) * 32 + lane;
    const float* x = reinterpret_cast<const float*>(p.x);
    float sum = 0.0f;
    if (column < p.n) {
#pragma unroll 4
        for (i64 r = warp; r < p.rows; r += WARPS) sum += x[r * p.n + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < p.n) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w][lane];
        float* out = reinterpret_cast<float*>(p.out) + column;
        *out = p.accumulate ? *out + total : total;
    }
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

// Elements whose products one block adds up.
constexpr int DOT_PART = 16 * THREADS;

// a·b in f64 over parts of DOT_PART elements; out f64 [parts].
extern "C" __global__ void __launch_bounds__(THREADS) dot_parts(const MapArgs p) {
    const float* a = reinterpret_cast<const float*>(p.a);
    const float* b = reinterpret_cast<const float*>(p.b);
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < DOT_PART / (4 * THREADS); k++) {
        i64 at = i64(blockIdx.x) * DOT_PART + (k * THREADS + threadIdx.x) * 4;
        Group<float, 4> x = fetch<4>(a, at, p.n, p.wide), y = fetch<4>(b, at, p.n, p.wide);
#pragma unroll
        for (int i = 0; i < 4; i++) sum += double(x.at[i]) * double(y.at[i]);
    }
    sum = block_total(sum);
    if (threadIdx.x == 0) reinterpret_cast<double*>(p.out)[blockIdx.x] = sum;
}

// out f32 [1] = Σ a f64 [n], by one block.
extern "C" __global__ void __launch_bounds__(1024) dot_total(const MapArgs p) {
    const double* a = reinterpret_cast<const double*>(p.a);
    double sum = 0.0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < p.n; i += 1024) sum += a[i];
    sum = block_total(sum);
    if (threadIdx.x == 0) *reinterpret_cast<float*>(p.out) = float(sum);
}
