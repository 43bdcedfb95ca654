// FP8 attention for Hopper: quantizes q, k and v to E4M3, and instances of the forward kernel of hopper_fp8.cuh.
// Probabilities are E4M3, too, so running maxima must not lag (FP8_PROBS).
#define FP8_PROBS
#include "attention/hopper_fp8.cuh"

// Quantizes 16 channels of a row.
__device__ __forceinline__ uint4 sixteen(const bf16* from, bool vectorized, float scale) {
    float x[16];
    if (vectorized) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 v = reinterpret_cast<const uint4*>(from)[h];
            const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) x[h * 8 + 2 * i] = low_bf16(w[i]), x[h * 8 + 2 * i + 1] = high_bf16(w[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = to_f32(from[i]);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] *= scale;
    return make_uint4(encode_fp8(0, x[0], x[1], x[2], x[3]), encode_fp8(0, x[4], x[5], x[6], x[7]),
                      encode_fp8(0, x[8], x[9], x[10], x[11]), encode_fp8(0, x[12], x[13], x[14], x[15]));
}

// q (blockIdx.y = 0) and k (1), in their own layout.
extern "C" __global__ void __launch_bounds__(256) attention_fp8_quantize_qk(const __grid_constant__ QuantizeQkvArgs a) {
    const int which = blockIdx.y;
    const float scale = __fdiv_rn(1.0f, unit_of(a.amax, which));
    const u32 each = u32(a.d_qk) / 16, heads = a.heads[which], tokens = a.tokens[which];
    const bool vectorized = a.vectorized >> which & 1;
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        const u32 i = (blockIdx.x * 4 + n) * 256 + threadIdx.x;
        if (i >= a.units[which]) break;
        const u32 row = i / each, piece = i - row * each, token = row / heads, batch = token / tokens;
        const bf16* from = row_at<const bf16>(a.x[which], batch, token - batch * tokens, row - token * heads) + piece * 16;
        reinterpret_cast<uint4*>(a.fp8[which])[i] = sixteen(from, vectorized, scale);
    }
}

// Position of key j among 32 keys of a row of v: four neighbours are two keys of one group of eight and two of the
// next, the order in which a thread holds its scores.
__device__ __forceinline__ int slot_of(int j) { return (j & 16) + (j & 6) * 2 + (j >> 2 & 2) + (j & 1); }

// v transposed: 128 keys of a head. Keys past the end become 0.
extern "C" __global__ void __launch_bounds__(256) attention_fp8_quantize_v(const __grid_constant__ QuantizeQkvArgs a) {
    constexpr int KEYS = 128, WORDS = KEYS / 4 + 1;
    __shared__ u32 transposed[128 * WORDS];
    const i32 tiles = a.pitch / KEYS, tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
    const i32 batch = pair / a.heads[1], head = pair - batch * a.heads[1], each = a.d_v / 16;
    const float scale = __fdiv_rn(1.0f, unit_of(a.amax, 2));
    u8* bytes = reinterpret_cast<u8*>(transposed);
    for (i32 i = threadIdx.x; i < KEYS * each; i += 256) {
        const i32 key = i / each, piece = i - key * each, token = tile * KEYS + key;
        const int slot = (key & ~31) + slot_of(key & 31);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (token < a.tokens[1]) v = sixteen(row_at<const bf16>(a.x[2], batch, token, head) + piece * 16, a.vectorized >> 2 & 1, scale);
        const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int c = 0; c < 16; c++) bytes[(piece * 16 + c) * (WORDS * 4) + slot] = u8(w[c / 4] >> (c % 4 * 8));
    }
    __syncthreads();
    u32* to = reinterpret_cast<u32*>(a.fp8[2]) + (i64(pair) * a.d_v * a.pitch + tile * KEYS) / 4;
    for (i32 i = threadIdx.x; i < a.d_v * (KEYS / 4); i += 256) {
        const i32 channel = i / (KEYS / 4), word = i % (KEYS / 4);
        to[i64(channel) * (a.pitch / 4) + word] = transposed[channel * WORDS + word];
    }
}

// Channels, consumer warpgroups, key stages, query stages.
#define HOPPER_FP8(NAME, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(HopperFp8<__VA_ARGS__>::THREADS, 1)                        \
        NAME(const __grid_constant__ HopperArgs m) {                                                              \
        HopperFp8<__VA_ARGS__>::run(m);                                                                     \
    }
HOPPER_FP8(attention_fp8_forward_64, 64, 3, 4, 2)
HOPPER_FP8(attention_fp8_forward_128, 128, 2, 4, 2)
