// Grouped fprop and dgrad with mma.sync: y = x·op(w[e]) + bias[e] of every segment's rows.
#include "grouped/mma.cuh"
#include "grouped/segments.cuh"

// Blocks of tiles, columns fastest, then blocks that zero rows outside all segments. DGRAD: w
// is [k, n].
template <int WM, int WN, int STAGES, bool DGRAD> __device__ __forceinline__ void grouped_mma(const GroupedArgs& g) {
    using Tile = GroupedMma<WM, WN, STAGES, false, DGRAD>;
    const Segments& z = g.segments;
    const i32 n = i32(g.n), across = (n + Tile::BN - 1) / Tile::BN, tiles = (z.rows / Tile::BM + z.count) * across;
    bf16* y = reinterpret_cast<bf16*>(g.y);
    if (i32(blockIdx.x) >= tiles) {
        constexpr int WARPS = Tile::THREADS / 32;
        const i32 warps = (i32(gridDim.x) - tiles) * WARPS, self = (i32(blockIdx.x) - tiles) * WARPS + (threadIdx.x >> 5);
        zero_gaps(z, z.count, z.rows, y, g.ldy, n, g.vectorized, self, warps);
        return;
    }
    __shared__ Place place;
    if (threadIdx.x < 32) {
        const Place p = find<Tile::BM>(z, i32(blockIdx.x) / across);
        if (threadIdx.x == 0) place = p;
    }
    __syncthreads();
    const i32 e = place.segment;
    if (e == z.count) return;
    const i32 row0 = place.tile * Tile::BM, column0 = i32(blockIdx.x) % across * Tile::BN;
    const i32 rows = segment_length(z, e) - row0;
    const i64 first = i64(segment_first(z, e)) + row0;
    const bf16* w = reinterpret_cast<const bf16*>(g.w) + e * g.step + (DGRAD ? i64(column0) : column0 * g.ldw);
    Tile t;
    t.sum({reinterpret_cast<const bf16*>(g.x) + first * g.ldx, g.ldx, rows}, {w, g.ldw, n - column0}, i32(g.k));

    // Through shared memory, so that whole rows of the tile are stored, 16 bytes to a thread. Four words more to a row let
    // eight rows of four neighbours use different banks.
    constexpr int PITCH = Tile::BN / 2 + 4, CHUNKS = Tile::BN / 8;
    static_assert(Tile::BM * PITCH * 4 <= Tile::BYTES, "shared memory");
    u32* staged = reinterpret_cast<u32*>(grouped_shared);
    const int lane = threadIdx.x & 31;
    const bf16* bias = reinterpret_cast<const bf16*>(g.bias);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const i32 inside = Tile::column0() + j * 8 + (lane & 3) * 2, column = column0 + inside;
        // Two columns are there or none: n is even.
        const bool added = bias && column < n;
        const float b0 = added ? to_f32(bias[e * g.n + column]) : 0.0f, b1 = added ? to_f32(bias[e * g.n + column + 1]) : 0.0f;
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                staged[(Tile::row0() + m * 16 + h * 8 + (lane >> 2)) * PITCH + inside / 2] =
                    pack_bf16(t.c[m][j][h * 2] + b0, t.c[m][j][h * 2 + 1] + b1);
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < Tile::BM * CHUNKS; i += Tile::THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        // Eight columns are there or none.
        if (row < rows && column0 + chunk * 8 < n)
            *reinterpret_cast<uint4*>(y + (first + row) * g.ldy + column0 + chunk * 8) =
                *reinterpret_cast<const uint4*>(staged + row * PITCH + chunk * 4);
    }
}

#define GROUPED_MMA(NAME, WM, WN, STAGES, DGRAD)                                                            \
    extern "C" __global__ void __launch_bounds__(WM * WN * 32) NAME(const __grid_constant__ GroupedArgs g) { \
        grouped_mma<WM, WN, STAGES, DGRAD>(g);                                                               \
    }
GROUPED_MMA(grouped_mma_fprop_128_bf16, 2, 2, 3, false)
GROUPED_MMA(grouped_mma_fprop_256_bf16, 2, 4, 4, false)
GROUPED_MMA(grouped_mma_dgrad_128_bf16, 2, 2, 3, true)
GROUPED_MMA(grouped_mma_dgrad_256_bf16, 2, 4, 4, true)
