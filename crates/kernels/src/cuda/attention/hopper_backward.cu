// Backward pass for Hopper: a persistent block has 128 keys of one key head, 64 for each of two consumer warpgroups,
// and streams the queries that see them, BM at a time. Scores are computed transposed, keys × queries, so that p and
// ds are A operands of dv += pᵀ·dout and dk += dsᵀ·q as they lie in registers; for dq = ds·k, ds goes through shared
// memory.
//
// Many blocks contribute to dq of one query tile. They add in 32-bit fixed point with atomics: integer sums do not
// depend on the order, so the result is deterministic. |dq| ≤ (|dout|·max|v| + |delta|)·max|k| (before the scale,
// which is applied at the end) gives every query a step that keeps sums below 2^29, two bits below overflow. Delta is
// not bounded by these values: where the keys are a part of all (ring attention), it comes from the output over all.
//
// The dq GEMM of one query tile is issued with those of the next tile, so that the warpgroups do not wait for each
// other: with PER_HEAD across tiles of keys too, whose k then has two stages.
#include "attention/hopper_backward_load.cuh"
#include "wgmma.cuh"

// SHORT: ds is computed from p as rounded for dv, which saves registers.
template <int D, int BM, bool SHORT, bool PER_HEAD> struct HopperBackward : HopperBackwardLoad<D, D, BM, 128, 3, PER_HEAD, 0> {
    using Load = HopperBackwardLoad<D, D, BM, 128, 3, PER_HEAD, 0>;
    using Bars = typename Load::Bars;
    static constexpr int BN = Load::BN, STAGES = Load::STAGES, COLUMNS = Load::COLUMNS, NS = BM / 2, ND = D / 2;
    static constexpr u32 Q_BYTES = Load::Q_BYTES, DS_BYTES = Load::DS_BYTES;
    static constexpr u32 K_AT = Load::K_AT, V_AT = Load::V_AT, Q_AT = Load::Q_AT, O_AT = Load::O_AT, DS_AT = Load::DS_AT;

    // Channels of a head in shared memory and in dq_accum.
    static constexpr int W = COLUMNS * 64;
    static_assert(BM * W == 8192, "dq of a tile is 64 x 64 for each of two warpgroups");

    // acc = x[64, D]·y[BM, D]ᵀ
    static __device__ __forceinline__ void scores(float (&s)[NS], u32 x, u32 y) {
        wgmma_abt<BM, D>(s, x, BN * 128, y, BM * 128);
    }
    // acc[64, 64] = ds[BN, 64]ᵀ·k[BN, 64]
    static __device__ __forceinline__ void queries(float (&c)[32], u32 ds, u32 k) { wgmma_atb<64, BN>(c, ds, k); }

    // Adds this warpgroup's part of dq to dq_accum.
    static __device__ __forceinline__ void flush(float (&dq)[32], float step0, float step1, i32* to, int wg) {
        atomic_add_fixed_point(part<16>(dq[0]), step0, step1, to);
        // Of 96 channels the second warpgroup has 32.
        if (D > 64 && D < 128 && wg) return;
        atomic_add_fixed_point(part<16>(dq[16]), step0, step1, to + 16 * 128);
    }

    // PER_HEAD: this block has all keys of the head. It keeps partial dq in scratch of its own, where every thread
    // reads back what it wrote, and stores dq after the last tile of keys. Scratch of all blocks and what they stream is more
    // than the L2 cache holds, so that scratch is what is to stay there.
    struct DqAccumulator {
        // Place in scratch; first query, and in its lowest bits whether this is the first, and the last, tile of keys that
        // contributes; batch and head.
        i32 at = 0, row = 1, pair = 0;
        static __device__ __forceinline__ float4* scratch(const HopperArgs& m) { return reinterpret_cast<float4*>(m.dq_accum); }
        __device__ __forceinline__ void load_guarded(const HopperArgs& m, float4 (&before)[8]) const {
#pragma unroll
            for (int j = 0; j < 8; j++) before[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (!(row & 1)) {
#pragma unroll
                for (int j = 0; j < 8; j++) before[j] = load_evict_last(scratch(m) + at + j * 128);
            }
        }
        __device__ __forceinline__ void flush(const HopperArgs& m, float (&dq)[32], const float4 (&before)[8], int wg) const {
            const AttentionArgs& a = m.a;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                dq[4 * j] += before[j].x;
                dq[4 * j + 1] += before[j].y;
                dq[4 * j + 2] += before[j].z;
                dq[4 * j + 3] += before[j].w;
            }
            if (row & 2) {
                const int self = threadIdx.x & 127, lane = self & 31, warp = self >> 5;
                const i32 batch = pair / a.heads, head = pair - batch * a.heads;
                const i32 i = (row & ~3) + wg * 64 + warp * 16 + (lane >> 2);
                bf16* row0 = i < a.q_len ? row_at<bf16>(a.dq, batch, i, head) : nullptr;
                bf16* row1 = i + 8 < a.q_len ? row_at<bf16>(a.dq, batch, i + 8, head) : nullptr;
                store_rows<64>(dq, row0, row1, a.scale, a.scale, a.d_qk);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    store_evict_last(scratch(m) + at + j * 128, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
            }
        }
    };
    static_assert(!PER_HEAD || W == 64, "a warpgroup has all channels of 64 queries");

    static __device__ __forceinline__ void consume(const HopperArgs& m, u32 base, Bars bars) {
        const AttentionArgs& a = m.a;
        const int wg = warpgroup() - 1, self = threadIdx.x & 127, lane = self & 31, warp = self >> 5;
        const bool first_lane = lane == 0;
        Ring<STAGES> ring;
        u32 tiles = 0, count = 0;
        DqAccumulator own;
        typename Load::Slots slot;
        // Where dq of the query tile before is added in fixed point.
        float step0 = 0.0f, step1 = 0.0f;
        i32* to = nullptr;
        auto keys_at = [&](u32 tile) { return base + K_AT + (PER_HEAD ? (tile & 1) * Load::K_BYTES : 0); };
        const u32 dq_channels = W == 128 ? wg * BN * 128 : 0, dq_ds = W == 128 ? 0 : wg * BN * 128;
        // dq of the last query tile.
        auto last_queries = [&] {
            const u32 before = count - 1;
            float dq[32];
            mbarrier_wait(bars.ds_full(before & 1), (before >> 1) & 1);
            wgmma_fence();
            queries(dq, base + DS_AT + (before & 1) * DS_BYTES + dq_ds, keys_at(tiles - 1) + dq_channels);
            wgmma_commit();
            float4 kept[8];
            if (PER_HEAD) own.load_guarded(m, kept);
            wgmma_wait<0>();
            fence_operand(dq);
            if (first_lane) {
                mbarrier_arrive(bars.ds_free(before & 1));
                if (!PER_HEAD) mbarrier_arrive(bars.kv_free());
            }
            if constexpr (PER_HEAD) own.flush(m, dq, kept, wg);
            else flush(dq, step0, step1, to, wg);
        };
        for (i32 index = 0;; index++) {
            if constexpr (!PER_HEAD) {
                mbarrier_wait(bars.tile_full(slot.stage), slot.phase);
                index = __shfl_sync(~0u, Load::slot_at(slot.stage)->index, 0);
                // An arrival orders only what its own lane has read.
                __syncwarp();
                if (first_lane) mbarrier_arrive(bars.tile_free(slot.stage));
                slot.next();
            }
            if (PER_HEAD ? index >= Load::total(m) : index < 0) break;
            const HopperTile p = Load::place(m, index);
            const i32 w0 = p.first + wg * 64;
            float dk[ND], dv[ND];
#pragma unroll
            for (int i = 0; i < ND; i++) dk[i] = dv[i] = 0.0f;
            if (p.from < p.to) {
                const u32 k_at = keys_at(tiles), v_at = base + V_AT;
                if constexpr (PER_HEAD) mbarrier_wait(bars.k_full(tiles & 1), (tiles >> 1) & 1);
                else mbarrier_wait(bars.kv_full(), tiles & 1);
                if (a.items && p.k_len - p.first < BN) {
                    zero_rows<BN, COLUMNS>(k_at, p.k_len - p.first, self);
                    zero_rows<BN, COLUMNS>(v_at, p.k_len - p.first, self);
                    named_barrier_sync(1 + wg, 128);
                }
                int add = 0;
                const i32 step = Load::downwards(index) ? -1 : 1;
                i32 head = p.head * a.group, tile = step < 0 ? p.to - 1 : p.from;
#pragma unroll 1
                for (i32 turn = (p.to - p.from) * a.group; turn > 0; turn--) {
                    const u32 stage = ring.stage, q_at = base + Q_AT + stage * Q_BYTES;
                    const u32 o_at = base + O_AT + stage * Q_BYTES;
                    const i32 q0 = tile * BM;
                    float s[NS], dp[NS], dq[32];
                    u32 x[NS / 2], y[NS / 2];
                    mbarrier_wait(bars.q_full(stage), ring.phase);
                    const bool foreign = a.items && p.q_len - q0 < BM;
                    if (foreign) {
                        zero_rows<BM, COLUMNS>(q_at, p.q_len - q0, self);
                        named_barrier_sync(1 + wg, 128);
                    }
                    wgmma_fence();
                    scores(s, k_at + wg * 8192, q_at);
                    wgmma_commit();
                    if (PER_HEAD) mbarrier_wait(bars.kv_full(), tiles & 1);
                    mbarrier_wait(bars.o_full(stage), ring.phase);
                    if (foreign) {
                        zero_rows<BM, COLUMNS>(o_at, p.q_len - q0, self);
                        named_barrier_sync(1 + wg, 128);
                    }
                    scores(dp, v_at + wg * 8192, o_at);
                    wgmma_commit();
                    wgmma_wait<1>();
                    fence_operand(s);

                    // p = exp(s - lse)
                    const int t = (lane & 3) * 2;
                    const float4* rows = reinterpret_cast<const float4*>(Load::rows_of(stage, 0)) + (lane & 3);
#pragma unroll
                    for (int i = 0; i < NS; i += 8) {
                        const float4 w = rows[(i / 32) * 48 + (i % 32) / 2];
#pragma unroll
                        for (int e = 0; e < 8; e++)
                            s[i + e] = fast_exp2(fmaf(s[i + e], a.inner, -(e & 4 ? (e & 1 ? w.w : w.z) : (e & 1 ? w.y : w.x))));
                    }
                    if (q0 < w0 + 63 - p.off - a.right || q0 + BM - 1 > min(w0 - p.off + a.left, p.q_len - 1) ||
                        w0 + 63 >= p.k_len) {
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            // Queries that see this key, relative to this thread's first query of the tile.
                            const i32 key = w0 + warp * 16 + r * 8 + (lane >> 2), j = key - p.off;
                            const i32 lo = j - a.right - q0 - t;
                            const i32 hi = key < p.k_len ? min(j + a.left, p.q_len - 1) - q0 - t : -1;
#pragma unroll
                            for (int i = 0; i < NS / 4; i++)
#pragma unroll
                                for (int e = 0; e < 2; e++)
                                    if (i * 8 + e < lo || i * 8 + e > hi) s[i * 4 + r * 2 + e] = 0.0f;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < NS / 2; i++) x[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
                    wgmma_fence();
                    wgmma_ab<D, BM>(dv, x, o_at, add);
                    wgmma_commit();
                    float4 kept[8];
                    if (PER_HEAD) own.load_guarded(m, kept);
                    wgmma_wait<1>();
                    fence_operand(dp);
                    if (PER_HEAD && turn == 1 && first_lane) mbarrier_arrive(bars.kv_free());

                    // ds = p·(dp - delta)
                    const float4* deltas = reinterpret_cast<const float4*>(Load::rows_of(stage, 1)) + (lane & 3);
#pragma unroll
                    for (int i = 0; i < NS; i += 8) {
                        const float4 d = deltas[(i / 32) * 48 + (i % 32) / 2];
#pragma unroll
                        for (int e = 0; e < 8; e++) {
                            const u32 two = x[(i + e) / 2];
                            const float p = SHORT ? (e & 1 ? high_bf16(two) : low_bf16(two)) : s[i + e];
                            dp[i + e] = p * (dp[i + e] - (e & 4 ? (e & 1 ? d.w : d.z) : (e & 1 ? d.y : d.x)));
                        }
                    }
#pragma unroll
                    for (int i = 0; i < NS / 2; i++) y[i] = pack_bf16(dp[2 * i], dp[2 * i + 1]);
                    const u32 side = count & 1, previous = side ^ 1;
                    mbarrier_wait(bars.ds_free(side), ((count >> 1) & 1) ^ 1);
                    {
                        const int row = wg * 64 + warp * 16 + (lane & 15);
                        const u32 at = base + DS_AT + side * DS_BYTES + row * 128;
#pragma unroll
                        for (int i = 0; i < BM / 16; i++) {
                            const int chunk = 2 * i + (lane >> 4);
                            stmatrix(at + (i >> 2) * BN * 128 + (((chunk & 7) ^ (row & 7)) << 4), y[4 * i], y[4 * i + 1],
                                 y[4 * i + 2], y[4 * i + 3]);
                        }
                        fence_proxy_async();
                        __syncwarp();
                        if (first_lane) mbarrier_arrive(bars.ds_full(side));
                    }
                    // Whether there is a query tile before.
                    const bool pending = PER_HEAD ? count > 0 : add;
                    if (pending) mbarrier_wait(bars.ds_full(previous), ((count - 1) >> 1) & 1);
                    wgmma_fence();
                    // In the first iteration the result is discarded: a branch here would cost more.
                    queries(dq, base + DS_AT + previous * DS_BYTES + dq_ds, keys_at(tiles - !add) + dq_channels);
                    wgmma_commit();
                    wgmma_ab<D, BM>(dk, y, q_at, add);
                    wgmma_commit();
                    wgmma_wait<1>();
                    fence_operand(dv);
                    fence_operand(x);
                    fence_operand(dq);
                    if (first_lane) mbarrier_arrive(bars.o_free(stage));
                    if (pending) {
                        if (first_lane) {
                            mbarrier_arrive(bars.ds_free(previous));
                            if (PER_HEAD && !add) mbarrier_arrive(bars.k_free(~tiles & 1));
                        }
                        if constexpr (PER_HEAD) own.flush(m, dq, kept, wg);
                        else flush(dq, step0, step1, to, wg);
                    }
                    if constexpr (PER_HEAD) {
                        own.at = ((i32(blockIdx.x) * a.group + (head - p.head * a.group)) * m.padded + q0) * (W / 4) + wg * 1024 + self;
                        own.row = q0 | i32(p.first / BN == max(q0 + p.off - a.left, 0) / BN) |
                                  i32(p.first / BN == min(q0 + BM - 1 + p.off + a.right, p.k_len - 1) / BN) << 1;
                        own.pair = p.batch * a.heads + head;
                    } else {
                        const float* steps = Load::rows_of(stage, 2) + (W == 128 ? 0 : wg * 192) + warp * 16 + (lane >> 2);
                        step0 = steps[0];
                        step1 = steps[8];
                        to = reinterpret_cast<i32*>(m.dq_accum) +
                             (((i64(p.batch) * a.heads + head) * m.padded + p.row + q0) * W + wg * 4096 + self * 2);
                    }
                    add = 1;
                    count++;
                    if (++head == (p.head + 1) * a.group) head = p.head * a.group, tile += step;
                    wgmma_wait<0>();
                    fence_operand(dk);
                    fence_operand(y);
                    __syncwarp();
                    if (first_lane) mbarrier_arrive(bars.q_free(stage));
                    ring.next();
                }
                tiles++;
                if (!PER_HEAD) last_queries();
            }
            bf16 *k_row[2], *v_row[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const i32 j = w0 + warp * 16 + r * 8 + (lane >> 2);
                k_row[r] = j < p.k_len ? row_at<bf16>(a.dk, p.batch, p.k_start + j, p.head) : nullptr;
                v_row[r] = j < p.k_len ? row_at<bf16>(a.dv, p.batch, p.k_start + j, p.head) : nullptr;
            }
            store_rows<D>(dv, v_row[0], v_row[1], 1.0f, 1.0f, a.d_v);
            store_rows<D>(dk, k_row[0], k_row[1], a.scale, a.scale, a.d_qk);
        }
        if (PER_HEAD && count > 0) last_queries();
    }

    static __device__ __forceinline__ void run(const HopperArgs& m) {
        const u32 base = shared_address(attention_shared);
        const Bars bars = {base};
        if (threadIdx.x == 0) Load::init(bars);
        __syncthreads();
        if (threadIdx.x < 128) {
            setmaxnreg_dec<24>();
            if (threadIdx.x < 32) Load::produce(m, base, bars);
            else if (threadIdx.x < 64) Load::choose(m, bars);
        } else {
            setmaxnreg_inc<240>();
            consume(m, base, bars);
        }
    }
};

#define HOPPER_BACKWARD(NAME, D, BM, SHORT, PER_HEAD)                                                      \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ HopperArgs m) {     \
        HopperBackward<D, BM, SHORT, PER_HEAD>::run(m);                                                    \
    }

HOPPER_BACKWARD(attention_hopper_backward_64_bf16, 64, 128, true, false)
HOPPER_BACKWARD(attention_hopper_backward_per_head_64_bf16, 64, 128, true, true)
HOPPER_BACKWARD(attention_hopper_backward_96_bf16, 96, 64, false, false)
HOPPER_BACKWARD(attention_hopper_backward_128_bf16, 128, 64, false, false)
