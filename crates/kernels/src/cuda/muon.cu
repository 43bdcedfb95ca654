// Muon: momentum and step over lists of tensors; normalization, combinations and adaptive scaling of one matrix.
// Every sum and product is rounded by itself, without FMA, as on the CPU.
#include "args/muon.cuh"
#include "multi_tensor.cuh"

// Elements of a thread.
constexpr int EACH = 4;

// Gradients become updates: first is the momentum, second the update, master the weights of L2 regularization.
template <class M> __device__ __forceinline__ void muon_momentum(const MomentumArgs& a) {
    const float* s = reinterpret_cast<const float*>(a.scalars);
    if (!is_number(s[GRAD_NORM])) return;
    const int index = entry_of(a, blockIdx.x);
    const TensorEntry& e = a.list[index];
    const float wd = __fmul_rn(s[WEIGHT_DECAY], e.wd_mult), clip = s[CLIP];
    const float* grad = reinterpret_cast<const float*>(e.grad);
    const float* master = reinterpret_cast<const float*>(e.master);
    M* momentum = reinterpret_cast<M*>(e.first);
    float* update = reinterpret_cast<float*>(e.second);
    const bool vectorized = ((e.master | e.grad | e.first | e.second) & 15) == 0;
    const i64 base = i64(blockIdx.x - a.start[index]) * UPDATES;
#pragma unroll 2
    for (int k = 0; k < UPDATES / (EACH * THREADS); k++) {
        const i64 at = base + (k * THREADS + threadIdx.x) * EACH;
        if (at >= e.n) return;
        Vec<float, EACH> g = load_guarded<EACH>(grad, at, e.n, vectorized);
        Vec<M, EACH> b = load_guarded<EACH>(momentum, at, e.n, vectorized);
        Vec<float, EACH> p = {};
        if (master) p = load_guarded<EACH>(master, at, e.n, vectorized);
        Vec<float, EACH> u;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float d = __fmul_rn(g.at[i], clip);
            if (master) d = __fadd_rn(d, __fmul_rn(wd, p.at[i]));
            const float held = __fadd_rn(__fmul_rn(a.momentum, to_f32(b.at[i])), __fmul_rn(a.fresh, d));
            b.at[i] = from_f32<M>(held);
            u.at[i] = a.nesterov ? __fadd_rn(__fmul_rn(a.fresh, d), __fmul_rn(a.momentum, held)) : held;
        }
        store_guarded<EACH>(momentum, at, e.n, vectorized, b);
        store_guarded<EACH>(update, at, e.n, vectorized, u);
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) muon_momentum_f32(const __grid_constant__ MomentumArgs a) {
    muon_momentum<float>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS) muon_momentum_bf16(const __grid_constant__ MomentumArgs a) {
    muon_momentum<bf16>(a);
}

