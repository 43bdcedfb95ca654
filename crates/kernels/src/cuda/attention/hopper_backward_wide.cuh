// What the consumers of the wide Hopper backward kernels share: their pipeline state, and probabilities from scores.
#pragma once
#include "hopper_tiles.cuh"

// LOAD: the producer. A block has 64 keys, and 64 queries of a tile.
template <class LOAD, bool CAP> struct HopperBackwardWideParts {
    using Load = LOAD;
    using Bars = typename Load::Bars;
    static constexpr int COLUMNS = Load::COLUMNS, V_COLUMNS = Load::V_COLUMNS;
    static constexpr u32 K_AT = Load::K_AT, V_AT = Load::V_AT;

    // Pipeline state of a consumer.
    struct At {
        u32 base;
        Bars bars;
        Ring<Load::STAGES> ring;
        typename Load::Slots slot;
        u32 kv_phase = 0, count = 0;
        __device__ __forceinline__ u32 q() const { return base + Load::Q_AT + ring.stage * Load::Q_BYTES; }
        __device__ __forceinline__ u32 o() const { return base + Load::O_AT + ring.stage * Load::O_BYTES; }
        __device__ __forceinline__ u32 ds(u32 side) const { return base + Load::DS_AT + side * Load::DS_BYTES; }
        // This thread's 16-byte slots of the hand-off buffer.
        __device__ __forceinline__ u32 passed(u32 side) const {
            return base + Load::PASSED_AT + side * 8192 + (tid() & 127) * 16;
        }
        // Index of the next tile of keys; -1 after the last.
        __device__ __forceinline__ i32 tile() {
            if constexpr (Load::PAIR) mbarrier_wait_cluster(bars.tile_full(slot.stage), slot.phase);
            else mbarrier_wait(bars.tile_full(slot.stage), slot.phase);
            const i32 index = __shfl_sync(~0u, Load::slot_at(slot.stage)->index, 0);
            __syncwarp();
            if constexpr (Load::PAIR) {
                if ((tid() & 31) == 0) mbarrier_arrive_cluster(bars.tile_free(slot.stage), 0);
            } else {
                free(bars.tile_free(slot.stage));
            }
            slot.next();
            return index;
        }
        // Waits for keys and values, and zeroes rows past the end of a packed sequence.
        __device__ __forceinline__ void keys(const AttentionArgs& a, const HopperTile& p, bool values, int wg) {
            mbarrier_wait(bars.kv_full(), kv_phase);
            kv_phase ^= 1;
            if (a.items && p.k_len - p.first < 64) {
                zero_rows<64, COLUMNS>(base + K_AT, p.k_len - p.first, tid() & 127);
                if (values) zero_rows<64, V_COLUMNS>(base + V_AT, p.k_len - p.first, tid() & 127);
                named_barrier_sync(1 + wg, 128);
            }
            if constexpr (Load::PAIR) {
                const i32 left = p.k_len - (p.first ^ 64);
                if (values && a.items && left < 64) {
                    zero_rows<64, 2>(base + Load::OTHER_K_AT, left, tid() & 127);
                    named_barrier_sync(1 + wg, 128);
                }
            }
        }
    };
    // Arrives for a warp. That orders only what the arriving lane has read: where all lanes have read shared memory themselves,
    // and not wgmma for them, __syncwarp comes first.
    static __device__ __forceinline__ void free(u32 bar) {
        if ((tid() & 31) == 0) mbarrier_arrive(bar);
    }
    // The same in both blocks of a pair, whose producers write to both.
    static __device__ __forceinline__ void free_in_pair(u32 bar) {
        if ((tid() & 31) == 0) {
            mbarrier_arrive_remote(bar, 0);
            mbarrier_arrive_remote(bar, 1);
        }
    }
    // This thread's elements of dq_accum for a query tile: pairs of channels.
    static __device__ __forceinline__ i32* sums_at(const HopperArgs& m, const HopperTile& p, i32 head, i32 q0) {
        return reinterpret_cast<i32*>(m.dq_accum) +
               (((i64(p.batch) * m.a.heads + head) * m.padded + p.row + q0) * (COLUMNS * 64) + (tid() & 127) * 2);
    }
    static __device__ __forceinline__ void steps_at(u32 stage, float& step0, float& step1) {
        const int self = tid() & 127;
        const float* steps = Load::rows_of(stage, 2) + (self >> 5) * 16 + ((self & 31) >> 2);
        step0 = steps[0];
        step1 = steps[8];
    }
    // The row of a gradient that this thread stores, or null.
    static __device__ __forceinline__ bf16* key_row(const View& to, const HopperTile& p, int r) {
        const int self = tid() & 127;
        const i32 j = p.first + (self >> 5) * 16 + r * 8 + ((self & 31) >> 2);
        return j < p.k_len ? row_at<bf16>(to, p.batch, p.k_start + j, p.head) : nullptr;
    }

    // Probabilities from scores, 0 where a query does not see a key; `x` packs them, `y` too, times the derivative of
    // the soft cap.
    static __device__ __forceinline__ void powers(const AttentionArgs& a, const HopperTile& p, i32 q0, u32 stage, float (&s)[32],
                                                  u32 (&x)[16], u32 (&y)[16]) {
        const int self = tid() & 127, lane = self & 31, t = (lane & 3) * 2;
        float slope[CAP ? 32 : 1];
        const float4* rows = reinterpret_cast<const float4*>(Load::rows_of(stage, 0)) + (lane & 3);
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
            const float4 w = rows[i / 2];
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float score = a.inner;
                const float lse = e & 4 ? (e & 1 ? w.w : w.z) : (e & 1 ? w.y : w.x);
                if constexpr (CAP) {
                    const float tanh = fast_tanh(a.inner * s[i + e]);
                    slope[i + e] = fmaf(-tanh, tanh, 1.0f);
                    s[i + e] = tanh;
                    score = a.outer;
                }
                s[i + e] = fast_exp2(fmaf(s[i + e], score, -lse));
            }
        }
        if (q0 < p.first + 63 - p.off - a.right || q0 + 63 > min(p.first - p.off + a.left, p.q_len - 1) ||
            p.first + 63 >= p.k_len) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // Queries that see this key, relative to this thread's first query of the tile.
                const i32 key = p.first + (self >> 5) * 16 + r * 8 + (lane >> 2), j = key - p.off;
                const i32 lo = j - a.right - q0 - t;
                const i32 hi = key < p.k_len ? min(j + a.left, p.q_len - 1) - q0 - t : -1;
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (i * 8 + e < lo || i * 8 + e > hi) {
                            s[i * 4 + r * 2 + e] = 0.0f;
                            if (CAP) slope[CAP ? i * 4 + r * 2 + e : 0] = 0.0f;
                        }
            }
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            x[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
            y[i] = CAP ? pack_bf16(s[2 * i] * slope[CAP ? 2 * i : 0], s[2 * i + 1] * slope[CAP ? 2 * i + 1 : 0]) : x[i];
        }
    }

    // Iterates over the query tiles of a key tile; heads of a group vary fastest.
    struct Turns {
        i32 left, step, first, head, q0;
        __device__ __forceinline__ Turns(const HopperArgs& m, const HopperTile& p, bool down)
            : left((p.to - p.from) * m.a.group), step(down ? -64 : 64), first(p.head * m.a.group), head(first),
              q0((down ? p.to - 1 : p.from) * 64) {}
        __device__ __forceinline__ void next(const AttentionArgs& a) {
            if (++head == first + a.group) head = first, q0 += step;
        }
    };
};
