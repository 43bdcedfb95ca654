// Backward pass with mma.sync in one kernel: a block has BN keys of one key head and streams the queries that see them,
// BM at a time. Scores are computed transposed, keys × queries, so that p and ds are A operands of dv += pᵀ·dout and
// dk += dsᵀ·q as they lie in registers; for dq = ds·k, ds goes through shared memory.
//
// Two warps share 32 keys, since accumulators of dk and dv together would not fit the registers of one:
//
// | warp  | first phase                                | second phase                                     |
// |-------|--------------------------------------------|--------------------------------------------------|
// | of dv | s = k·qᵀ, p = exp(s - lse), p to the other | dv += pᵀ·dout; dq of the tile before             |
// | of dk | dq of the tile before; dp = v·doutᵀ        | ds = p·(dp - delta) in place of p; dk += dsᵀ·q   |
//
// dq is added to dq_accum in fixed point, as in hopper_backward.cu, whose preprocessing and conversion it shares.
#include "attention/hopper_common.cuh"

// Head and first query of a tile.
struct Turn {
    i32 head, q0;
};
// The last four tiles, after the block's own in shared memory.
__device__ __forceinline__ Turn& turn_at(i32 turn) { return reinterpret_cast<Turn*>(attention_shared + 64)[turn & 3]; }
static_assert(sizeof(HopperTile) <= 64 && 64 + 4 * sizeof(Turn) <= PLACE, "both fit");

