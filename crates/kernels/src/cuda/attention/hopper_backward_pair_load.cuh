// Producer of the Hopper backward kernel for pairs of blocks: shared-memory layout, tile scheduling, multicast loads.
#pragma once
#include "attention/hopper_common.cuh"
#include "hopper_tiles.cuh"

// A cluster of two blocks has 128 keys, each block 64 of them; queries are streamed 64 at a time through STAGES. Of dq
// each block computes 96 of 192 channels, over all 128 keys: so it also loads the other block's keys in these channels,
// and gets the other block's ds, behind its own.
//
// Columns of 64 channels of k lie in the order 0, 64, 128 in the first block and 128, 64, 0 in the second: in both, its
// channels of dq are then the first column and half of the next, [0, 96), and [128, 192) with [96, 128).
template <int STAGES_> struct HopperBackwardPairLoad {
    static constexpr bool PAIR = true;
    static constexpr int STAGES = STAGES_, COLUMNS = 3, V_COLUMNS = 2;
    static constexpr u32 COLUMN = 64 * 128;  // bytes of 64 channels of 64 rows
    static constexpr u32 Q_BYTES = 3 * COLUMN, O_BYTES = 2 * COLUMN, DS_BYTES = 2 * COLUMN, ROW_BYTES = 64 * 4;
    static constexpr u32 TILE_AT = 224, ROWS_AT = 256, K_AT = (ROWS_AT + 3 * STAGES * ROW_BYTES + 1023) / 1024 * 1024;
    static constexpr u32 OTHER_K_AT = K_AT + 3 * COLUMN, V_AT = OTHER_K_AT + 2 * COLUMN, Q_AT = V_AT + 2 * COLUMN;
    static constexpr u32 O_AT = Q_AT + STAGES * Q_BYTES, DS_AT = O_AT + STAGES * O_BYTES;
    static constexpr u32 PASSED_AT = DS_AT + 2 * DS_BYTES, BYTES = PASSED_AT + 2 * 8192;
    static_assert(BYTES <= 227 * 1024, "shared memory");

    struct Bars {
        u32 base;
        __device__ __forceinline__ u32 kv_full() const { return base; }
        __device__ __forceinline__ u32 kv_free() const { return base + 8; }
        __device__ __forceinline__ u32 ds_full(u32 s) const { return base + 16 + s * 8; }
        __device__ __forceinline__ u32 ds_free(u32 s) const { return base + 32 + s * 8; }
        __device__ __forceinline__ u32 tile_full(u32) const { return base + 48; }
        __device__ __forceinline__ u32 tile_free(u32) const { return base + 56; }
        __device__ __forceinline__ u32 passed_full(u32 s) const { return base + 64 + s * 8; }
        __device__ __forceinline__ u32 passed_free(u32 s) const { return base + 80 + s * 8; }
        __device__ __forceinline__ u32 q_full(u32 s) const { return base + 96 + s * 8; }
        __device__ __forceinline__ u32 q_free(u32 s) const { return base + 96 + (STAGES + s) * 8; }
        __device__ __forceinline__ u32 o_full(u32 s) const { return base + 96 + (2 * STAGES + s) * 8; }
        __device__ __forceinline__ u32 o_free(u32 s) const { return base + 96 + (3 * STAGES + s) * 8; }
    };
    static_assert(96 + 4 * STAGES * 8 <= TILE_AT, "mbarriers");
    // For 64 rows: lse_log2, deltas, steps.
    static __device__ __forceinline__ const float* rows_of(u32 stage, int part) {
        return reinterpret_cast<const float*>(attention_shared + ROWS_AT + stage * 3 * ROW_BYTES) + part * 64;
    }
    // Bytes from the first column of this block's channels of dq to the half of the next.
    static __device__ __forceinline__ u32 dq_column() { return COLUMN + cluster_rank() * 64; }

    // Coordinates of this block's half of a tile; both halves visit the same queries.
    static __device__ __forceinline__ HopperTile place(const HopperArgs& m, i32 index) {
        const AttentionArgs& a = m.a;
        HopperTile p = hopper_tile(m, index, a.heads / a.group, 128, false);
        const i32 last = min(p.first + 128, p.k_len) - 1;
        p.from = max(p.first - p.off - a.right, 0) / 64;
        p.to = (min(last - p.off + a.left, p.q_len - 1) + 64) / 64;
        p.first += i32(cluster_rank()) * 64;
        return p;
    }
    // As in hopper_backward_load.cuh; 64 is about the number of pairs.
    static __device__ __forceinline__ bool downwards(i32 index) { return (index / 64) % 2 == 0; }

    // Initializes the mbarriers with their arrival counts. Warps of both blocks release query tiles and ds.
    static __device__ __forceinline__ void init(Bars bars) {
        mbarrier_init(bars.kv_full(), 1);
        mbarrier_init(bars.kv_free(), 12);
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(bars.q_full(s), 1);
            mbarrier_init(bars.o_full(s), 1);
            mbarrier_init(bars.q_free(s), 16);
            mbarrier_init(bars.o_free(s), 16);
        }
        for (int s = 0; s < 2; s++) {
            mbarrier_init(bars.ds_full(s), 1);
            mbarrier_init(bars.ds_free(s), 8);
            mbarrier_init(bars.passed_full(s), 4);
            mbarrier_init(bars.passed_free(s), 4);
        }
        mbarrier_init(bars.tile_full(0), 1);
        mbarrier_init(bars.tile_free(0), 26);
        mbarrier_init_fence();
    }

    // What the producer warp needs of a tile; it has too few registers to compute it. The index is -1 after the last.
    struct Load {
        i32 index, batch, head, key, query, row, from, to;
    };
    using Slots = Ring<1>;
    static __device__ __forceinline__ volatile Load* slot_at(u32) {
        return reinterpret_cast<volatile Load*>(attention_shared + TILE_AT);
    }

    // A second warp beside the first block's producer claims tiles for both blocks, as in hopper_backward_load.cuh.
    static __device__ __forceinline__ void choose(const HopperArgs& m, u32 base, Bars bars) {
        const u32 lane = threadIdx.x & 31;
        const i32 n = schedule_of(m).total;
        u32 phase = 1;
        i32 index = 0;
        do {
            mbarrier_wait_cluster(bars.tile_free(0), phase);
            phase ^= 1;
            if (lane == 0) index = atomicAdd(reinterpret_cast<i32*>(m.next_tile), 1);
            index = __shfl_sync(~0u, index, 0);
            // One lane for each block.
            if (lane < 2) {
                auto put = [&](int at, i32 x) { st_shared_cluster(base + TILE_AT + at * 4, lane, u32(x)); };
                put(0, index < n ? index : -1);
                if (index < n) {
                    const HopperTile p = place(m, index);
                    put(1, p.batch), put(2, p.head), put(3, p.k_start + p.first), put(4, p.q_start);
                    put(5, p.row), put(6, p.from), put(7, p.to);
                }
                mbarrier_arrive_cluster(bars.tile_full(0), lane);
            }
            __syncwarp();
        } while (index < n);
    }

    // One warp runs the loop; one lane issues the copies. Of queries and dout each block loads 32 rows for both.
    static __device__ __forceinline__ void produce(const HopperArgs& m, u32 base, Bars bars) {
        const AttentionArgs& a = m.a;
        const bool one = (threadIdx.x & 31) == 0;
        auto rank = [] { return i32(cluster_rank()); };
        Ring<STAGES> ring;
        u32 tile_phase = 0, kv_phase = 0;
        while (true) {
            mbarrier_wait_cluster(bars.tile_full(0), tile_phase);
            tile_phase ^= 1;
            const volatile Load* p = slot_at(0);
            if (p->index < 0) break;
            i32 left = p->to - p->from;
            if (left > 0) {
                mbarrier_wait(bars.kv_free(), kv_phase ^ 1);
                kv_phase ^= 1;
                if (one) {
                    mbarrier_arrive_expect_tx(bars.kv_full(), 7 * COLUMN);
                    const i32 key = p->key + rank() * 64, other = p->key + (rank() ^ 1) * 64;
#pragma unroll
                    for (int c = 0; c < 3; c++)
                        tma_load(base + K_AT + c * COLUMN, m.k, bars.kv_full(), rank() ? 128 - c * 64 : c * 64, key, p->head,
                                 p->batch);
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        tma_load(base + OTHER_K_AT + c * COLUMN, m.k, bars.kv_full(), rank() ? 128 - c * 64 : c * 64, other,
                                 p->head, p->batch);
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        tma_load(base + V_AT + c * COLUMN, m.v, bars.kv_full(), c * 64, key, p->head, p->batch);
                }
            }
            const i32 step = downwards(p->index) ? -64 : 64;
            i32 token = (step < 0 ? p->to - 1 : p->from) * 64;
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
                        for (int c = 0; c < 3; c++)
                            tma_load_multicast(base + Q_AT + s * Q_BYTES + c * COLUMN + rank() * 4096, m.q, bars.q_full(s), c * 64,
                                               p->query + token + rank() * 32, head + n, p->batch);
                        const i64 row = i64(p->batch * a.heads + head + n) * m.padded + (p->row + token);
                        bulk_copy(base + ROWS_AT + s * 3 * ROW_BYTES, reinterpret_cast<const float*>(a.lse_log2) + row * 3,
                                  3 * ROW_BYTES, bars.q_full(s));
                    }
                    mbarrier_wait(bars.o_free(s), ring.phase ^ 1);
                    if (one) {
                        mbarrier_arrive_expect_tx(bars.o_full(s), O_BYTES);
#pragma unroll
                        for (int c = 0; c < 2; c++)
                            tma_load_multicast(base + O_AT + s * O_BYTES + c * COLUMN + rank() * 4096, m.dout, bars.o_full(s), c * 64,
                                               p->query + token + rank() * 32, head + n, p->batch);
                    }
                    ring.next();
                }
            }
            __syncwarp();
            if (one) mbarrier_arrive_cluster(bars.tile_free(0), 0);
        }
    }
};
