// sm_90a only: grouped GEMM by persistent blocks: a producer warp that loads tiles by TMA, and two consumer warpgroups
// of 64 rows each of a tile [128, BN] of the result.
//
// Every block derives the tiles of all segments from the segment table on the device, so that nothing waits for the host,
// and takes every gridDim-th of them. wgrad, whose tiles wait for the slices before them, takes the next tile from a
// counter instead: a tile waits only for tiles that were claimed before it, by blocks that already run, so that it ends
// with any number of resident blocks (NCCL may hold the other multiprocessors for as long as it waits). Tiles of a segment are ordered in groups of 16 rows of tiles, down before
// across: what the blocks read at a time is about square, and an expert's matrix is read once while it is in the L2
// cache. Two blocks of a cluster (PAIR) have tiles one below the other, or side by side where tiles are taller than wide,
// and multicast half of the operand that they share each.
//
// With 48 KiB (32 for a block of a pair) per 128 × 256 × 64 × 2 FLOP, 640 TFLOP/s draw 7.5 (5.0) TB/s from the L2
// cache.
#pragma once
#include "args/grouped_hopper.cuh"
#include "grouped/segments.cuh"
#include "hopper_tiles.cuh"

// fprop: rows with matrices [n, k]; dgrad: rows with matrices [k, n]; wgrad: rows with rows, summed over rows. FP8:
// rows with matrices [n, k], or columns with columns of transposed operands.
enum GroupedOp { FPROP, DGRAD, WGRAD, FPROP_FP8, WGRAD_FP8 };

extern __shared__ __align__(1024) u8 grouped_shared[];


constexpr int MAX_SEGMENTS = 1024;
// wgrad: rows of the shortest slice of a segment, as in hopper.rs.
constexpr i32 MIN_SLICE = 1024;

// A tile: rows 128·m and columns BN·n of a segment; `first` and `rows`: rows of the segment, or of the slice;
// `blocks`: steps of BK along k; `slice` of `slices` (wgrad).
struct GroupedTile {
    i32 segment, m, n, first, rows, blocks, slice, slices;
};

