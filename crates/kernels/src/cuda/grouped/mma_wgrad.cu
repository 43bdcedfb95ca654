// Grouped wgrad with mma.sync: dw[e] (+)= dyᵀ·x over every segment's rows, in f32.
#include "grouped/mma.cuh"
#include "grouped/segments.cuh"

// Rows of a segment that are summed in the tensor cores' accumulators, which round towards zero: the sums of slices are
// added in f32, in order.
constexpr i32 SLICE = 1536;

// A tile of dw from its first element on, of which `rows` and `columns` are there.
template <class Tile> struct TileGradient {
    float* dw;
    i64 ld;
    i32 rows, columns;

    // dw = c (+ dw) by way of the last stage, 16 rows of each warp at a time, so that a warp reads and writes 256 bytes of
    // a row, 16 to a lane. What is added to the next rows is in flight while these are written.
    __device__ __forceinline__ void store(const float (&c)[4][8][4], bool added) const {
        constexpr u32 EACH = 16 * 64 * 4;
        static_assert(Tile::THREADS / 32 * EACH <= Tile::STAGE, "shared memory");
        const int lane = tid() & 31;
        const u32 staged = shared_address(grouped_shared) + (Tile::STAGES - 1) * Tile::STAGE + (tid() >> 5) * EACH;
        // The lane's 16 bytes of a row; then of every second row.
        const i32 row = Tile::row0() + (lane >> 4), column = Tile::column0() + (lane & 15) * 4;
        float* to = dw + row * ld + column;
        const i32 below = column < columns ? rows - row : 0;
        float4 old[2][8];
        auto load = [&](int m) {
#pragma unroll
            for (int q = 0; q < 8; q++) old[m & 1][q] = load_line(to + (m * 16 + q * 2) * ld, added && m * 16 + q * 2 < below);
        };
        load(0);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            if (m < 3) load(m + 1);
            // 16-byte chunks of four neighbouring rows are permuted to different banks.
            const u32 own = (lane >> 2) * 256 + (lane & 1) * 8, chunk = (lane & 2) >> 1, turn = (lane >> 2 & 3) << 1;
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(staged + h * 2048 + own + (((j * 2 + chunk) ^ turn) << 4)),
                                 "f"(c[m][j][h * 2]), "f"(c[m][j][h * 2 + 1])
                                 : "memory");
            __syncwarp();
            float4 v[8];
#pragma unroll
            for (int q = 0; q < 8; q++) {
                const int r = q * 2 + (lane >> 4);
                u32 x, y, z, w;
                ld_shared_v4(staged + r * 256 + (((lane & 15) ^ ((r & 3) << 1)) << 4), x, y, z, w);
                v[q] = make_float4(__uint_as_float(x), __uint_as_float(y), __uint_as_float(z), __uint_as_float(w));
            }
            if (added) {
#pragma unroll
                for (int q = 0; q < 8; q++) {
                    const float4 o = old[m & 1][q];
                    v[q].x += o.x, v[q].y += o.y, v[q].z += o.z, v[q].w += o.w;
                }
            }
#pragma unroll
            for (int q = 0; q < 8; q++)
                if (m * 16 + q * 2 < below) *reinterpret_cast<float4*>(to + (m * 16 + q * 2) * ld) = v[q];
            __syncwarp();
        }
    }
    // Issued where it stands, before the stores that follow; zeros where there is nothing to load.
    static __device__ __forceinline__ float4 load_line(const float* from, bool there) {
        float4 v;
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %5, 0;\n"
            "mov.f32 %0, 0f00000000;\n"
            "mov.f32 %1, 0f00000000;\n"
            "mov.f32 %2, 0f00000000;\n"
            "mov.f32 %3, 0f00000000;\n"
            "@p ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];\n"
            "}\n"
            : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
            : "l"(from), "r"(i32(there))
            : "memory");
        return v;
    }
};

// Blocks of tiles of each segment's dw, columns fastest.
template <int WM, int WN, int STAGES> __device__ __forceinline__ void grouped_mma_wgrad(const GroupedWgradArgs& g) {
    using Tile = GroupedMma<WM, WN, STAGES, true, true>;
    const i32 n = i32(g.n), k = i32(g.k), across = (k + Tile::BN - 1) / Tile::BN;
    const i32 tiles = (n + Tile::BM - 1) / Tile::BM * across, e = i32(blockIdx.x) / tiles, tile = i32(blockIdx.x) - e * tiles;
    const i32 row0 = tile / across * Tile::BM, column0 = tile % across * Tile::BN;
    const i64 first = segment_first(g.segments, e);
    const bf16* dy = reinterpret_cast<const bf16*>(g.dy) + first * g.ldy + row0;
    const bf16* x = reinterpret_cast<const bf16*>(g.x) + first * g.ldx + column0;
    float* dw = reinterpret_cast<float*>(g.dw) + e * g.step + row0 * g.ldw + column0;
    const TileGradient<Tile> gradient = {dw, g.ldw, n - row0, k - column0};
    const i32 length = segment_length(g.segments, e);
    auto left = [&](i32 from) { return typename Tile::A(dy + from * g.ldy, g.ldy, n - row0); };
    auto right = [&](i32 from) { return typename Tile::B(x + from * g.ldx, g.ldx, k - column0); };
    bool added = g.accumulate;
    Tile t;
    Tile::start(left(0), right(0), min(length, SLICE));
    // Also a segment without rows has a sum.
#pragma unroll 1
    for (i32 from = 0; from == 0 || from < length; from += SLICE) {
        t.finish(left(from), right(from), min(length - from, SLICE));
        // The next slice's first steps arrive while this one's sum is stored.
        if (from + SLICE < length) Tile::start(left(from + SLICE), right(from + SLICE), min(length - from - SLICE, SLICE));
        gradient.store(t.c, added);
        added = true;
    }
}

#define GROUPED_MMA_WGRAD(NAME, WM, WN, STAGES)                                                                    \
    extern "C" __global__ void __launch_bounds__(WM * WN * 32) NAME(const __grid_constant__ GroupedWgradArgs g) { \
        grouped_mma_wgrad<WM, WN, STAGES>(g);                                                                      \
    }
GROUPED_MMA_WGRAD(grouped_mma_wgrad_128_bf16, 2, 2, 3)