// p = keep·p − lr·update; the update is in the place of the gradient.
template <class P> __device__ __forceinline__ void apply_update(const ApplyArgs& a) {
    const float* s = reinterpret_cast<const float*>(a.scalars);
    if (!is_number(s[GRAD_NORM])) return;
    const int index = entry_of(a, blockIdx.x);
    const TensorEntry& e = a.list[index];
    const float lr = __fmul_rn(s[LR], e.lr_mult), wd = __fmul_rn(s[WEIGHT_DECAY], e.wd_mult);
    // As WeightDecay of the host: 0 decoupled, 1 independent, 2 inside the gradient.
    const float decay = a.decay == 0 ? __fmul_rn(lr, wd) : a.decay == 1 ? wd : 0.0f;
    const float keep = __fsub_rn(1.0f, decay);
    const float* update = reinterpret_cast<const float*>(e.grad);
    const P masters(e);
    const bool vectorized = ((e.master | e.weight | e.grad) & 15) == 0;
    const i64 base = i64(blockIdx.x - a.start[index]) * UPDATES;
    if (!vectorized || base + UPDATES > e.n) {
        for (i64 at = base + threadIdx.x; at < min(base + UPDATES, e.n); at += THREADS)
            masters.set(at, __fsub_rn(__fmul_rn(keep, masters.get(at)), __fmul_rn(lr, update[at])));
        return;
    }
    constexpr int N = 8;
#pragma unroll 1
    for (int k = 0; k < UPDATES / (N * THREADS); k++) {
        const i64 at = base + (k * THREADS + threadIdx.x) * N;
        typename P::template Raw<N> p = masters.template load<N>(at);
        Vec<float, N> u = load_vec<N>(update, at), x;
#pragma unroll
        for (int i = 0; i < N; i++) x.at[i] = __fsub_rn(__fmul_rn(keep, P::open(p, i)), __fmul_rn(lr, u.at[i]));
        masters.store(at, x);
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) apply_update_f32(const __grid_constant__ ApplyArgs a) {
    apply_update<F32Master>(a);
}
extern "C" __global__ void __launch_bounds__(THREADS) apply_update_split(const __grid_constant__ ApplyArgs a) {
    apply_update<SplitMaster>(a);
}

// out = f(x, y), in f32 and rounded once.
template <class X, class O, class F> __device__ __forceinline__ void map_matrix(const MatrixArgs& a, F f) {
    const X* x = reinterpret_cast<const X*>(a.x);
    const float* y = reinterpret_cast<const float*>(a.y);
    O* out = reinterpret_cast<O*>(a.out);
    const bool vectorized = ((a.x | a.y | a.out) & 15) == 0;
    const i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * EACH;
    if (at >= a.n) return;
    Vec<X, EACH> v = load_guarded<EACH>(x, at, a.n, vectorized);
    Vec<float, EACH> w = {};
    if (y) w = load_guarded<EACH>(y, at, a.n, vectorized);
    Vec<O, EACH> o;
#pragma unroll
    for (int i = 0; i < EACH; i++) o.at[i] = from_f32<O>(f(to_f32(v.at[i]), w.at[i]));
    store_guarded<EACH>(out, at, a.n, vectorized, o);
}

// out = x / max(√square, eps).
template <class O> __device__ __forceinline__ void normalize(const MatrixArgs& a) {
    const float norm = fmaxf(float(sqrt(*reinterpret_cast<const double*>(a.square))), a.beta);
    map_matrix<float, O>(a, [&](float x, float) { return __fdiv_rn(x, norm); });
}
extern "C" __global__ void __launch_bounds__(THREADS) normalize_f32(const MatrixArgs a) { normalize<float>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) normalize_bf16(const MatrixArgs a) { normalize<bf16>(a); }

// x = alpha·x + beta·y.
template <class X> __device__ __forceinline__ void combine(const MatrixArgs& a) {
    map_matrix<X, X>(a, [&](float x, float y) { return __fadd_rn(__fmul_rn(a.alpha, x), __fmul_rn(a.beta, y)); });
}
extern "C" __global__ void __launch_bounds__(THREADS) combine_f32(const MatrixArgs a) { combine<float>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) combine_bf16(const MatrixArgs a) { combine<bf16>(a); }

// x[c][r] = x[r][c] for every row r from `from` on and every column c before it: a tile to each block, through shared memory
// so that reads and writes are of whole rows. T has the size of an element.
constexpr int TILE = 32;
template <class T> __device__ __forceinline__ void mirror(const MirrorArgs& a) {
    __shared__ T tile[TILE][TILE + 1];
    const i64 across = (a.from + TILE - 1) / TILE, down = (a.side - a.from + TILE - 1) / TILE;
    const i64 column = i64(blockIdx.x) % across * TILE, row = a.from + i64(blockIdx.x) / across % down * TILE;
    T* x = reinterpret_cast<T*>(a.x) + i64(blockIdx.x) / (across * down) * a.side * a.side;
    const int lane = threadIdx.x % TILE;
    for (int i = threadIdx.x / TILE; i < TILE; i += THREADS / TILE)
        if (row + i < a.side && column + lane < a.from) tile[i][lane] = x[(row + i) * a.side + column + lane];
    __syncthreads();
    for (int i = threadIdx.x / TILE; i < TILE; i += THREADS / TILE)
        if (column + i < a.from && row + lane < a.side) x[(column + i) * a.side + row + lane] = tile[lane][i];
}
extern "C" __global__ void __launch_bounds__(THREADS) mirror_f32(const MirrorArgs a) { mirror<float>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) mirror_bf16(const MirrorArgs a) { mirror<u16>(a); }

// v = EMA(o²), o /= √v + eps.
extern "C" __global__ void __launch_bounds__(THREADS) adamuon(const AdaptiveArgs a) {
    if (!is_number(reinterpret_cast<const float*>(a.scalars)[GRAD_NORM])) return;
    float* o = reinterpret_cast<float*>(a.o);
    float* v = reinterpret_cast<float*>(a.v);
    const bool vectorized = ((a.o | a.v) & 15) == 0;
    const i64 n = a.rows * a.cols, at = (i64(blockIdx.x) * THREADS + threadIdx.x) * EACH;
    if (at >= n) return;
    Vec<float, EACH> x = load_guarded<EACH>(o, at, n, vectorized), w = load_guarded<EACH>(v, at, n, vectorized);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        w.at[i] = __fadd_rn(__fmul_rn(a.beta2, w.at[i]), __fmul_rn(a.fresh, __fmul_rn(x.at[i], x.at[i])));
        x.at[i] = __fdiv_rn(x.at[i], __fadd_rn(__fsqrt_rn(w.at[i]), a.eps));
    }
    store_guarded<EACH>(o, at, n, vectorized, x);
    store_guarded<EACH>(v, at, n, vectorized, w);
}