// STAGES: buffers of dout. With one, its tile arrives while the warps of dk multiply for dq.
template <int D, int BM, int PAIRS, int STAGES> struct Fused {
    static constexpr int WARPS = 2 * PAIRS, THREADS = WARPS * 32, BN = PAIRS * 32;
    // Bytes of a row of ds.
    static constexpr int ROW = BM * 2;
    static_assert(BM % 64 == 0, "rows are multiples of 128 bytes");
    static constexpr u32 K_BYTES = BN * D * 2, Q_BYTES = BM * D * 2, DS_BYTES = BN * ROW, ROWS_BYTES = BM * 12;
    static constexpr u32 V_AT = PLACE + K_BYTES, Q_AT = V_AT + K_BYTES, O_AT = Q_AT + 2 * Q_BYTES;
    static constexpr u32 DS_AT = O_AT + STAGES * Q_BYTES, ROWS_AT = DS_AT + 2 * DS_BYTES, BYTES = ROWS_AT + 3 * ROWS_BYTES;
    // A warp's part of dq: 32 rows, CQ channels.
    static constexpr int CQ = D / (WARPS / (BM / 32));
    static_assert(CQ % 16 == 0, "whole fragments");

    // Named barriers: the warps of dk have their parts of dout; the warps of dv may read it; a pair's p is stored.
    static constexpr int DOUT_LOADED = 1, DOUT_READY = 2, P_READY = 3;

    static __device__ __forceinline__ void zero(float (&c)[4]) { c[0] = c[1] = c[2] = c[3] = 0.0f; }

    // dq[32, CQ] = ds[BN, 32]ᵀ·k[BN, CQ], added to dq_accum.
    static __device__ __forceinline__ void add_dq(const HopperArgs& m, const HopperTile& p, u32 base, i32 turn) {
        const AttentionArgs& a = m.a;
        const int self = tid(), lane = self & 31, warp = self >> 5;
        const int rq = warp % (BM / 32), cq = warp / (BM / 32);
        const u32 ds_at = k_step(b_fragment<BM>(base + DS_AT + (turn & 1) * DS_BYTES, lane), rq * 2);
        const u32 k_at = k_step(b_fragment_trans<D>(base + PLACE, lane), cq * (CQ / 16));
        float dq[2][CQ / 8][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < CQ / 8; n++) zero(dq[i][n]);
#pragma unroll
        for (int k = 0; k < BN / 16; k++) {
            u32 x[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) ldmatrix_trans(x[i], k_step(ds_at, i) + k * 16 * ROW);
#pragma unroll
            for (int n = 0; n < CQ / 16; n++) {
                u32 y[4];
                ldmatrix_trans(y, k_step(k_at, n) + k * 16 * D * 2);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma(dq[i][2 * n], x[i], y[0], y[1]);
                    mma(dq[i][2 * n + 1], x[i], y[2], y[3]);
                }
            }
        }
        const i32 head = turn_at(turn).head, q0 = turn_at(turn).q0 + rq * 32;
        const float* steps =
            reinterpret_cast<const float*>(attention_shared + ROWS_AT + turn % 3 * ROWS_BYTES) + 2 * BM + rq * 32 + (lane >> 2);
        // 64 rows after another, 64 channels after another, 16 rows to 32 lanes, two channels to a lane.
        i32* to = reinterpret_cast<i32*>(m.dq_accum) +
                  (((i64(p.batch) * a.heads + head) * m.padded + p.row + (q0 & ~63)) * D + cq * CQ * 64 +
                   ((q0 & 32) * 2 + lane) * 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float step0 = steps[i * 16], step1 = steps[i * 16 + 8];
#pragma unroll
            for (int n = 0; n < CQ / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e += 2)
                    atomic_add_fixed_point(to + (n * 4 + e) * 128 + i * 64, dq[i][n][e], dq[i][n][e + 1], e & 2 ? step1 : step0);
        }
    }

    static __device__ __forceinline__ void run(const HopperArgs& m) {
        const AttentionArgs& a = m.a;
        if (past_last_tile(a)) return;
        if (threadIdx.x == 0) {
            HopperTile p = hopper_tile(m, blockIdx.x, a.heads / a.group, BN, false);
            const i32 last = min(p.first + BN, p.k_len) - 1;
            p.from = max(p.first - p.off - a.right, 0) / BM;
            p.to = (min(last - p.off + a.left, p.q_len - 1) + BM) / BM;
            *reinterpret_cast<HopperTile*>(attention_shared) = p;
        }
        __syncthreads();
        const HopperTile& p = *reinterpret_cast<const HopperTile*>(attention_shared);
        const u32 base = shared_address(attention_shared);
        // Whether this warp has dk, or dv.
        auto has_dk = [] { return tid() >= THREADS / 2; };
        // Tiles of all heads of the group, read again from shared memory at every call.
        auto turns = [&] { return max(p.to - p.from, 0) * a.group; };

        // One head of the group after another: blocks of the same head that run together share its queries in L2.
        auto load_q = [&](i32 turn) {
            Turn at = {p.head * a.group, p.from * BM};
            if (turn > 0) {
                at = turn_at(turn - 1);
                at.q0 += BM;
                if (at.q0 >= p.to * BM) at.head++, at.q0 = p.from * BM;
            }
            load_tile<BM, D, STAGES == 1 ? THREADS / 2 : THREADS>(
                base + Q_AT + (turn & 1) * Q_BYTES, row_at<element>(a.q, p.batch, p.q_start + at.q0, at.head), a.q.token,
                p.q_len - at.q0, a.d_qk, true);
            const int self = tid();
            if (self < 3 * BM / 4) {
                const i32 piece = self / (BM / 4), r = self % (BM / 4) * 4;
                const float* rows = reinterpret_cast<const float*>(a.lse_log2) +
                                    ((i64(p.batch) * a.heads + at.head) * m.padded + p.row + ((at.q0 + r) & ~63)) * 3;
                cp_async_16(base + ROWS_AT + turn % 3 * ROWS_BYTES + (piece * BM + r) * 4, rows + piece * 64 + ((at.q0 + r) & 63));
            }
            if (self == 0) turn_at(turn) = at;
            return at;
        };
        auto load_dout = [&](i32 turn, Turn at) {
            load_tile<BM, D, STAGES == 1 ? THREADS / 2 : THREADS>(
                base + O_AT + turn % STAGES * Q_BYTES, row_at<element>(a.dout, p.batch, p.q_start + at.q0, at.head), a.dout.token,
                p.q_len - at.q0, a.d_v, true, tid() - (STAGES == 1 ? THREADS / 2 : 0));
        };
        static_assert(STAGES == 2 || 3 * BM / 4 <= THREADS / 2, "the warps of dv load all rows");

        float acc[2][D / 8][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < D / 8; n++) zero(acc[i][n]);

        if (turns() > 0) {
            load_tile<BN, D, THREADS>(base + PLACE, row_at<element>(a.k, p.batch, p.k_start + p.first, p.head), a.k.token,
                                      p.k_len - p.first, a.d_qk, true);
            load_tile<BN, D, THREADS>(base + V_AT, row_at<element>(a.v, p.batch, p.k_start + p.first, p.head), a.v.token,
                                      p.k_len - p.first, a.d_v, true);
            if (STAGES == 2) load_dout(0, load_q(0));
            else if (!has_dk()) load_q(0);
            cp_async_commit();
        }
#pragma unroll 1
        for (i32 turn = 0; turn < turns(); turn++) {
            cp_async_wait_all();
            __syncthreads();
            const bool second = has_dk();
            if (STAGES == 2) {
                if (turn + 1 < turns()) load_dout(turn + 1, load_q(turn + 1));
            } else if (second) {
                load_dout(turn, turn_at(turn));
            } else if (turn + 1 < turns()) {
                load_q(turn + 1);
            }
            cp_async_commit();
            const u32 q_at = base + Q_AT + (turn & 1) * Q_BYTES, o_at = base + O_AT + turn % STAGES * Q_BYTES;
            const float4* rows = reinterpret_cast<const float4*>(attention_shared + ROWS_AT + turn % 3 * ROWS_BYTES);
            // Where this lane's pairs of p and ds lie: the pair of query chunk c is at `pairs() ^ (c << 4)`.
            auto pairs = [&] {
                const int self = tid(), g = (self & 31) >> 2;
                return base + DS_AT + (turn & 1) * DS_BYTES + (self / 32 % PAIRS * 32 + g) * ROW + (g << 4) + (self & 3) * 4;
            };
            if (second) {
                if (turn > 0) add_dq(m, p, base, turn - 1);
                if (STAGES == 1) {
                    cp_async_wait_all();
                    named_barrier_sync(DOUT_LOADED, THREADS / 2);
                    named_barrier_arrive(DOUT_READY, THREADS);
                }
            }
            float s[2][BM / 8][4];
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int n = 0; n < BM / 8; n++) zero(s[i][n]);
            {
                const int self = tid();
                const u32 x_at = a_fragment<D>(base + (second ? V_AT : PLACE), self & 31, self / 32 % PAIRS * 32);
                const u32 y_at = b_fragment<D>(second ? o_at : q_at, self & 31);
#pragma unroll
                for (int k = 0; k < D / 16; k++) {
                    u32 x[2][4];
#pragma unroll
                    for (int i = 0; i < 2; i++) ldmatrix(x[i], k_step(x_at, k) + i * 16 * D * 2);
#pragma unroll
                    for (int n = 0; n < BM / 16; n++) {
                        u32 y[4];
                        ldmatrix(y, k_step(y_at, k) + n * 16 * D * 2);
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            mma(s[i][2 * n], x[i], y[0], y[1]);
                            mma(s[i][2 * n + 1], x[i], y[2], y[3]);
                        }
                    }
                }
            }
            u32 x[2][BM / 16][4];
            if (!second) {
                const int self = tid(), g = (self & 31) >> 2, t = (self & 3) * 2;
                const u32 ds_at = pairs();
                const i32 q0 = turn_at(turn).q0, w0 = p.first + self / 32 % PAIRS * 32;
#pragma unroll
                for (int n = 0; n < BM / 16; n++) {
                    const float4 w = rows[n * 4 + (self & 3)];
#pragma unroll
                    for (int i = 0; i < 2; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            s[i][2 * n][e] = fast_exp2(fmaf(s[i][2 * n][e], a.inner, -(e & 1 ? w.y : w.x)));
                            s[i][2 * n + 1][e] = fast_exp2(fmaf(s[i][2 * n + 1][e], a.inner, -(e & 1 ? w.w : w.z)));
                        }
                }
                if (q0 < w0 + 31 - p.off - a.right || q0 + BM - 1 > min(w0 - p.off + a.left, p.q_len - 1) ||
                    w0 + 31 >= p.k_len) {
#pragma unroll
                    for (int i = 0; i < 2; i++)
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            // Queries that see this key, relative to this thread's first query of the tile.
                            const i32 key = w0 + i * 16 + r * 8 + g, j = key - p.off;
                            const i32 lo = j - a.right - q0 - t;
                            const i32 hi = key < p.k_len ? min(j + a.left, p.q_len - 1) - q0 - t : -1;
#pragma unroll
                            for (int n = 0; n < BM / 8; n++)
#pragma unroll
                                for (int e = 0; e < 2; e++)
                                    if (n * 8 + e < lo || n * 8 + e > hi) s[i][n][r * 2 + e] = 0.0f;
                        }
                }
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int n = 0; n < BM / 16; n++)
#pragma unroll
                        for (int h = 0; h < 4; h++) {
                            x[i][n][h] = pack_pair<element>(s[i][2 * n + (h >> 1)][(h & 1) * 2],
                                                            s[i][2 * n + (h >> 1)][(h & 1) * 2 + 1]);
                            st_shared((ds_at ^ ((2 * n + (h >> 1)) << 4)) + (i * 16 + (h & 1) * 8) * ROW, x[i][n][h]);
                        }
                named_barrier_arrive(P_READY + self / 32, 64);
                if (STAGES == 1) named_barrier_sync(DOUT_READY, THREADS);
            } else {
                named_barrier_sync(P_READY + tid() / 32 - PAIRS, 64);
                const u32 ds_at = pairs();
                const float4* deltas = rows + BM / 4 + (tid() & 3);
#pragma unroll
                for (int n = 0; n < BM / 16; n++) {
                    const float4 d = deltas[n * 4];
#pragma unroll
                    for (int i = 0; i < 2; i++)
#pragma unroll
                        for (int h = 0; h < 4; h++) {
                            const u32 at = (ds_at ^ ((2 * n + (h >> 1)) << 4)) + (i * 16 + (h & 1) * 8) * ROW;
                            const u32 pair = ld_shared(at);
                            const float(&dp)[4] = s[i][2 * n + (h >> 1)];
                            x[i][n][h] = pack_pair<element>(
                                low_of<element>(pair) * (dp[(h & 1) * 2] - (h >> 1 ? d.z : d.x)),
                                high_of<element>(pair) * (dp[(h & 1) * 2 + 1] - (h >> 1 ? d.w : d.y)));
                            st_shared(at, x[i][n][h]);
                        }
                }
            }
            {
                const u32 z_at = b_fragment_trans<D>(second ? q_at : o_at, tid() & 31);
#pragma unroll
                for (int k = 0; k < BM / 16; k++)
#pragma unroll
                    for (int n = 0; n < D / 16; n++) {
                        u32 y[4];
                        ldmatrix_trans(y, k_step(z_at, n) + k * 16 * D * 2);
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            mma(acc[i][2 * n], x[i][k], y[0], y[1]);
                            mma(acc[i][2 * n + 1], x[i][k], y[2], y[3]);
                        }
                    }
            }
            if (!has_dk() && turn > 0) add_dq(m, p, base, turn - 1);
        }
        if (turns() > 0) {
            __syncthreads();
            add_dq(m, p, base, turns() - 1);
        }
        const int self = tid(), g = (self & 31) >> 2, t = (self & 3) * 2;
        const i32 w0 = p.first + self / 32 % PAIRS * 32;
        const bool second = has_dk();
        const float scale = second ? a.scale : 1.0f;
        const i32 channels = second ? a.d_qk : a.d_v;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const i32 j = w0 + i * 16 + r * 8 + g;
                if (j >= p.k_len) continue;
                element* row = row_at<element>(second ? a.dk : a.dv, p.batch, p.k_start + j, p.head);
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    store_pair(row, n * 8 + t, channels, true, acc[i][n][r * 2] * scale, acc[i][n][r * 2 + 1] * scale);
            }
    }
};

#define FUSED(NAME, D, BM, PAIRS, STAGES, BLOCKS)                                                                           \
    extern "C" __global__ void __launch_bounds__(PAIRS * 64, BLOCKS) ELEMENT_NAME(NAME)(const __grid_constant__ HopperArgs m) { \
        Fused<D, BM, PAIRS, STAGES>::run(m);                                                                                \
    }

FUSED(attention_backward_fused_64, 64, 64, 2, 2, 3)
FUSED(attention_backward_fused_128, 128, 64, 2, 1, 2)
