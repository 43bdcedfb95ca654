// Generic GEMM with FMA instructions, for sizes and alignments that cuBLASLt does not take.
#include "args/gemm.cuh"
#include "gemm_tile.cuh"

template <class T, class C> __device__ __forceinline__ void gemm(const GemmArgs& g) {
    i64 across = (g.n + SIDE - 1) / SIDE;
    i64 row0 = i64(blockIdx.x) / across * SIDE, column0 = i64(blockIdx.x) % across * SIDE;
    gemm_tile<T, C>({reinterpret_cast<const T*>(g.a), g.lda, !g.trans_a},
                       {reinterpret_cast<const T*>(g.b), g.ldb, bool(g.trans_b)}, row0, column0, g.m, g.n, g.k,
                       reinterpret_cast<C*>(g.c), g.ldc, reinterpret_cast<const T*>(g.bias), g.accumulate);
}
#ifdef ELEMENT_F16
extern "C" __global__ void __launch_bounds__(THREADS) gemm_f16(const GemmArgs g) { gemm<f16, f16>(g); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_f16_f32(const GemmArgs g) { gemm<f16, float>(g); }
#else
extern "C" __global__ void __launch_bounds__(THREADS) gemm_f32(const GemmArgs g) { gemm<float, float>(g); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_bf16(const GemmArgs g) { gemm<bf16, bf16>(g); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_bf16_f32(const GemmArgs g) { gemm<bf16, float>(g); }
#endif
