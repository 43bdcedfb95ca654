// Tile scheduling of the persistent Hopper attention kernels.
#pragma once
#include "args/attention_hopper.cuh"
#include "attention/common.cuh"
#include "hopper.cuh"

// Tile of this block in wave `round`, or -1 where a section does not fill its last wave. Tiles are sorted from long to
// short, and every other wave runs backwards, so that blocks get equal shares of the work.
__device__ __forceinline__ i32 tile_of(const HopperArgs& m, i32 round) {
    const i32 blocks = gridDim.x, self = blockIdx.x;
    const i32 x = round * blocks + ((round & 1) ? blocks - 1 - self : self);
    const i32 part = x / m.section_tiles, here = min(m.section, m.pairs - part * m.section);
    return x - part * m.section_tiles < here * m.a.tiles ? x : -1;
}
// Waves, rounded up: the last may have a tile for a block in one direction only.
__device__ __forceinline__ i32 rounds(i32 total) { return (total + i32(gridDim.x) - 1) / i32(gridDim.x); }

// A tile, and the row of dq_accum and lse_log2 where its sequence starts.
struct HopperTile : Place {
    i32 row;
};
// Coordinates of tile `index`; `a.tiles` tiles of every (batch, head) pair, those of the table for packed sequences.
__device__ __forceinline__ HopperTile hopper_tile(const HopperArgs& m, i32 index, i32 heads, i32 size, bool reversed) {
    const AttentionArgs& a = m.a;
    HopperTile p;
    p.row = 0;
    const i32 part = index / m.section_tiles, rest = index - part * m.section_tiles;
    const i32 here = min(m.section, m.pairs - part * m.section);
    const i32 tile = rest / here, pair = part * m.section + (rest - tile * here);
    p.batch = pair / heads;
    p.head = pair - p.batch * heads;
    if (a.items) {
        const TileItem it = reinterpret_cast<const TileItem*>(a.items)[tile];
        p.q_start = it.q_start;
        p.q_len = it.q_len;
        p.k_start = it.k_start;
        p.k_len = it.k_len;
        p.first = it.first;
        p.row = it.row;
    } else {
        p.q_start = 0;
        p.q_len = a.q_len;
        p.k_start = 0;
        p.k_len = a.k_len;
        p.first = (reversed ? a.tiles - 1 - tile : tile) * size;
    }
    p.kv_head = heads == a.heads ? p.head / a.group : p.head;
    p.off = a.bottom ? p.k_len - p.q_len : 0;
    p.from = p.to = 0;
    return p;
}

// Adds dq from an accumulator to dq_accum in fixed point.
template <int N> __device__ __forceinline__ void atomic_add_fixed_point(const float (&dq)[N], float step0, float step1, i32* to) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to + i * 128),
                     "r"(__float2int_rn(dq[i] * (i & 2 ? step1 : step0)))
                     : "memory");
}
