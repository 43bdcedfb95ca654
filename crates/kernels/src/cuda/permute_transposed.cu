// Permutes FP8 rows into expert order and transposes them, for wgrad. One block: 128 rows, 128 bytes of each.
#include "args/permute.cuh"
#include "quant/transpose.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) transpose_rows(const TransposeRowsArgs a) {
    __shared__ alignas(16) uint2 tile[TILE * UNITS];
    __shared__ i32 from[TILE];
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const i32 tile_r = i32(blockIdx.x / a.across) * TILE, tile_c = i32(blockIdx.x % a.across) * TILE;
    if (threadIdx.x < TILE) {
        const i32 r = tile_r + i32(threadIdx.x);
        const u32 selection = r < a.n ? u32(reinterpret_cast<const i32*>(a.source)[r]) : ~0u;
        from[threadIdx.x] = selection < a.selections ? i32(selection / a.k) : -1;
    }
    __syncthreads();
    const i32 col = tile_c + 8 * tx;
    u32 low[8], high[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const i32 token = from[8 * ty + i];
        uint2 v = {0, 0};
        if (token >= 0) {
            const u8* x = reinterpret_cast<const u8*>(a.x) + token * a.width + col;
            if (a.vectorized && col + 8 <= a.columns) {
                v = *reinterpret_cast<const uint2*>(x);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (col + j < a.columns) (j < 4 ? v.x : v.y) |= u32(x[j]) << 8 * (j & 3);
            }
        }
        low[i] = v.x, high[i] = v.y;
    }
    store_tile_transposed(tile, low, high, tx, ty);
    __syncthreads();
    write_transposed(tile, reinterpret_cast<u8*>(a.out), tile_c, tile_r, a.columns, a.pitch, a.vectorized_out);
}
