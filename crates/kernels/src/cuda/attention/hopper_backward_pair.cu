// Backward pass for Hopper with 192 channels of q and k and 128 of v (multi-head latent attention): a cluster of two
// persistent blocks has 128 keys of one key head, each block 64, and streams the queries that see them, 64 at a time.
// Within a block three warpgroups have a gradient each:
//
//   first:   s = k·qᵀ, p = exp(s - lse), dv += p·dout
//   second:  dp = v·doutᵀ, ds = p·(dp - delta), dk += ds·q
//   third:   dq = dsᵀ·k
//
// p and ds are A operands as they lie in registers; the first passes p to the second through shared memory, as in
// hopper_backward_wide.cu. What a block of 64 keys adds to dq is 48 KiB for 64 queries, so a pair of blocks adds once: each
// copies its ds to the other's shared memory (8 KiB), and computes half of the channels of dq over all 128 keys. The second
// warpgroup waits for nothing of that: dq and its atomics are off the path from one query tile to the next. Queries and dout
// are loaded once for both blocks.
//
// Arrivals in the other block are those of pipelines of TMA: they tell that wgmma has read shared memory. An arrival with
// release at cluster scope would also wait for all atomics of the thread, which took a sixth of the second warpgroup's time.
//
// dq is accumulated in fixed point over clusters, as in hopper_backward.cu.
#include "attention/hopper_backward_pair_load.cuh"
#include "attention/hopper_backward_wide.cuh"
#include "wgmma.cuh"

struct HopperBackwardPair : HopperBackwardWideParts<HopperBackwardPairLoad<3>, false> {
    using Parts = HopperBackwardWideParts<HopperBackwardPairLoad<3>, false>;
    using Load = Parts::Load;
    using At = Parts::At;
    using Turns = Parts::Turns;
    using Bars = Load::Bars;
    using Parts::free, Parts::free_in_pair, Parts::key_row, Parts::powers, Parts::sums_at;
    static constexpr u32 COLUMN = Load::COLUMN, K_AT = Load::K_AT, OTHER_K_AT = Load::OTHER_K_AT, V_AT = Load::V_AT;