// Sums of squares of the rows, a block to each.
extern "C" __global__ void __launch_bounds__(THREADS) normuon_rows(const AdaptiveArgs a) {
    const float* row = reinterpret_cast<const float*>(a.o) + i64(blockIdx.x) * a.cols;
    double sum = 0.0;
    for (i64 c = threadIdx.x; c < a.cols; c += THREADS) sum = fma(double(row[c]), double(row[c]), sum);
    sum = block_total(sum);
    if (threadIdx.x == 0) reinterpret_cast<double*>(a.sums)[blockIdx.x] = sum;
}

// Sums of squares of the columns: 32 columns to a block, whose warps take every eighth row.
extern "C" __global__ void __launch_bounds__(THREADS) normuon_columns(const AdaptiveArgs a) {
    __shared__ double shared[THREADS];
    const float* o = reinterpret_cast<const float*>(a.o);
    const i64 c = i64(blockIdx.x) * 32 + (threadIdx.x & 31);
    double sum = 0.0;
    if (c < a.cols)
        for (i64 r = threadIdx.x >> 5; r < a.rows; r += THREADS / 32) sum = fma(double(o[r * a.cols + c]), double(o[r * a.cols + c]), sum);
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || c >= a.cols) return;
    for (int w = 1; w < THREADS / 32; w++) sum += shared[w * 32 + threadIdx.x];
    reinterpret_cast<double*>(a.sums)[c] = sum;
}

// One block: second moments from the sums of squares, which the factors of the lines replace.
extern "C" __global__ void __launch_bounds__(1024) normuon_factors(const AdaptiveArgs a) {
    __shared__ double rescale;
    const bool skipped = !is_number(reinterpret_cast<const float*>(a.scalars)[GRAD_NORM]);
    double* sums = reinterpret_cast<double*>(a.sums);
    float* v = reinterpret_cast<float*>(a.v);
    const bool by_row = a.rows >= a.cols;
    const i64 lines = by_row ? a.rows : a.cols;
    const double length = double(by_row ? a.cols : a.rows);
    double before = 0.0, after = 0.0;
    for (i64 i = threadIdx.x; i < lines; i += 1024) {
        const float now = __fadd_rn(__fmul_rn(a.beta2, v[i]), __fmul_rn(a.fresh, float(sums[i] / length)));
        if (!skipped) v[i] = now;
        before += sums[i];
        after += sums[i] / double(fmaxf(now, a.eps));
    }
    before = block_total(before);
    __syncthreads();
    after = block_total(after);
    if (threadIdx.x == 0) rescale = after > 0.0 ? sqrt(before / after) : 0.0;
    __syncthreads();
    for (i64 i = threadIdx.x; i < lines; i += 1024) sums[i] = rescale / sqrt(double(fmaxf(v[i], a.eps)));
}

// o *= the factor of its line.
extern "C" __global__ void __launch_bounds__(THREADS) normuon_scale(const AdaptiveArgs a) {
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= a.rows * a.cols) return;
    const i64 line = a.rows >= a.cols ? at / a.cols : at % a.cols;
    float* o = reinterpret_cast<float*>(a.o);
    o[at] = __fmul_rn(o[at], float(reinterpret_cast<const double*>(a.sums)[line]));
}
