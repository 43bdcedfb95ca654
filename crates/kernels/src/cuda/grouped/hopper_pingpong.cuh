// sm_90a only: grouped wgrad by pairs of blocks whose two consumer warpgroups take turns: each has every second tile of the
// block to itself, and while it stores the sums the other one multiplies. A tile of 1024 rows leaves 96 KiB after some ten
// microseconds of products, so that a store that nothing overlaps with costs a fifth of the time.
//
// A tile has 128 × 192 or 192 × 128 elements, 192 registers of every thread. A pair shares the operand of 192: each block
// multicasts 32 of a step's 64 rows. With 28 KiB per 128 × 192 × 64 × 2 FLOP, 600 TFLOP/s draw 5.5 TB/s from the L2 cache.
//
// The producer hands tiles to the consumers with the stage where each begins, so that a warpgroup need not follow the
// tiles of the other. Segments without rows have no tiles: spare warps of the producer's warpgroup write their zeros.
#pragma once
#include "grouped/hopper_store.cuh"
#include "wgmma.cuh"

template <int BM_, int BN_, int STAGES_>
struct GroupedPingpong : GroupedStore<GroupedLoad<WGRAD, BN_, STAGES_, true, BM_, true>> {
    using Load = GroupedLoad<WGRAD, BN_, STAGES_, true, BM_, true>;
    using Store = GroupedStore<Load>;
    static constexpr int BM = Load::BM, BN = Load::BN, BK = Load::BK, STAGES = Load::STAGES, PARTS = BM / 64;
    static constexpr bool BESIDE = Load::BESIDE;
    using Sums = float[PARTS][BN / 2];

    // Tiles on their way to the consumers: 32 bytes each, then mbarriers.
    static constexpr u32 SLOTS = 4;
    static_assert(SLOTS * 48 <= Load::QUEUE, "shared memory");
    static __device__ __forceinline__ u32 slot_at(u32 base, u32 i) { return base + Load::QUEUE_AT + i % SLOTS * 32; }
    static __device__ __forceinline__ u32 slot_full(u32 base, u32 i) {
        return base + Load::QUEUE_AT + SLOTS * 32 + i % SLOTS * 8;
    }
    static __device__ __forceinline__ u32 slot_free(u32 base, u32 i) { return slot_full(base, i) + SLOTS * 8; }
    static __device__ __forceinline__ u32 slot_phase(u32 i) { return i / SLOTS & 1; }

