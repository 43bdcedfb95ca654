// Small kernels of an MoE layer: one thread to an element or row.
#include "args/moe_elementwise.cuh"
#include "philox.cuh"

__device__ __forceinline__ i64 element_index() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

// Tokens with a negative segment route nowhere. a: segments [n], b: index [n, width], c: probs [n, width]; n·width
// threads.
extern "C" __global__ void mask_padding(const MoeArgs p) {
    const i64 at = element_index();
    if (at >= p.n * p.width || reinterpret_cast<const i32*>(p.a)[at / p.width] >= 0) return;
    reinterpret_cast<i32*>(p.b)[at] = -1;
    reinterpret_cast<float*>(p.c)[at] = 0.0f;
}

// One slot for each of `copies` ranks that share an expert. a: index [n], b: slots [n, copies]; n·copies threads.
extern "C" __global__ void expand_topk(const MoeArgs p) {
    const i64 at = element_index();
    if (at >= p.n * p.copies) return;
    const i32 e = reinterpret_cast<const i32*>(p.a)[at / p.copies], copy = i32(at % p.copies);
    reinterpret_cast<i32*>(p.b)[at] = e < 0 ? -1 : (e / p.own * p.copies + copy) * p.own + e % p.own;
}

// y = x·u, u uniform in [1 − x, 1 + x]. a: row numbers [n / width], b: x [n], c: y [n].
template <class T> __device__ __forceinline__ void jitter(const MoeArgs& p) {
    const PhiloxStream stream = step_stream(p.stream);
    const i64 at = element_index();
    if (at >= p.n) return;
    const i64 row = at / p.width;
    const u64 word = u64(reinterpret_cast<const u32*>(p.a)[row]) * u64(p.width) + u64(at - row * p.width);
    u32 words[4];
    philox(stream, word / 4, words);
    const u32 low = word & 1 ? words[1] : words[0], high = word & 1 ? words[3] : words[2];
    const float unit = float((word & 2 ? high : low) >> 8) / 16777216.0f;
    const float factor = 1.0f - p.x + 2.0f * p.x * unit;
    reinterpret_cast<T*>(p.c)[at] = from_f32<T>(to_f32(reinterpret_cast<const T*>(p.b)[at]) * factor);
}
extern "C" __global__ void jitter_f32(const MoeArgs p) { jitter<float>(p); }
extern "C" __global__ void jitter_bf16(const MoeArgs p) { jitter<bf16>(p); }

// x as the sum of two bf16 numbers. a: x f32 [n], b: bf16 [n / width, 2·width].
extern "C" __global__ void split_bf16x2(const MoeArgs p) {
    const i64 at = element_index();
    if (at >= p.n) return;
    const float x = reinterpret_cast<const float*>(p.a)[at];
    const bf16 high = from_f32<bf16>(x);
    const i64 row = at / p.width, to = at + row * p.width;
    reinterpret_cast<bf16*>(p.b)[to] = high;
    reinterpret_cast<bf16*>(p.b)[to + p.width] = from_f32<bf16>(x - to_f32(high));
}

// a: bias [width], b: x f32 [n].
template <class T> __device__ __forceinline__ void add_router_bias(const MoeArgs& p) {
    const i64 at = element_index();
    if (at < p.n) reinterpret_cast<float*>(p.b)[at] += to_f32(reinterpret_cast<const T*>(p.a)[at % p.width]);
}
extern "C" __global__ void add_router_bias_f32(const MoeArgs p) { add_router_bias<float>(p); }
extern "C" __global__ void add_router_bias_bf16(const MoeArgs p) { add_router_bias<bf16>(p); }

// a: counts i64 [n], b: total i64 [n], c: steps f32 [1], all added to.
extern "C" __global__ void accumulate_counts(const MoeArgs p) {
    const i64 at = element_index();
    if (at < p.n) reinterpret_cast<i64*>(p.b)[at] += reinterpret_cast<const i64*>(p.a)[at];
    if (at == 0) *reinterpret_cast<float*>(p.c) += 1.0f;
}

// a: x f64 [n], b: total f64 [n].
extern "C" __global__ void accumulate_f64(const MoeArgs p) {
    const i64 at = element_index();
    if (at < p.n) reinterpret_cast<double*>(p.b)[at] += reinterpret_cast<const double*>(p.a)[at];
}

// beta = x·beta + (1 − x)·y·found, minus its mean; unchanged where found is not finite. a: found f32 [n], b: beta f32 [n].
// One thread, because there is one value per expert once a step, and the sum has a fixed order.
extern "C" __global__ void update_quantiles(const MoeArgs p) {
    const float* found = reinterpret_cast<const float*>(p.a);
    float* beta = reinterpret_cast<float*>(p.b);
    for (i64 i = 0; i < p.n; i++)
        if (!isfinite(found[i])) return;
    double sum = 0.0;
    for (i64 i = 0; i < p.n; i++) {
        beta[i] = p.x * beta[i] + (1.0f - p.x) * p.y * found[i];
        sum += double(beta[i]);
    }
    const float middle = float(sum / double(p.n > 0 ? p.n : 1));
    for (i64 i = 0; i < p.n; i++) beta[i] -= middle;
}
