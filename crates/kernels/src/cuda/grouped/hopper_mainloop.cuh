// Consumers of the Hopper grouped GEMMs.
#pragma once
#include "grouped/hopper_store.cuh"
#include "wgmma.cuh"

// E5: the A operand is E5M2.
template <int KIND, int BN_, int STAGES_, bool PAIR, bool E5 = false>
struct GroupedHopper : GroupedStore<GroupedLoad<KIND, BN_, STAGES_, PAIR>> {
    using Load = GroupedLoad<KIND, BN_, STAGES_, PAIR>;
    using Store = GroupedStore<Load>;
    static constexpr int BM = Load::BM, BN = Load::BN, BK = Load::BK, STAGES = Load::STAGES;
    static constexpr bool IS_FP8 = Load::IS_FP8, IS_WGRAD = Load::IS_WGRAD;
    static constexpr int TA = KIND == WGRAD, TB = KIND == WGRAD || KIND == DGRAD;

    // acc (+)= the product of a stage. One instruction takes 32 bytes of a row along k, or 16 rows.
    static __device__ __forceinline__ void multiply(float (&c)[BN / 2], u32 a, u32 b, int more) {
        const u64 l = TA ? desc_mn_major(a, BK * 128) : desc_k_major(a);
        const u64 r = TB ? desc_mn_major(b, BK * 128) : desc_k_major(b);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u64 x = l + ((i * (TA ? 2048 : 32)) >> 4), y = r + ((i * (TB ? 2048 : 32)) >> 4);
            if constexpr (IS_FP8) WgmmaFp8<BN, E5>::ss(c, x, y, i > 0 ? 1 : more);
            else Wgmma<BN>::template ss<TA, TB>(c, x, y, i > 0 ? 1 : more);
        }
    }

    static __device__ __forceinline__ void let_go(u32 bar) {
        const int lane = threadIdx.x & 31;
        if constexpr (PAIR) {
            if (lane < 2) mbarrier_arrive_remote(bar, lane);
        } else {
            if (lane == 0) mbarrier_arrive(bar);
        }
    }

    // A tile in which this warpgroup has no row: it only releases the stages, and leaves the tensor cores to the
    // other.
    static __device__ __forceinline__ void pass(const GroupedTile& t, u32 base, Ring<STAGES>& ring) {
#pragma unroll 1
        for (i32 block = 0; block < t.blocks; block++) {
            mbarrier_wait(Load::full(base, ring.stage), ring.phase);
            let_go(Load::free(base, ring.stage));
            ring.next();
        }
    }

    // Accumulates a tile over k.
    static __device__ __forceinline__ void sum(const GroupedTile& t, u32 base, int wg, Ring<STAGES>& ring,
                                               float (&c)[BN / 2]) {
        // A sum over no rows is zero; fprop and dgrad start with an instruction that ignores the accumulator.
        if constexpr (IS_WGRAD) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++) c[i] = 0.0f;
        }
        u32 last = 0;
#pragma unroll 1
        for (i32 block = 0; block < t.blocks; block++) {
            const u32 stage = ring.stage, a = Load::a_at(base, stage) + wg * 8192, b = Load::b_at(base, stage);
            mbarrier_wait(Load::full(base, stage), ring.phase);
            if constexpr (KIND == WGRAD) {
                // Rows past the segment belong to another one or to none, and may be NaN.
                const i32 left = t.rows - block * BK;
                if (left < BK) {
                    zero_rows<BK, 1>(a, left, threadIdx.x & 127);
                    zero_rows<BK, BN / 64>(b, left, threadIdx.x & 127);
                    named_barrier_sync(2 + wg, 128);
                }
            }
            wgmma_fence();
            multiply(c, a, b, IS_WGRAD || block > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (block > 0) let_go(Load::free(base, last));
            last = stage;
            ring.next();
        }
        wgmma_wait<0>();
        fence_operand(c);
        if (!IS_WGRAD || t.blocks > 0) let_go(Load::free(base, last));
    }

    // Loop of a consumer: `tile` accumulates and stores one tile.
    template <class Tile>
    static __device__ __forceinline__ void each_tile(const GroupedHopperArgs& g, u32 base, int wg, Tile tile) {
        Ring<STAGES> ring;
        typename Load::Walk walk;
        GroupedTile t;
        while (walk.next(g, base, t)) {
            if (t.m * BM + wg * 64 >= (IS_WGRAD ? g.height : t.rows)) pass(t, base, ring);
            else tile(t, ring);
        }
    }
    static __device__ __forceinline__ void consume(const GroupedHopperArgs& g, u32 base) {
        const int wg = warpgroup() - 1;
        each_tile(g, base, wg, [&](const GroupedTile& t, Ring<STAGES>& ring) {
            float c[BN / 2];
            sum(t, base, wg, ring, c);
            if constexpr (IS_WGRAD) Store::store_gradient(g, t, wg, c);
            else Store::store_output(g, t, wg, c);
        });
    }

    template <class Consumer> static __device__ __forceinline__ void run(const GroupedHopperArgs& g, Consumer consumer) {
        const u32 base = shared_address(grouped_shared);
        Load::init(base);
        Load::make_table(g);
        if constexpr (PAIR) cluster_sync();
        else __syncthreads();
        if (threadIdx.x < 128) {
            setmaxnreg_dec<40>();
            const i32 warp = threadIdx.x >> 5;
            if (warp == 0) Load::produce(g, base);
            else if constexpr (IS_WGRAD) {
                if (threadIdx.x == 32 && (!PAIR || cluster_rank() == 0)) Load::claim(g, base);
            } else
                zero_gaps(typename Load::Table(), g.segments.count, g.segments.rows, reinterpret_cast<bf16*>(g.out), g.row,
                           g.width, true, blockIdx.x * 3 + warp - 1, gridDim.x * 3);
        } else {
            setmaxnreg_inc<232>();
            consumer(base);
        }
        // A block must not exit while its peer may still multicast into its shared memory.
        if constexpr (PAIR) cluster_sync();
    }
    static __device__ __forceinline__ void run(const GroupedHopperArgs& g) {
        run(g, [&](u32 base) { consume(g, base); });
    }
};

// Operation, columns and stages of a tile.
#define GROUPED_HOPPER(NAME, KIND, BN, STAGES)                                                                    \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ GroupedHopperArgs g) {         \
        GroupedHopper<KIND, BN, STAGES, false>::run(g);                                                          \
    }
#define GROUPED_HOPPER_PAIR(NAME, KIND, BN, STAGES)                                                              \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)                               \
        NAME(const __grid_constant__ GroupedHopperArgs g) {                                                          \
        GroupedHopper<KIND, BN, STAGES, true>::run(g);                                                           \
    }
