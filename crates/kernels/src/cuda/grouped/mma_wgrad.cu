// Grouped wgrad with mma.sync: dw[e] (+)= dyᵀ·x over every segment's rows, in f32.
#include "grouped/mma.cuh"
#include "grouped/segments.cuh"

// Rows of a segment that are summed in the tensor cores' accumulators, which round towards zero: the sums of slices are
// added in f32, in order.
constexpr i32 SLICE = 1536;

// Blocks of tiles of each segment's dw, columns fastest.
template <int WM, int WN, int STAGES> __device__ __forceinline__ void grouped_mma_wgrad(const GroupedWgradArgs& g) {
    using Tile = GroupedMma<WM, WN, STAGES, true, true>;
    const i32 n = i32(g.n), k = i32(g.k), across = (k + Tile::BN - 1) / Tile::BN;
    const i32 tiles = (n + Tile::BM - 1) / Tile::BM * across, e = i32(blockIdx.x) / tiles, tile = i32(blockIdx.x) - e * tiles;
    const i32 row0 = tile / across * Tile::BM, column0 = tile % across * Tile::BN;
    const i64 first = segment_first(g.segments, e);
    const bf16* dy = reinterpret_cast<const bf16*>(g.dy) + first * g.ldy + row0;
    const bf16* x = reinterpret_cast<const bf16*>(g.x) + first * g.ldx + column0;
    float* dw = reinterpret_cast<float*>(g.dw) + e * g.step;
    const i32 length = segment_length(g.segments, e);
    const int lane = threadIdx.x & 31;
    bool added = g.accumulate;
    Tile t;
    // Also a segment without rows has a sum.
#pragma unroll 1
    for (i32 from = 0; from == 0 || from < length; from += SLICE) {
        t.sum({dy + from * g.ldy, g.ldy, n - row0}, {x + from * g.ldx, g.ldx, k - column0}, min(length - from, SLICE));
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i32 row = row0 + Tile::row0() + m * 16 + h * 8 + (lane >> 2);
                if (row >= n) continue;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const i32 column = column0 + Tile::column0() + j * 8 + (lane & 3) * 2;
                    // Two columns are there or none: k is even.
                    if (column >= k) continue;
                    float2* to = reinterpret_cast<float2*>(dw + row * g.ldw + column);
                    float2 v = make_float2(t.c[m][j][h * 2], t.c[m][j][h * 2 + 1]);
                    if (added) {
                        const float2 old = *to;
                        v.x += old.x, v.y += old.y;
                    }
                    *to = v;
                }
            }
        added = true;
    }
}

#define GROUPED_MMA_WGRAD(NAME, WM, WN, STAGES)                                                                    \
    extern "C" __global__ void __launch_bounds__(WM * WN * 32) NAME(const __grid_constant__ GroupedWgradArgs g) { \
        grouped_mma_wgrad<WM, WN, STAGES>(g);                                                                      \
    }
GROUPED_MMA_WGRAD(grouped_mma_wgrad_128_bf16, 2, 2, 3)
GROUPED_MMA_WGRAD(grouped_mma_wgrad_256_bf16, 2, 4, 4)
