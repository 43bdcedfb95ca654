// Storage formats of master weights and moments, for optimizer steps over a list of tensors.
#pragma once
#include "args/multi_tensor.cuh"
#include "moments.cuh"
#include "optim.cuh"
#include "vec.cuh"

// Elements of a tensor that one block updates.
constexpr int UPDATES = 16 * THREADS;
constexpr int LIST = 36;


// f32 master weights, with a 16-bit copy for the model where there is one.
struct F32Master {
    static constexpr bool whole = true;
    float* master;
    element* weight;
    template <int N> struct Raw {
        Vec<float, N> p;
    };
    __device__ __forceinline__ F32Master(const TensorEntry& e)
        : master(reinterpret_cast<float*>(e.master)), weight(reinterpret_cast<element*>(e.weight)) {}
    template <int N> __device__ __forceinline__ Raw<N> load(i64 at) const { return {::load_vec<N>(master, at)}; }
    template <int N> static __device__ __forceinline__ float open(const Raw<N>& raw, int i) { return raw.p.at[i]; }
    template <int N> __device__ __forceinline__ void store(i64 at, const Vec<float, N>& p) const {
        store_vec(master, at, p);
        if (!weight) return;
        Vec<element, N> w;
#pragma unroll
        for (int i = 0; i < N; i++) w.at[i] = from_f32<element>(p.at[i]);
        store_vec(weight, at, w);
    }
    // The 16-bit weight of a master, whether or not a copy is stored.
    static __device__ __forceinline__ float weight_of(float p) { return to_f32(from_f32<element>(p)); }
    __device__ __forceinline__ float get(i64 at) const { return master[at]; }
    __device__ __forceinline__ void set(i64 at, float p) const {
        master[at] = p;
        if (weight) weight[at] = from_f32<element>(p);
    }
};

// Master weights in two halves, of which the high one is the bf16 weight.
struct SplitMaster {
    static constexpr bool whole = false;
    u16* low;
    bf16* high;
    template <int N> struct Raw {
        Vec<bf16, N> high;
        Vec<u16, N> low;
    };
    __device__ __forceinline__ SplitMaster(const TensorEntry& e)
        : low(reinterpret_cast<u16*>(e.master)), high(reinterpret_cast<bf16*>(e.weight)) {}
    template <int N> __device__ __forceinline__ Raw<N> load(i64 at) const {
        return {::load_vec<N>(high, at), ::load_vec<N>(low, at)};
    }
    template <int N> static __device__ __forceinline__ float open(const Raw<N>& raw, int i) {
        return join({raw.high.at[i], raw.low.at[i]});
    }
    template <int N> __device__ __forceinline__ void store(i64 at, const Vec<float, N>& p) const {
        Vec<bf16, N> h;
        Vec<u16, N> l;
#pragma unroll
        for (int i = 0; i < N; i++) {
            Halves x = split_of(p.at[i]);
            h.at[i] = x.high, l.at[i] = x.low;
        }
        store_vec(high, at, h);
        store_vec(low, at, l);
    }
    static __device__ __forceinline__ float weight_of(float p) { return to_f32(split_of(p).high); }
    __device__ __forceinline__ float get(i64 at) const { return join({high[at], low[at]}); }
    __device__ __forceinline__ void set(i64 at, float p) const {
        Halves x = split_of(p);
        high[at] = x.high, low[at] = x.low;
    }
};

// Unscaled moments. `settle` and random bits matter for packed ones only.
template <class T> struct PlainMoment {
    typedef T Code;
    static constexpr bool packed = false;
    // Elements of a thread: a 16-byte access.
    static constexpr int N = 16 / sizeof(T);
    T* at_all;
    struct Raw {
        Vec<T, N> codes;
    };
    __device__ __forceinline__ PlainMoment(u64 values, u64) : at_all(reinterpret_cast<T*>(values)) {}
    __device__ __forceinline__ Raw load(i64 at) const { return {load_vec<N>(at_all, at)}; }
    static __device__ __forceinline__ float open(const Raw& raw, int i) { return to_f32(raw.codes.at[i]); }
    __device__ __forceinline__ float settle(i64, const float (&)[N]) const { return 0.0f; }
    static __device__ __forceinline__ T code(float x, float, u32) { return from_f32<T>(x); }
    __device__ __forceinline__ void store(i64 at, const Vec<T, N>& codes) const { store_vec(at_all, at, codes); }
    __device__ __forceinline__ float get(i64 at) const { return to_f32(at_all[at]); }
    __device__ __forceinline__ void set(i64 at, bool there, float x, u32) const {
        if (there) at_all[at] = from_f32<T>(x);
    }
};

// Moments as codes under block scales. A block of 32 belongs to four neighbouring threads, or, one element a thread,
// to a warp.
template <class F> struct BlockScaled {
    typedef typename F::Code Code;
    static constexpr bool packed = true;
    static constexpr int N = 8;
    Code* codes;
    u8* scales;
    struct Raw {
        Vec<Code, N> codes;
        u32 scale;
    };
    __device__ __forceinline__ BlockScaled(u64 values, u64 scales)
        : codes(reinterpret_cast<Code*>(values)), scales(reinterpret_cast<u8*>(scales)) {}
    __device__ __forceinline__ Raw load(i64 at) const { return {load_vec<N>(codes, at), scales[at / BLOCK]}; }
    static __device__ __forceinline__ float open(const Raw& raw, int i) {
        return unpack<F>(raw.codes.at[i], raw.scale);
    }
    // Stores the block's new scale and returns its inverse.
    __device__ __forceinline__ float settle(i64 at, const float (&x)[N]) const {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
        for (int d = 1; d < BLOCK / N; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
        u32 scale = scale_of<F>(most);
        if (threadIdx.x % (BLOCK / N) == 0) scales[at / BLOCK] = u8(scale);
        return inverse_of(scale);
    }
    static __device__ __forceinline__ Code code(float x, float inverse, u32 dice) {
        return Code(pack<F>(x, inverse, dice));
    }
    __device__ __forceinline__ void store(i64 at, const Vec<Code, N>& c) const { store_vec(codes, at, c); }
    __device__ __forceinline__ float get(i64 at) const { return unpack<F>(codes[at], scales[at / BLOCK]); }
    __device__ __forceinline__ void set(i64 at, bool there, float x, u32 dice) const {
        u32 scale = scale_of<F>(warp_max(there ? fabsf(x) : 0.0f));
        if (!there) return;
        codes[at] = Code(pack<F>(x, inverse_of(scale), dice));
        if (at % BLOCK == 0) scales[at / BLOCK] = u8(scale);
    }
};