// PINGPONG: wgrad by pairs whose consumer warpgroups take turns at tiles (hopper_pingpong.cuh).
template <int KIND_, int BN_, int STAGES_, bool PAIR, int BM_ = 128, bool PINGPONG = false> struct GroupedLoad {
    static constexpr int KIND = KIND_;
    static constexpr bool IS_FP8 = KIND == FPROP_FP8 || KIND == WGRAD_FP8, IS_WGRAD = KIND == WGRAD || KIND == WGRAD_FP8;
    // A step along k is 128 bytes.
    static constexpr int BM = BM_, BN = BN_, BK = IS_FP8 ? 128 : 64, STAGES = STAGES_, BLOCKS = PAIR ? 2 : 1;
    static constexpr int GROUP = 16 / BLOCKS;
    // The blocks of a pair lie side by side and share A.
    static constexpr bool BESIDE = BM > BN;
    static_assert(!PINGPONG || (KIND == WGRAD && PAIR), "warpgroups take turns in wgrad by pairs alone");
    static constexpr u32 A_BYTES = BM * 128, B_BYTES = BN * 128, STAGE = A_BYTES + B_BYTES;
    // wgrad: scales of the rows of a and of b.
    static constexpr u32 SCALES = KIND == WGRAD_FP8 ? (BM + BN) * 4 : 0;
    // Staging buffer of each consumer warp for the epilogue.
    static constexpr u32 STAGING = BM + BN == 320 ? 1024 : 2048;
    // Warps of a block that read a claimed tile: the producer, and consumers to which it does not hand tiles.
    static constexpr u32 READERS = PINGPONG ? 1 : 9;
    // mbarriers of the stages, then those of a claimed tile, and its index; tiles for the consumers.
    static constexpr u32 CLAIM_AT = 96, QUEUE_AT = 128, QUEUE = PINGPONG ? 256 : 0, TABLE_AT = QUEUE_AT + QUEUE, TABLE = 4 * (3 * MAX_SEGMENTS + 64), STAGING_AT = TABLE_AT + TABLE;
    static constexpr u32 SCALES_AT = STAGING_AT + 8 * STAGING;
    static constexpr u32 TILES_AT = (SCALES_AT + STAGES * SCALES + 1023) / 1024 * 1024, BYTES = TILES_AT + STAGES * STAGE;
    static_assert(BYTES <= 227 * 1024 && 2 * STAGES * 8 <= CLAIM_AT, "shared memory");

    static __device__ __forceinline__ u32 full(u32 base, u32 s) { return base + s * 8; }
    static __device__ __forceinline__ u32 free(u32 base, u32 s) { return base + (STAGES + s) * 8; }
    static __device__ __forceinline__ u32 claim_full(u32 base) { return base + CLAIM_AT; }
    static __device__ __forceinline__ u32 claim_free(u32 base) { return base + CLAIM_AT + 8; }
    static __device__ __forceinline__ u32 claim_at(u32 base) { return base + CLAIM_AT + 16; }
    static __device__ __forceinline__ u32 a_at(u32 base, u32 s) { return base + TILES_AT + s * STAGE; }
    static __device__ __forceinline__ u32 b_at(u32 base, u32 s) { return a_at(base, s) + A_BYTES; }

    static __device__ __forceinline__ const float* scales_at(u32 s) {
        return reinterpret_cast<const float*>(grouped_shared + SCALES_AT + s * SCALES);
    }

    // Of every segment: its first row, its rows, and how many units (rows of tiles, or slices) come before it. Behind
    // the last segment: all units, then 32 sentinels, then the rows of a slice.
    static __device__ __forceinline__ i32* firsts() { return reinterpret_cast<i32*>(grouped_shared + TABLE_AT); }
    static __device__ __forceinline__ i32* lengths() { return firsts() + MAX_SEGMENTS; }
    static __device__ __forceinline__ i32* befores() { return lengths() + MAX_SEGMENTS; }

    // The same interface as `Segments`.
    struct Table {
        friend __device__ __forceinline__ i32 segment_first(const Table&, i32 e) { return firsts()[e]; }
        friend __device__ __forceinline__ i32 segment_length(const Table&, i32 e) { return lengths()[e]; }
    };

    // wgrad: rows of a segment that one tile sums. All rows up to the end of the last segment are cut into about 64 slices,
    // whatever room there is behind them: the order of sums follows from the segments alone.
    static __device__ __forceinline__ i32 slice_of(const Segments& z) {
        const i32 rows = min(max(reinterpret_cast<const i32*>(z.offsets)[z.count], 0), z.rows);
        return (min(max(rows / 64, MIN_SLICE), 8192) + 127) / 128 * 128;
    }

    static __device__ __forceinline__ i32 units(const GroupedHopperArgs& g, i32 rows, i32 slice) {
        if constexpr (IS_WGRAD) {
            // A segment without rows has zeros to write, or nothing (PINGPONG: other warps write them).
            const i32 slices = (rows + slice - 1) / slice;
            return g.accumulate || PINGPONG ? slices : max(slices, 1);
        } else {
            return (rows + BM * BLOCKS - 1) / (BM * BLOCKS);
        }
    }
    // Called by all threads; the caller synchronizes afterwards.
    static __device__ __forceinline__ void make_table(const GroupedHopperArgs& g) {
        const i32 n = g.segments.count;
        for (i32 e = threadIdx.x; e < n; e += blockDim.x) {
            firsts()[e] = segment_first(g.segments, e);
            lengths()[e] = segment_length(g.segments, e);
        }
        __syncthreads();
        if (threadIdx.x >= 32) return;
        const i32 lane = threadIdx.x, slice = IS_WGRAD ? slice_of(g.segments) : 0;
        i32 before = 0;
        for (i32 e0 = 0; e0 < n; e0 += 32) {
            const i32 own = e0 + lane < n ? units(g, lengths()[e0 + lane], slice) : 0;
            i32 upto = own;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const i32 got = __shfl_up_sync(~0u, upto, d);
                if (lane >= d) upto += got;
            }
            if (e0 + lane < n) befores()[e0 + lane] = before + upto - own;
            before += __shfl_sync(~0u, upto, 31);
        }
        befores()[n + lane] = lane == 0 ? before : 0x7fffffff;
        if (lane == 0) befores()[n + 32] = 0x7fffffff, befores()[n + 33] = slice;
    }

    // Tiles of a unit.
    static __device__ __forceinline__ i32 across(const GroupedHopperArgs& g) {
        constexpr i32 EACH = BN * (BESIDE ? BLOCKS : 1);
        return (g.width + EACH - 1) / EACH;
    }
    static __device__ __forceinline__ i32 down(const GroupedHopperArgs& g) {
        constexpr i32 EACH = BM * (BESIDE ? 1 : BLOCKS);
        return (g.height + EACH - 1) / EACH;
    }
    static __device__ __forceinline__ i32 tiles_of_unit(const GroupedHopperArgs& g) {
        return IS_WGRAD ? down(g) * across(g) : across(g);
    }

    // Claims wgrad's tiles, one ahead of the consumers, for both blocks of a pair; run by one thread of the first block.
    static __device__ __forceinline__ void claim(const GroupedHopperArgs& g, u32 base) {
        const i32 total = befores()[g.segments.count] * tiles_of_unit(g), step = i32(gridDim.x) / BLOCKS;
        i32 index = i32(blockIdx.x) / BLOCKS;
        u32 phase = 1;
        while (true) {
            mbarrier_wait_cluster(claim_free(base), phase);
            phase ^= 1;
            // Without slices no tile waits for another.
            if (g.counters) index = atomicAdd(reinterpret_cast<i32*>(g.counters), 1);
#pragma unroll
            for (u32 block = 0; block < BLOCKS; block++) {
                st_shared_cluster(claim_at(base), block, u32(index));
                mbarrier_arrive_cluster(claim_full(base), block);
            }
            if (index >= total) return;
            index += step;
        }
    }

    // Iterates over this block's tiles; called by a whole warp.
    struct Walk {
        i32 index, segment = 0;
        u32 phase = 0;
        __device__ __forceinline__ Walk() : index(i32(blockIdx.x) / BLOCKS - i32(gridDim.x) / BLOCKS) {}
        __device__ __forceinline__ void advance(u32 base) {
            if constexpr (IS_WGRAD) {
                mbarrier_wait_cluster(claim_full(base), phase);
                phase ^= 1;
                index = uniform(i32(ld_shared(claim_at(base))));
                __syncwarp();
                if ((threadIdx.x & 31) == 0) mbarrier_arrive_cluster(claim_free(base), 0);
            } else {
                index += i32(gridDim.x) / BLOCKS;
            }
        }
        __device__ __forceinline__ bool next(const GroupedHopperArgs& g, u32 base, GroupedTile& t) {
            advance(base);
            const i32 across = GroupedLoad::across(g), down = GroupedLoad::down(g), each = tiles_of_unit(g);
            const i32 unit = index / each;
            if (unit >= uniform(befores()[g.segments.count])) return false;
            // The unit's segment is the first that ends behind it.
            const i32 lane = threadIdx.x & 31;
            u32 passed;
            do {
                passed = __ballot_sync(~0u, befores()[segment + 1 + lane] <= unit);
                segment += __popc(passed);
            } while (passed == ~0u);
            t.segment = segment;
            t.first = uniform(firsts()[segment]);
            t.rows = uniform(lengths()[segment]);
            const i32 before = uniform(befores()[segment]), here = uniform(befores()[segment + 1]) - before;
            if constexpr (IS_WGRAD) {
                const i32 slice = uniform(befores()[g.segments.count + 33]);
                t.slice = unit - before;
                t.slices = here;
                t.first += t.slice * slice;
                t.rows = min(t.rows - t.slice * slice, slice);
                t.blocks = (t.rows + BK - 1) / BK;
                spread(index - unit * each, across, down, t);
            } else {
                t.blocks = (g.length + BK - 1) / BK;
                spread(index - before * each, across, here, t);
            }
            if constexpr (PAIR) {
                i32& at = BESIDE ? t.n : t.m;
                at = at * 2 + i32(cluster_rank());
            }
            return true;
        }
        static __device__ __forceinline__ void spread(i32 at, i32 across, i32 down, GroupedTile& t) {
            const i32 part = at / (GROUP * across), rest = at - part * (GROUP * across);
            const i32 rows = min(GROUP, down - part * GROUP);
            t.n = rest / rows;
            t.m = part * GROUP + (rest - t.n * rows);
        }
    };

    static __device__ __forceinline__ void init(u32 base) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; s++) {
                mbarrier_init(full(base, s), 1);
                mbarrier_init(free(base, s), (PINGPONG ? 4 : 8) * BLOCKS);
            }
            mbarrier_init(claim_full(base), 1);
            mbarrier_init(claim_free(base), READERS * BLOCKS);
            mbarrier_init_fence();
        }
    }

    // Scales of a tile's rows, as many as there are; their number is padded to a multiple of four.
    static __device__ __forceinline__ u32 a_scale_bytes(const GroupedHopperArgs& g, const GroupedTile& t) {
        return u32(max(min(BM, g.a_stride - t.m * BM), 0)) * 4;
    }
    static __device__ __forceinline__ u32 b_scale_bytes(const GroupedHopperArgs& g, const GroupedTile& t) {
        return u32(min(BN, g.b_stride - t.n * BN)) * 4;
    }
    static __device__ __forceinline__ u32 scale_bytes(const GroupedHopperArgs& g, const GroupedTile& t) {
        return KIND == WGRAD_FP8 && g.block_scaled ? a_scale_bytes(g, t) + b_scale_bytes(g, t) : 0;
    }
    static __device__ __forceinline__ void load_scales(const GroupedHopperArgs& g, const GroupedTile& t, u32 stage, u32 bar,
                                                       i32 block) {
        if (!g.block_scaled) return;
        const u32 to = shared_address(scales_at(stage)), bytes = a_scale_bytes(g, t);
        const float* a = reinterpret_cast<const float*>(g.a_scale) + (i64(block) * g.a_stride + t.m * BM);
        const float* b = reinterpret_cast<const float*>(g.b_scale) + (i64(block) * g.b_stride + t.n * BN);
        if (bytes) bulk_copy(to, a, bytes, bar);
        bulk_copy(to + BM * 4, b, b_scale_bytes(g, t), bar);
    }

    // One warp runs the loop; one lane issues the copies.
    static __device__ __forceinline__ void produce(const GroupedHopperArgs& g, u32 base) {
        const bool one = (threadIdx.x & 31) == 0;
        const i32 rank = PAIR ? i32(cluster_rank()) : 0;
        Ring<STAGES> ring;
        Walk walk;
        GroupedTile t;
        while (walk.next(g, base, t)) {
#pragma unroll 1
            for (i32 block = 0; block < t.blocks; block++) {
                mbarrier_wait(free(base, ring.stage), ring.phase ^ 1);
                if (one) load(g, t, block, rank, base, ring.stage);
                __syncwarp();
                ring.next();
            }
        }
    }

    // Loads both operands of a step, and their scales. The blocks of a pair each multicast one half of B.
    static __device__ __forceinline__ void load(const GroupedHopperArgs& g, const GroupedTile& t, i32 block, i32 rank, u32 base,
                                                u32 stage) {
        const u32 bar = full(base, stage), a = a_at(base, stage), b = b_at(base, stage);
        const i32 k0 = block * BK;
        auto right = [&](u32 to, i32 c, i32 r, i32 matrix) {
            if constexpr (PAIR) tma_load_multicast(to, g.b, bar, c, r, matrix, 0);
            else tma_load(to, g.b, bar, c, r, matrix, 0);
        };
        mbarrier_arrive_expect_tx(bar, STAGE + scale_bytes(g, t));
        if constexpr (KIND == WGRAD) {
#pragma unroll
            for (int c = 0; c < 2; c++)
                tma_load(a + c * BK * 128, g.a, bar, t.m * BM + c * 64, t.first + k0, 0, 0);
        } else if constexpr (KIND == WGRAD_FP8) {
            tma_load(a, g.a, bar, t.first + k0, t.m * BM, 0, 0);
            load_scales(g, t, stage, bar, (t.first + k0) / 128);
        } else {
            tma_load(a, g.a, bar, k0, t.first + t.m * BM, 0, 0);
        }
        if constexpr (KIND == FPROP || IS_FP8) {
            right(b + rank * (B_BYTES / 2), KIND == WGRAD_FP8 ? t.first + k0 : k0, t.n * BN + rank * (BN / 2),
                  KIND == WGRAD_FP8 ? 0 : t.segment);
        } else {
            // Columns of 64; [64 rows along k, 64] each.
            constexpr int COLUMNS = BN / 64 / BLOCKS;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const i32 at = rank * COLUMNS + c;
                const i32 row = KIND == WGRAD ? t.first + k0 : k0, matrix = KIND == WGRAD ? 0 : t.segment;
                right(b + at * BK * 128, t.n * BN + at * 64, row, matrix);
            }
        }
    }
};
