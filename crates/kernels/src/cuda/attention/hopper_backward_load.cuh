// Producer of the Hopper backward kernels: shared-memory layout, tile scheduling, and the order in which queries are
// streamed.
#pragma once
#include "attention/hopper_common.cuh"
#include "hopper_tiles.cuh"

// Heads of up to DQ channels of q and k and DV of v, BM queries and BN keys of a tile, STAGES query tiles. PER_HEAD: a
// block has all keys of a head, and k has two stages, because dq of a tile's last queries is computed in the next tile.
// Besides ds there are two buffers of PASSED bytes that warpgroups hand to each other.
template <int DQ, int DV, int BM, int BN_, int STAGES_, bool PER_HEAD, int PASSED> struct HopperBackwardLoad {
    static constexpr bool PAIR = false;
    static constexpr int BN = BN_, STAGES = STAGES_, K_STAGES = PER_HEAD ? 2 : 1, COLUMNS = (DQ + 63) / 64, V_COLUMNS = (DV + 63) / 64;
    static constexpr u32 K_BYTES = BN * COLUMNS * 128, V_BYTES = BN * V_COLUMNS * 128;
    static constexpr u32 Q_BYTES = BM * COLUMNS * 128, O_BYTES = BM * V_COLUMNS * 128;
    static constexpr u32 DS_BYTES = BN * BM * 2, ROW_BYTES = BM * 4;
    static constexpr u32 TILES_AT = 240, ROWS_AT = 304, K_AT = (ROWS_AT + 3 * STAGES * ROW_BYTES + 1023) / 1024 * 1024;
    static constexpr u32 V_AT = K_AT + K_STAGES * K_BYTES, Q_AT = V_AT + V_BYTES, O_AT = Q_AT + STAGES * Q_BYTES;
    static constexpr u32 DS_AT = O_AT + STAGES * O_BYTES, PASSED_AT = DS_AT + 2 * DS_BYTES;
    static constexpr u32 BYTES = PASSED_AT + 2 * PASSED;
    static_assert(BYTES <= 227 * 1024, "shared memory");

    static __device__ __forceinline__ void bounds(const AttentionArgs& a, HopperTile& p) {
        const i32 last = min(p.first + BN, p.k_len) - 1;
        p.from = max(p.first - p.off - a.right, 0) / BM;
        p.to = (min(last - p.off + a.left, p.q_len - 1) + BM) / BM;
    }

    struct Bars {
        u32 base;
        // With PER_HEAD of v alone.
        __device__ __forceinline__ u32 kv_full() const { return base; }
        __device__ __forceinline__ u32 kv_free() const { return base + 8; }
        __device__ __forceinline__ u32 k_full(u32 s) const { return base + 208 + s * 8; }
        __device__ __forceinline__ u32 k_free(u32 s) const { return base + 224 + s * 8; }
        __device__ __forceinline__ u32 ds_full(u32 s) const { return base + 16 + s * 8; }
        __device__ __forceinline__ u32 ds_free(u32 s) const { return base + 32 + s * 8; }
        __device__ __forceinline__ u32 tile_full(u32 s) const { return base + 48 + s * 8; }
        __device__ __forceinline__ u32 tile_free(u32 s) const { return base + 64 + s * 8; }
        __device__ __forceinline__ u32 passed_full(u32 s) const { return base + 176 + s * 8; }
        __device__ __forceinline__ u32 passed_free(u32 s) const { return base + 192 + s * 8; }
        __device__ __forceinline__ u32 q_full(u32 s) const { return base + 80 + s * 8; }
        __device__ __forceinline__ u32 q_free(u32 s) const { return base + 80 + (STAGES + s) * 8; }
        __device__ __forceinline__ u32 o_full(u32 s) const { return base + 80 + (2 * STAGES + s) * 8; }
        __device__ __forceinline__ u32 o_free(u32 s) const { return base + 80 + (3 * STAGES + s) * 8; }
    };
    // For 64 rows at a time: lse_log2, deltas, steps.
    static __device__ __forceinline__ const float* rows_of(u32 stage, int part) {
        return reinterpret_cast<const float*>(attention_shared + ROWS_AT + stage * 3 * ROW_BYTES) + part * 64;
    }

    // Coordinates of a tile. With PER_HEAD a block takes all tiles of a key head in turn, and `index` counts them;
    // otherwise blocks take the next tile from a counter, and the assignment does not affect the results.
    static __device__ __forceinline__ HopperTile place(const HopperArgs& m, i32 index) {
        const i32 heads = m.a.heads / m.a.group;
        HopperTile p;
        if constexpr (PER_HEAD) {
            const i32 turn = index / m.a.tiles, pair = turn * i32(gridDim.x) + i32(blockIdx.x);
            p.batch = pair / heads;
            p.head = p.kv_head = pair - p.batch * heads;
            p.q_start = p.k_start = p.row = 0;
            p.q_len = m.a.q_len;
            p.k_len = m.a.k_len;
            p.first = (index - turn * m.a.tiles) * BN;
            p.off = m.a.bottom ? p.k_len - p.q_len : 0;
        } else {
            p = hopper_tile(m, index, heads, BN, false);
        }
        bounds(m.a, p);
        return p;
    }
    // Blocks that start together visit queries from last to first, those that replace them from first to last: under a
    // causal mask, blocks of the same head then read the same queries at the same time, and hit the L2 cache. 128 is
    // about the number of blocks; it is fixed, so that no result depends on the GPU.
    static __device__ __forceinline__ bool downwards(i32 index) { return !PER_HEAD && (index / 128) % 2 == 0; }
    static __device__ __forceinline__ i32 total(const HopperArgs& m) {
        const i32 blocks = gridDim.x, self = blockIdx.x;
        return PER_HEAD ? (m.pairs - self + blocks - 1) / blocks * m.a.tiles : schedule_of(m).total;
    }

    // Initializes the mbarriers with their arrival counts: warps that release keys, query tiles and ds.
    static __device__ __forceinline__ void init(Bars bars) {
        mbarrier_init(bars.kv_full(), 1);
        mbarrier_init(bars.kv_free(), 8);
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(bars.q_full(s), 1);
            mbarrier_init(bars.o_full(s), 1);
            mbarrier_init(bars.q_free(s), 8);
            mbarrier_init(bars.o_free(s), 8);
        }
        for (int s = 0; s < 2; s++) {
            mbarrier_init(bars.ds_full(s), PASSED ? 4 : 8);
            mbarrier_init(bars.ds_free(s), 8);
            mbarrier_init(bars.tile_full(s), 1);
            mbarrier_init(bars.tile_free(s), PER_HEAD ? 1 : 9);
            mbarrier_init(bars.passed_full(s), 4);
            mbarrier_init(bars.passed_free(s), 4);
            mbarrier_init(bars.k_full(s), 1);
            mbarrier_init(bars.k_free(s), 8);
        }
        mbarrier_init_fence();
    }

    // What the producer warp needs of a tile; it has too few registers to compute it. The index is -1 after the last.
    struct Load {
        i32 index, batch, head, key, query, row, from, to;
    };
    static_assert(sizeof(Load) == 32, "two in 64 bytes");
    static __device__ __forceinline__ Load load_of(const HopperArgs& m, i32 index) {
        const HopperTile p = place(m, index);
        return {index, p.batch, p.head, p.k_start + p.first, p.q_start, p.row, p.from, p.to};
    }
    // A tile is claimed only when the producer has finished the one before: claimed earlier, long tiles could queue up
    // behind long ones. With PER_HEAD the assignment is static, and one tile ahead is safe.
    using Slots = Ring<PER_HEAD ? 2 : 1>;
    static __device__ __forceinline__ volatile Load* slot_at(u32 slot) {
        return reinterpret_cast<volatile Load*>(attention_shared + TILES_AT) + slot;
    }

    // A second warp beside the producer claims tiles: from the counter, or with PER_HEAD in turn.
    static __device__ __forceinline__ void choose(const HopperArgs& m, Bars bars) {
        const bool one = (threadIdx.x & 31) == 0;
        const i32 n = total(m);
        Slots slot;
        i32 index = -1;
        do {
            mbarrier_wait(bars.tile_free(slot.stage), slot.phase ^ 1);
            index++;
            if (!PER_HEAD && one) index = atomicAdd(reinterpret_cast<i32*>(m.next_tile), 1);
            index = __shfl_sync(~0u, index, 0);
            if (one) {
                volatile Load* to = slot_at(slot.stage);
                to->index = index < n ? index : -1;
                if (index < n) {
                    const Load x = load_of(m, index);
                    to->batch = x.batch, to->head = x.head, to->key = x.key, to->query = x.query;
                    to->row = x.row, to->from = x.from, to->to = x.to;
                }
                mbarrier_arrive(bars.tile_full(slot.stage));
            }
            slot.next();
        } while (index < n);
    }

    static __device__ __forceinline__ void copy(u32 to, const TensorMap& map, u32 bar, i32 c, i32 t, i32 h, i32 b) {
        if constexpr (PER_HEAD) tma_load_evict_first(to, map, bar, c, t, h, b);
        else tma_load(to, map, bar, c, t, h, b);
    }

    // One warp runs the loop; one lane issues the copies.
    static __device__ __forceinline__ void produce(const HopperArgs& m, u32 base, Bars bars) {
        const AttentionArgs& a = m.a;
        const bool one = (threadIdx.x & 31) == 0;
        Ring<STAGES> ring;
        Slots slot;
        u32 tiles = 0;
        while (true) {
            mbarrier_wait(bars.tile_full(slot.stage), slot.phase);
            const volatile Load* p = slot_at(slot.stage);
            if (p->index < 0) break;
            i32 left = p->to - p->from;
            if (left > 0) {
                const u32 stage = PER_HEAD ? tiles & 1 : 0, k_full = PER_HEAD ? bars.k_full(stage) : bars.kv_full();
                if (PER_HEAD) {
                    mbarrier_wait(bars.k_free(stage), ((tiles >> 1) & 1) ^ 1);
                    if (one) mbarrier_arrive_expect_tx(k_full, K_BYTES);
                } else {
                    mbarrier_wait(bars.kv_free(), (tiles & 1) ^ 1);
                    if (one) mbarrier_arrive_expect_tx(k_full, K_BYTES + V_BYTES);
                }
                if (one) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++)
                        copy(base + K_AT + stage * K_BYTES + c * BN * 128, m.k, k_full, c * 64, p->key, p->head, p->batch);
                }
                if (PER_HEAD) {
                    mbarrier_wait(bars.kv_free(), (tiles & 1) ^ 1);
                    if (one) mbarrier_arrive_expect_tx(bars.kv_full(), V_BYTES);
                }
                if (one) {
#pragma unroll
                    for (int c = 0; c < V_COLUMNS; c++)
                        copy(base + V_AT + c * BN * 128, m.v, bars.kv_full(), c * 64, p->key, p->head, p->batch);
                }
                tiles++;
            }
            const i32 step = downwards(p->index) ? -BM : BM;
            i32 token = (step < 0 ? p->to - 1 : p->from) * BM;