    static __device__ __forceinline__ void init(u32 base) {
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < SLOTS; i++) {
                mbarrier_init(slot_full(base, i), 1);
                mbarrier_init(slot_free(base, i), 4);
            }
        }
        Load::init(base);
    }

    // Hands over tile `i`, whose sum has so many steps and begins at `ring`; no steps: there are no more tiles. Called by the
    // producer warp.
    static __device__ __forceinline__ void hand_over(u32 base, u32 i, const GroupedTile& t, const Ring<STAGES>& ring) {
        mbarrier_wait(slot_free(base, i), slot_phase(i) ^ 1);
        if ((threadIdx.x & 31) == 0) {
            const u32 at = slot_at(base, i);
            st_shared_v4(at, t.segment, t.m, t.n, t.rows);
            st_shared_v4(at + 16, t.blocks, t.slice, t.slices, ring.stage | ring.phase << 8);
            mbarrier_arrive(slot_full(base, i));
        }
        __syncwarp();
    }
    static __device__ __forceinline__ void take(u32 base, u32 i, GroupedTile& t, Ring<STAGES>& ring) {
        mbarrier_wait(slot_full(base, i), slot_phase(i));
        u32 a[4], b[4];
        ld_shared_v4(slot_at(base, i), a[0], a[1], a[2], a[3]);
        ld_shared_v4(slot_at(base, i) + 16, b[0], b[1], b[2], b[3]);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(slot_free(base, i));
        t.segment = uniform(a[0]), t.m = uniform(a[1]), t.n = uniform(a[2]), t.rows = uniform(a[3]);
        t.blocks = uniform(b[0]), t.slice = uniform(b[1]), t.slices = uniform(b[2]);
        const u32 at = uniform(b[3]);
        ring.stage = at & 255, ring.phase = at >> 8;
    }

    static __device__ __forceinline__ void produce(const GroupedHopperArgs& g, u32 base) {
        const bool one = (threadIdx.x & 31) == 0;
        const i32 rank = i32(cluster_rank());
        Ring<STAGES> ring;
        typename Load::Walk walk;
        GroupedTile t;
        u32 i = 0;
        for (; walk.next(g, base, t); i++) {
            hand_over(base, i, t, ring);
#pragma unroll 1
            for (i32 block = 0; block < t.blocks; block++) {
                mbarrier_wait(Load::free(base, ring.stage), ring.phase ^ 1);
                if (one) load(g, t, block, rank, base, ring.stage);
                __syncwarp();
                ring.next();
            }
        }
        t.blocks = 0;
        hand_over(base, i, t, ring);
        hand_over(base, i + 1, t, ring);
    }
    // Loads the block's own operand, and half of the rows of the one that the pair shares.
    static __device__ __forceinline__ void load(const GroupedHopperArgs& g, const GroupedTile& t, i32 block, i32 rank, u32 base,
                                                u32 stage) {
        const u32 bar = Load::full(base, stage), a = Load::a_at(base, stage), b = Load::b_at(base, stage);
        const i32 row = t.first + block * BK, half = BK / 2;
        mbarrier_arrive_expect_tx(bar, Load::STAGE);
#pragma unroll
        for (int c = 0; c < PARTS; c++) {
            const u32 to = a + c * BK * 128;
            if constexpr (BESIDE) tma_load_multicast(to + rank * half * 128, g.a, bar, t.m * BM + c * 64, row + rank * half, 0, 0);
            else tma_load(to, g.a, bar, t.m * BM + c * 64, row, 0, 0);
        }
#pragma unroll
        for (int c = 0; c < BN / 64; c++) {
            const u32 to = b + c * BK * 128;
            if constexpr (BESIDE) tma_load(to, g.b, bar, t.n * BN + c * 64, row, 0, 0);
            else tma_load_multicast(to + rank * half * 128, g.b, bar, t.n * BN + c * 64, row + rank * half, 0, 0);
        }
    }

    // Releases a stage to the producers of both blocks.
    static __device__ __forceinline__ void let_go(u32 bar) {
        const int lane = threadIdx.x & 31;
        if (lane < 2) mbarrier_arrive_remote(bar, lane);
    }

    // One warpgroup issues products at a time: the stages that are loaded ahead are all for the tile that ends first.
    static __device__ __forceinline__ void begin_products(int wg) { named_barrier_sync(4 + wg, 256); }
    static __device__ __forceinline__ void end_products(int wg) { named_barrier_arrive(4 + (wg ^ 1), 256); }

    // A tile past the matrix, whose peer has one inside: only releases the stages.
    static __device__ __forceinline__ void pass(const GroupedTile& t, u32 base, int wg, Ring<STAGES>& ring) {
#pragma unroll 1
        for (i32 block = 0; block < t.blocks; block++) {
            mbarrier_wait(Load::full(base, ring.stage), ring.phase);
            let_go(Load::free(base, ring.stage));
            ring.next();
        }
        end_products(wg);
    }

    // Sums a tile over its rows.
    static __device__ __forceinline__ void sum(const GroupedTile& t, u32 base, int wg, Ring<STAGES>& ring, Sums& c) {
#pragma unroll
        for (int h = 0; h < PARTS; h++)
#pragma unroll
            for (int i = 0; i < BN / 2; i++) c[h][i] = 0.0f;
        u32 last = 0;
#pragma unroll 1
        for (i32 block = 0; block < t.blocks; block++) {
            const u32 stage = ring.stage, a = Load::a_at(base, stage), b = Load::b_at(base, stage);
            mbarrier_wait(Load::full(base, stage), ring.phase);
            // Rows past the segment belong to another one or to none, and may be NaN.
            const i32 left = t.rows - block * BK;
            if (left < BK) {
                zero_rows<BK, PARTS>(a, left, threadIdx.x & 127);
                zero_rows<BK, BN / 64>(b, left, threadIdx.x & 127);
                named_barrier_sync(2 + wg, 128);
            }
            wgmma_fence();
            const u64 r = desc_mn_major(b, BK * 128);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int h = 0; h < PARTS; h++)
                    Wgmma<BN>::template ss<1, 1>(c[h], desc_mn_major(a + h * BK * 128, BK * 128) + ((i * 2048) >> 4),
                                                 r + ((i * 2048) >> 4), 1);
            wgmma_commit();
            wgmma_wait<1>();
            if (block > 0) let_go(Load::free(base, last));
            last = stage;
            ring.next();
        }
        end_products(wg);
        wgmma_wait<0>();
