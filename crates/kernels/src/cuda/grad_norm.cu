// Global gradient norm, zeros in gradients, clip factor, dynamic loss scale and step counter.
#include "args/grad_norm.cuh"
#include "args/optim.cuh"
#include "optim.cuh"
#include "vec.cuh"

// Gradients of one launch, and elements of one partial sum.
constexpr int GRADS = 128;
constexpr int PART = 64 * THREADS;


// Σ f(x) over the part of this block, in f64 in thread 0. Zeros follow the end of a gradient: f(0) must be 0.
template <class F> __device__ __forceinline__ double sum_of_part(const GradSlice& e, i64 base, F f) {
    const float* x = reinterpret_cast<const float*>(e.x);
    bool vectorized = (e.x & 15) == 0;
    double sum = 0.0;
#pragma unroll 4
    for (int k = 0; k < PART / (4 * THREADS); k++) {
        Vec<float, 4> g = load_guarded<4>(x, base + (k * THREADS + threadIdx.x) * 4, e.n, vectorized);
#pragma unroll
        for (int i = 0; i < 4; i++) sum = f(sum, g.at[i]);
    }
    return block_total(sum);
}

// parts[b] = Σ x² over part b, in f64.
extern "C" __global__ void __launch_bounds__(THREADS) square_parts(const __grid_constant__ GradPartsArgs a) {
    const int index = entry_of(a, blockIdx.x);
    const i64 base = i64(blockIdx.x - a.start[index]) * PART;
    double sum = sum_of_part(a.list[index], base, [](double sum, float x) { return fma(double(x), double(x), sum); });
    if (threadIdx.x == 0) reinterpret_cast<double*>(a.parts)[blockIdx.x] = sum;
}

// parts[b] = number of zeros in part b: its elements without those that are not.
extern "C" __global__ void __launch_bounds__(THREADS) zero_parts(const __grid_constant__ GradPartsArgs a) {
    const int index = entry_of(a, blockIdx.x);
    const i64 base = i64(blockIdx.x - a.start[index]) * PART;
    double others = sum_of_part(a.list[index], base, [](double sum, float x) { return x == 0.0f ? sum : sum + 1.0; });
    const double elements = double(min(i64(PART), a.list[index].n - base));
    if (threadIdx.x == 0) reinterpret_cast<double*>(a.parts)[blockIdx.x] = elements - others;
}


// Sum of the parts, in thread 0.
__device__ double total_of_parts(const ClipArgs& a) {
    const double* parts = reinterpret_cast<const double*>(a.parts);
    double sum = 0.0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < a.n; i += 1024) sum += parts[i];
    return block_total(sum);
}

// Sum of the parts, to be all-reduced over ranks.
extern "C" __global__ void __launch_bounds__(1024) grad_total(const ClipArgs a) {
    double sum = total_of_parts(a);
    if (threadIdx.x == 0) *reinterpret_cast<double*>(a.scalars) = sum;
}

// Gradient norm from the parts, and the clip factor min(1, max_norm/(norm + 1e-6)); NaN for NaN.
extern "C" __global__ void __launch_bounds__(1024) clip_factor(const ClipArgs a) {
    double sum = total_of_parts(a);
    if (threadIdx.x != 0) return;
    float* s = reinterpret_cast<float*>(a.scalars);
    double norm = sqrt(sum);
    double factor = double(a.max_norm) / (norm + 1e-6);
    s[GRAD_NORM] = float(norm);
    s[CLIP] = !a.limited || factor >= 1.0 ? 1.0f : float(factor);
}


// out = x·(loss scale).
extern "C" __global__ void __launch_bounds__(THREADS) scale_loss(const LossScaleArgs a) {
    const float scale = float(reinterpret_cast<const double*>(a.state)[SCALE]);
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at < a.n) reinterpret_cast<float*>(a.out)[at] = __fmul_rn(reinterpret_cast<const float*>(a.x)[at], scale);
}

// One thread: divides a sum of squares by the square of the loss scale.
extern "C" __global__ void unscale_square(const LossScaleArgs a) {
    const double scale = reinterpret_cast<const double*>(a.state)[SCALE];
    double* square = reinterpret_cast<double*>(a.out);
    *square = __ddiv_rn(*square, __dmul_rn(scale, scale));
}


// Dynamic loss scale after a step; grad_scaler.rs of the crate defines it.
extern "C" __global__ void update_scaler(const GradScalerArgs a) {
    double* state = reinterpret_cast<double*>(a.state);
    float* s = reinterpret_cast<float*>(a.scalars);
    const float scale = float(state[SCALE]);
    s[LOSS_SCALE] = scale;
    s[CLIP] = __fmul_rn(s[CLIP], __fdiv_rn(1.0f, scale));
    if (!is_number(s[GRAD_NORM])) {
        const i32 left = max(i32(state[HYSTERESIS]), -0x7fffffff) - 1;
        state[GROWTH] = 0.0;
        state[HYSTERESIS] = double(left);
        if (left <= 0) state[SCALE] = double(fmaxf(__fmul_rn(scale, a.backoff), a.least));
        return;
    }
    const u32 good = u32(state[GROWTH]) + 1;
    const bool grows = good >= a.interval;
    state[GROWTH] = grows ? 0.0 : double(good);
    if (!grows) return;
    state[HYSTERESIS] = double(a.hysteresis);
    state[SCALE] = double(__fmul_rn(scale, a.growth));
}


// Zeroes amax values before a step that will raise them.
extern "C" __global__ void __launch_bounds__(THREADS) reset_amax(const ResetAmaxArgs a) {
    if (!is_number(reinterpret_cast<const float*>(a.scalars)[GRAD_NORM])) return;
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at < a.n) reinterpret_cast<float*>(a.amax)[at] = 0.0f;
}


// Counts a step unless its gradients are not finite. Every operation is rounded by itself: a fused 1 - p·b would
// differ from the CPU's bits.
extern "C" __global__ void advance_step(const StepArgs a) {
    double* count = reinterpret_cast<double*>(a.counter);
    float* s = reinterpret_cast<float*>(a.scalars);
    if (!is_number(s[GRAD_NORM])) return;
    s[STEPS_DONE] = float(count[STEPS]);
    count[STEPS] += 1.0;
    double power1 = __dmul_rn(count[BETA1_POWER], double(a.beta1)), power2 = __dmul_rn(count[BETA2_POWER], double(a.beta2));
    count[BETA1_POWER] = power1, count[BETA2_POWER] = power2;
    s[BIAS1] = float(__dsub_rn(1.0, power1)), s[BIAS2] = float(__dsub_rn(1.0, power2));
}
