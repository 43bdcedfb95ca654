// Quantizes x to FP8, as it lies and transposed, in one pass over x. One block: a tile of 128 × 128, a thread 8 × 8
// elements of it, which it transposes in registers; shared memory gathers the bytes of a column.
#include "amax.cuh"
#include "args/quantize.cuh"
#include "quant/common.cuh"
#include "quant/transpose.cuh"

// Which elements share a scale.
enum Granularity { PER_TENSOR, BLOCK_1X128, BLOCK_128X128, PER_TENSOR_WITH_AMAX };

// PER_TENSOR_WITH_AMAX: as PER_TENSOR, but the amax is computed here. All blocks of a matrix publish their amax and
// wait for each other with their elements in registers, so that x is read once. That is safe without a cooperative
// launch: a block that has spun for SPIN_CYCLES, because not all blocks are resident, computes the amax of the whole
// matrix itself.
constexpr i64 SPIN_CYCLES = 2000000;

template <class T> __device__ __forceinline__ float grid_amax(const QuantizeArgs& a, i64 matrix, u64 amax, float m, float* most) {
    __shared__ bool there;
    if (threadIdx.x == 0) {
        atomic_amax(amax, __float_as_uint(m));
        __threadfence();
        u32* arrived = reinterpret_cast<u32*>(a.arrived) + matrix;
        atomicAdd(arrived, 1u);
        const i64 begin = clock64();
        u32 seen;
        do seen = *reinterpret_cast<volatile u32*>(arrived);
        while (seen < gridDim.x && clock64() - begin < SPIN_CYCLES);
        there = seen >= gridDim.x;
        __threadfence();
    }
    __syncthreads();
    if (!there) {
        const T* x = reinterpret_cast<const T*>(a.x) + matrix * a.x_step;
#pragma unroll 1
        for (i64 i = threadIdx.x; i < a.r * a.c; i += THREADS) m = fmaxf(m, fabsf(to_f32(x[i])));
        m = fmaxf(block_max(m, most), 0.0f);
        if (threadIdx.x == 0) atomic_amax(amax, __float_as_uint(m));
        __syncthreads();
    }
    return *reinterpret_cast<volatile float*>(amax);
}

__device__ __forceinline__ i64 up(i64 n, i64 to) { return (n + to - 1) / to * to; }

// amax of each of eight rows over the 16 lanes that share them; the lane returns that of row (lane >> 1) & 7.
__device__ __forceinline__ float max_of_rows(float (&m)[8], int lane) {
#pragma unroll
    for (int n = 4; n > 0; n >>= 1) {
        const bool upper = lane & 2 * n;
#pragma unroll
        for (int i = 0; i < n; i++) {
            float send = upper ? m[i] : m[i + n], keep = upper ? m[i + n] : m[i];
            m[i] = fmaxf(keep, __shfl_xor_sync(~0u, send, 2 * n));
        }
    }
    return fmaxf(m[0], __shfl_xor_sync(~0u, m[0], 1));
}

