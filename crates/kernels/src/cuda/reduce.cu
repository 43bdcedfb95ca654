// Column sums and dot products in two passes: partial sums, then their total. The order of both follows from the shape
// alone.
#include "args/reduce.cuh"
#include "vec.cuh"

constexpr int THREADS = 256;


constexpr int WARPS = THREADS / 32;
// Rows of a warp whose loads are in flight together.
constexpr int AHEAD = 8;

// sum += rows r, r + WARPS, ... below `last`; `get` loads the columns of one row.
template <class T, int N, class Get>
__device__ __forceinline__ void add_rows(float (&sum)[N], i64 r, i64 last, Get get) {
    auto add = [&](const Vec<T, N>& row) {
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += to_f32(row.at[i]);
    };
    for (; r + (AHEAD - 1) * WARPS < last; r += AHEAD * WARPS) {
        Vec<T, N> row[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) row[u] = get(r + u * WARPS);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) add(row[u]);
    }
#pragma unroll 1
    for (; r < last; r += WARPS) add(get(r));
}

// One block: a lane has N columns, the rows of one part are dealt to the warps. out [parts, n].
template <class T> __device__ __forceinline__ void column_parts(const ColumnArgs& p) {
    constexpr int N = VecWidth<T>::count;
    __shared__ float sums[WARPS][32 * N];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 column = (i64(blockIdx.x) * 32 + lane) * N;
    i64 first = i64(blockIdx.y) * p.part_rows;
    i64 last = first + p.part_rows < p.rows ? first + p.part_rows : p.rows;
    const T* x = reinterpret_cast<const T*>(p.x);
    float sum[N] = {};
    // Two loops: a branch at every access would keep loads from overlapping.
    if (p.vectorized && column + N <= p.n)
        add_rows<T>(sum, first + warp, last, [&](i64 r) { return load_vec<N>(x + r * p.stride, column); });
    else if (column < p.n)
        add_rows<T>(sum, first + warp, last, [&](i64 r) { return load_guarded<N>(x + r * p.stride, column, p.n, false); });
    // Column i of lane l lies at i·32 + l, so that the lanes of a warp use different banks.
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
        out[to] = total;
    }
}
#define COLUMN_PARTS(T, NAME) \
    extern "C" __global__ void __launch_bounds__(THREADS) column_parts_##NAME(const ColumnArgs p) { column_parts<T>(p); }
FOR_EACH_TYPE(COLUMN_PARTS)

// out (+)= Σ over the rows of x f32 [rows, n]: a block has 32 columns, each warp a share of the rows.
extern "C" __global__ void __launch_bounds__(1024) column_total(const ColumnArgs p) {
    __shared__ float sums[32][33];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 column = i64(blockIdx.x) * 32 + lane;
    const float* x = reinterpret_cast<const float*>(p.x);
    float sum = 0.0f;
    if (column < p.n) {
#pragma unroll 8
        for (i64 r = warp; r < p.rows; r += 32) sum += x[r * p.stride + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= p.n) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 32; w++) total += sums[w][lane];
    float* out = reinterpret_cast<float*>(p.out) + column;
    *out = p.accumulate ? *out + total : total;
}


// Elements of one partial dot product.
constexpr int DOT_PART = 16 * THREADS;

// a·b in f64 over parts of DOT_PART elements; out f64 [parts].
extern "C" __global__ void __launch_bounds__(THREADS) dot_parts(const DotArgs p) {
    const float* a = reinterpret_cast<const float*>(p.a);
    const float* b = reinterpret_cast<const float*>(p.b);
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < DOT_PART / (4 * THREADS); k++) {
        i64 at = i64(blockIdx.x) * DOT_PART + (k * THREADS + threadIdx.x) * 4;
        Vec<float, 4> x = load_guarded<4>(a, at, p.n, p.vectorized), y = load_guarded<4>(b, at, p.n, p.vectorized);
#pragma unroll
        for (int i = 0; i < 4; i++) sum += double(x.at[i]) * double(y.at[i]);
    }
    sum = block_total(sum);
    if (threadIdx.x == 0) reinterpret_cast<double*>(p.out)[blockIdx.x] = sum;
}

// out f32 [1] = Σ a f64 [n], by one block.
extern "C" __global__ void __launch_bounds__(1024) dot_total(const DotArgs p) {
    const double* a = reinterpret_cast<const double*>(p.a);
    double sum = 0.0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < p.n; i += 1024) sum += a[i];
    sum = block_total(sum);
    if (threadIdx.x == 0) *reinterpret_cast<float*>(p.out) = float(sum);
}
