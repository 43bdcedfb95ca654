// Optimizer steps over lists of tensors, and the joint norm of gradients.
//
// A launch takes a list by value: no table to upload, nothing to keep alive. Block b works on the tensor whose blocks
// `start[e]..start[e + 1]` hold b. Each sum and product is rounded by itself, as on the CPU: a step gives the same
// bits on both, in groups or one by one.

constexpr int THREADS = 256;

// The last e with start[e] <= block.
template <class A> __device__ __forceinline__ int entry_of(const A& p, u32 block) {
    int low = 0, high = int(p.count);
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (p.start[middle] <= block) low = middle;
        else high = middle;
    }
    return low;
}

// Places in the buffer of step scalars.
enum { LR = 0, WEIGHT_DECAY = 1, BIAS1 = 2, BIAS2 = 3, CLIP = 4, GRAD_NORM = 5, STEPS_DONE = 6 };

// Elements of a tensor one block updates, four in one access.
constexpr int UPDATES = 16 * THREADS;
constexpr int LIST = 64;

struct Entry {
    u64 master, weight, grad, first, second;
    i64 n;
    float lr_mult, wd_mult;
};

struct AdamArgs {
    Entry list[LIST];
    u64 scalars;
    u32 start[LIST];
    u32 count;
    float beta1, new1, beta2, new2, eps;
    u32 decoupled;
    u32 pad;
};

struct AdamFactors {
    float beta1, new1, beta2, new2, eps, bias1, bias2, clip, lr, inside, beside;
};

__device__ __forceinline__ void adam_element(const AdamFactors& f, float& p, float g, float& m, float& v) {
    g = __fadd_rn(__fmul_rn(g, f.clip), __fmul_rn(f.inside, p));
    m = __fadd_rn(__fmul_rn(f.beta1, m), __fmul_rn(f.new1, g));
    v = __fadd_rn(__fmul_rn(f.beta2, v), __fmul_rn(__fmul_rn(f.new2, g), g));
    float root = __fsqrt_rn(__fdiv_rn(v, f.bias2));
    float update = __fdiv_rn(__fdiv_rn(m, f.bias1), __fadd_rn(root, f.eps));
    update = __fadd_rn(update, __fmul_rn(f.beside, p));
    p = __fsub_rn(p, __fmul_rn(f.lr, update));
}

template <class M> __device__ __forceinline__ void adam(const AdamArgs& a) {
    const int index = entry_of(a, blockIdx.x);
    const Entry& e = a.list[index];
    const float* s = reinterpret_cast<const float*>(a.scalars);
    float wd = __fmul_rn(s[WEIGHT_DECAY], e.wd_mult);
    AdamFactors f = {a.beta1,  a.new1,  a.beta2, a.new2,
                     a.eps,    s[BIAS1], s[BIAS2], s[CLIP],
                     __fmul_rn(s[LR], e.lr_mult), a.decoupled ? 0.0f : wd, a.decoupled ? wd : 0.0f};
    float* master = reinterpret_cast<float*>(e.master);
    bf16* weight = reinterpret_cast<bf16*>(e.weight);
    const float* grad = reinterpret_cast<const float*>(e.grad);
    M* first = reinterpret_cast<M*>(e.first);
    M* second = reinterpret_cast<M*>(e.second);
    bool wide = ((e.master | e.weight | e.grad | e.first | e.second) & 15) == 0;
    i64 base = i64(blockIdx.x - a.start[index]) * UPDATES;
    if (!wide || base + UPDATES > e.n) {
        // Few blocks: those at an end.
        for (i64 at = base + threadIdx.x; at < min(base + UPDATES, e.n); at += THREADS) {
            float x = master[at], m = to_f32(first[at]), v = to_f32(second[at]);
            adam_element(f, x, grad[at], m, v);
            master[at] = x;
            first[at] = from_f32<M>(m);
            second[at] = from_f32<M>(v);
            if (weight) weight[at] = from_f32<bf16>(x);
        }
        return;
    }
    // Groups that fill an access of the moments.
    constexpr int N = 16 / sizeof(M), AHEAD = 2;
#pragma unroll 1
    for (int k = 0; k < UPDATES / (N * THREADS); k += AHEAD) {
        Group<float, N> p[AHEAD], g[AHEAD];
        Group<M, N> m[AHEAD], v[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            i64 at = base + ((k + u) * THREADS + threadIdx.x) * N;
            p[u] = whole<N>(master, at);
            g[u] = whole<N>(grad, at);
            m[u] = whole<N>(first, at);
            v[u] = whole<N>(second, at);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            i64 at = base + ((k + u) * THREADS + threadIdx.x) * N;
            Group<bf16, N> w;
#pragma unroll
            for (int i = 0; i < N; i++) {
                float x = to_f32(m[u].at[i]), y = to_f32(v[u].at[i]);
                adam_element(f, p[u].at[i], g[u].at[i], x, y);
                m[u].at[i] = from_f32<M>(x);
                v[u].at[i] = from_f32<M>(y);
                w.at[i] = from_f32<bf16>(p[u].at[i]);
            }
            put_whole(master, at, p[u]);
            put_whole(first, at, m[u]);
            put_whole(second, at, v[u]);
            if (weight) put_whole(weight, at, w);
        }
    }
}
extern "C" __global__ void __launch_bounds__(THREADS, 3) adam_f32(const __grid_constant__ AdamArgs a) { adam<float>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 3) adam_bf16(const __grid_constant__ AdamArgs a) { adam<bf16>(a); }

struct SgdArgs {
    Entry list[LIST];
    u64 scalars;
    u32 start[LIST];
    u32 count;
    float momentum, fresh;
    u32 nesterov;
};

