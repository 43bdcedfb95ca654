// Router gate in f64: c[m, n] (+)= Σ_k a[m, k]·b[n, k], products and sums in f64 in order of k.
#include "args/router_gate.cuh"

constexpr int TILE = 64, DEPTH = 16, GATE_THREADS = 256;

// Loads TILE rows from `first`, DEPTH steps of k from `from`; zeros past the end. `along`: k is the contiguous axis.
template <bool along, class T>
__device__ __forceinline__ void
gather(const T* x, i64 row, i64 step, i64 first, i64 rows, i64 from, i64 steps, double (&to)[DEPTH][TILE + 1]) {
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / GATE_THREADS; i++) {
        const int at = i * GATE_THREADS + threadIdx.x;
        const int r = along ? at / DEPTH : at % TILE, k = along ? at % DEPTH : at / TILE;
        const bool there = first + r < rows && from + k < steps;
        to[k][r] = there ? double(to_f32(x[(first + r) * row + (from + k) * step])) : 0.0;
    }
}

// A block has a tile of TILE × TILE results, a thread 4 × 4 of them: rows y, y + 16, ... and columns x, x + 16, ...
template <bool along_a, bool along_b, class A, class B, class C> __device__ __forceinline__ void gate(const GateArgs& p) {
    __shared__ double a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    const int x = threadIdx.x & 15, y = threadIdx.x >> 4;
    const i64 m = i64(blockIdx.x) * TILE, n = i64(blockIdx.y) * TILE;
    double sum[4][4] = {};
    for (i64 k = 0; k < p.k; k += DEPTH) {
        gather<along_a>(reinterpret_cast<const A*>(p.a), p.a_row, p.a_step, m, p.m, k, p.k, a);
        gather<along_b>(reinterpret_cast<const B*>(p.b), p.b_row, p.b_step, n, p.n, k, p.k, b);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            double u[4], v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) u[i] = a[d][y + 16 * i], v[i] = b[d][x + 16 * i];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += u[i] * v[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const i64 r = m + y + 16 * i, c = n + x + 16 * j;
            if (r >= p.m || c >= p.n) continue;
            C* to = reinterpret_cast<C*>(p.c) + r * p.n + c;
            *to = from_f32<C>(float(p.accumulate ? sum[i][j] + double(to_f32(*to)) : sum[i][j]));
        }
}

#define GATE_KERNELS(T, type)                                                                                          \
    extern "C" __global__ void __launch_bounds__(GATE_THREADS) gate_logits_##type(const GateArgs p) {                  \
        gate<true, true, T, T, float>(p);                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(GATE_THREADS) gate_dx_##type(const GateArgs p) {                      \
        gate<true, false, float, T, T>(p);                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(GATE_THREADS) gate_dw_##type(const GateArgs p) {                      \
        gate<false, false, float, T, float>(p);                                                                        \
    }
GATE_KERNELS(float, f32)
GATE_KERNELS(bf16, bf16)
