// Activation functions: values, derivatives and gates. A function with parameters (limit, alpha, offset) takes them
// from the kernel's arguments.
#pragma once
#include "prelude.cuh"

enum Act : u32 { GELU_TANH = 0, GELU_ERF = 1, SILU = 2, CLAMPED_SILU = 3, SQUARED_RELU = 4 };

// Both return NaN for NaN.
__device__ __forceinline__ float at_least(float x, float low) { return x < low ? low : x; }
__device__ __forceinline__ float at_most(float x, float high) { return x > high ? high : x; }

// 16-bit outputs can afford the hardware's approximations, which are accurate to a few ulp and exact at their limits:
// 2^∞ = ∞, 1/∞ = 0, NaN stays NaN. f32 outputs use the exact division and expf below.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define LOG2_E 1.44269504f

template <class T> __device__ __forceinline__ float quotient(float a, float b) { return a * reciprocal(b); }
template <> __device__ __forceinline__ float quotient<float>(float a, float b) { return a / b; }

// Range in which the f32 sigmoid is evaluated: e^86 and its reciprocal are normal numbers, and above 88 σ(x) rounds to
// 1.
#define SIGMOID_LOW (-86.0f)
#define SIGMOID_HIGH 88.0f
template <class T> __device__ __forceinline__ float inverse_power(float x) { return power_of_two(x * -LOG2_E); }
template <> __device__ __forceinline__ float inverse_power<float>(float x) {
    return expf(-at_most(at_least(x, SIGMOID_LOW), SIGMOID_HIGH));
}

// y·σ(x)
template <class T> __device__ __forceinline__ float times_sigmoid(float y, float x) {
    return quotient<T>(y, 1.0f + inverse_power<T>(x));
}
// σ(x) and 1 − σ(x), neither losing digits to cancellation.
template <class T> __device__ __forceinline__ void sigmoid_pair(float x, float& s, float& rest) {
    // Clamped below ∞, because ∞·0 is NaN.
    float e = at_most(inverse_power<T>(x), 3e37f);
    s = quotient<T>(1.0f, 1.0f + e);
    rest = e * s;
}

// For |x| > 20 GELU has reached its asymptotes in f32: value 0 and slope 0 on the left, slope 1 on the right. Clamping
// there keeps powers of x and products with a vanishing σ in range.
#define FLAT 20.0f

// Each activation has `value(x)`, `slope(x, value)` (derivative and value together), and for gated use `gate(u)` and
// `gate_slope(u, d)`, the linear half and its derivative times d.
template <class T> struct GeluTanh {
    // ½(1 + tanh u) = σ(2u), so GELU is x·σ(x·(A + B·x²)) with A = 2√(2/π), B = 0.044715·A.
    static constexpr float A = 1.5957692f, B = 0.071354814f;
    template <class Args> __device__ __forceinline__ GeluTanh(const Args&) {}
    __device__ __forceinline__ float value(float x) const {
        float low = at_least(x, -FLAT);
        return times_sigmoid<T>(low, low * fmaf(low * low, B, A));
    }
    __device__ __forceinline__ float slope(float x, float& value) const {
        float low = at_least(x, -FLAT), c = at_most(low, FLAT), z = c * c, s, rest;
        sigmoid_pair<T>(c * fmaf(z, B, A), s, rest);
        value = low * s;
        return fmaf(c, s * rest * fmaf(z, 3.0f * B, A), s);
    }
    __device__ __forceinline__ float gate(float u) const { return u; }
    __device__ __forceinline__ float gate_slope(float, float d) const { return d; }
};

