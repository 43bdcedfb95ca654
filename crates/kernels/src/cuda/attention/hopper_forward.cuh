// Forward pass for Hopper: persistent blocks of one producer warpgroup, which copies tiles with the copy engine, and
// WGS consumer warpgroups of 64 queries each. A consumer issues the products q·kᵀ of the next tile and p·v of the
// last one together, and works on the softmax of the next while p·v runs; named barriers make the consumers take
// turns, so that one's softmax meets another's products. For short sequences, whose tiles begin and end often, there are
// four consumers and tiles of 64 keys.
//
// Where scores have no soft cap the scale is positive.

template <int DQ, int DV, int WGS, int BN, int STAGES, int Q, bool CAP>
struct HopperForward : HopperForwardLoad<DQ, DV, WGS, BN, STAGES, Q> {
    using Load = HopperForwardLoad<DQ, DV, WGS, BN, STAGES, Q>;
    using Bars = typename Load::Bars;
    static constexpr int BM = Load::BM, V_COLUMNS = Load::V_COLUMNS;
    static constexpr u32 Q_BYTES = Load::Q_BYTES, K_BYTES = Load::K_BYTES, V_BYTES = Load::V_BYTES;
    static constexpr u32 Q_AT = Load::Q_AT, K_AT = Load::K_AT, V_AT = Load::V_AT;
    // Maxima may lag by this much (of log2): sums are brought to a new maximum only when it pays.
    static constexpr float LAG = MAY_LAG(8.0f);

    // s = q·kᵀ
    static __device__ __forceinline__ void scores(float (&s)[BN / 2], u32 q, u32 k) {
        rows_product<BN, DQ>(s, q, BM * 128, k, BN * 128);
    }
    static __device__ __forceinline__ void pack(u32 (&p)[BN / 4], const float (&s)[BN / 2]) {
#pragma unroll
        for (int i = 0; i < BN / 4; i++) p[i] = pack_weights(s[2 * i], s[2 * i + 1]);
    }

    // A thread's first query.
    static __device__ __forceinline__ i32 row_of(i32 w0, int self) {
        return w0 + ((self >> 5) & 3) * 16 + ((self & 31) >> 2);
    }
    static __device__ __forceinline__ void free(u32 bar) {
        if ((thread() & 31) == 0) barrier_arrive(bar);
    }

    struct Rows {
        float top[2], sum[2];
    };
    // Scores to powers, with the queries' maxima and sums; `shrink` is what earlier sums are to be multiplied with,
    // if the result says so. w0: first query of the warpgroup.
    static __device__ __forceinline__ bool soften(const Attention& a, const Place& p, i32 tile, i32 w0,
                                                  float (&s)[BN / 2], Rows& rows, float (&shrink)[2]) {
        if constexpr (CAP) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++) s[i] = a.outer * fast_tanh(a.inner * s[i]);
        }
        const i32 k0 = tile * BN, w1 = min(w0 + 63, p.q_len - 1);
        if (k0 < p.lo(a, w1) || k0 + BN - 1 > p.hi(a, w0)) {
            const i32 self = thread(), t = (self & 3) * 2, i0 = row_of(w0, self);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const i32 lo = p.lo(a, i0 + r * 8) - k0 - t, hi = p.hi(a, i0 + r * 8) - k0 - t;
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (n * 8 + e < lo || n * 8 + e > hi) s[n * 4 + r * 2 + e] = NEG_INF;
            }
        }
        bool moved = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = s[r * 2], y = s[r * 2 + 1];
#pragma unroll
            for (int n = 1; n < BN / 8; n++) {
                x = fmaxf(x, s[n * 4 + r * 2]);
                y = fmaxf(y, s[n * 4 + r * 2 + 1]);
            }
            x = fmaxf(x, y);
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            const float old = rows.top[r];
            const bool up = (x - old) * a.factor > LAG;
            x = up ? x : old;
            moved |= up;
            // While a query has seen nothing its maximum is -inf, which must not meet another -inf.
            const float origin = x == NEG_INF ? 0.0f : x * a.factor;
            shrink[r] = up ? fast_exp2(old * a.factor - origin) : 1.0f;
            rows.top[r] = x;
            float total = 0.0f, other = 0.0f;
