// Quantizes weights while Adam updates them, so that FP8 GEMMs need no pass of their own over the weights: raises
// their amax (current scaling), or writes E4M3 under a scale that is known (delayed scaling). Entries that ask for
// neither cost nothing; the branch is uniform over a block.
#pragma once
#include "adam.cuh"
#include "amax.cuh"
#include "quant/common.cuh"

struct QuantizedWeight {
    static constexpr bool wanted = true;
    float most, scale;
    u8* bytes;
    __device__ __forceinline__ QuantizedWeight(const TensorEntry& e, bool first_block)
        : most(0.0f), scale(1.0f), bytes(reinterpret_cast<u8*>(e.fp8)) {
        if (!bytes) return;
        scale = *reinterpret_cast<const float*>(e.scale);
        if (first_block && threadIdx.x == 0) *reinterpret_cast<float*>(e.scale_inv) = __fdiv_rn(1.0f, scale);
    }
    // N aligned elements. Only f32 master weights are quantized, not split ones.
    template <class P, int N> __device__ __forceinline__ void take(i64 at, const Vec<float, N>& p) {
        Vec<u32, N / 4> out;
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = P::weight_of(p.at[i + j]), most = fmaxf(most, fabsf(w[j]));
            if (P::whole) out.at[i / 4] = encode_fp8(0, w[0] * scale, w[1] * scale, w[2] * scale, w[3] * scale);
        }
        if (P::whole && bytes) *reinterpret_cast<Vec<u32, N / 4>*>(bytes + at) = out;
    }
    template <class P> __device__ __forceinline__ void take_one(i64 at, float p) {
        float w = P::weight_of(p);
        most = fmaxf(most, fabsf(w));
        if (P::whole && bytes) bytes[at] = u8(encode_fp8(0, w * scale, 0.0f, 0.0f, 0.0f));
    }
    __device__ __forceinline__ void atomic_amax(const TensorEntry& e) const {
        if (e.amax) block_atomic_amax(e.amax, most);
    }
    // When the step is skipped (non-finite gradients): the weights stay, but are quantized again, because their scale
    // may have changed.
    template <class P> static __device__ __forceinline__ void requantize_unchanged(const AdamArgs& a) {
        const int index = entry_of(a, blockIdx.x);
        const TensorEntry& e = a.list[index];
        if (!P::whole || !e.fp8) return;
        QuantizedWeight taken(e, blockIdx.x == a.start[index]);
        const P masters(e);
        i64 base = i64(blockIdx.x - a.start[index]) * UPDATES;
#pragma unroll 1
        for (i64 at = base + threadIdx.x; at < min(base + UPDATES, e.n); at += THREADS)
            taken.take_one<P>(at, masters.get(at));
        taken.atomic_amax(e);
    }
};
