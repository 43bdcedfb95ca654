// Merges attention over two sets of keys, eight lanes to a row of `width` channels. With x = e^-|lse - part_lse| the
// side with the larger log-sum-exp gets the weight 1/(1+x), the other x/(1+x).
#include "args/attention_merge.cuh"

template <class T> struct alignas(4 * sizeof(T)) Four {
    T at[4];
};

template <class T> __device__ __forceinline__ void merge(const MergeArgs& a) {
    const i64 r = (i64(blockIdx.x) * blockDim.x + threadIdx.x) >> 3;
    const i32 lane = threadIdx.x & 7;
    const float none = -__int_as_float(0x7f800000);
    float* total = reinterpret_cast<float*>(a.lse) + r;
    float old = none, add = none;
    if (r < a.rows) old = *total, add = reinterpret_cast<const float*>(a.part_lse)[r];
    // All lanes of a row have read its log-sum-exp before lane 0 overwrites it.
    __syncwarp();
    if (add == none) return;
    const float x = expf(-fabsf(old - add)), large = 1.0f / (1.0f + x), small = x / (1.0f + x);
    const float u = old >= add ? large : small, v = old >= add ? small : large;
    if (lane == 0) *total = fmaxf(old, add) + log1pf(x);
    float* out = reinterpret_cast<float*>(a.out) + r * a.width;
    const T* part = reinterpret_cast<const T*>(a.part) + r * a.width;
    if (a.vectorized) {
        for (i32 c = lane * 4; c < a.width; c += 32) {
            Four<float> y = *reinterpret_cast<const Four<float>*>(out + c);
            const Four<T> z = *reinterpret_cast<const Four<T>*>(part + c);
#pragma unroll
            for (int e = 0; e < 4; e++) y.at[e] = y.at[e] * u + to_f32(z.at[e]) * v;
            *reinterpret_cast<Four<float>*>(out + c) = y;
        }
    } else {
        for (i32 c = lane; c < a.width; c += 8) out[c] = out[c] * u + to_f32(part[c]) * v;
    }
}

#define ATTENTION_MERGE(T, NAME) \
    extern "C" __global__ void attention_merge_##NAME(const MergeArgs a) { merge<T>(a); }
FOR_EACH_TYPE(ATTENTION_MERGE)
