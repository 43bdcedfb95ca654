// Backward pass for Hopper where heads are wide or logits have a soft cap: a persistent block has 64 keys of one key
// head and streams the queries that see them, 64 at a time. Accumulators of 64 keys are as much as a warpgroup holds,
// so the two consumers do not split the keys but the gradients:
//
//   first:  s = k·qᵀ, p = exp(s - lse), dv += p·dout
//   second: dp = v·doutᵀ, ds = p·(dp - delta), dk += ds·q
//
// Scores are computed transposed, keys × queries, so that p and ds are A operands as they lie in registers. The first
// passes p (times the derivative of the soft cap) to the second through shared memory, thread to thread, because both
// hold the same elements; ds goes to shared memory for dq = dsᵀ·k, of whose channels each computes a part. Neither
// waits for the other within a tile: the first computes its part of dq one tile later.
//
// dq is accumulated in fixed point over blocks, as in hopper_backward.cu.
#include "attention/hopper_backward_load.cuh"
#include "attention/hopper_backward_wide.cuh"
#include "wgmma.cuh"

template <int DQ, int DV, int STAGES, bool CAP>
struct HopperBackwardWide : HopperBackwardWideParts<HopperBackwardLoad<DQ, DV, 64, 64, STAGES, false, 8192>, CAP> {
    using Parts = HopperBackwardWideParts<HopperBackwardLoad<DQ, DV, 64, 64, STAGES, false, 8192>, CAP>;
    using Load = typename Parts::Load;
    using At = typename Parts::At;
    using Turns = typename Parts::Turns;
    using Bars = typename Load::Bars;
    using Parts::free, Parts::key_row, Parts::powers, Parts::steps_at, Parts::sums_at;
    static constexpr int COLUMNS = Load::COLUMNS, V_COLUMNS = Load::V_COLUMNS;
    // Channels of dq: the first warpgroup has 128 where there are as many.
    static constexpr int FIRST = DQ > 128 ? 128 : 64, SECOND = DQ - FIRST;
    static constexpr u32 COLUMN = 64 * 128;  // bytes of 64 channels of a tile
    static constexpr u32 K_AT = Load::K_AT, V_AT = Load::V_AT;

