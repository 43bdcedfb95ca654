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

// A tile of dw and a slice of its segment's rows: `length` rows from `first` on to the segment's end.
struct WgradTile {
    i32 segment, tile, slice, first, length;
};

// Persistent blocks take tiles from a counter: of each segment, of each slice, columns fastest. The slices of a tile are added
// in order: a block waits for blocks that claimed their tiles before it, and these run. The first steps of the next tile
// arrive while the sums of a tile are stored.
template <int WM, int WN, int STAGES> struct GroupedMmaWgrad {
    using Tile = GroupedMma<WM, WN, STAGES, true, true>;

    static __device__ __forceinline__ i32 across(const GroupedWgradArgs& g) { return (i32(g.k) + Tile::BN - 1) / Tile::BN; }
    static __device__ __forceinline__ i32 tiles(const GroupedWgradArgs& g) {
        return (i32(g.n) + Tile::BM - 1) / Tile::BM * across(g);
    }
    static __device__ __forceinline__ i32 row0(const GroupedWgradArgs& g, const WgradTile& w) { return w.tile / across(g) * Tile::BM; }
    static __device__ __forceinline__ i32 column0(const GroupedWgradArgs& g, const WgradTile& w) { return w.tile % across(g) * Tile::BN; }
    static __device__ __forceinline__ typename Tile::A left(const GroupedWgradArgs& g, const WgradTile& w) {
        const i32 at = row0(g, w);
        return {reinterpret_cast<const bf16*>(g.dy) + w.first * g.ldy + at, g.ldy, i32(g.n) - at};
    }
    static __device__ __forceinline__ typename Tile::B right(const GroupedWgradArgs& g, const WgradTile& w) {
        const i32 at = column0(g, w);
        return {reinterpret_cast<const bf16*>(g.x) + w.first * g.ldx + at, g.ldx, i32(g.k) - at};
    }

    // Called by all threads; thread 0 has the index. Segment E where there are no more tiles.
    static __device__ __forceinline__ WgradTile locate(const GroupedWgradArgs& g, i32 index) {
        __shared__ WgradTile shared;
        if (threadIdx.x < 32) {
            index = __shfl_sync(~0u, index, 0);
            const i32 unit = index / tiles(g);
            // Also a segment without rows has a sum.
            const Place p = find<SLICE, 1>(g.segments, unit);
            if (threadIdx.x == 0) {
                WgradTile w = {p.segment, index - unit * tiles(g), p.tile, 0, 0};
                if (w.segment < g.segments.count) {
                    w.first = segment_first(g.segments, w.segment) + w.slice * SLICE;
                    w.length = segment_length(g.segments, w.segment) - w.slice * SLICE;
                }
                shared = w;
            }
        }
        __syncthreads();
        return shared;
    }

    static __device__ __forceinline__ void store(const GroupedWgradArgs& g, const WgradTile& w, const Tile& t) {
        i32* turn = reinterpret_cast<i32*>(g.counters) + 1 + (i64(w.segment) * tiles(g) + w.tile);
        if (w.slice > 0) {
            i32 done = 0;
            while (threadIdx.x == 0 && done < w.slice)
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(turn) : "memory");
            __syncthreads();
        }
        const i32 row = row0(g, w), column = column0(g, w);
        float* dw = reinterpret_cast<float*>(g.dw) + w.segment * g.step + row * g.ldw + column;
        TileGradient<Tile>{dw, g.ldw, i32(g.n) - row, i32(g.k) - column}.store(t.c, g.accumulate || w.slice > 0);
        if (w.length > SLICE) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0)
                asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(w.slice + 1) : "memory");
        }
    }

    static __device__ __forceinline__ void run(const GroupedWgradArgs& g) {
        auto claim = [&] { return threadIdx.x == 0 ? atomicAdd(reinterpret_cast<i32*>(g.counters), 1) : 0; };
        WgradTile w = locate(g, claim());
        if (w.segment == g.segments.count) return;
        Tile::start(left(g, w), right(g, w), min(w.length, SLICE));
        Tile t;
#pragma unroll 1
        while (true) {
            const i32 index = claim();
            t.finish(left(g, w), right(g, w), min(w.length, SLICE));
            const WgradTile next = locate(g, index);
            const bool more = next.segment < g.segments.count;
            if (more) Tile::start(left(g, next), right(g, next), min(next.length, SLICE));
            store(g, w, t);
            if (!more) return;
            w = next;
        }
    }
};

#define GROUPED_MMA_WGRAD(NAME, WM, WN, STAGES)                                                                    \
    extern "C" __global__ void __launch_bounds__(WM * WN * 32) NAME(const __grid_constant__ GroupedWgradArgs g) { \
        GroupedMmaWgrad<WM, WN, STAGES>::run(g);                                                                   \
    }
GROUPED_MMA_WGRAD(grouped_mma_wgrad_128_bf16, 2, 2, 3)