template <class T, Granularity S> __device__ __forceinline__ void quantize(const QuantizeArgs& a) {
    __shared__ alignas(16) uint2 tile[TILE * UNITS];
    __shared__ alignas(16) float part[THREADS / 32][TILE];
    __shared__ alignas(16) float scales[2][TILE];
    __shared__ float most[32];
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4, warp = threadIdx.x >> 5;
    // In descending order: what was written or measured last is still in the L2 cache.
    const u32 block = gridDim.x - 1 - blockIdx.x;
    const i64 matrix = gridDim.y - 1 - blockIdx.y;
    const i64 tile_c = i64(block % a.across) * TILE, tile_r = i64(block / a.across) * TILE;
    const i64 col = tile_c + 8 * tx, row = tile_r + 8 * ty;

    Pack8<T> v[8];
    const T* x = reinterpret_cast<const T*>(a.x) + matrix * a.x_step + row * a.stride + col;
    if (a.vectorized && tile_c + TILE <= a.c && tile_r + TILE <= a.r) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = *reinterpret_cast<const Pack8<T>*>(x + i * a.stride);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = {};
            if (row + i >= a.r) continue;
            if (a.vectorized && col + 8 <= a.c) {
                v[i] = *reinterpret_cast<const Pack8<T>*>(x + i * a.stride);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (col + j < a.c) v[i].put(j, x[i * a.stride + j]);
            }
        }
    }

    const float largest = fp8_max(a.e5m2);
    const u64 amax = a.amax + matrix * a.amax_step * sizeof(float);
    float* const rows_scale = reinterpret_cast<float*>(a.rows_scale) + matrix * a.rows_scales;
    float* const cols_scale = reinterpret_cast<float*>(a.cols_scale) + matrix * a.cols_scales;
    float scale = 1.0f;
    if (S == PER_TENSOR_WITH_AMAX) {
        float m = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) m = fmaxf(m, fabsf(v[i].at(j)));
        m = fmaxf(block_max(m, most), 0.0f);
        const float found = grid_amax<T>(a, matrix, amax, m, most);
        scale = scale_of(found, largest, a.pow2, __uint_as_float(MaxFinite<float>::bits));
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            const float inverse = __fdiv_rn(1.0f, scale);
            if (a.rows) *rows_scale = inverse;
            if (a.cols) *cols_scale = inverse;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) opaque(v[i]);
    }
    if (S == PER_TENSOR) {
        const bool given = a.scale;
        const float infinite = __uint_as_float(MaxFinite<float>::bits);
        scale = given ? *reinterpret_cast<const float*>(a.scale)
                      : scale_of(*reinterpret_cast<const float*>(amax), largest, a.pow2, infinite);
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            const float inverse = __fdiv_rn(1.0f, scale);
            if (a.rows) *rows_scale = inverse;
            if (a.cols) *cols_scale = inverse;
        }
    }
    if (S == BLOCK_128X128 || (S == PER_TENSOR && a.scale && a.amax)) {
        float m = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) m = fmaxf(m, fabsf(v[i].at(j)));
        m = fmaxf(block_max(m, most), 0.0f);
        if (S == PER_TENSOR && threadIdx.x == 0) atomic_amax(amax, __float_as_uint(m));
        if (S == BLOCK_128X128) {
            scale = scale_of(m, largest, a.pow2, __uint_as_float(MaxFinite<T>::bits));
            const float inverse = __fdiv_rn(1.0f, scale);
            const i64 tr = tile_r / TILE, tc = tile_c / TILE;
            const i64 down = (a.r + TILE - 1) / TILE;
            // The last tile of a line writes the padding behind it as well.
            if (a.rows && threadIdx.x < 4) {
                const i64 pitch = up(a.across, 4), at = tc + threadIdx.x;
                if (threadIdx.x == 0 || (tc == a.across - 1 && at < pitch))
                    rows_scale[tr * pitch + at] = threadIdx.x ? 0.0f : inverse;
            }
            if (a.cols && threadIdx.x < 4) {
                const i64 pitch = up(down, 4), at = tr + threadIdx.x;
                if (threadIdx.x == 0 || (tr == down - 1 && at < pitch))
                    cols_scale[tc * pitch + at] = threadIdx.x ? 0.0f : inverse;
            }
        }
    }
    if (S == BLOCK_1X128) {
        if (a.rows) {
            float m[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                m[i] = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) m[i] = fmaxf(m[i], fabsf(v[i].at(j)));
            }
            const float own = max_of_rows(m, tx);
            if (!(tx & 1)) scales[0][8 * ty + (tx >> 1)] = own;
        }
        if (a.cols) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float m = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) m = fmaxf(m, fabsf(v[i].at(j)));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
                if (!(ty & 1)) part[warp][8 * tx + j] = m;
            }
        }
        __syncthreads();
        // Half of the threads have a row each, the other half a column.
        const int line = threadIdx.x & (TILE - 1);
        const bool of_rows = threadIdx.x < TILE;
        if (of_rows ? a.rows : a.cols) {
            float m = of_rows ? scales[0][line] : 0.0f;
            if (!of_rows)
#pragma unroll
                for (int w = 0; w < THREADS / 32; w++) m = fmaxf(m, part[w][line]);
            const float s = scale_of(m, largest, a.pow2, __uint_as_float(MaxFinite<T>::bits));
            scales[!of_rows][line] = s;
            const i64 n = of_rows ? a.r : a.c, pitch = up(n, 4), at = (of_rows ? tile_r : tile_c) + line;
            const i64 block = (of_rows ? tile_c : tile_r) / TILE;
            float* to = (of_rows ? rows_scale : cols_scale) + block * pitch;
            if (at < pitch) to[at] = at < n ? __fdiv_rn(1.0f, s) : 0.0f;
        }
        __syncthreads();
    }

    if (a.parts) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) sum += v[i].at(j);
            sum += __shfl_xor_sync(~0u, sum, 16);
            if (!(ty & 1)) part[warp][8 * tx + j] = sum;
        }
    }

    if (S == BLOCK_1X128 || a.parts)