    // The first warpgroup. The GEMM of the next scores is issued before that of this tile is waited for.
    static __device__ __forceinline__ void values_side(const HopperArgs& m, At at) {
        const AttentionArgs& a = m.a;
        for (i32 index; (index = at.tile()) >= 0;) {
            const HopperTile p = Load::place(m, index);
            float dv[DV / 2];
#pragma unroll
            for (int i = 0; i < DV / 2; i++) dv[i] = 0.0f;
            if (p.from < p.to) {
                at.keys(a, p, false, 0);
                float s[32], dq[FIRST / 2], step0 = 0.0f, step1 = 0.0f;
                u32 x[16], stage;
                i32* to = nullptr;
                int add = 0;
                auto scores = [&] {
                    stage = at.ring.stage;
                    mbarrier_wait(at.bars.q_full(stage), at.ring.phase);
                    wgmma_fence();
                    wgmma_abt<64, DQ>(s, at.base + K_AT, COLUMN, at.q(), COLUMN);
                    wgmma_commit();
                };
                Turns turn(m, p, Load::downwards(index));
                scores();
#pragma unroll 1
                while (true) {
                    const u32 side = at.count & 1, last = side ^ 1, o_at = at.o(), here = stage;
                    float next0, next1;
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
                        steps_at(here, next0, next1);
                        __syncwarp();
                        free(at.bars.passed_full(side));
                        free(at.bars.q_free(here));
                    }
                    mbarrier_wait(at.bars.o_full(here), at.ring.phase);
                    if (a.items && p.q_len - turn.q0 < 64) {
                        zero_rows<64, V_COLUMNS>(o_at, p.q_len - turn.q0, tid() & 127);
                        named_barrier_sync(1, 128);
                    }
                    if (add) mbarrier_wait(at.bars.ds_full(last), ((at.count - 1) >> 1) & 1);
                    wgmma_fence();
                    // In the first iteration the result is discarded.
                    wgmma_atb<FIRST, 64>(dq, at.ds(last), at.base + K_AT);
                    wgmma_commit();
                    wgmma_ab<DV, 64>(dv, x, o_at, add);
                    wgmma_commit();
                    wgmma_wait<1>();
                    fence_operand(dq);
                    if (add) {
                        free(at.bars.ds_free(last));
                        atomic_add_fixed_point(dq, step0, step1, to);
                    }
                    step0 = next0;
                    step1 = next1;
                    to = sums_at(m, p, turn.head, turn.q0);
                    add = 1;
                    at.count++;
                    at.ring.next();
                    turn.next(a);
                    if (--turn.left == 0) break;
                    scores();
                    wgmma_wait<1>();
                    fence_operand(dv);
                    fence_operand(x);
                    free(at.bars.o_free(here));
                }
                wgmma_wait<0>();
                fence_operand(dv);
                fence_operand(x);
                free(at.bars.o_free(stage));
                const u32 before = at.count - 1;
                mbarrier_wait(at.bars.ds_full(before & 1), (before >> 1) & 1);
                wgmma_fence();
                wgmma_atb<FIRST, 64>(dq, at.ds(before & 1), at.base + K_AT);
                wgmma_commit();
                wgmma_wait<0>();
                fence_operand(dq);
                free(at.bars.ds_free(before & 1));
                free(at.bars.kv_free());
                atomic_add_fixed_point(dq, step0, step1, to);
            }
            store_rows<DV>(dv, key_row(a.dv, p, 0), key_row(a.dv, p, 1), 1.0f, 1.0f, a.d_v);
        }
    }

    // The second warpgroup.
    static __device__ __forceinline__ void keys_side(const HopperArgs& m, At at) {
        const AttentionArgs& a = m.a;
        for (i32 index; (index = at.tile()) >= 0;) {
            const HopperTile p = Load::place(m, index);
            float dk[DQ / 2];
#pragma unroll
            for (int i = 0; i < DQ / 2; i++) dk[i] = 0.0f;
            if (p.from < p.to) {
                at.keys(a, p, true, 1);
                float dp[32];
                u32 y[16], stage;
                int add = 0;
                Turns turn(m, p, Load::downwards(index));
                auto foreign = [&] { return a.items && p.q_len - turn.q0 < 64; };
                auto scores = [&] {
                    stage = at.ring.stage;
                    mbarrier_wait(at.bars.o_full(stage), at.ring.phase);
                    if (foreign()) {
                        zero_rows<64, V_COLUMNS>(at.o(), p.q_len - turn.q0, tid() & 127);
                        named_barrier_sync(2, 128);
                    }
                    wgmma_fence();
                    wgmma_abt<64, DV>(dp, at.base + V_AT, COLUMN, at.o(), COLUMN);
                    wgmma_commit();
                };
                scores();
#pragma unroll 1
                while (true) {
                    const u32 side = at.count & 1, q_at = at.q(), here = stage;
                    float dq[SECOND / 2];
                    mbarrier_wait(at.bars.q_full(here), at.ring.phase);
                    if (foreign()) {
                        zero_rows<64, COLUMNS>(q_at, p.q_len - turn.q0, tid() & 127);
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
                    free(at.bars.o_free(here));
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
                    free(at.bars.ds_full(side));
                    float step0, step1;
                    steps_at(here, step0, step1);
                    wgmma_fence();
                    wgmma_atb<SECOND, 64>(dq, at.ds(side), at.base + K_AT + FIRST * 128);
                    wgmma_commit();
                    wgmma_ab<DQ, 64>(dk, y, q_at, add);
                    wgmma_commit();
                    wgmma_wait<1>();
                    fence_operand(dq);
                    free(at.bars.ds_free(side));
                    atomic_add_fixed_point(dq, step0, step1, sums_at(m, p, turn.head, turn.q0) + FIRST * 64);
                    add = 1;
                    at.count++;
                    at.ring.next();
                    turn.next(a);
                    if (--turn.left == 0) break;
                    scores();
                    wgmma_wait<1>();
                    fence_operand(dk);
                    fence_operand(y);
                    __syncwarp();
                    free(at.bars.q_free(here));
                }
                wgmma_wait<0>();
                fence_operand(dk);
                fence_operand(y);
                __syncwarp();
                free(at.bars.q_free(stage));
                free(at.bars.kv_free());
            }
            store_rows<DQ>(dk, key_row(a.dk, p, 0), key_row(a.dk, p, 1), a.scale, a.scale, a.d_qk);
        }
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
            if (warpgroup() == 1) values_side(m, {base, bars});
            else keys_side(m, {base, bars});
        }
    }
};

#define HOPPER_BACKWARD_WIDE(NAME, ...)                                                                        \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ HopperArgs m) {     \
        HopperBackwardWide<__VA_ARGS__>::run(m);                                                              \
    }

// Channels of keys and of values, query stages, soft cap.
HOPPER_BACKWARD_WIDE(attention_hopper_backward_256_bf16, 256, 256, 2, false)
HOPPER_BACKWARD_WIDE(attention_hopper_backward_capped_128_bf16, 128, 128, 3, true)
HOPPER_BACKWARD_WIDE(attention_hopper_backward_capped_256_bf16, 256, 256, 2, true)
