// Tile scheduling of the persistent Hopper attention kernels.
#pragma once
#include "args/attention_hopper.cuh"
#include "attention/common.cuh"
#include "hopper.cuh"

// How the tiles of all heads are scheduled; that of packed sequences lies in memory: see past_last_tile.
__device__ __forceinline__ TileSchedule schedule_of(const HopperArgs& m) {
    TileSchedule s = {m.a.tiles, m.total, m.section, m.section_tiles};
    if (m.a.items) {
        const int4 x = *reinterpret_cast<const int4*>(m.a.items);
        s.tiles = x.x, s.total = x.y, s.section = x.z, s.section_tiles = x.w;
    }
    return s;
}

// Tile of this block in wave `round`, or -1 where a section does not fill its last wave. Tiles are sorted from long to
// short, and every other wave runs backwards, so that blocks get equal shares of the work.
__device__ __forceinline__ i32 tile_of(const HopperArgs& m, i32 round) {
    const i32 blocks = gridDim.x, self = blockIdx.x;
    const i32 x = round * blocks + ((round & 1) ? blocks - 1 - self : self);
    const TileSchedule s = schedule_of(m);
    const i32 part = x / s.section_tiles, here = min(s.section, m.pairs - part * s.section);
    return x - part * s.section_tiles < here * s.tiles ? x : -1;
}
// Waves, rounded up: the last may have a tile for a block in one direction only.
__device__ __forceinline__ i32 rounds(const HopperArgs& m) {
    return (schedule_of(m).total + i32(gridDim.x) - 1) / i32(gridDim.x);
}

// A tile, and the row of dq_accum and lse_log2 where its sequence starts.
struct HopperTile : Place {
    i32 row;
};
// Coordinates of tile `index`: of every (batch, head) pair there are as many, those of the table for packed sequences.
__device__ __forceinline__ HopperTile hopper_tile(const HopperArgs& m, i32 index, i32 heads, i32 size, bool reversed) {
    const AttentionArgs& a = m.a;
    HopperTile p;
    p.row = 0;
    const TileSchedule s = schedule_of(m);
    const i32 part = index / s.section_tiles, rest = index - part * s.section_tiles;
    const i32 here = min(s.section, m.pairs - part * s.section);
    const i32 tile = rest / here, pair = part * s.section + (rest - tile * here);
    p.batch = pair / heads;
    p.head = pair - p.batch * heads;
    if (a.items) {
        const TileItem it = item_at(a, tile);
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

// Adds dq of two neighbouring channels to dq_accum in fixed point, by one 64-bit atomic: half as many are issued. The words
// hi·2³² + lo, lo signed, add up to a word with both sums in it, because neither sum overflows.
__device__ __forceinline__ void atomic_add_fixed_point(i32* to, float x, float y, float step) {
    const i32 lo = __float2int_rn(x * step), hi = __float2int_rn(y * step) + (lo >> 31);
    asm volatile("{\n.reg .b64 pair;\nmov.b64 pair, {%1, %2};\nred.relaxed.gpu.global.add.u64 [%0], pair;\n}\n" ::"l"(to), "r"(lo),
                 "r"(hi)
                 : "memory");
}
// The same of a whole accumulator; `to` is this thread's first pair. From the last pair on, as that takes fewer registers.
template <int N> __device__ __forceinline__ void atomic_add_fixed_point(const float (&dq)[N], float step0, float step1, i32* to) {
#pragma unroll
    for (int i = N - 2; i >= 0; i -= 2) atomic_add_fixed_point(to + i * 128, dq[i], dq[i + 1], i & 2 ? step1 : step0);
}
// The two sums of a pair.
__device__ __forceinline__ void unpack_fixed_point(int2 pair, float& x, float& y) {
    x = float(pair.x);
    y = float(pair.y - (pair.x >> 31));
}
