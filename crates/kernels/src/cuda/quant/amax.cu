// amax of tensors, and scales of delayed scaling from amax histories.
#include "amax.cuh"
#include "args/quant_amax.cuh"
#include "quant/common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// Rows of a warp whose loads are in flight together.
constexpr int AHEAD = 8;


// One block: a lane has 8 columns, a warp IN_FLIGHT rows.
template <class T> __device__ __forceinline__ void amax(const AmaxArgs& a) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 column = (i64(blockIdx.x % a.across) * 32 + lane) * 8;
    const i64 first = i64(blockIdx.x / a.across) * (WARPS * AHEAD);
    const T* x = reinterpret_cast<const T*>(a.x) + blockIdx.y * a.step + first * a.stride + column;
    float m = 0.0f;
    auto take = [&](const Pack8<T>& e) {
#pragma unroll
        for (int j = 0; j < 8; j++) m = fmaxf(m, fabsf(e.at(j)));
    };
    if (a.vectorized && first + WARPS * AHEAD < a.rows && (i64(blockIdx.x % a.across) + 1) * 256 <= a.width) {
        Pack8<T> e[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            e[i] = *reinterpret_cast<const Pack8<T>*>(x + (i * WARPS + warp) * a.stride);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) take(e[i]);
    } else {
#pragma unroll 1
        for (int i = warp; i < WARPS * AHEAD && first + i < a.rows; i += WARPS) {
            const i64 width = first + i + 1 == a.rows ? a.last : a.width;
            if (a.vectorized && column + 8 <= width) {
                take(*reinterpret_cast<const Pack8<T>*>(x + i * a.stride));
            } else {
#pragma unroll 1
                for (int j = 0; j < 8 && column + j < width; j++) m = fmaxf(m, fabsf(to_f32(x[i * a.stride + j])));
            }
        }
    }
    block_atomic_amax(a.amax + blockIdx.y * sizeof(float), m);
}
extern "C" __global__ void __launch_bounds__(THREADS) amax_f32(const AmaxArgs a) { amax<float>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) amax_bf16(const AmaxArgs a) { amax<bf16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) amax_f16(const AmaxArgs a) { amax<f16>(a); }


constexpr int GROUPS = 16;

// One block: 32 tensors, lanes across them, warps down the history. history[0] is this step's amax; it is appended at
// the end, the others move up by one, and the oldest, at index 1, is dropped.
extern "C" __global__ void __launch_bounds__(32 * GROUPS) delayed_update(const DelayedArgs a) {
    __shared__ float most[GROUPS][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 t = i64(blockIdx.x) * 32 + lane;
    const bool here = t < a.n;
    float* history = reinterpret_cast<float*>(a.history) + t;
    const float own = here ? history[0] : 0.0f;
    const float agreed = here ? reinterpret_cast<const float*>(a.reduced)[t] : 0.0f;
    const float last = agreed != 0.0f ? agreed : own;
    // An amax of 0: the tensor was not quantized in this step.
    const bool moves = here && last != 0.0f;
    float m = last;
    for (i64 i0 = 1; i0 < a.len; i0 += 4 * GROUPS) {
        float h[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const i64 i = i0 + u * GROUPS + warp;
            h[u] = moves && i < a.len ? history[i * a.n] : 0.0f;
            m = fmaxf(m, h[u]);
        }
        // All rows of this round are read before any is overwritten.
        __syncthreads();
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const i64 i = i0 + u * GROUPS + warp;
            if (moves && i < a.len) history[(i - 1) * a.n] = h[u];
        }
    }
    most[warp][lane] = m;
    __syncthreads();
    if (warp != 0 || !moves) return;
#pragma unroll
    for (int w = 0; w < GROUPS; w++) m = fmaxf(m, most[w][lane]);
    // With a history of one row, that row is reset.
    history[(a.len - 1) * a.n] = last;
    history[0] = 0.0f;
    if (a.most_recent) m = last;
    const float infinity = __uint_as_float(0x7f800000u);
    if (!(m > 0.0f) || m == infinity) return;
    const float s = __fdiv_rn(reinterpret_cast<const float*>(a.largest)[t] * a.factor, m);
    reinterpret_cast<float*>(a.scale)[t] = s == infinity ? __uint_as_float(0x7f7fffffu) : s;
}
