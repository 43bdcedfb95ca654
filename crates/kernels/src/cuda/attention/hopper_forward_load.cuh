// The producer of the Hopper forward kernel: what lies where in shared memory, and which tiles are copied there when.

// Q: tiles of queries in shared memory.
template <int DQ, int DV, int WGS, int BN, int STAGES, int Q> struct HopperForwardLoad {
    static constexpr int BM = WGS * 64, COLUMNS = (DQ + 63) / 64, V_COLUMNS = (DV + 63) / 64;
    // One block a multiprocessor: the producer is a warpgroup that hands its registers to the others. Two blocks: a
    // warp behind the others.
    static constexpr int THREADS = (WGS + 1) * 128;
    static constexpr u32 Q_BYTES = BM * COLUMNS * 128, K_BYTES = BN * COLUMNS * 128, V_BYTES = BN * V_COLUMNS * 128;
    static constexpr u32 Q_AT = 1024, K_AT = Q_AT + Q * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES;
    static constexpr u32 BYTES = V_AT + STAGES * V_BYTES;
    static_assert(BYTES <= 227 * 1024, "shared memory");

    static __device__ __forceinline__ void bounds(const Attention& a, Place& p) {
        p.from = p.lo(a, p.first) / BN;
        p.to = (p.hi(a, min(p.first + BM, p.q_len) - 1) + BN) / BN;
    }

    struct Bars {
        u32 base;
        __device__ __forceinline__ u32 q_full(u32 s) const { return base + s * 8; }
        __device__ __forceinline__ u32 q_free(u32 s) const { return base + 16 + s * 8; }
        __device__ __forceinline__ u32 k_full(u32 s) const { return base + 32 + s * 8; }
        __device__ __forceinline__ u32 k_free(u32 s) const { return base + 32 + (STAGES + s) * 8; }
        __device__ __forceinline__ u32 v_full(u32 s) const { return base + 32 + (2 * STAGES + s) * 8; }
        __device__ __forceinline__ u32 v_free(u32 s) const { return base + 32 + (3 * STAGES + s) * 8; }
    };

    static __device__ __forceinline__ void produce(const Mapped& m, u32 base, Bars bars) {
        const Attention& a = m.a;
        Ring<STAGES> k, v;
        Ring<Q> q;
        const i32 n = rounds(m.total);
#pragma unroll 1
        for (i32 round = 0; round < n; round++) {
            const i32 index = tile_of(m, round);
            if (index < 0) continue;
            Spot p = tile_place(m, index, a.heads, BM, true);
            bounds(a, p);
            if (p.from >= p.to) continue;
            auto keys = [&](i32 tile) {
                barrier_wait(bars.k_free(k.stage), k.phase ^ 1);
                barrier_expect(bars.k_full(k.stage), K_BYTES);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    tensor_load(base + K_AT + k.stage * K_BYTES + c * BN * 128, m.k, bars.k_full(k.stage), c * 64,
                                p.k_start + tile * BN, p.kv_head, p.batch);
                k.next();
            };
            barrier_wait(bars.q_free(q.stage), q.phase ^ 1);
            barrier_expect(bars.q_full(q.stage), Q_BYTES);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                tensor_load(base + Q_AT + q.stage * Q_BYTES + c * BM * 128, m.q, bars.q_full(q.stage), c * 64,
                            p.q_start + p.first, p.head, p.batch);
            q.next();
            keys(p.to - 1);
#pragma unroll 1
            for (i32 tile = p.to - 1; tile >= p.from; tile--) {
                if (tile > p.from) keys(tile - 1);
                barrier_wait(bars.v_free(v.stage), v.phase ^ 1);
                barrier_expect(bars.v_full(v.stage), V_BYTES);
#pragma unroll
                for (int c = 0; c < V_COLUMNS; c++)
                    tensor_load(base + V_AT + v.stage * V_BYTES + c * BN * 128, m.v, bars.v_full(v.stage), c * 64,
                                p.k_start + tile * BN, p.kv_head, p.batch);
                v.next();
            }
        }
    }
};