#pragma unroll 1
            for (; left > 0; left--, token += step) {
                const i32 head = p->head * a.group;
#pragma unroll 1
                for (i32 n = 0; n < a.group; n++) {
                    const u32 s = ring.stage;
                    mbarrier_wait(bars.q_free(s), ring.phase ^ 1);
                    if (one) {
                        mbarrier_arrive_expect_tx(bars.q_full(s), Q_BYTES + 3 * ROW_BYTES);
#pragma unroll
                        for (int c = 0; c < COLUMNS; c++)
                            copy(base + Q_AT + s * Q_BYTES + c * BM * 128, m.q, bars.q_full(s), c * 64,
                                        p->query + token, head + n, p->batch);
                        const i64 row = i64(p->batch * a.heads + head + n) * m.padded + (p->row + token);
                        bulk_copy(base + ROWS_AT + s * 3 * ROW_BYTES, reinterpret_cast<const float*>(a.lse_log2) + row * 3,
                                  3 * ROW_BYTES, bars.q_full(s));
                    }
                    mbarrier_wait(bars.o_free(s), ring.phase ^ 1);
                    if (one) {
                        mbarrier_arrive_expect_tx(bars.o_full(s), O_BYTES);
#pragma unroll
                        for (int c = 0; c < V_COLUMNS; c++)
                            copy(base + O_AT + s * O_BYTES + c * BM * 128, m.dout, bars.o_full(s), c * 64,
                                        p->query + token, head + n, p->batch);
                    }
                    ring.next();
                }
            }
            __syncwarp();
            if (one) mbarrier_arrive(bars.tile_free(slot.stage));
            slot.next();
        }
    }
};
