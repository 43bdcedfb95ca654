// FP8 formats: scales, conversion, and packed loads.
#pragma once
#include "prelude.cuh"

// Largest finite value of a type.
template <class T> struct MaxFinite;
template <> struct MaxFinite<float> {
    static constexpr u32 bits = 0x7f7fffffu;
};
template <> struct MaxFinite<bf16> {
    static constexpr u32 bits = 0x7f7f0000u;
};
template <> struct MaxFinite<f16> {
    static constexpr u32 bits = 0x477fe000u;
};

// Largest values of E4M3 and E5M2.
__device__ __forceinline__ float fp8_max(u32 e5m2) { return e5m2 ? 57344.0f : 448.0f; }

// Scale that maps magnitudes up to `amax` into a format: largest/amax; `instead` where that is infinite; 1 where amax
// is 0, infinite or NaN. IEEE division: CPU and GPU find the same bits.
__device__ __forceinline__ float scale_of(float amax, float largest, u32 pow2, float instead) {
    const float infinity = __uint_as_float(0x7f800000u);
    if (!(amax > 0.0f) || amax == infinity) return 1.0f;
    float s = __fdiv_rn(largest, amax);
    if (s == infinity) s = instead;
    return pow2 ? __uint_as_float(__float_as_uint(s) & 0xff800000u) : s;
}

// Converts to M bits of mantissa with exponent bias B on GPUs without an FP8 instruction: rounds to nearest even,
// saturates at `most`, NaN stays.
template <int M, int B> __device__ __forceinline__ u32 encode_fp8_software(float x, float most) {
    const u32 sign = __float_as_uint(x) >> 24 & 0x80u;
    if (x != x) return sign | 0x7fu;
    const float y = fminf(fabsf(x), most);
    const u32 bits = __float_as_uint(y);
    // Subnormals are multiples of one step; a carry out of them gives the smallest normal number.
    const u32 small = __float2uint_rn(y * __uint_as_float(u32(127 - 1 + B + M) << 23));
    constexpr int DROP = 23 - M;
    const u32 normal = ((bits + (1u << (DROP - 1)) - 1 + (bits >> DROP & 1)) >> DROP) - (u32(127 - B) << M);
    return sign | (int(bits >> 23) - 127 < 1 - B ? small : normal);
}

// Four values as bytes, the first lowest.
__device__ __forceinline__ u32 encode_fp8_software(u32 e5m2, float x, float y, float z, float w) {
    const float v[4] = {x, y, z, w};
    u32 out = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        out |= (e5m2 ? encode_fp8_software<2, 15>(v[i], 57344.0f) : encode_fp8_software<3, 7>(v[i], 448.0f)) << 8 * i;
    return out;
}
__device__ __forceinline__ u32 encode_fp8(u32 e5m2, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 890
    u16 low, high;
    if (e5m2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(y), "f"(x));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(w), "f"(z));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(y), "f"(x));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(w), "f"(z));
    }
    return u32(low) | u32(high) << 16;
#else
    return encode_fp8_software(e5m2, x, y, z, w);
#endif
}

// Converts FP8 to f32. Both formats are f16 with fewer bits; E4M3 has another exponent bias, and its only NaN has
// another encoding.
__device__ __forceinline__ float decode_fp8(u32 e5m2, u32 byte) {
    if (e5m2) return to_f32(f16{u16(byte << 8)});
    const float y = to_f32(f16{u16((byte & 0x80u) << 8 | (byte & 0x7fu) << 7)}) * 256.0f;
    return (byte & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : y;
}

// Eight neighbouring elements of a row as in memory: they are unpacked only where they are used.
template <class T> struct alignas(16) Pack8 {
    static constexpr int WORDS = 2 * sizeof(T);
    u32 word[WORDS];
    __device__ __forceinline__ float at(int i) const;
    // Sets element i, whose bits are zero so far.
    __device__ __forceinline__ void put(int i, T x);
};
template <> __device__ __forceinline__ float Pack8<float>::at(int i) const { return __uint_as_float(word[i]); }
template <> __device__ __forceinline__ float Pack8<bf16>::at(int i) const {
    return i & 1 ? high_bf16(word[i / 2]) : low_bf16(word[i / 2]);
}
template <> __device__ __forceinline__ float Pack8<f16>::at(int i) const {
    return to_f32(f16{u16(i & 1 ? word[i / 2] >> 16 : word[i / 2])});
}
template <> __device__ __forceinline__ void Pack8<float>::put(int i, float x) { word[i] = __float_as_uint(x); }
template <> __device__ __forceinline__ void Pack8<bf16>::put(int i, bf16 x) {
    word[i / 2] |= u32(x.bits) << 16 * (i & 1);
}
template <> __device__ __forceinline__ void Pack8<f16>::put(int i, f16 x) { word[i / 2] |= u32(x.bits) << 16 * (i & 1); }
template <class T> __device__ __forceinline__ void opaque(Pack8<T>& e) {
#pragma unroll
    for (int i = 0; i < Pack8<T>::WORDS; i++) asm volatile("" : "+r"(e.word[i]));
}
