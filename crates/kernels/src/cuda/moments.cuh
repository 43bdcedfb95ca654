// Optimizer moments in 16 or 8 bits; moments.rs of the crate defines the formats. Blocks of 32 elements share a scale
// 2^k, stored as k + 127. SIGN_BELOW: by how many bits the sign is below that of an f32.
#pragma once
#include "prelude.cuh"

struct First8 {
    typedef u8 Code;
    static constexpr u32 MANTISSA = 3, BIAS = 7, LARGEST = 0x7e, SIGN = 0x80, SIGN_BELOW = 24;
    static constexpr bool ABOVE_ZERO = false;
};
struct Second8 {
    typedef u8 Code;
    static constexpr u32 MANTISSA = 3, BIAS = 15, LARGEST = 0xff, SIGN = 0, SIGN_BELOW = 0;
    static constexpr bool ABOVE_ZERO = true;
};
struct First16 {
    typedef u16 Code;
    static constexpr u32 MANTISSA = 10, BIAS = 15, LARGEST = 0x7bff, SIGN = 0x8000, SIGN_BELOW = 16;
    static constexpr bool ABOVE_ZERO = false;
};
struct Second16 {
    typedef u16 Code;
    static constexpr u32 MANTISSA = 10, BIAS = 15, LARGEST = 0x7bff, SIGN = 0, SIGN_BELOW = 0;
    static constexpr bool ABOVE_ZERO = true;
};

constexpr int BLOCK = 32;

__device__ __forceinline__ float power_of_two(u32 biased) { return __uint_as_float(biased << 23); }

// k + 127 of the smallest scale that brings `largest` into range.
template <class F> __device__ __forceinline__ u32 scale_of(float packed_amax) {
    constexpr u32 top = F::LARGEST << (23 - F::MANTISSA), above = 0x7fffff - (top & 0x7fffff);
    i32 k = i32((__float_as_uint(packed_amax) + above) >> 23) - i32(top >> 23) - 127 + i32(F::BIAS);
    return u32(min(max(k, -100), 120) + 127);
}
__device__ __forceinline__ float inverse_of(u32 scale) { return power_of_two(254 - scale); }

template <class F> __device__ __forceinline__ float unpack(u32 code, u32 scale) {
    u32 bits = (code & ~F::SIGN) << (23 - F::MANTISSA);
    if (F::SIGN != 0) bits |= (code & F::SIGN) << F::SIGN_BELOW;
    return __fmul_rn(__fmul_rn(__uint_as_float(bits), power_of_two(254 - F::BIAS)), power_of_two(scale));
}

// Bits of an f32 with the exponent of the code: linear in the value between neighbouring codes.
template <class F> __device__ __forceinline__ u32 scaled(float x, float inverse) {
    float y = __fmul_rn(__fmul_rn(fabsf(x), inverse), power_of_two(F::BIAS));
    return __float_as_uint(y) & 0x7fffffffu;
}
template <class F> __device__ __forceinline__ u32 finish(float x, u32 bits) {
    u32 magnitude = min(bits >> (23 - F::MANTISSA), F::LARGEST);
    if (F::ABOVE_ZERO) return max(magnitude, u32(x > 0.0f));
    return magnitude | ((__float_as_uint(x) >> F::SIGN_BELOW) & F::SIGN);
}
// `pack` rounds stochastically (up with the probability that makes the expectation exact), `pack_nearest` to nearest
// even.
template <class F> __device__ __forceinline__ u32 pack(float x, float inverse, u32 dice) {
    return finish<F>(x, scaled<F>(x, inverse) + (dice >> (9 + F::MANTISSA)));
}
template <class F> __device__ __forceinline__ u32 pack_nearest(float x, float inverse) {
    constexpr u32 drop = 23 - F::MANTISSA;
    u32 bits = scaled<F>(x, inverse);
    return finish<F>(x, bits + ((1u << (drop - 1)) - 1 + ((bits >> drop) & 1)));
}

__device__ __forceinline__ u32 seed_of(float steps_done) { return __float_as_uint(steps_done) * 0x9e3779b1u; }
__device__ __forceinline__ u32 rotate16(u32 x) { return __funnelshift_l(x, x, 16); }
__device__ __forceinline__ u32 dice_of(u32 seed, float master, float momentum) {
    u32 h = (__float_as_uint(master) ^ rotate16(__float_as_uint(momentum)) ^ seed) * 0x85ebca6bu;
    return (h ^ (h >> 16)) * 0xc2b2ae35u;
}

// A split master weight: the bf16 that the model computes with, rounded half away from zero, and the low 16 bits.
struct Halves {
    bf16 high;
    u16 low;
};
__device__ __forceinline__ Halves split_of(float master) {
    u32 bits = __float_as_uint(master);
    return {{u16((bits + 0x8000u) >> 16)}, u16(bits)};
}
__device__ __forceinline__ float join(Halves h) {
    return __uint_as_float(((u32(h.high.bits) - (h.low >> 15)) << 16) | h.low);
}
