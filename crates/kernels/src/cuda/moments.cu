// Packs and unpacks optimizer moments, splits and joins master weights. A warp has one block of 32 packed elements.
#include "args/moments.cuh"
#include "moments.cuh"
#include "optim.cuh"

template <class F> __device__ __forceinline__ void pack_all(const MomentArgs& a) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    float x = at < a.n ? reinterpret_cast<const float*>(a.values)[at] : 0.0f;
    u32 scale = scale_of<F>(warp_max(fabsf(x)));
    if (at >= a.n) return;
    typedef typename F::Code Code;
    reinterpret_cast<Code*>(a.codes)[at] = Code(pack_nearest<F>(x, inverse_of(scale)));
    if (at % BLOCK == 0) reinterpret_cast<u8*>(a.scales)[at / BLOCK] = u8(scale);
}
template <class F> __device__ __forceinline__ void unpack_all(const MomentArgs& a) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= a.n) return;
    u32 code = reinterpret_cast<const typename F::Code*>(a.codes)[at];
    u32 scale = reinterpret_cast<const u8*>(a.scales)[at / BLOCK];
    reinterpret_cast<float*>(a.values)[at] = unpack<F>(code, scale);
}
template <class T> __device__ __forceinline__ void narrow_all(const MomentArgs& a) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at < a.n) reinterpret_cast<T*>(a.codes)[at] = from_f32<T>(reinterpret_cast<const float*>(a.values)[at]);
}
template <class T> __device__ __forceinline__ void widen_all(const MomentArgs& a) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at < a.n) reinterpret_cast<float*>(a.values)[at] = to_f32(reinterpret_cast<const T*>(a.codes)[at]);
}

#define BOTH_WAYS(NAME, PACK, UNPACK, T)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) pack_##NAME(const MomentArgs a) { PACK<T>(a); } \
    extern "C" __global__ void __launch_bounds__(THREADS) unpack_##NAME(const MomentArgs a) { UNPACK<T>(a); }
BOTH_WAYS(f32, narrow_all, widen_all, float)
BOTH_WAYS(bf16, narrow_all, widen_all, bf16)
BOTH_WAYS(first_f16, pack_all, unpack_all, First16)
BOTH_WAYS(second_f16, pack_all, unpack_all, Second16)
BOTH_WAYS(first_fp8, pack_all, unpack_all, First8)
BOTH_WAYS(second_fp8, pack_all, unpack_all, Second8)


extern "C" __global__ void __launch_bounds__(THREADS) split_master(const SplitMasterArgs a) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= a.n) return;
    Halves h = split_of(reinterpret_cast<const float*>(a.master)[at]);
    reinterpret_cast<bf16*>(a.high)[at] = h.high;
    reinterpret_cast<u16*>(a.low)[at] = h.low;
}
extern "C" __global__ void __launch_bounds__(THREADS) join_master(const SplitMasterArgs a) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= a.n) return;
    Halves h = {reinterpret_cast<const bf16*>(a.high)[at], reinterpret_cast<const u16*>(a.low)[at]};
    reinterpret_cast<float*>(a.master)[at] = join(h);
}
