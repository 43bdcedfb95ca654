// Segments of rows, one for each expert. Offsets and counts come from device memory and are clamped, so that invalid
// ones cannot address rows outside the tensor.
#pragma once
#include "args/grouped.cuh"

__device__ __forceinline__ i32 segment_first(const Segments& z, i32 e) {
    return min(max(reinterpret_cast<const i32*>(z.offsets)[e], 0), z.rows);
}
__device__ __forceinline__ i32 segment_length(const Segments& z, i32 e) {
    return min(max(reinterpret_cast<const i32*>(z.counts)[e], 0), z.rows - segment_first(z, e));
}

// Zeroes `width` elements of each row outside all segments: warp `self` of `warps`. `Of` is `Segments`, or has the
// same functions. In 16-byte stores where rows are aligned and `width` is a multiple of them (`vectorized`).
template <class T, class Of>
__device__ __forceinline__ void zero_gaps(const Of& z, i32 count, i32 rows, T* y, i64 step, i32 width, bool vectorized, i32 self,
                                           i32 warps) {
    const i32 lane = threadIdx.x & 31;
    // The gap before segment e, or behind the last.
    i32 from = 0;
    for (i32 e = 0; e <= count; e++) {
        const i32 end = e < count ? segment_first(z, e) : rows;
        for (i32 r = from + self; r < end; r += warps) {
            T* row = y + r * step;
            if (vectorized) {
                for (i32 c = lane * VecWidth<T>::count; c < width; c += 32 * VecWidth<T>::count)
                    *reinterpret_cast<uint4*>(row + c) = make_uint4(0, 0, 0, 0);
            } else {
                for (i32 c = lane; c < width; c += 32) row[c] = from_f32<T>(0.0f);
            }
        }
        if (e < count) from = end + segment_length(z, e);
    }
}

// A tile of SIDE rows: its segment, and its number in the segment.
struct Place {
    i32 segment, tile;
};
// Tile `index` of all segments' tiles, of which each has at least LEAST; segment E where there are fewer. Called by a whole warp. A lane has four
// neighbouring segments, whose counts are all in flight at once: this is where a block starts.
template <int SIDE, int LEAST = 0> __device__ __forceinline__ Place find(const Segments& z, i32 index) {
    const i32 lane = threadIdx.x & 31;
    for (i32 e0 = 0; e0 < z.count; e0 += 128) {
        i32 tiles[4], own = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const i32 e = e0 + lane * 4 + i;
            tiles[i] = e < z.count ? max((segment_length(z, e) + SIDE - 1) / SIDE, LEAST) : 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) own += tiles[i];
        i32 upto = own;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const i32 got = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += got;
        }
        const u32 found = __ballot_sync(~0u, index < upto);
        if (found) {
            i32 rest = index - (upto - own), at = e0 + lane * 4;
#pragma unroll
            for (int i = 0; i < 3; i++)
                if (at == e0 + lane * 4 + i && rest >= tiles[i]) rest -= tiles[i], at++;
            const int from = __ffs(found) - 1;
            return {__shfl_sync(~0u, at, from), __shfl_sync(~0u, rest, from)};
        }
        index -= __shfl_sync(~0u, upto, 31);
    }
    return {z.count, 0};
}