#pragma unroll
        for (int h = 0; h < PARTS; h++) fence_operand(c[h]);
        let_go(Load::free(base, last));
    }

    static __device__ __forceinline__ void consume(const GroupedHopperArgs& g, u32 base) {
        const int wg = warpgroup() - 1;
        // The first warpgroup begins.
        if (wg == 1) end_products(wg);
        for (u32 i = wg;; i += 2) {
            GroupedTile t;
            Ring<STAGES> ring;
            take(base, i, t, ring);
            if (t.blocks == 0) return;
            begin_products(wg);
            if (t.m * BM >= g.height || t.n * BN >= g.width) {
                pass(t, base, wg, ring);
                continue;
            }
            Sums c;
            sum(t, base, wg, ring, c);
            i32* turn = Store::template turn_of<1>(g, t, 0);
            Store::wait_for_turn(turn, t, wg);
#pragma unroll
            for (int h = 0; h < PARTS; h++) Store::add_rows(g, t, h, c[h]);
            Store::end_turn(turn, t, wg);
        }
    }

    // Zeroes dw of segments without rows: warp `self` of `warps`.
    static __device__ __forceinline__ void zero_empty(const GroupedHopperArgs& g, i32 self, i32 warps) {
        if (g.accumulate) return;
        for (i32 e = 0; e < g.segments.count; e++) {
            if (Load::lengths()[e] > 0) continue;
            for (i32 r = self; r < g.height; r += warps) {
                float* row = reinterpret_cast<float*>(g.out) + e * g.matrix + r * g.row;
                for (i32 c = (threadIdx.x & 31) * 4; c < g.width; c += 128) Store::put16(row + c, make_uint4(0, 0, 0, 0));
            }
        }
    }

    static __device__ __forceinline__ void run(const GroupedHopperArgs& g) {
        const u32 base = shared_address(grouped_shared);
        init(base);
        Load::make_table(g);
        cluster_sync();
        if (threadIdx.x < 128) {
            setmaxnreg_dec<40>();
            const i32 warp = threadIdx.x >> 5;
            if (warp == 0) produce(g, base);
            else if (warp > 1) zero_empty(g, i32(blockIdx.x) * 2 + warp - 2, i32(gridDim.x) * 2);
            else if (threadIdx.x == 32 && cluster_rank() == 0) Load::claim(g, base);
        } else {
            setmaxnreg_inc<232>();
            consume(g, base);
        }
        // A block must not exit while its peer may still multicast into its shared memory.
        cluster_sync();
    }
};

// Rows, columns and stages of a tile.
#define GROUPED_PINGPONG(NAME, BM, BN, STAGES)                                                                    \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)                               \
        NAME(const __grid_constant__ GroupedHopperArgs g) {                                                          \
        GroupedPingpong<BM, BN, STAGES>::run(g);                                                                 \
    }
