// Grouped GEMM with FMA instructions: any sizes, strides and alignments.
#include "gemm_tile.cuh"
#include "grouped/segments.cuh"

// Blocks of tiles, columns fastest, then blocks that zero rows outside all segments.
template <class T> __device__ __forceinline__ void grouped(const GroupedArgs& g) {
    const Segments& z = g.segments;
    const i64 across = (g.n + SIDE - 1) / SIDE, tiles = (i64(z.rows) / SIDE + z.count) * across;
    T* y = reinterpret_cast<T*>(g.y);
    if (blockIdx.x >= tiles) {
        const i32 warps = i32(gridDim.x - tiles) * (THREADS / 32);
        const i32 self = i32(blockIdx.x - tiles) * (THREADS / 32) + (threadIdx.x >> 5);
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
    const T* bias = reinterpret_cast<const T*>(g.bias);
    gemm_tile<T, T>({reinterpret_cast<const T*>(g.x) + first * g.ldx, g.ldx, true},
                       {reinterpret_cast<const T*>(g.w) + e * g.step, g.ldw, !g.as_stored}, i64(place.tile) * SIDE,
                       blockIdx.x % across * SIDE, segment_length(z, e), g.n, g.k, y + first * g.ldy, g.ldy,
                       bias ? bias + e * g.n : nullptr, false);
}
extern "C" __global__ void __launch_bounds__(THREADS) grouped_f32(const GroupedArgs g) { grouped<float>(g); }
extern "C" __global__ void __launch_bounds__(THREADS) grouped_bf16(const GroupedArgs g) { grouped<bf16>(g); }


// Blocks of tiles of each segment's dw, columns fastest.
template <class T> __device__ __forceinline__ void grouped_wgrad(const GroupedWgradArgs& g) {
    const i64 across = (g.k + SIDE - 1) / SIDE, tiles = (g.n + SIDE - 1) / SIDE * across;
    const i32 e = i32(blockIdx.x / tiles);
    const i64 tile = blockIdx.x % tiles, first = segment_first(g.segments, e);
    gemm_tile<T, float>({reinterpret_cast<const T*>(g.dy) + first * g.ldy, g.ldy, false},
                           {reinterpret_cast<const T*>(g.x) + first * g.ldx, g.ldx, false}, tile / across * SIDE,
                           tile % across * SIDE, g.n, g.k, segment_length(g.segments, e),
                           reinterpret_cast<float*>(g.dw) + e * g.step, g.ldw, nullptr, g.accumulate);
}
extern "C" __global__ void __launch_bounds__(THREADS) grouped_wgrad_f32(const GroupedWgradArgs g) { grouped_wgrad<float>(g); }
extern "C" __global__ void __launch_bounds__(THREADS) grouped_wgrad_bf16(const GroupedWgradArgs g) { grouped_wgrad<bf16>(g); }
