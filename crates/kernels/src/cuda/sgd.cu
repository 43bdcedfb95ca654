// SGD with momentum over a list of tensors.
#include "one_moment.cuh"

template <class P, class A> __device__ __forceinline__ void sgd(const SgdArgs& a) {
    const float* s = reinterpret_cast<const float*>(a.scalars);
    if (!is_number(s[GRAD_NORM])) return;
    const int index = entry_of(a, blockIdx.x);
    const TensorEntry& e = a.list[index];
    float lr = __fmul_rn(s[LR], e.lr_mult), wd = __fmul_rn(s[WEIGHT_DECAY], e.wd_mult), clip = s[CLIP];
    bool starts = s[STEPS_DONE] == 0.0f;
    float momentum = starts ? 0.0f : a.momentum, fresh = starts ? 1.0f : a.fresh;
    float lead = a.nesterov ? 1.0f : 0.0f, share = a.nesterov ? a.momentum : 1.0f;
    auto update = [&](float& x, float g, float held) {
        float d = __fadd_rn(__fmul_rn(g, clip), __fmul_rn(wd, x));
        // In the first step the buffer is uninitialized and may hold NaN.
        float old = momentum == 0.0f ? 0.0f : __fmul_rn(momentum, held);
        float now = __fadd_rn(old, __fmul_rn(fresh, d));
        x = __fsub_rn(x, __fmul_rn(lr, __fadd_rn(__fmul_rn(lead, d), __fmul_rn(share, now))));
        return now;
    };
    one_moment<P, A>(e, blockIdx.x - a.start[index], seed_of(s[STEPS_DONE]), update);
}

#define SGD(NAME, MOMENT)                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                 \
        sgd_##NAME(const __grid_constant__ SgdArgs a) { sgd<F32Master, MOMENT>(a); } \
    extern "C" __global__ void __launch_bounds__(THREADS)                 \
        sgd_split_##NAME(const __grid_constant__ SgdArgs a) { sgd<SplitMaster, MOMENT>(a); }
SGD(f32, PlainMoment<float>)
SGD(bf16, PlainMoment<bf16>)
SGD(f16, BlockScaled<First16>)
SGD(fp8, BlockScaled<First8>)
