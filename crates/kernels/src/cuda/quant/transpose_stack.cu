// Transposes every FP8 matrix of a stack. One block: a tile of 128 × 128 of one of them.
#include "args/transpose_stack.cuh"
#include "quant/transpose.cuh"

__device__ __forceinline__ i64 up(i64 n, i64 to) { return (n + to - 1) / to * to; }

extern "C" __global__ void __launch_bounds__(THREADS) transpose_stack(const TransposeStackArgs a) {
    __shared__ alignas(16) uint2 tile[TILE * UNITS];
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const i64 tr = blockIdx.x / a.across, tc = blockIdx.x % a.across, matrix = blockIdx.y;
    const i64 pitch = up(a.c, 16), to_pitch = up(a.r, 16), row = tr * TILE + 8 * ty, col = tc * TILE + 8 * tx;
    const u8* from = reinterpret_cast<const u8*>(a.from) + (matrix * a.r + row) * pitch + col;
    u32 low[8], high[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint2 v = {0, 0};
        if (row + i < a.r && col < pitch) {
            if (a.vectorized) {
                v = *reinterpret_cast<const uint2*>(from + i * pitch);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) (j < 4 ? v.x : v.y) |= u32(from[i * pitch + j]) << 8 * (j & 3);
            }
        }
        low[i] = v.x, high[i] = v.y;
    }
    store_tile_transposed(tile, low, high, tx, ty);
    __syncthreads();
    u8* to = reinterpret_cast<u8*>(a.to) + matrix * a.c * to_pitch;
    write_transposed(tile, to, tc * TILE, tr * TILE, a.c, to_pitch, a.vectorized_to);
    const float* scale = reinterpret_cast<const float*>(a.scale);
    float* to_scale = reinterpret_cast<float*>(a.to_scale);
    if (!a.block_scaled) {
        if (blockIdx.x == 0 && threadIdx.x == 0) to_scale[matrix] = scale[matrix];
        return;
    }
    // The last tile of a line writes the padding behind it as well.
    const i64 down = a.r / TILE, line = up(a.across, 4), to_line = up(down, 4), at = tr + threadIdx.x;
    if (threadIdx.x == 0 || (threadIdx.x < 4 && tr == down - 1 && at < to_line))
        to_scale[(matrix * a.across + tc) * to_line + at] =
            threadIdx.x ? 0.0f : scale[(matrix * down + tr) * line + tc];
}
