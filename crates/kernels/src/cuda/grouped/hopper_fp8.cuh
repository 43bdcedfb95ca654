// sm_90a only: consumers of the FP8 grouped GEMMs.
#pragma once
#include "grouped/hopper_mainloop.cuh"
#include "wgmma_fp8.cuh"

// FAST: sums stay in the tensor core's accumulator. Otherwise the sum over each 128 of k is promoted to f32, times its
// scales where scaling is by blocks.
template <int KIND, int BN_, int STAGES_, bool PAIR, bool E5, bool FAST>
struct GroupedHopperFp8 : GroupedHopper<KIND, BN_, STAGES_, PAIR, E5> {
    using Base = GroupedHopper<KIND, BN_, STAGES_, PAIR, E5>;
    using Load = typename Base::Load;
    static constexpr int BM = Base::BM, BN = Base::BN, STAGES = Base::STAGES;

    // Block scales of fprop: of a thread's two rows of x, and of each 64 columns of w.
    struct Scales {
        float row[2], column[BN / 64];
    };
    static __device__ __forceinline__ void load_guarded(const GroupedHopperArgs& g, const GroupedTile& t, int wg, i32 block, Scales& s) {
        const i32 i = t.first + Base::row_of(t, wg), last = g.segments.rows - 1;
        const float* rows = reinterpret_cast<const float*>(g.a_scale) + i64(block) * g.a_stride;
        s.row[0] = rows[min(i, last)];
        s.row[1] = rows[min(i + 8, last)];
        // Columns past the last are multiplied by zeros.
        const i32 n0 = t.segment * g.width, end = g.width - 1;
        const float* tiles = reinterpret_cast<const float*>(g.b_scale) + block;
#pragma unroll
        for (int q = 0; q < BN / 64; q++)
            s.column[q] = tiles[i64((n0 + min(t.n * BN + q * 64, end)) / 128) * g.b_stride];
    }

    // c += p, times scales.
    static __device__ __forceinline__ void add(float (&c)[BN / 2], const float (&p)[BN / 2]) {
#pragma unroll
        for (int i = 0; i < BN / 2; i++) c[i] += p[i];
    }
    static __device__ __forceinline__ void add(float (&c)[BN / 2], const float (&p)[BN / 2], const Scales& s) {
#pragma unroll
        for (int q = 0; q < BN / 64; q++) {
            const float f[2] = {s.row[0] * s.column[q], s.row[1] * s.column[q]};
#pragma unroll
            for (int i = q * 32; i < q * 32 + 32; i++) c[i] = fmaf(p[i], f[i >> 1 & 1], c[i]);
        }
    }
    // wgrad: scales of the rows of both operands, in shared memory.
    static __device__ __forceinline__ void add(float (&c)[BN / 2], const float (&p)[BN / 2], const float* scales, int wg) {
        const int row = wg * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
        const float x = scales[row], y = scales[row + 8];
        const float2* columns = reinterpret_cast<const float2*>(scales + BM) + (threadIdx.x & 3);
#pragma unroll
        for (int j = 0; j < BN / 8; j++) {
            const float2 f = columns[j * 4];
            c[4 * j] = fmaf(p[4 * j], x * f.x, c[4 * j]);
            c[4 * j + 1] = fmaf(p[4 * j + 1], x * f.y, c[4 * j + 1]);
            c[4 * j + 2] = fmaf(p[4 * j + 2], y * f.x, c[4 * j + 2]);
            c[4 * j + 3] = fmaf(p[4 * j + 3], y * f.y, c[4 * j + 3]);
        }
    }

    // As `sum` of the base class, promoted to f32 after every step.
    static __device__ __forceinline__ void sum(const GroupedHopperArgs& g, const GroupedTile& t, u32 base, int wg,
                                               Ring<STAGES>& ring, float (&c)[BN / 2]) {
        Scales next;
        if (KIND == FPROP_FP8 && g.block_scaled) load_guarded(g, t, wg, 0, next);
#pragma unroll
        for (int i = 0; i < BN / 2; i++) c[i] = 0.0f;
#pragma unroll 1
        for (i32 block = 0; block < t.blocks; block++) {
            const u32 stage = ring.stage;
            float p[BN / 2];
            mbarrier_wait(Load::full(base, stage), ring.phase);
            wgmma_fence();
            Base::multiply(p, Load::a_at(base, stage) + wg * 8192, Load::b_at(base, stage), 0);
            wgmma_commit();
            const Scales now = next;
            if (KIND == FPROP_FP8 && g.block_scaled && block + 1 < t.blocks) load_guarded(g, t, wg, block + 1, next);
            wgmma_wait<0>();
            fence_operand(p);
            if constexpr (KIND == FPROP_FP8) {
                Base::let_go(Load::free(base, stage));
                if (g.block_scaled) add(c, p, now);
                else add(c, p);
            } else {
                if (g.block_scaled) add(c, p, Load::scales_at(stage), wg);
                else add(c, p);
                // All lanes have read the scales before the stage is released.
                __syncwarp();
                Base::let_go(Load::free(base, stage));
            }
            ring.next();
        }
    }

    static __device__ __forceinline__ void consume(const GroupedHopperArgs& g, u32 base) {
        const int wg = warpgroup() - 1;
        Base::each_tile(g, base, wg, [&](const GroupedTile& t, Ring<STAGES>& ring) {
            float c[BN / 2];
            if constexpr (FAST) Base::sum(t, base, wg, ring, c);
            else sum(g, t, base, wg, ring, c);
            float left = 1.0f, right = 1.0f;
            if (FAST || !g.block_scaled) {
                left = *reinterpret_cast<const float*>(g.a_scale);
                right = reinterpret_cast<const float*>(g.b_scale)[KIND == FPROP_FP8 ? t.segment : 0];
            }
            if constexpr (KIND == FPROP_FP8) {
                Base::store_output(g, t, wg, c, left, right);
            } else {
#pragma unroll
                for (int i = 0; i < BN / 2; i++) c[i] = c[i] * left * right;
                Base::store_gradient(g, t, wg, c);
            }
        });
    }
    static __device__ __forceinline__ void run(const GroupedHopperArgs& g) {
        Base::run(g, [&](u32 base) { consume(g, base); });
    }
};

// Operation, columns and stages of a tile, A is E5M2, fast accumulation.
#define GROUPED_HOPPER_FP8(NAME, KIND, BN, STAGES, E5, FAST)                                                         \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ GroupedHopperArgs g) {          \
        GroupedHopperFp8<KIND, BN, STAGES, false, E5, FAST>::run(g);                                                \
    }
#define GROUPED_HOPPER_FP8_PAIR(NAME, KIND, BN, STAGES, E5, FAST)                                                    \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)                                \
        NAME(const __grid_constant__ GroupedHopperArgs g) {                                                           \
        GroupedHopperFp8<KIND, BN, STAGES, true, E5, FAST>::run(g);                                                 \
    }