#pragma unroll
            for (int n = 0; n < BN / 8; n++) {
                s[n * 4 + r * 2] = fast_exp2(fmaf(s[n * 4 + r * 2], a.factor, -origin));
                s[n * 4 + r * 2 + 1] = fast_exp2(fmaf(s[n * 4 + r * 2 + 1], a.factor, -origin));
                total += s[n * 4 + r * 2];
                other += s[n * 4 + r * 2 + 1];
            }
            rows.sum[r] = fmaf(rows.sum[r], shrink[r], total + other);
        }
        return __any_sync(~0u, moved);
    }

    static __device__ __forceinline__ void consume(const Mapped& m, u32 base, Bars bars) {
        const Attention& a = m.a;
        const int wg = warpgroup() - 1;
        Ring<STAGES> k, v;
        Ring<Q> q;
        const i32 n = rounds(m.total);
        if (wg == WGS - 1) named_arrive(1, 256);
#pragma unroll 1
        for (i32 round = 0; round < n; round++) {
            const i32 index = tile_of(m, round);
            if (index < 0) continue;
            Spot p = tile_place(m, index, a.heads, BM, true);
            Load::bounds(a, p);
            const i32 w0 = p.first + wg * 64;
            float o[DV / 2];
            Rows rows = {{NEG_INF, NEG_INF}, {0.0f, 0.0f}};
            if (p.from < p.to) {
                const u32 q_at = base + Q_AT + q.stage * Q_BYTES + wg * 8192;
                const i32 w1 = min(w0 + 63, p.q_len - 1);
                const i32 mine = w1 < w0 ? p.from : min(max(p.hi(a, w1) / BN, p.from), p.to - 1);
                float shrink[2];
                // Values past the end of a packed sequence are another's.
                auto blank = [&](i32 tile) {
                    if (a.items && p.k_len - tile * BN < BN) {
                        blank_rows<BN, V_COLUMNS>(base + V_AT + v.stage * V_BYTES, p.k_len - tile * BN, thread() & 127);
                        named_sync(8 + wg, 128);
                    }
                };
                barrier_wait(bars.q_full(q.stage), q.phase);
                // Tiles that none of this warpgroup's queries see: it only lets them go, and its turns.
#pragma unroll 1
                for (i32 tile = p.to - 1; tile > mine; tile--) {
                    barrier_wait(bars.k_full(k.stage), k.phase);
                    free(bars.k_free(k.stage));
                    k.next();
                    barrier_wait(bars.v_full(v.stage), v.phase);
                    free(bars.v_free(v.stage));
                    v.next();
                    named_sync(1 + wg, 256);
                    named_arrive(1 + (wg + 1) % WGS, 256);
                }
                u32 x[BN / 4];
                {
                    float s[BN / 2];
                    barrier_wait(bars.k_full(k.stage), k.phase);
                    products_begin();
                    scores(s, q_at, base + K_AT + k.stage * K_BYTES);
                    products_issued();
                    products_done<0>();
                    pin(s);
                    free(bars.k_free(k.stage));
                    k.next();
                    soften(a, p, mine, w0, s, rows, shrink);
                    pack(x, s);
                }
                int add = 0;
#pragma unroll 1
                for (i32 tile = mine - 1; tile >= p.from; tile--) {
                    float s[BN / 2];
                    barrier_wait(bars.k_full(k.stage), k.phase);
                    named_sync(1 + wg, 256);
                    products_begin();
                    pin(o);
                    scores(s, q_at, base + K_AT + k.stage * K_BYTES);
                    products_issued();
                    barrier_wait(bars.v_full(v.stage), v.phase);
                    blank(tile + 1);
                    sum_product<DV, BN>(o, x, base + V_AT + v.stage * V_BYTES, add);
                    add = 1;
                    products_issued();
                    named_arrive(1 + (wg + 1) % WGS, 256);
                    products_done<1>();
                    pin(s);
                    free(bars.k_free(k.stage));
                    k.next();
                    const bool moved = soften(a, p, tile, w0, s, rows, shrink);
                    settle(rows.sum[0] + rows.sum[1]);
                    products_done<0>();
                    pin(o);
                    pin(x);
                    free(bars.v_free(v.stage));
                    v.next();
                    pack(x, s);
                    if (moved) {
#pragma unroll
                        for (int i = 0; i < DV / 2; i++) o[i] *= shrink[(i >> 1) & 1];
                    }
                }
                free(bars.q_free(q.stage));
                q.next();
                barrier_wait(bars.v_full(v.stage), v.phase);
                blank(p.from);
                products_begin();
                pin(o);
                sum_product<DV, BN>(o, x, base + V_AT + v.stage * V_BYTES, add);
                products_issued();
                products_done<0>();
                pin(o);
                free(bars.v_free(v.stage));
                v.next();
            }
            if constexpr (DV > 128) {
                // Worked out again, or it would take registers all along.
                asm volatile("" : "+r"(round));
                p = tile_place(m, tile_of(m, round), a.heads, BM, true);
            }
            // The sink is one more score that no value belongs to.
            const float sink = a.sink ? reinterpret_cast<const float*>(a.sink)[p.head] * LOG2_E : NEG_INF;
            const i32 self = thread(), i0 = row_of(w0, self);
            bf16* row[2];
            float share[2];
            u32 keep[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const i32 i = i0 + r * 8;
                float total = rows.sum[r], lse;
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                conclude(rows.top[r] == NEG_INF ? NEG_INF : rows.top[r] * a.factor, total, sink, lse, share[r]);
                row[r] = nullptr;
                if (i < p.q_len) {
                    if ((self & 3) == 0)
                        reinterpret_cast<float*>(a.lse)[p.batch * a.lse_batch + p.head * a.lse_head +
                                                        (p.q_start + i) * a.lse_token] = lse;
                    row[r] = a.out.row<bf16>(p.batch, p.q_start + i, p.head);
                }
                // A query that sees no key: whatever came from masked ones, or nowhere, is not its own.
                keep[r] = p.lo(a, i) > p.hi(a, i) ? 0u : ~0u;
            }
            store_rows<DV>(o, row[0], row[1], share[0], share[1], a.d_v, keep[0], keep[1]);
        }
    }

    static __device__ __forceinline__ void run(const Mapped& m) {
        const u32 base = shared_address(attention_shared);
        const Bars bars = {base};
        if (threadIdx.x == 0) {
            for (int s = 0; s < Q; s++) {
                barrier_init(bars.q_full(s), 1);
                barrier_init(bars.q_free(s), WGS * 4);
            }
            for (int s = 0; s < STAGES; s++) {
                barrier_init(bars.k_full(s), 1);
                barrier_init(bars.v_full(s), 1);
                barrier_init(bars.k_free(s), WGS * 4);
                barrier_init(bars.v_free(s), WGS * 4);
            }
            barrier_init_done();
        }
        __syncthreads();
        if (threadIdx.x < 128) {
            fewer_registers<WGS == 2 ? (DV > 128 ? 24 : 40) : WGS == 3 ? 32 : 24>();
            if (threadIdx.x == 0) Load::produce(m, base, bars);
        } else {
            more_registers<WGS == 2 ? (DV > 128 ? 240 : 232) : WGS == 3 ? 160 : 112>();
            consume(m, base, bars);
        }
    }
};

// Channels of keys and of values, warpgroups, keys of a tile, tiles of keys, tiles of queries, soft cap.
#define HOPPER_FORWARD(NAME, ...)                                                                              \
    extern "C" __global__ void __launch_bounds__(HopperForward<__VA_ARGS__>::THREADS, 1)                        \
        NAME(const __grid_constant__ Mapped m) {                                                               \
        HopperForward<__VA_ARGS__>::run(m);                                                                    \
    }