template <class M> __device__ __forceinline__ void sgd(const SgdArgs& a) {
    const int index = entry_of(a, blockIdx.x);
    const Entry& e = a.list[index];
    const float* s = reinterpret_cast<const float*>(a.scalars);
    float lr = __fmul_rn(s[LR], e.lr_mult), wd = __fmul_rn(s[WEIGHT_DECAY], e.wd_mult), clip = s[CLIP];
    bool starts = s[STEPS_DONE] == 0.0f;
    float momentum = starts ? 0.0f : a.momentum, fresh = starts ? 1.0f : a.fresh;
    float lead = a.nesterov ? 1.0f : 0.0f, share = a.nesterov ? a.momentum : 1.0f;
    float* master = reinterpret_cast<float*>(e.master);
    bf16* weight = reinterpret_cast<bf16*>(e.weight);
    const float* grad = reinterpret_cast<const float*>(e.grad);
    M* first = reinterpret_cast<M*>(e.first);
    auto update = [&](float& x, float g, float held) {
        float d = __fadd_rn(__fmul_rn(g, clip), __fmul_rn(wd, x));
        // On the first step the buffer may hold anything, NaN too.
        float old = momentum == 0.0f ? 0.0f : __fmul_rn(momentum, held);
        float now = __fadd_rn(old, __fmul_rn(fresh, d));
        x = __fsub_rn(x, __fmul_rn(lr, __fadd_rn(__fmul_rn(lead, d), __fmul_rn(share, now))));
        return now;
    };
    bool wide = ((e.master | e.weight | e.grad | e.first) & 15) == 0;
    i64 base = i64(blockIdx.x - a.start[index]) * UPDATES;
    if (!wide || base + UPDATES > e.n) {
        for (i64 at = base + threadIdx.x; at < min(base + UPDATES, e.n); at += THREADS) {
            float x = master[at];
            first[at] = from_f32<M>(update(x, grad[at], to_f32(first[at])));
            master[at] = x;
            if (weight) weight[at] = from_f32<bf16>(x);
        }
        return;
    }
    constexpr int N = 16 / sizeof(M), AHEAD = 2;
#pragma unroll 1
    for (int k = 0; k < UPDATES / (N * THREADS); k += AHEAD) {
        Group<float, N> p[AHEAD], g[AHEAD];
        Group<M, N> b[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            i64 at = base + ((k + u) * THREADS + threadIdx.x) * N;
            p[u] = whole<N>(master, at);
            g[u] = whole<N>(grad, at);
            b[u] = whole<N>(first, at);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            i64 at = base + ((k + u) * THREADS + threadIdx.x) * N;
            Group<bf16, N> w;
#pragma unroll
            for (int i = 0; i < N; i++) {
                b[u].at[i] = from_f32<M>(update(p[u].at[i], g[u].at[i], to_f32(b[u].at[i])));
                w.at[i] = from_f32<bf16>(p[u].at[i]);
            }
            put_whole(master, at, p[u]);
            put_whole(first, at, b[u]);
            if (weight) put_whole(weight, at, w);
        }
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) sgd_f32(const __grid_constant__ SgdArgs a) { sgd<float>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) sgd_bf16(const __grid_constant__ SgdArgs a) { sgd<bf16>(a); }

// Gradients one launch squares, and elements of one part.
constexpr int GRADS = 128;
constexpr int PART = 64 * THREADS;

struct Slice {
    u64 x;
    i64 n;
};
struct SquareArgs {
    Slice list[GRADS];
    u64 parts;
    u32 start[GRADS];
    u32 count;
    u32 pad;
};

// parts[b] = Σ x² over part b, f64.
extern "C" __global__ void __launch_bounds__(THREADS) square_parts(const __grid_constant__ SquareArgs a) {
    const int index = entry_of(a, blockIdx.x);
    const Slice& e = a.list[index];
    const float* x = reinterpret_cast<const float*>(e.x);
    bool wide = (e.x & 15) == 0;
    i64 base = i64(blockIdx.x - a.start[index]) * PART;
    double sum = 0.0;
#pragma unroll 4
    for (int k = 0; k < PART / (4 * THREADS); k++) {
        Group<float, 4> g = fetch<4>(x, base + (k * THREADS + threadIdx.x) * 4, e.n, wide);
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fma(double(g.at[i]), double(g.at[i]), sum);
    }
    sum = block_total(sum);
    if (threadIdx.x == 0) reinterpret_cast<double*>(a.parts)[blockIdx.x] = sum;
}

struct ClipArgs {
    u64 parts, scalars;
    i64 n;
    float max_norm;
    u32 limited;
};

// The sum of the parts, in thread 0.
__device__ double total_of_parts(const ClipArgs& a) {
    const double* parts = reinterpret_cast<const double*>(a.parts);
    double sum = 0.0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < a.n; i += 1024) sum += parts[i];
    return block_total(sum);
}

// The sum of the parts, as a number for other ranks to add to.
extern "C" __global__ void __launch_bounds__(1024) square_total(const ClipArgs a) {
    double sum = total_of_parts(a);
    if (threadIdx.x == 0) *reinterpret_cast<double*>(a.scalars) = sum;
}

// The norm from the parts, and the factor it asks for: max/(norm + 1e-6) where that is below 1; NaN for NaN.
extern "C" __global__ void __launch_bounds__(1024) clip_factor(const ClipArgs a) {
    double sum = total_of_parts(a);
    if (threadIdx.x != 0) return;
    float* s = reinterpret_cast<float*>(a.scalars);
    double norm = sqrt(sum);
    double factor = double(a.max_norm) / (norm + 1e-6);
    s[GRAD_NORM] = float(norm);
    s[CLIP] = !a.limited || factor >= 1.0 ? 1.0f : float(factor);
}