    // The first warpgroup.
    static __device__ __forceinline__ void values_side(const HopperArgs& m, At at) {
        const AttentionArgs& a = m.a;
        const u32 rank = cluster_rank();
        for (i32 index; (index = at.tile()) >= 0;) {
            const HopperTile p = Load::place(m, index);
            float dv[64];
#pragma unroll
            for (int i = 0; i < 64; i++) dv[i] = 0.0f;
            if (p.from < p.to) {
                at.keys(a, p, false, 0);
                float s[32];
                u32 x[16], here;
                int add = 0;
                // Tile whose scores are computed next.
                Ring<3> next = at.ring;
                // Columns of the second block are reversed.
                auto scores = [&] {
                    mbarrier_wait(at.bars.q_full(next.stage), next.phase);
                    const u32 q_at = at.base + Load::Q_AT + next.stage * Load::Q_BYTES;
                    wgmma_fence();
                    const u64 r = desc_k_major(q_at), l = desc_k_major(at.base + K_AT + (rank ? 2 * COLUMN : 0));
                    const u64 step = rank ? u64(0) - (COLUMN >> 4) : u64(COLUMN >> 4);
#pragma unroll
                    for (int i = 0; i < 12; i++)
                        Wgmma<64>::ss<0, 0>(s, l + (i >> 2) * step + (((i & 3) * 32) >> 4),
                                            r + (((i >> 2) * COLUMN + (i & 3) * 32) >> 4), i > 0);
                    wgmma_commit();
                    next.next();
                };
                Turns turn(m, p, Load::downwards(index));
                scores();
#pragma unroll 1
                while (true) {
                    const u32 side = at.count & 1;
                    here = at.ring.stage;
                    wgmma_wait<0>();
                    fence_operand(s);
                    {
                        u32 y[16];
                        powers(a, p, turn.q0, here, s, x, y);
                        mbarrier_wait(at.bars.passed_free(side), ((at.count >> 1) & 1) ^ 1);
                        const u32 passed = at.passed(side);
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            st_shared_v4(passed + i * 2048, y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
                        __syncwarp();
                        free(at.bars.passed_full(side));
                        free_in_pair(at.bars.q_free(here));
                    }
                    mbarrier_wait(at.bars.o_full(at.ring.stage), at.ring.phase);
                    if (a.items && p.q_len - turn.q0 < 64) {
                        zero_rows<64, 2>(at.o(), p.q_len - turn.q0, tid() & 127);
                        named_barrier_sync(1, 128);
                    }
                    wgmma_fence();
                    wgmma_ab<128, 64>(dv, x, at.o(), add);
                    wgmma_commit();
                    add = 1;
                    at.count++;
                    at.ring.next();
                    turn.next(a);
                    if (--turn.left == 0) break;
                    scores();
                    wgmma_wait<1>();
                    fence_operand(dv);
                    fence_operand(x);
                    free_in_pair(at.bars.o_free(here));
                }
                wgmma_wait<0>();
                fence_operand(dv);
                fence_operand(x);
                free_in_pair(at.bars.o_free(here));
                free(at.bars.kv_free());
            }
            store_rows<128>(dv, key_row(a.dv, p, 0), key_row(a.dv, p, 1), 1.0f, 1.0f, a.d_v);
        }
    }

    // The second warpgroup.
    static __device__ __forceinline__ void keys_side(const HopperArgs& m, At at) {
        const AttentionArgs& a = m.a;
        const u32 rank = cluster_rank();
        for (i32 index; (index = at.tile()) >= 0;) {
            const HopperTile p = Load::place(m, index);
            float dk[96];
#pragma unroll
            for (int i = 0; i < 96; i++) dk[i] = 0.0f;
            if (p.from < p.to) {
                at.keys(a, p, true, 1);
                float dp[32];
                u32 y[16], stage;
                int add = 0;
                Turns turn(m, p, Load::downwards(index));
                // Behind the last tile the result is discarded.
                auto scores = [&](bool more) {
                    stage = at.ring.stage;
                    if (more) mbarrier_wait(at.bars.o_full(stage), at.ring.phase);
                    if (more && a.items && p.q_len - turn.q0 < 64) {
                        zero_rows<64, 2>(at.o(), p.q_len - turn.q0, tid() & 127);
                        named_barrier_sync(2, 128);
                    }
                    wgmma_fence();
                    wgmma_abt<64, 128>(dp, at.base + V_AT, COLUMN, at.o(), COLUMN);
                    wgmma_commit();
                };
                scores(true);
#pragma unroll 1
                while (true) {
                    const u32 side = at.count & 1, q_at = at.q(), here = stage;
                    mbarrier_wait(at.bars.q_full(here), at.ring.phase);
                    if (a.items && p.q_len - turn.q0 < 64) {
                        zero_rows<64, 3>(q_at, p.q_len - turn.q0, tid() & 127);
                        named_barrier_sync(2, 128);
                    }
                    mbarrier_wait(at.bars.passed_full(side), (at.count >> 1) & 1);
                    {
                        const u32 from = at.passed(side);
#pragma unroll
                        for (int i = 0; i < 16; i += 4) ld_shared_v4(from + i * 512, y[i], y[i + 1], y[i + 2], y[i + 3]);
                    }
                    wgmma_wait<0>();
                    fence_operand(dp);
                    free_in_pair(at.bars.o_free(here));
                    const float4* deltas = reinterpret_cast<const float4*>(Load::rows_of(here, 1)) + (tid() & 3);
#pragma unroll
                    for (int i = 0; i < 32; i += 8) {
                        const float4 d = deltas[i / 2];
#pragma unroll
                        for (int e = 0; e < 8; e += 2) {
                            const u32 two = y[(i + e) / 2];
                            y[(i + e) / 2] = pack_bf16(low_bf16(two) * (dp[i + e] - (e & 4 ? d.z : d.x)),
                                                       high_bf16(two) * (dp[i + e + 1] - (e & 4 ? d.w : d.y)));
                        }
                    }
                    __syncwarp();
                    free(at.bars.passed_free(side));
                    // Both third warpgroups have used ds of two tiles ago, here and what was copied from here.
                    mbarrier_wait(at.bars.ds_free(side), ((at.count >> 1) & 1) ^ 1);
                    {
                        const int self = tid() & 127, lane = self & 31, row = (self >> 5) * 16 + (lane & 15);
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            stmatrix(at.ds(side) + row * 128 + (((2 * i + (lane >> 4)) ^ (row & 7)) << 4), y[4 * i],
                                 y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
                    }
                    fence_proxy_async();
                    named_barrier_sync(2, 128);
                    if ((tid() & 127) == 0) {
                        mbarrier_arrive_expect_tx(at.bars.ds_full(side), COLUMN);
                        bulk_copy_to_block(at.ds(side) + COLUMN, at.ds(side), COLUMN, at.bars.ds_full(side), rank ^ 1);
                    }
                    wgmma_fence();
                    wgmma_ab<192, 64>(dk, y, q_at, add);
                    wgmma_commit();
                    at.ring.next();
                    turn.next(a);
                    at.count++;
                    turn.left--;
                    scores(turn.left > 0);
                    add = 1;
                    wgmma_wait<1>();
                    fence_operand(dk);
                    fence_operand(y);
                    __syncwarp();
                    free_in_pair(at.bars.q_free(here));
                    if (turn.left == 0) break;
                }
                wgmma_wait<0>();
                free(at.bars.kv_free());
            }
            store_rows<192>(dk, key_row(a.dk, p, 0), key_row(a.dk, p, 1), a.scale, a.scale, a.d_qk);
        }
    }

    // The third warpgroup: this block's channels of dq from both blocks' ds. It adds dq of a tile while that of the next is computed.
    static __device__ __forceinline__ void queries_side(const HopperArgs& m, At at) {
        const AttentionArgs& a = m.a;
        const int self = tid() & 127;
        for (i32 index; (index = at.tile()) >= 0;) {
            const HopperTile p = Load::place(m, index);
            if (p.from >= p.to) continue;
            at.keys(a, p, true, 2);
            float even[48], odd[48], step0 = 0.0f, step1 = 0.0f;
            i32* to = nullptr;
            Turns turn(m, p, Load::downwards(index));
            // Channels [0, 96) are the first 48 registers of a tile of dq_accum; [128, 192) the last 32 and [96, 128)
            // those from 48 on.
            auto flush = [&](float (&dq)[48]) {
                const u32 rank = cluster_rank();
                atomic_add_fixed_point(part<32>(dq[0]), step0, step1, to + (rank ? 64 * 128 : 0));
                atomic_add_fixed_point(part<16>(dq[32]), step0, step1, to + (rank ? 48 * 128 : 32 * 128));
            };
            auto tile = [&](float (&dq)[48], float (&before)[48], bool pending) {
                const u32 side = at.count & 1, column = Load::dq_column();
                // Not from the stage of the queries, which need not wait for this warpgroup.
                const float* steps = reinterpret_cast<const float*>(a.lse_log2) +
                                     ((i64(p.batch) * a.heads + turn.head) * m.padded + p.row + turn.q0) * 3 + 128 +
                                     (self >> 5) * 16 + ((self & 31) >> 2);
                const float next0 = steps[0], next1 = steps[8];
                mbarrier_wait(at.bars.ds_full(side), (at.count >> 1) & 1);
                wgmma_fence();
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u64 l = desc_mn_major(at.ds(side) + half * COLUMN, COLUMN);
                    const u64 r = desc_mn_major(at.base + (half ? OTHER_K_AT : K_AT), column);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        Wgmma<96>::ss<1, 1>(dq, l + ((i * 2048) >> 4), r + ((i * 2048) >> 4), half + i > 0);
                }
                wgmma_commit();
                if (pending) flush(before);
                step0 = next0;
                step1 = next1;
                to = sums_at(m, p, turn.head, turn.q0);
                wgmma_wait<0>();
                fence_operand(dq);
                free_in_pair(at.bars.ds_free(side));
                at.count++;
                turn.next(a);
                if (--turn.left == 0) free(at.bars.kv_free());
            };
#pragma unroll 1
            for (bool pending = false;; pending = true) {
                tile(even, odd, pending);
                if (turn.left == 0) {
                    flush(even);
                    break;
                }
                tile(odd, even, true);
                if (turn.left == 0) {
                    flush(odd);
                    break;
                }
            }
        }
    }

    // Registers of a thread of each warpgroup. With one more the last to ask would wait for ever.
    static constexpr int LOAD_REGISTERS = 24, VALUES_REGISTERS = 160, KEYS_REGISTERS = 184, QUERIES_REGISTERS = 144;
    static_assert((LOAD_REGISTERS + VALUES_REGISTERS + KEYS_REGISTERS + QUERIES_REGISTERS) * 128 <= 65536, "registers of a multiprocessor");

    static __device__ __forceinline__ void run(const HopperArgs& m) {
        const u32 base = shared_address(attention_shared);
        const Bars bars = {base};
        if (threadIdx.x == 0) Load::init(bars);
        cluster_sync();
        if (threadIdx.x < 128) {
            setmaxnreg_dec<LOAD_REGISTERS>();
            if (threadIdx.x < 32) Load::produce(m, base, bars);
            else if (threadIdx.x < 64 && cluster_rank() == 0) Load::choose(m, base, bars);
        } else {
            if (warpgroup() == 1) {
                setmaxnreg_inc<VALUES_REGISTERS>();
                values_side(m, {base, bars});
            } else if (warpgroup() == 2) {
                setmaxnreg_inc<KEYS_REGISTERS>();
                keys_side(m, {base, bars});
            } else {
                setmaxnreg_inc<QUERIES_REGISTERS>();
                queries_side(m, {base, bars});
            }
        }
        // A block must not exit while the other may still write to its shared memory.
        cluster_sync();
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1)
    attention_hopper_backward_192_bf16(const __grid_constant__ HopperArgs m) {
    HopperBackwardPair::run(m);
}
