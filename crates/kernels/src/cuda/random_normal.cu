// Normal values of a random stream by Box-Muller. The arithmetic follows normal.rs of the crate line by line: f64,
// every operation rounded by itself (the _rn intrinsics are never fused), so that CPU and GPU give the same bits.
#include "args/random_normal.cuh"
#include "philox.cuh"

constexpr int THREADS = 256;

__device__ constexpr double ARTANH[] = {1.0 / 3.0,  1.0 / 5.0,  1.0 / 7.0,  1.0 / 9.0, 1.0 / 11.0,
                                        1.0 / 13.0, 1.0 / 15.0, 1.0 / 17.0, 1.0 / 19.0};
__device__ constexpr double SINE[] = {
    -1.0 / 6.0,        1.0 / 120.0,          -1.0 / 5040.0,           1.0 / 362880.0,
    -1.0 / 39916800.0, 1.0 / 6227020800.0, -1.0 / 1307674368000.0, 1.0 / 355687428096000.0,
};
__device__ constexpr double COSINE[] = {
    -1.0 / 2.0,       1.0 / 24.0,        -1.0 / 720.0,          1.0 / 40320.0,
    -1.0 / 3628800.0, 1.0 / 479001600.0, -1.0 / 87178291200.0, 1.0 / 20922789888000.0,
};
constexpr u64 HALF_ROOT = 0x3fe6a09e667f3bcdull;
constexpr double LN_2 = 0.693147180559945309417232121458;
constexpr double STEP = 6.28318530717958647692528676655900577 / 4294967296.0;

// x·(c0 + x·(c1 + ...))
template <int N> __device__ __forceinline__ double series(double x, const double (&c)[N]) {
    double sum = c[N - 1];
#pragma unroll
    for (int i = N - 2; i >= 0; i--) sum = __dadd_rn(__dmul_rn(sum, x), c[i]);
    return __dmul_rn(sum, x);
}

// √(−2·ln((a + 1)/2³²))
__device__ __forceinline__ double radius(u32 a) {
    u64 bits = u64(__double_as_longlong(__dadd_rn(__uint2double_rn(a), 1.0)));
    u64 exponent = (bits - HALF_ROOT) >> 52;
    double m = __longlong_as_double(i64(bits - (exponent << 52)));
    double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
    double artanh = __dadd_rn(s, __dmul_rn(s, series(__dmul_rn(s, s), ARTANH)));
    double below = __int2double_rn(32 - i32(exponent));
    return __dsqrt_rn(__dsub_rn(__dmul_rn(below, 2.0 * LN_2), __dmul_rn(4.0, artanh)));
}

__device__ __forceinline__ double flip(double x, u32 by) {
    return __longlong_as_double(__double_as_longlong(x) ^ i64(u64(by & 2) << 62));
}

// cos and sin of 2π·b/2³²
__device__ __forceinline__ void sincos_2pi(u32 b, double& cosine, double& sine) {
    u32 quarter = (b + (1u << 29)) >> 30;
    double x = __dmul_rn(__int2double_rn(i32(b - (quarter << 30))), STEP);
    double z = __dmul_rn(x, x);
    double cos = __dadd_rn(1.0, series(z, COSINE));
    double sin = __dadd_rn(x, __dmul_rn(x, series(z, SINE)));
    cosine = flip(quarter & 1 ? sin : cos, quarter + 1);
    sine = flip(quarter & 1 ? cos : sin, quarter);
}

// The four values of Philox block `group` of a row whose first value is number `start` of the stream; those inside the
// row are written.
__device__ __forceinline__ void
draw(const PhiloxStream& stream, u64 start, u64 group, double std, i64 width, float* row) {
    u64 block = start / 4 + group;
    // Column of the block's first value; negative where the row begins inside the block.
    i64 column = i64(4 * block - start);
    if (column >= width) return;
    u32 words[4];
    philox(stream, block, words);
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        double r = radius(words[i]), cosine, sine;
        sincos_2pi(words[i + 1], cosine, sine);
        values[i] = __double2float_rn(__dmul_rn(std, __dmul_rn(r, cosine)));
        values[i + 1] = __double2float_rn(__dmul_rn(std, __dmul_rn(r, sine)));
    }
    float* to = row + column;
    if (column >= 0 && column + 4 <= width && aligned16(to)) {
        store(to, values);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (column + i >= 0 && column + i < width) to[i] = values[i];
}


// out[r, c] = std·z, z being value first + r·stride + c of the stream. A thread has one Philox block of a row.
extern "C" __global__ void __launch_bounds__(THREADS) normal_f32(const NormalArgs p) {
    u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    u64 row = p.rows == 1 ? 0 : at / u64(p.groups);
    if (row >= u64(p.rows)) return;
    float* to = reinterpret_cast<float*>(p.out) + i64(row) * p.width;
    draw(p.stream, p.first + row * p.stride, at - row * u64(p.groups), p.std, p.width, to);
}


// out[r, c] = value numbers[r]·width + c of the stream.
extern "C" __global__ void __launch_bounds__(THREADS) normal_rows_f32(const NormalRowsArgs p) {
    const PhiloxStream stream = step_stream(p.stream);
    u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    u64 row = at / u64(p.groups);
    if (row >= u64(p.rows)) return;
    u64 start = u64(reinterpret_cast<const u32*>(p.numbers)[row]) * u64(p.width);
    float* to = reinterpret_cast<float*>(p.out) + i64(row) * p.width;
    draw(stream, start, at - row * u64(p.groups), 1.0, p.width, to);
}
