// What the attention kernels share: the mask, cp.async tile loads, and mma.sync fragments.
//
// For a query i and the keys j it sees: s = scale·q·k (with a soft cap c: s = c·tanh(s/c)), p = exp(s - lse), out = Σ
// p·v. Logits are held times log2 e, so that every exponential is one ex2.
#pragma once
#include "args/attention.cuh"
#include "args/tile_table.cuh"
#include "tensor_core.cuh"

#define NEG_INF __int_as_float(0xff800000)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f


// Row (b, t, h) of a view: its channels.
template <class T> __device__ __forceinline__ T* row_at(const View& x, i64 b, i64 t, i64 h) {
    return reinterpret_cast<T*>(x.data) + (b * x.batch + t * x.token + h * x.head);
}


// Bits of `vectorized`: views whose rows lie on 16-byte boundaries.
enum Aligned : u32 { W_Q = 1, W_K = 2, W_V = 4, W_OUT = 8, W_DOUT = 16, W_DQ = 32, W_DK = 64, W_DV = 128 };


// The tile that a block works on. Heads vary fastest over blocks, so that heads that share keys run at the same time.
struct Place {
    i32 batch, head, kv_head, q_start, q_len, k_start, k_len, first, off;
    i32 from, to;  // tiles of the other operand to visit
    // First and last key that query i sees; none when the first is greater.
    __device__ __forceinline__ i32 lo(const AttentionArgs& a, i32 i) const { return max(i + off - a.left, 0); }
    __device__ __forceinline__ i32 hi(const AttentionArgs& a, i32 i) const { return min(i + off + a.right, k_len - 1); }
};

// Whether this block is past the last tile of packed sequences. How many tiles there are lies in memory, so that a captured
// launch, which has blocks for as many as there may be, serves other sequences.
__device__ __forceinline__ bool past_last_tile(const AttentionArgs& a) {
    return a.items && i32(blockIdx.x) >= reinterpret_cast<const TileSchedule*>(a.items)->total;
}
// Tile `index` of packed sequences; the table begins with its schedule.
__device__ __forceinline__ TileItem item_at(const AttentionArgs& a, i32 index) {
    static_assert(sizeof(TileSchedule) == sizeof(TileItem), "one entry of the table");
    return reinterpret_cast<const TileItem*>(a.items)[1 + index];
}

