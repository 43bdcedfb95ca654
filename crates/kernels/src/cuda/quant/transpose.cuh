// Transposes tiles of 128 × 128 bytes with 256 threads, 8 × 8 bytes each.
#pragma once
#include "prelude.cuh"

constexpr int THREADS = 256;
constexpr int TILE = 128;
// 8-byte units of a column of a tile.
constexpr int UNITS = TILE / 8;

// 4×4 byte transpose.
__device__ __forceinline__ void transpose4(u32& a, u32& b, u32& c, u32& d) {
    u32 ab = __byte_perm(a, b, 0x5140), ab2 = __byte_perm(a, b, 0x7362);
    u32 cd = __byte_perm(c, d, 0x5140), cd2 = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab, cd, 0x5410), b = __byte_perm(ab, cd, 0x7632);
    c = __byte_perm(ab2, cd2, 0x5410), d = __byte_perm(ab2, cd2, 0x7632);
}

// A thread's 8 × 8 bytes, row i in low[i] and high[i], are transposed in registers and stored to a tile in shared
// memory that holds columns. Unit ty of a column lies at ty ^ tx, so that the 16 lanes that store one unit of 16
// columns use different banks.
__device__ __forceinline__ void store_tile_transposed(uint2 (&tile)[TILE * UNITS], u32 (&low)[8], u32 (&high)[8], int tx, int ty) {
    transpose4(low[0], low[1], low[2], low[3]);
    transpose4(low[4], low[5], low[6], low[7]);
    transpose4(high[0], high[1], high[2], high[3]);
    transpose4(high[4], high[5], high[6], high[7]);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint2 eight = j < 4 ? uint2{low[j], low[j + 4]} : uint2{high[j - 4], high[j]};
        tile[(8 * tx + j) * UNITS + (ty ^ tx)] = eight;
    }
}

// Writes the columns of such a tile to rows of `to`, `pitch` bytes apart (a multiple of 16): element (0, 0) of the
// tile goes to row `row`, byte `at`, of `rows` rows.
__device__ __forceinline__ void write_transposed(const uint2 (&tile)[TILE * UNITS], u8* to, i64 row, i64 at, i64 rows, i64 pitch,
                                             bool vectorized) {
#pragma unroll
    for (int k = 0; k < TILE * UNITS / 2 / THREADS; k++) {
        const int task = k * THREADS + threadIdx.x, column = task / 8, pair = task % 8, swap = column / 8;
        uint4 q = reinterpret_cast<const uint4*>(tile)[column * (UNITS / 2) + (pair ^ (swap >> 1))];
        if (swap & 1) q = {q.z, q.w, q.x, q.y};
        const i64 byte = at + 16 * pair;
        if (row + column >= rows || byte >= pitch) continue;
        u8* out = to + (row + column) * pitch + byte;
        if (vectorized) {
            *reinterpret_cast<uint4*>(out) = q;
        } else {
#pragma unroll
            for (int j = 0; j < 16; j++)
                out[j] = u8((j < 4 ? q.x : j < 8 ? q.y : j < 12 ? q.z : q.w) >> 8 * (j & 3));
        }
    }
}
