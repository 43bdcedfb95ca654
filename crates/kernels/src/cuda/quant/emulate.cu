// Emulation of MXFP8 and NVFP4: values are rounded to the format and back.
#include "amax.cuh"
#include "quant/microscaling.cuh"

template <class T> __device__ __forceinline__ void emulate(const EmulateArgs& a) {
    __shared__ Shared s;
    quantize_tile<T, true>(a, s);
    transform_back(a, s);
    store_tile<T>(a, s, blockIdx.x, threadIdx.x);
}

// amax after the Hadamard transform.
template <class T> __device__ __forceinline__ void hadamard_amax(const EmulateArgs& a) {
    __shared__ Shared s;
    const int t = threadIdx.x;
    load_tile<T>(a, s, blockIdx.x, t);
    __syncthreads();
    hadamard_tile(s, a.hadamard, t, false);
    __syncthreads();
    float m = 0.0f;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const Position p(a, blockIdx.x, t, k);
        m = fmaxf(m, fabsf(s.tile[p.i][p.j]));
    }
    block_atomic_amax(a.amax, m);
}

#define EMULATE(T, NAME)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) emulate_##NAME(const EmulateArgs a) { emulate<T>(a); } \
    extern "C" __global__ void __launch_bounds__(THREADS) turned_amax_##NAME(const EmulateArgs a) { hadamard_amax<T>(a); }
EMULATE(float, f32)
EMULATE(bf16, bf16)
EMULATE(f16, f16)