template <class T> struct GeluErf {
    template <class Args> __device__ __forceinline__ GeluErf(const Args&) {}
    // Φ(x) = ½(1 + erf(x/√2)) and its density, with full relative accuracy in the tail.
    __device__ __forceinline__ static void normal(float x, float& cdf, float& pdf) {
        float z = fabsf(x) * 0.70710678f;
        float e = expf(at_least(-0.5f * (x * x), -88.0f));
        // erfc(z) = e^(−z²)·t·R(t) with t = 1/(1 + 0.4z); relative error of R below 3e-8 for z <= 10.
        float t = quotient<T>(1.0f, fmaf(z, 0.4f, 1.0f));
        float q = -0.033501126f;
        q = fmaf(q, t, 0.21878536f);
        q = fmaf(q, t, -0.5465026f);
        q = fmaf(q, t, 0.6093422f);
        q = fmaf(q, t, -0.33431188f);
        q = fmaf(q, t, 0.2979732f);
        q = fmaf(q, t, 0.121059984f);
        q = fmaf(q, t, 0.2166894f);
        q = fmaf(q, t, 0.22474867f);
        q = fmaf(q, t, 0.22571686f);
        float tail = 0.5f * (e * (t * q));
        cdf = x < 0.0f ? tail : 1.0f - tail;
        pdf = e * 0.3989423f;
    }
    __device__ __forceinline__ float value(float x) const {
        float low = at_least(x, -FLAT), cdf, pdf;
        normal(low, cdf, pdf);
        return low * cdf;
    }
    __device__ __forceinline__ float slope(float x, float& value) const {
        float low = at_least(x, -FLAT), c = at_most(low, FLAT), cdf, pdf;
        normal(c, cdf, pdf);
        value = low * cdf;
        return fmaf(c, pdf, cdf);
    }
    __device__ __forceinline__ float gate(float u) const { return u; }
    __device__ __forceinline__ float gate_slope(float, float d) const { return d; }
};

template <class T> struct SquaredRelu {
    template <class Args> __device__ __forceinline__ SquaredRelu(const Args&) {}
    __device__ __forceinline__ float value(float x) const {
        float positive = at_least(x, 0.0f);
        return positive * positive;
    }
    __device__ __forceinline__ float slope(float x, float& value) const {
        float positive = at_least(x, 0.0f);
        value = positive * positive;
        return 2.0f * positive;
    }
    __device__ __forceinline__ float gate(float u) const { return u; }
    __device__ __forceinline__ float gate_slope(float, float d) const { return d; }
};

template <class T> struct Silu {
    template <class Args> __device__ __forceinline__ Silu(const Args&) {}
    __device__ __forceinline__ float value(float x) const {
        float low = at_least(x, SIGMOID_LOW);
        return times_sigmoid<T>(low, low);
    }
    __device__ __forceinline__ float slope(float x, float& value) const {
        float low = at_least(x, SIGMOID_LOW), c = at_most(low, SIGMOID_HIGH), s, rest;
        sigmoid_pair<T>(c, s, rest);
        value = low * s;
        return fmaf(c, s * rest, s);
    }
    __device__ __forceinline__ float gate(float u) const { return u; }
    __device__ __forceinline__ float gate_slope(float, float d) const { return d; }
};

template <class T> struct ClampedSilu {
    float limit, alpha, offset;
    template <class Args> __device__ __forceinline__ ClampedSilu(const Args& a)
        : limit(a.limit), alpha(a.alpha), offset(a.offset) {}
    // Clamped from below as well, where σ(α·x) has long vanished.
    __device__ __forceinline__ float bounded(float x) const { return at_least(at_most(x, limit), -1e28f); }
    __device__ __forceinline__ float value(float x) const {
        float b = bounded(x);
        return times_sigmoid<T>(b, alpha * b);
    }
    __device__ __forceinline__ float slope(float x, float& value) const {
        float b = bounded(x), s, rest;
        sigmoid_pair<T>(alpha * b, s, rest);
        value = b * s;
        return x > limit ? 0.0f : fmaf(alpha * b, s * rest, s);
    }
    __device__ __forceinline__ float gate(float u) const { return at_least(at_most(u, limit), -limit) + offset; }
    __device__ __forceinline__ float gate_slope(float u, float d) const { return fabsf(u) > limit ? 0.0f : d; }
};
