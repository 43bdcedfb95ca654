// GEMM operands in MXFP8 and NVFP4. An operand is stored with the contracted axis last: codes [lines, depth] and row-major
// scales [lines, depth/32 or depth/16]; `depth` is a multiple of 32, so that tiles end where the operand does.
#include "args/quant_swizzle.cuh"
#include "quant/microscaling.cuh"

__device__ __forceinline__ u32 encode_e2m1(float y) {
    const float m = fabsf(y);
    return u32(m < 2.0f ? 2.0f * m : m < 4.0f ? m + 2.0f : 0.5f * m + 4.0f) | __float_as_uint(y) >> 28 & 8u;
}
__device__ __forceinline__ float decode_e2m1(u32 code) {
    const float m = float(code & 7u);
    const float y = m < 4.0f ? 0.5f * m : m < 6.0f ? m - 2.0f : 2.0f * m - 8.0f;
    return code & 8u ? -y : y;
}

// A tile as part of the operand: the matrix itself, or its transpose.
struct Place {
    // First line and first element along the contracted axis.
    i64 line, k, lines;
    __device__ __forceinline__ Place(const EmulateArgs& a) {
        const i64 row = i64(blockIdx.x / a.across) * SIDE, column = i64(blockIdx.x % a.across) * SIDE;
        line = a.transposed ? column : row, k = a.transposed ? row : column, lines = a.transposed ? a.c : a.r;
    }
};
// Element of a tile by its line and its place along the contracted axis.
__device__ __forceinline__ float& value_at(const EmulateArgs& a, Shared& s, int line, int k) {
    return a.transposed ? s.tile[k][line] : s.tile[line][k];
}
// Elements that share a scale, and their scaling blocks in a line of a tile.
__device__ __forceinline__ int block_size(const EmulateArgs& a) { return a.four ? 16 : 32; }
__device__ __forceinline__ u64 scale_address(const EmulateArgs& a, const Place& p, int line, int k) {
    const int size = block_size(a);
    return a.scales + u64((p.line + line) * (a.depth / size) + (p.k + k) / size);
}

template <class T> __device__ __forceinline__ void microscale(const EmulateArgs& a) {
    __shared__ Shared s;
    quantize_tile<T, false>(a, s);
    __syncthreads();
    const Place p(a);
    // A thread has four FP8 or eight FP4 codes of a line.
    const int n = a.four ? 8 : 4, t = threadIdx.x, line = t * n / SIDE, k = t * n % SIDE;
    if (line < SIDE && p.line + line < p.lines) {
        const u64 at = u64((p.line + line) * a.depth + p.k + k);
        u32 word = 0;
        if (a.four) {
#pragma unroll
            for (int i = 0; i < 8; i++) word |= encode_e2m1(value_at(a, s, line, k + i)) << 4 * i;
        } else {
            word = encode_fp8(a.e5m2, value_at(a, s, line, k), value_at(a, s, line, k + 1), value_at(a, s, line, k + 2),
                              value_at(a, s, line, k + 3));
        }
        *reinterpret_cast<u32*>(a.out + (a.four ? at / 2 : at)) = word;
    }
    const int size = block_size(a), each = SIDE / size, own = t / each, b = t % each * size;
    if (own < SIDE && p.line + own < p.lines) {
        const int i = a.transposed ? b : own, j = a.transposed ? own : b;
        const int block = (i >> a.down) * (SIDE >> a.along) + (j >> a.along);
        *reinterpret_cast<unsigned char*>(scale_address(a, p, own, b)) = (unsigned char)(s.code[block]);
    }
}

// The values of an operand as the matrix it was quantized from: `x` holds codes.
template <class T> __device__ __forceinline__ void dequantize(const EmulateArgs& a) {
    __shared__ Shared s;
    const Place p(a);
    const int n = a.four ? 8 : 4, t = threadIdx.x, line = t * n / SIDE, k = t * n % SIDE;
    if (line < SIDE) {
        const bool inside = p.line + line < p.lines;
        const u64 at = u64((p.line + line) * a.depth + p.k + k);
        const u32 word = inside ? *reinterpret_cast<const u32*>(a.x + (a.four ? at / 2 : at)) : 0u;
        const u32 code = inside ? *reinterpret_cast<const unsigned char*>(scale_address(a, p, line, k)) : 0u;
        const float scale =
            a.four ? __fmul_rn(decode_fp8(0, code),
                               __fdiv_rn(1.0f, tensor_scale(*reinterpret_cast<const float*>(a.amax))))
                   : power_of(code);
        for (int i = 0; i < n; i++) {
            const float y = a.four ? decode_e2m1(word >> 4 * i & 0xfu) : decode_fp8(a.e5m2, word >> 8 * i & 0xffu);
            value_at(a, s, line, k + i) = __fmul_rn(y, scale);
        }
    }
    __syncthreads();
    transform_back(a, s);
    store_tile<T>(a, s, blockIdx.x, threadIdx.x);
}

#define MICROSCALE(T, NAME)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) microscale_##NAME(const EmulateArgs a) { microscale<T>(a); } \
    extern "C" __global__ void __launch_bounds__(THREADS) dequantize_##NAME(const EmulateArgs a) { dequantize<T>(a); }
MICROSCALE(float, f32)
MICROSCALE(bf16, bf16)
MICROSCALE(f16, f16)

// Scales [rows, cols] in the layout of cuBLASLt: consecutive tiles of 128 × 4, padded with zeros, whose rows of four bytes
// are ordered 0, 32, 64, 96, 1, 33, … A block has a tile, a thread a row of it. Source scales are bytes, or f32 powers of
// two that become E8M0; each may serve 2^`row_share` rows and 2^`col_share` columns.
extern "C" __global__ void __launch_bounds__(128) swizzle_scales(const SwizzleArgs a) {
    const int t = threadIdx.x;
    const i64 row = i64(blockIdx.x / a.across) * 128 + t / 4 + t % 4 * 32, column = i64(blockIdx.x % a.across) * 4;
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row >= a.rows || column + i >= a.cols) continue;
        const i64 at = (row >> a.row_share) * a.row_step + (column + i >> a.col_share) * a.col_step;
        const u32 code = a.f32 ? reinterpret_cast<const u32*>(a.scales)[at] >> 23
                               : reinterpret_cast<const unsigned char*>(a.scales)[at];
        word |= (code & 0xffu) << 8 * i;
    }
    reinterpret_cast<u32*>(a.out)[i64(blockIdx.x) * 128 + t] = word;
    if (a.factors && blockIdx.x == 0 && t == 0) {
        float* const factors = reinterpret_cast<float*>(a.factors);
        const float x = __fdiv_rn(1.0f, tensor_scale(*reinterpret_cast<const float*>(a.amax[0])));
        const float y = __fdiv_rn(1.0f, tensor_scale(*reinterpret_cast<const float*>(a.amax[1])));
        factors[0] = __fmul_rn(x, y);
        factors[1] = a.accumulate ? 1.0f : 0.0f;
    }
}
