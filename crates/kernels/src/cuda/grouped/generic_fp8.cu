// Grouped GEMM of FP8 operands with FMA instructions: any sizes and alignments.
#include "args/grouped_fp8.cuh"
#include "grouped/segments.cuh"
#include "quant/matrix.cuh"

// Blocks of tiles, columns fastest, then blocks that zero rows outside all segments.
extern "C" __global__ void __launch_bounds__(256) grouped_fp8_bf16(const GroupedFp8Args g) {
    const Segments& z = g.segments;
    const i64 across = (g.n + SIDE - 1) / SIDE, tiles = (i64(z.rows) / SIDE + z.count) * across;
    bf16* y = reinterpret_cast<bf16*>(g.y);
    if (blockIdx.x >= tiles) {
        const i32 warps = i32(gridDim.x - tiles) * 8, self = i32(blockIdx.x - tiles) * 8 + (threadIdx.x >> 5);
        zero_gaps(z, z.count, z.rows, y, g.ldy, i32(g.n), g.vectorized, self, warps);
        return;
    }
    __shared__ Place place;
    if (threadIdx.x < 32) {
        const Place p = find<SIDE>(z, i32(blockIdx.x / across));
        if (threadIdx.x == 0) place = p;
    }
    __syncthreads();
    const i32 e = place.segment;
    if (e == z.count) return;
    const i64 first = segment_first(z, e);
    Part x = {g.x, first, first + segment_length(z, e)}, w = {g.w, e * g.n, (e + 1) * g.n};
    // Per-tensor scaling: one scale for each expert's matrix.
    if (w.all.scaling == 0) w.all.scale += e * 4;
    gemm_tile(x, w, 0, g.x.c, i64(place.tile) * SIDE, blockIdx.x % across * SIDE, y + first * g.ldy, g.ldy, nullptr, false);
}


// Blocks of tiles of each segment's dw, columns fastest.
extern "C" __global__ void __launch_bounds__(256) grouped_wgrad_fp8_f32(const GroupedWgradFp8Args g) {
    const i64 across = (g.x.r + SIDE - 1) / SIDE, tiles = (g.dy.r + SIDE - 1) / SIDE * across;
    const i32 e = i32(blockIdx.x / tiles);
    const i64 tile = blockIdx.x % tiles, first = segment_first(g.segments, e);
    gemm_tile({g.dy, 0, g.dy.r}, {g.x, 0, g.x.r}, first, first + segment_length(g.segments, e), tile / across * SIDE,
                 tile % across * SIDE, reinterpret_cast<float*>(g.dw) + e * g.matrix, g.row, nullptr, g.accumulate);
}
