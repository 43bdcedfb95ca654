// What every kernel source includes: integer types, 16-bit floating point, 16-byte accesses, reductions. NVRTC
// compiles it without any header of the CUDA toolkit.
//
// Every kernel takes one struct by value, which `kernel_args!` (args.rs) declares for the host and for the device.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
static_assert(sizeof(u32) == 4 && sizeof(i32) == 4 && sizeof(float) == 4, "32 bits");
static_assert(sizeof(u64) == 8 && sizeof(i64) == 8 && sizeof(double) == 8, "64 bits");

// 16-bit floating-point numbers: bf16 is the upper half of an f32, f16 is IEEE's half.
struct alignas(2) bf16 {
    u16 bits;
};
struct alignas(2) f16 {
    u16 bits;
};

// The 16-bit type of a source that is compiled for bf16 and, as its f16 variant, for f16 (`Variant` of sources.rs).
//   ELEMENT_PTX                its name in PTX instructions
//   ELEMENT_NAME(kernel)       the kernel's name with the type's
//   FOR_ELEMENT(KERNELS)       KERNELS(type, name) for it
//   FOR_EACH_TYPE(KERNELS)     the same; f32 kernels belong to the base variant, which has both
#ifdef ELEMENT_F16
typedef f16 element;
#define ELEMENT_PTX "f16"
#define ELEMENT_NAME(kernel) kernel##_f16
#define FOR_ELEMENT(KERNELS) KERNELS(f16, f16)
#define FOR_EACH_TYPE(KERNELS) KERNELS(f16, f16)
#else
typedef bf16 element;
#define ELEMENT_PTX "bf16"
#define ELEMENT_NAME(kernel) kernel##_bf16
#define FOR_ELEMENT(KERNELS) KERNELS(bf16, bf16)
#define FOR_EACH_TYPE(KERNELS) KERNELS(float, f32) KERNELS(bf16, bf16)
#endif

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Rounds to nearest even; NaN stays NaN, and what overflows becomes infinite.
template <class T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 from_f32<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two 16-bit numbers in one register, `low` first in memory.
template <class E> __device__ __forceinline__ u32 pack_pair(float low, float high);
template <> __device__ __forceinline__ u32 pack_pair<bf16>(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <> __device__ __forceinline__ u32 pack_pair<f16>(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <class E> __device__ __forceinline__ float low_of(u32 pair);
template <class E> __device__ __forceinline__ float high_of(u32 pair);
template <> __device__ __forceinline__ float low_of<bf16>(u32 pair) { return __uint_as_float(pair << 16); }
template <> __device__ __forceinline__ float high_of<bf16>(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
template <> __device__ __forceinline__ float low_of<f16>(u32 pair) { return to_f32(f16{u16(pair)}); }
template <> __device__ __forceinline__ float high_of<f16>(u32 pair) { return to_f32(f16{u16(pair >> 16)}); }
__device__ __forceinline__ u32 pack_bf16(float low, float high) { return pack_pair<bf16>(low, high); }
__device__ __forceinline__ float low_bf16(u32 pair) { return low_of<bf16>(pair); }
__device__ __forceinline__ float high_bf16(u32 pair) { return high_of<bf16>(pair); }

// Elements of T in a 16-byte access.
template <class T> struct VecWidth {
    static constexpr int count = 16 / sizeof(T);
};

// A 16-byte access converted to or from f32. The address must be a multiple of 16.
template <class T> struct alignas(16) AlignedVec {
    T at[VecWidth<T>::count];
};
template <class T> __device__ __forceinline__ void load(const T* from, float (&to)[VecWidth<T>::count]) {
    AlignedVec<T> v = *reinterpret_cast<const AlignedVec<T>*>(from);
#pragma unroll
    for (int i = 0; i < VecWidth<T>::count; i++) to[i] = to_f32(v.at[i]);
}
template <class T> __device__ __forceinline__ void store(T* to, const float (&from)[VecWidth<T>::count]) {
    AlignedVec<T> v;
#pragma unroll
    for (int i = 0; i < VecWidth<T>::count; i++) v.at[i] = from_f32<T>(from[i]);
    *reinterpret_cast<AlignedVec<T>*>(to) = v;
}

// 16 bytes as in memory: values that wait in registers stay packed.
template <class T> struct alignas(16) Packed {
    u32 word[4];
};
__device__ __forceinline__ void unpack(const Packed<float>& p, float (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = __uint_as_float(p.word[i]);
}
template <class E> __device__ __forceinline__ void unpack(const Packed<E>& p, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[2 * i] = low_of<E>(p.word[i]), to[2 * i + 1] = high_of<E>(p.word[i]);
}
__device__ __forceinline__ Packed<float> pack(const float (&from)[4]) {
    Packed<float> p;
#pragma unroll
    for (int i = 0; i < 4; i++) p.word[i] = __float_as_uint(from[i]);
    return p;
}
__device__ __forceinline__ Packed<element> pack(const float (&from)[8]) {
    Packed<element> p;
#pragma unroll
    for (int i = 0; i < 4; i++) p.word[i] = pack_pair<element>(from[2 * i], from[2 * i + 1]);
    return p;
}

// Hides from the compiler how these registers were computed, so that it does not keep the unpacked values as well.
template <class T> __device__ __forceinline__ void opaque(Packed<T>& p) {
    asm volatile("" : "+r"(p.word[0]), "+r"(p.word[1]), "+r"(p.word[2]), "+r"(p.word[3]));
}

// Columns at .. at + V − 1 of a row of `width`; 0 beyond the end. One access where `vectorized` says that row and `at`
// are aligned, otherwise element by element: the values are the same, and so are all sums of them.
__device__ __forceinline__ void shift_in(Packed<float>& p, float x) {
    p.word[0] = p.word[1], p.word[1] = p.word[2], p.word[2] = p.word[3], p.word[3] = __float_as_uint(x);
}
template <class E> __device__ __forceinline__ void shift_in(Packed<E>& p, E x) {
#pragma unroll
    for (int i = 0; i < 3; i++) p.word[i] = __funnelshift_r(p.word[i], p.word[i + 1], 16);
    p.word[3] = __funnelshift_r(p.word[3], x.bits, 16);
}
__device__ __forceinline__ float first_of(const Packed<float>& p) { return __uint_as_float(p.word[0]); }
template <class E> __device__ __forceinline__ E first_of(const Packed<E>& p) { return {u16(p.word[0])}; }
template <class T> __device__ __forceinline__ Packed<T> load_guarded(const T* row, i32 at, i32 width, bool vectorized) {
    constexpr int V = VecWidth<T>::count;
    if (vectorized && at + V <= width) return *reinterpret_cast<const Packed<T>*>(row + at);
    Packed<T> p = {};
#pragma unroll 1
    for (int i = 0; i < V; i++) shift_in(p, at + i < width ? row[at + i] : T{0});
    return p;
}
// Stores them; nothing is written beyond the end.
template <class T> __device__ __forceinline__ void store_guarded(T* row, i32 at, i32 width, bool vectorized, Packed<T> p) {
    constexpr int V = VecWidth<T>::count;
    if (vectorized && at + V <= width) {
        *reinterpret_cast<Packed<T>*>(row + at) = p;
        return;
    }
#pragma unroll 1
    for (int i = at; i < min(at + V, width); i++) {
        row[i] = first_of(p);
        shift_in(p, T{0});
    }
}

__device__ __forceinline__ bool aligned16(const void* p) { return (reinterpret_cast<u64>(p) & 15) == 0; }

// Sum over a warp, in a fixed order, in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}

// Sum over a block of up to 1024 threads (a multiple of 32), in a fixed order, in every thread. `shared`: 32 floats.
// Synchronizes before and after use.
__device__ __forceinline__ float block_sum(float x, float* shared) {
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    int warps = (blockDim.x + 31) >> 5;
    x = (threadIdx.x & 31) < warps ? shared[threadIdx.x & 31] : 0.0f;
    return warp_sum(x);
}
__device__ __forceinline__ float block_max(float x, float* shared) {
    x = warp_max(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    int warps = (blockDim.x + 31) >> 5;
    x = (threadIdx.x & 31) < warps ? shared[threadIdx.x & 31] : -__int_as_float(0x7f800000);
    return warp_max(x);
}

// Invalid input that a kernel finds at run time is reported in the device's fault word, which the host reads at its
// next synchronization.
enum Fault : u32 { FAULT_ID = 1, FAULT_LABEL = 2 };
__device__ __forceinline__ void fault(u64 word, u32 code) { *reinterpret_cast<volatile u32*>(word) = code; }

