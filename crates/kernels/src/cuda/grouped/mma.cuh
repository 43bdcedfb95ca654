// A tile of c = op(a)·op(b) with mma.sync, within the shared memory of every card: WM × WN warps of 64 × 64 elements
// each. STAGES steps of 32 along the sum are in flight by cp.async, and a warp loads the fragments of its next 16 before
// it multiplies the present ones.
//
// An operand is stored with the sum along its rows ([m, k] and [n, k]) or along its columns ([k, m] and [k, n]), which
// ldmatrix then transposes. In shared memory 16-byte chunks of a row are permuted, so that the eight rows of an ldmatrix
// lie in different banks: rows of 64 bytes (32 along the sum) take turns two by two, longer ones one by one.
#pragma once
#include "tensor_core.cuh"

extern __shared__ __align__(128) u8 grouped_shared[];

// Elements of a step along the sum.
constexpr int DEPTH = 32;

// An operand of SIDE rows of the result's side; ACROSS: the sum runs across stored rows.
template <int SIDE, bool ACROSS, int THREADS> struct TileOperand {
    // Stored rows of a step, their 16-byte chunks, and the chunks that a thread copies.
    static constexpr int ROWS = ACROSS ? DEPTH : SIDE, CHUNKS = (ACROSS ? SIDE : DEPTH) / 8;
    static constexpr int EACH = ROWS * CHUNKS / THREADS, BYTES = ROWS * CHUNKS * 16;
    static_assert(ROWS * CHUNKS % THREADS == 0 && THREADS % CHUNKS == 0, "whole rounds, one chunk column to a thread");

    static __device__ __forceinline__ u32 place(int row, int chunk) {
        return u32(row * CHUNKS + (chunk ^ (ACROSS ? row & 7 : row >> 1 & 3))) * 16;
    }

    const bf16* at;  // this thread's first chunk of step 0
    i64 ld;
    i32 across;  // bytes of this thread's chunk along the result's side; with the sum along rows: rows from its first on

    // x: the operand from the first element of the tile's side and of the sum; `side` elements of the side are there.
    __device__ __forceinline__ TileOperand(const bf16* x, i64 ld, i32 side) : ld(ld) {
        const int row = tid() / CHUNKS, chunk = tid() % CHUNKS;
        at = x + row * ld + chunk * 8;
        across = ACROSS ? min(max((side - chunk * 8) * 2, 0), 16) : side - row;
    }
    // Copies step `n`, of which `left` elements along the sum are there; the others are zero.
    __device__ __forceinline__ void copy(u32 to, i32 n, i32 left) const {
        const int row = tid() / CHUNKS, chunk = tid() % CHUNKS;
        const bf16* from = at + (ACROSS ? i64(n) * DEPTH * ld : i64(n) * DEPTH);
        // Of a chunk along the sum.
        const i32 along = min(max((left - chunk * 8) * 2, 0), 16);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            constexpr int STEP = THREADS / CHUNKS;
            const bool there = ACROSS ? row + i * STEP < left : i * STEP < across;
            const i32 bytes = there ? (ACROSS ? across : along) : 0;
            cp_async_16(to + place(row + i * STEP, chunk), bytes > 0 ? from + i * (STEP * ld) : at, u32(bytes));
        }
    }
    // Fragments of 64 rows of the side from `first` on, at 16·k of the step. LEFT: of the first operand, 16 rows to each;
    // otherwise two blocks of 8.
    template <bool LEFT> static __device__ __forceinline__ void fragments(u32 (&f)[4][4], u32 tile, int first, int k) {
        const int lane = tid() & 31, low = lane & 15, high = lane >> 4, paired = (lane & 7) + high * 8, odd = lane >> 3 & 1;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int side = first + n * 16;
            if constexpr (ACROSS)
                ldmatrix_trans(f[n], tile + place(k * 16 + (LEFT ? paired : low), side / 8 + (LEFT ? odd : high)));
            else
                ldmatrix(f[n], tile + place(side + (LEFT ? low : paired), k * 2 + (LEFT ? high : odd)));
        }
    }
};

// TA, TB: the sum runs across the stored rows of a, of b.
template <int WM, int WN, int STAGES_, bool TA, bool TB> struct GroupedMma {
    static constexpr int BM = WM * 64, BN = WN * 64, STAGES = STAGES_, THREADS = WM * WN * 32;
    using A = TileOperand<BM, TA, THREADS>;
    using B = TileOperand<BN, TB, THREADS>;
    static constexpr int STAGE = A::BYTES + B::BYTES, BYTES = STAGES * STAGE;
    static_assert(BYTES <= 99 * 1024, "shared memory");

    // Accumulators of 16 × 8 elements: element e of c[m][n] is row m·16 + e/2·8 + lane/4, column n·8 + lane%4·2 + e%2.
    float c[4][8][4];

    // This warp's first row and column in the tile.
    static __device__ __forceinline__ int row0() { return (tid() >> 5) / WN * 64; }
    static __device__ __forceinline__ int column0() { return (tid() >> 5) % WN * 64; }

    // Copies the first steps of a sum over `length`, to all stages but the last; `finish` adds it up.
    static __device__ __forceinline__ void start(const A& a, const B& b, i32 length) {
        const i32 steps = (length + DEPTH - 1) / DEPTH;
#pragma unroll
        for (int n = 0; n < STAGES - 1; n++) copy(a, b, length, steps, n, n);
    }
    // Every step commits a group, also an empty one, so that a thread always waits for the same number.
    static __device__ __forceinline__ void copy(const A& a, const B& b, i32 length, i32 steps, i32 n, u32 stage) {
        if (n < steps) {
            const u32 to = shared_address(grouped_shared) + stage * STAGE;
            a.copy(to, n, length - n * DEPTH);
            b.copy(to + A::BYTES, n, length - n * DEPTH);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void sum(const A& a, const B& b, i32 length) {
        start(a, b, length);
        finish(a, b, length);
    }

    // Sums over `length`, which was started. Afterwards no stage is in use.
    __device__ __forceinline__ void finish(const A& a, const B& b, i32 length) {
        const u32 base = shared_address(grouped_shared);
        const i32 steps = (length + DEPTH - 1) / DEPTH;
        const int first_row = row0(), first_column = column0();
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) c[m][n][e] = 0.0f;
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        u32 x[2][4][4], y[2][4][4];
        A::template fragments<true>(x[0], base, first_row, 0);
        B::template fragments<false>(y[0], base + A::BYTES, first_column, 0);
        u32 stage = 0, last = STAGES - 1;
#pragma unroll 1
        for (i32 n = 0; n < steps; n++) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (k == 0) {
                    // All warps have read the stage that is copied to before the last barrier.
                    copy(a, b, length, steps, n + STAGES - 1, last);
                    last = last + 1 == STAGES ? 0 : last + 1;
                } else {
                    cp_async_wait<STAGES - 2>();
                    __syncthreads();
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                }
                const u32 next = base + stage * STAGE;
                A::template fragments<true>(x[k ^ 1], next, first_row, k ^ 1);
                B::template fragments<false>(y[k ^ 1], next + A::BYTES, first_column, k ^ 1);
#pragma unroll
                for (int m = 0; m < 4; m++)
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        // Back and forth, so that neighbours share an operand.
                        const int i = m & 1 ? 7 - j : j;
                        mma(c[m][i], x[k][m], y[k][i / 2][i % 2 * 2], y[k][i / 2][i % 2 * 2 + 1]);
                    }
            }
        }
        cp_async_wait_all();
    }
};
