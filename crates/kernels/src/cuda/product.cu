// c = op(a)·op(b) (+ bias) (+ c) in plain arithmetic: any sizes, strides and alignments. For products that the matrix
// units' library refuses.

constexpr int SIDE = 64;
constexpr int DEEP = 16;
constexpr int THREADS = 256;
// One more column keeps a warp that writes down a column of the tile in different banks.
constexpr int PITCH = SIDE + 1;

struct ProductArgs {
    u64 a, b, c, bias;
    i64 m, n, k, lda, ldb, ldc;
    u32 trans_a, trans_b;
    u32 accumulate;
    u32 pad;
};

// tile[p][i] = x(first + i, k0 + p) for an operand with `count` rows of length k, zero outside. `along`: k is the
// contiguous axis in memory; neighbouring threads read neighbouring elements either way.
template <class T>
__device__ __forceinline__ void load_tile(float (&tile)[DEEP][PITCH], const T* x, i64 ld, bool along, i64 first,
                                          i64 count, i64 k0, i64 k) {
#pragma unroll
    for (int step = 0; step < SIDE * DEEP / THREADS; step++) {
        int e = step * THREADS + threadIdx.x;
        int p = along ? e % DEEP : e / SIDE, i = along ? e / DEEP : e % SIDE;
        i64 row = first + i, deep = k0 + p;
        float v = 0.0f;
        if (row < count && deep < k) v = to_f32(along ? x[row * ld + deep] : x[deep * ld + row]);
        tile[p][i] = v;
    }
}

// One block: a tile of SIDE × SIDE of c; a thread has rows ty + 16r and columns tx + 16s of it. Each element is one
// sum over k, in order.
template <class T, class C> __device__ __forceinline__ void product(const ProductArgs& g) {
    __shared__ float left[DEEP][PITCH], right[DEEP][PITCH];
    i64 across = (g.n + SIDE - 1) / SIDE;
    i64 row0 = i64(blockIdx.x) / across * SIDE, column0 = i64(blockIdx.x) % across * SIDE;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const T* a = reinterpret_cast<const T*>(g.a);
    const T* b = reinterpret_cast<const T*>(g.b);
    float sum[4][4] = {};
    for (i64 k0 = 0; k0 < g.k; k0 += DEEP) {
        load_tile(left, a, g.lda, !g.trans_a, row0, g.m, k0, g.k);
        load_tile(right, b, g.ldb, g.trans_b, column0, g.n, k0, g.k);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < DEEP; p++) {
            float x[4], y[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                x[r] = left[p][ty + 16 * r];
                y[r] = right[p][tx + 16 * r];
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < 4; s++) sum[r][s] = __fmaf_rn(x[r], y[s], sum[r][s]);
        }
        __syncthreads();
    }
    C* c = reinterpret_cast<C*>(g.c);
    const T* bias = reinterpret_cast<const T*>(g.bias);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int s = 0; s < 4; s++) {
            i64 row = row0 + ty + 16 * r, column = column0 + tx + 16 * s;
            if (row >= g.m || column >= g.n) continue;
            C* to = c + row * g.ldc + column;
            float v = sum[r][s];
            if (bias) v += to_f32(bias[column]);
            if (g.accumulate) v += to_f32(*to);
            *to = from_f32<C>(v);
        }
}
extern "C" __global__ void __launch_bounds__(THREADS) product_f32(const ProductArgs g) { product<float, float>(g); }
extern "C" __global__ void __launch_bounds__(THREADS) product_bf16(const ProductArgs g) { product<bf16, bf16>(g); }
extern "C" __global__ void __launch_bounds__(THREADS) product_bf16_f32(const ProductArgs g) { product<bf16, float>(g); }