#pragma unroll
        for (int i = 0; i < 8; i++) opaque(v[i]);
    // FP8 of row i: columns 0 to 3 and 4 to 7.
    u32 low[8], high[8];
    if (S != BLOCK_1X128 || a.rows) {
        const i64 pitch = up(a.c, 16);
        u8* to = reinterpret_cast<u8*>(a.rows) + matrix * a.rows_step + row * pitch + col;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float s = S == BLOCK_1X128 ? scales[0][8 * ty + i] : scale;
            float f[8];
#pragma unroll
            for (int j = 0; j < 8; j++) f[j] = v[i].at(j) * s;
            low[i] = encode_fp8(a.e5m2, f[0], f[1], f[2], f[3]);
            high[i] = encode_fp8(a.e5m2, f[4], f[5], f[6], f[7]);
            if (!a.rows || row + i >= a.r || col >= pitch) continue;
            if (a.vectorized_rows) {
                *reinterpret_cast<uint2*>(to + i * pitch) = {low[i], high[i]};
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) to[i * pitch + j] = u8((j < 4 ? low[i] : high[i]) >> 8 * (j & 3));
            }
        }
    }
    if (a.cols) {
        if (S == BLOCK_1X128) {
            float s[8];
#pragma unroll
            for (int j = 0; j < 8; j++) s[j] = scales[1][8 * tx + j];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float f[8];
#pragma unroll
                for (int j = 0; j < 8; j++) f[j] = v[i].at(j) * s[j];
                low[i] = encode_fp8(a.e5m2, f[0], f[1], f[2], f[3]);
                high[i] = encode_fp8(a.e5m2, f[4], f[5], f[6], f[7]);
            }
        }
        store_tile_transposed(tile, low, high, tx, ty);
    }
    if (!a.cols && !a.parts) return;
    __syncthreads();
    if (a.cols)
        write_transposed(tile, reinterpret_cast<u8*>(a.cols) + matrix * a.cols_step, tile_c, tile_r, a.c, up(a.r, 16), a.vectorized_cols);
    if (a.parts && threadIdx.x < TILE && tile_c + threadIdx.x < a.c) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < THREADS / 32; w++) sum += part[w][threadIdx.x];
        reinterpret_cast<float*>(a.parts)[tile_r / TILE * a.c + tile_c + threadIdx.x] = sum;
    }
}

#define QUANTIZE(T, name, blocks)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) quantize_tensor_##name(const QuantizeArgs a) {          \
        quantize<T, PER_TENSOR>(a);                                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) quantize_blocks_1x128_##name(const QuantizeArgs a) {        \
        quantize<T, BLOCK_1X128>(a);                                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) quantize_blocks_128x128_##name(const QuantizeArgs a) {        \
        quantize<T, BLOCK_128X128>(a);                                                                                         \
    }
QUANTIZE(float, f32, 2)
QUANTIZE(bf16, bf16, 3)
QUANTIZE(f16, f16, 3)
extern "C" __global__ void __launch_bounds__(THREADS, 2) quantize_with_amax_f32(const QuantizeArgs a) {
    quantize<float, PER_TENSOR_WITH_AMAX>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 3) quantize_with_amax_bf16(const QuantizeArgs a) {
    quantize<bf16, PER_TENSOR_WITH_AMAX>(a);
}