__device__ __forceinline__ Place place(const AttentionArgs& a, i32 block, i32 heads, i32 size, bool reversed) {
    Place p;
    p.head = block % heads;
    i32 rest = block / heads;
    if (a.items) {
        const TileItem it = item_at(a, rest);
        p.batch = 0;
        p.q_start = it.q_start;
        p.q_len = it.q_len;
        p.k_start = it.k_start;
        p.k_len = it.k_len;
        p.first = it.first;
    } else {
        p.batch = rest % a.batches;
        i32 tile = rest / a.batches;
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


__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh with an absolute error of about 1e-7, enough for a logit; ±1 at ±inf, NaN stays NaN.
__device__ __forceinline__ float fast_tanh(float x) {
    return 1.0f - __fdividef(2.0f, fast_exp2(x * (2.0f * LOG2_E)) + 1.0f);
}

// An attention probability, at most 1, as it multiplies v. With FP8_PROBS it is rounded to E4M3 under the scale 256:
// adding and subtracting 1.5·2^20 times its power of two leaves three bits after the leading one, down to 2^-14, the
// smallest normal number, below which the step stays. NaN stays NaN. Then the running maximum may not lag behind
// (RESCALE_THRESHOLD), or probabilities would exceed 1.
#ifdef FP8_PROBS
#define RESCALE_THRESHOLD(x) 0.0f
__device__ __forceinline__ float round_prob(float x) {
    const float shift = __uint_as_float(max(__float_as_uint(x) & 0x7f800000u, 0x38800000u)) * 1572864.0f;
    return __fsub_rn(__fadd_rn(x, shift), shift);
}
#else
#define RESCALE_THRESHOLD(x) x
__device__ __forceinline__ float round_prob(float x) { return x; }
#endif
__device__ __forceinline__ u32 pack_probs(float low, float high) { return pack_pair<element>(round_prob(low), round_prob(high)); }

// Loads a tile [ROWS, D] into shared memory: rows of D·2 bytes (a multiple of 128) on a 128-byte boundary, in which
// 16-byte chunk c of a row lies at c ^ (row % 8), so that eight rows of one chunk use different banks. Rows from
// `rows` on and channels from `channels` on are zero. SHORT: tiles without such rows and channels take a path with fewer
// instructions, which costs a few registers.
template <int ROWS, int D, int THREADS, bool SHORT = true>
__device__ __forceinline__ void load_tile(u32 to, const element* from, i64 step, i32 rows, i32 channels, bool vectorized,
                                          int self = tid()) {
    constexpr int CHUNKS = D / 8;
    static_assert(ROWS * CHUNKS % THREADS == 0, "whole rounds only");
    // Rows of a round, where they are whole: then the address of the next round is one addition away.
    constexpr int STEP = THREADS / CHUNKS;
    if (SHORT && THREADS % CHUNKS == 0 && vectorized && rows >= ROWS && channels == D) {
        const int row = self / CHUNKS, c = self % CHUNKS;
        const element* p = from + (row * step + c * 8);
        const u32 at = to + row * (D * 2) + ((c ^ (row & 7)) << 4);
        // In bytes and opaque: the compiler would compute the address of every round from the beginning.
        i64 stride = step * (STEP * 2);
        asm volatile("" : "+l"(stride));
#pragma unroll
        for (int n = 0; n < ROWS / STEP; n++) {
            cp_async_16((at ^ ((n * STEP & 7) << 4)) + n * STEP * (D * 2), p);
            p = reinterpret_cast<const element*>(reinterpret_cast<u64>(p) + stride);
        }
    } else if (vectorized) {
#pragma unroll
        for (int n = 0; n < ROWS * CHUNKS / THREADS; n++) {
            int at = n * THREADS + self, row = at / CHUNKS, c = at % CHUNKS;
            int bytes = row < rows ? min(max((channels - c * 8) * 2, 0), 16) : 0;
            const element* p = bytes > 0 ? from + (row * step + c * 8) : from;
            cp_async_16(to + row * (D * 2) + ((c ^ (row & 7)) << 4), p, u32(bytes));
        }
    } else {
#pragma unroll 1
        for (int n = 0; n < ROWS * CHUNKS / THREADS; n++) {
            int at = n * THREADS + self, row = at / CHUNKS, c = at % CHUNKS;
            u32 x[8];
#pragma unroll
            for (int e = 0; e < 8; e++)
                x[e] = row < rows && c * 8 + e < channels ? from[row * step + c * 8 + e].bits : 0;
            st_shared_v4(to + row * (D * 2) + ((c ^ (row & 7)) << 4), x[0] | x[1] << 16, x[2] | x[3] << 16,
                    x[4] | x[5] << 16, x[6] | x[7] << 16);
        }
    }
}

// This lane's ldmatrix address for an A operand (rows m, channels k): row 0, chunk 0. Chunk 2·k of the same row is at
// `k_step(address, k)`.
template <int D> __device__ __forceinline__ u32 a_fragment(u32 tile, int lane, int row) {
    return tile + (row + (lane & 15)) * (D * 2) + (((lane >> 4) ^ (lane & 7)) << 4);
}
// The same for a B operand stored [n, k]: two blocks of 8 n, 16 k.
template <int D> __device__ __forceinline__ u32 b_fragment(u32 tile, int lane) {
    return tile + ((lane & 7) + (lane >> 4) * 8) * (D * 2) + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
}
// The same for a B operand stored [k, n], loaded with .trans: 16 k, two blocks of 8 n.
template <int D> __device__ __forceinline__ u32 b_fragment_trans(u32 tile, int lane) {
    return tile + (lane & 15) * (D * 2) + (((lane >> 4) ^ (lane & 7)) << 4);
}
// 32·k bytes along the row through the swizzle, which XORs bits 5 and 6 of the address: tiles are aligned to 128.
__device__ __forceinline__ u32 k_step(u32 at, int k) { return (at ^ ((k & 3) << 5)) + (k >> 2) * 128; }

// Stores two neighbouring channels of a row.
__device__ __forceinline__ void store_pair(element* row, i32 c, i32 channels, bool vectorized, float x, float y) {
    if (vectorized && c + 1 < channels) {
        *reinterpret_cast<u32*>(row + c) = pack_pair<element>(x, y);
    } else {
        if (c < channels) row[c] = from_f32<element>(x);
        if (c + 1 < channels) row[c + 1] = from_f32<element>(y);
    }
}

// Log-sum-exp of a query, and the factor that normalizes its sum of p·v, from the largest logit, the sum of
// exponentials and the sink, all times log2 e.
__device__ __forceinline__ void finalize_softmax(float most, float sum, float sink, float& lse, float& share) {
    const float top = sink > most ? sink : most;
    // No visible key, or only logits of -inf, and no sink: lse is -inf and the output 0, unless there was a NaN.
    const bool nothing = top == NEG_INF;
    const float origin = nothing ? 0.0f : top, shift = exp2f(most - origin);
    const float total = fmaf(sum, shift, exp2f(sink - origin));
    const bool empty = nothing && !isnan(sum);
    lse = empty ? NEG_INF : fmaf(origin, LN_2, logf(total));
    share = empty ? 0.0f : shift / total;
}

extern __shared__ __align__(128) u8 attention_shared[];

// The block's tile at the start of shared memory, to save registers for accumulators. Operand tiles start after
// TILE_INFO bytes.
constexpr int PLACE = 128;
// `rows` queries, and the tiles of `size` keys that they see.
__device__ __forceinline__ const Place& query_tile(const AttentionArgs& a, i32 rows, i32 size) {
    if (threadIdx.x == 0) {
        Place p = place(a, blockIdx.x, a.heads, rows, true);
        p.from = p.lo(a, p.first) / size;
        // The last visible key may be -1 or less.
        p.to = (p.hi(a, min(p.first + rows, p.q_len) - 1) + size) / size;
        *reinterpret_cast<Place*>(attention_shared) = p;
    }
    __syncthreads();
    return *reinterpret_cast<const Place*>(attention_shared);
}
// `rows` keys, and the tiles of `size` queries that see them.
__device__ __forceinline__ const Place& key_tile(const AttentionArgs& a, i32 block, i32 rows, i32 size) {
    if (threadIdx.x == 0) {
        Place p = place(a, block, a.heads / a.group, rows, false);
        const i32 last = min(p.first + rows, p.k_len) - 1;
        p.from = max(p.first - p.off - a.right, 0) / size;
        p.to = (min(last - p.off + a.left, p.q_len - 1) + size) / size;
        *reinterpret_cast<Place*>(attention_shared) = p;
    }
    __syncthreads();
    return *reinterpret_cast<const Place*>(attention_shared);
}
