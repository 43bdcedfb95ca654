// Bytes as numbers again, and products of bytes in plain arithmetic: any sizes and alignments.

constexpr int TILE = 128;

// Where the scale of number (row, column) of a matrix [r, c] is: see Scaling in quant.rs.
struct Matrix {
    u64 data, scale;
    i64 r, c;
    // 0: one scale; 1: one for 128 along c; 2: one for 128 × 128.
    u32 sharing;
    u32 e5m2;
    __device__ __forceinline__ i64 pitch() const { return (c + 15) / 16 * 16; }
    __device__ __forceinline__ float scale_at(i64 row, i64 column) const {
        const i64 blocks = (c + TILE - 1) / TILE;
        const i64 at = sharing == 0   ? 0
                       : sharing == 1 ? column / TILE * ((r + 3) / 4 * 4) + row
                                      : row / TILE * ((blocks + 3) / 4 * 4) + column / TILE;
        return reinterpret_cast<const float*>(scale)[at];
    }
};

struct DequantiseArgs {
    Matrix q;
    u64 out;
    i64 stride;
    u32 across;
    u32 wide;
};

// One block: a tile of 128 × 128; a thread has 16 columns of four rows of it.
template <class T> __device__ __forceinline__ void dequantise(const DequantiseArgs& a) {
    const i64 column = i64(blockIdx.x % a.across) * TILE + (threadIdx.x & 7) * 16;
    const i64 row0 = i64(blockIdx.x / a.across) * TILE + (threadIdx.x >> 3);
    if (column >= a.q.c) return;
    const i64 pitch = a.q.pitch();
    const u8* q = reinterpret_cast<const u8*>(a.q.data) + column;
    const bool whole = a.wide && column + 16 <= a.q.c;
    uint4 four[4] = {};
    float scale[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const i64 row = row0 + 32 * i;
        if (row >= a.q.r) continue;
        scale[i] = a.q.scale_at(row, column);
        if (whole) four[i] = *reinterpret_cast<const uint4*>(q + row * pitch);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const i64 row = row0 + 32 * i;
        if (row >= a.q.r) continue;
        T* out = reinterpret_cast<T*>(a.out) + row * a.stride + column;
        if (whole) {
            const u32 word[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
            constexpr int N = Wide<T>::count;
#pragma unroll
            for (int at = 0; at < 16; at += N) {
                float f[N];
#pragma unroll
                for (int j = 0; j < N; j++)
                    f[j] = decode(a.q.e5m2, word[(at + j) / 4] >> 8 * ((at + j) & 3) & 0xffu) * scale[i];
                store(out + at, f);
            }
        } else {
#pragma unroll 1
            for (int j = 0; j < 16 && column + j < a.q.c; j++)
                out[j] = from_f32<T>(decode(a.q.e5m2, q[row * pitch + j]) * scale[i]);
        }
    }
}
extern "C" __global__ void __launch_bounds__(256) dequantise_f32(const DequantiseArgs a) { dequantise<float>(a); }
extern "C" __global__ void __launch_bounds__(256) dequantise_bf16(const DequantiseArgs a) { dequantise<bf16>(a); }

struct ProductArgs {
    Matrix a, b;
    u64 c, bias;
    i64 ldc;
    u32 accumulate;
    u32 pad;
};

constexpr int SIDE = 64;
constexpr int DEEP = 16;
constexpr int PITCH = SIDE + 1;

// tile[p][i] = number (first + i, k0 + p), zero outside.
__device__ __forceinline__ void load_tile(float (&tile)[DEEP][PITCH], const Matrix& x, i64 first, i64 k0) {
#pragma unroll
    for (int step = 0; step < SIDE * DEEP / 256; step++) {
        const int e = step * 256 + threadIdx.x, p = e % DEEP, i = e / DEEP;
        const i64 row = first + i, deep = k0 + p;
        float v = 0.0f;
        if (row < x.r && deep < x.c)
            v = decode(x.e5m2, reinterpret_cast<const u8*>(x.data)[row * x.pitch() + deep]) * x.scale_at(row, deep);
        tile[p][i] = v;
    }
}

// One block: a tile of SIDE × SIDE of c = a·bᵀ; each element is one sum over k, in order.
template <class C> __device__ __forceinline__ void product(const ProductArgs& g) {
    __shared__ float left[DEEP][PITCH], right[DEEP][PITCH];
    const i64 across = (g.b.r + SIDE - 1) / SIDE;
    const i64 row0 = i64(blockIdx.x) / across * SIDE, column0 = i64(blockIdx.x) % across * SIDE;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (i64 k0 = 0; k0 < g.a.c; k0 += DEEP) {
        load_tile(left, g.a, row0, k0);
        load_tile(right, g.b, column0, k0);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < DEEP; p++) {
            float x[4], y[4];
#pragma unroll
            for (int r = 0; r < 4; r++) x[r] = left[p][ty + 16 * r], y[r] = right[p][tx + 16 * r];
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < 4; s++) sum[r][s] = __fmaf_rn(x[r], y[s], sum[r][s]);
        }
        __syncthreads();
    }
    C* c = reinterpret_cast<C*>(g.c);
    const bf16* bias = reinterpret_cast<const bf16*>(g.bias);
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const i64 row = row0 + ty + 16 * r, column = column0 + tx + 16 * s;
            if (row >= g.a.r || column >= g.b.r) continue;
            C* to = c + row * g.ldc + column;
            float v = sum[r][s];
            if (bias) v += to_f32(bias[column]);
            if (g.accumulate) v += to_f32(*to);
            *to = from_f32<C>(v);
        }
}
extern "C" __global__ void __launch_bounds__(256) product8_f32(const ProductArgs g) { product<float>(g); }
extern "C" __global__ void __launch_bounds__(256) product8_bf16(const ProductArgs g) { product<bf16>(g); }
