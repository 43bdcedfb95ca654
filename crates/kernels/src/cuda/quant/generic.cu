// Dequantization, transposition, and GEMM of FP8 operands with FMA instructions: any sizes and alignments.
#include "quant/matrix.cuh"

// One block: a tile of 128 × 128; a thread has 16 columns of four rows of it.
template <class T> __device__ __forceinline__ void dequantize(const DequantizeArgs& a) {
    const i64 column = i64(blockIdx.x % a.across) * TILE + (threadIdx.x & 7) * 16;
    const i64 row0 = i64(blockIdx.x / a.across) * TILE + (threadIdx.x >> 3);
    if (column >= a.q.c) return;
    const i64 pitch = pitch_of(a.q);
    const u8* q = reinterpret_cast<const u8*>(a.q.data) + column;
    const bool whole = a.vectorized && column + 16 <= a.q.c;
    uint4 four[4] = {};
    float scale[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const i64 row = row0 + 32 * i;
        if (row >= a.q.r) continue;
        scale[i] = scale_at(a.q, row, column);
        if (whole) four[i] = *reinterpret_cast<const uint4*>(q + row * pitch);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const i64 row = row0 + 32 * i;
        if (row >= a.q.r) continue;
        T* out = reinterpret_cast<T*>(a.out) + row * a.stride + column;
        if (whole) {
            const u32 word[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
            constexpr int N = VecWidth<T>::count;
#pragma unroll
            for (int at = 0; at < 16; at += N) {
                float f[N];
#pragma unroll
                for (int j = 0; j < N; j++)
                    f[j] = decode_fp8(a.q.e5m2, word[(at + j) / 4] >> 8 * ((at + j) & 3) & 0xffu) * scale[i];
                store(out + at, f);
            }
        } else {
#pragma unroll 1
            for (int j = 0; j < 16 && column + j < a.q.c; j++)
                out[j] = from_f32<T>(decode_fp8(a.q.e5m2, q[row * pitch + j]) * scale[i]);
        }
    }
}
extern "C" __global__ void __launch_bounds__(256) dequantize_f32(const DequantizeArgs a) { dequantize<float>(a); }
extern "C" __global__ void __launch_bounds__(256) dequantize_bf16(const DequantizeArgs a) { dequantize<bf16>(a); }


// One block: a tile of c = a·bᵀ.
template <class C> __device__ __forceinline__ void gemm(const Fp8GemmArgs& g) {
    const i64 across = (g.b.r + SIDE - 1) / SIDE;
    gemm_tile({g.a, 0, g.a.r}, {g.b, 0, g.b.r}, 0, g.a.c, i64(blockIdx.x) / across * SIDE,
                 i64(blockIdx.x) % across * SIDE, reinterpret_cast<C*>(g.c), g.ldc, reinterpret_cast<const bf16*>(g.bias),
                 g.accumulate);
}
extern "C" __global__ void __launch_bounds__(256) fp8_gemm_f32(const Fp8GemmArgs g) { gemm<float>(g); }
extern "C" __global__ void __launch_bounds__(256) fp8_gemm_bf16(const Fp8GemmArgs g) { gemm<bf16>(g); }


// One block: transposes a tile of 64 × 64 bytes of [r, c] into [c, r padded to 16].
extern "C" __global__ void __launch_bounds__(256) transpose_fp8(const Fp8TransposeArgs a) {
    __shared__ u8 tile[64][68];
    const i64 row0 = i64(blockIdx.x / a.across) * 64, column0 = i64(blockIdx.x % a.across) * 64;
    const i64 pitch = (a.c + 15) / 16 * 16, to_pitch = (a.r + 15) / 16 * 16;
    const u8* from = reinterpret_cast<const u8*>(a.from);
    u8* to = reinterpret_cast<u8*>(a.to);
    // A thread moves four bytes each way. Rows are padded to 16 bytes, so that a word never crosses the end of one.
    const int x = threadIdx.x % 16 * 4, y = threadIdx.x / 16;
#pragma unroll
    for (int i = y; i < 64; i += 16) {
        u32 word = 0;
        if (row0 + i < a.r && column0 + x < pitch)
            word = *reinterpret_cast<const u32*>(from + (row0 + i) * pitch + column0 + x);
        *reinterpret_cast<u32*>(&tile[i][x]) = word;
    }
    __syncthreads();
#pragma unroll
    for (int i = y; i < 64; i += 16) {
        const i64 row = column0 + i, column = row0 + x;
        if (row >= a.c || column >= to_pitch) continue;
        const u32 word = tile[x][i] | u32(tile[x + 1][i]) << 8 | u32(tile[x + 2][i]) << 16 | u32(tile[x + 3][i]) << 24;
        *reinterpret_cast<u32*>(to + row * to_pitch + column) = word;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *reinterpret_cast<float*>(a.to_scale) = *reinterpret_cast<const float*>(a.scale);
}
