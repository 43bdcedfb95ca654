// Lion over a list of tensors.
#include "one_moment.cuh"

template <class P, class A> __device__ __forceinline__ void lion(const LionArgs& a) {
    const float* s = reinterpret_cast<const float*>(a.scalars);
    if (!is_number(s[GRAD_NORM])) return;
    const int index = entry_of(a, blockIdx.x);
    const TensorEntry& e = a.list[index];
    float lr = __fmul_rn(s[LR], e.lr_mult), wd = __fmul_rn(s[WEIGHT_DECAY], e.wd_mult), clip = s[CLIP];
    auto update = [&](float& x, float g, float held) {
        float d = __fmul_rn(g, clip);
        float mixed = __fadd_rn(__fmul_rn(a.beta1, held), __fmul_rn(a.new1, d));
        float sign = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : 0.0f;
        x = __fsub_rn(x, __fmul_rn(lr, __fadd_rn(sign, __fmul_rn(wd, x))));
        return __fadd_rn(__fmul_rn(a.beta2, held), __fmul_rn(a.new2, d));
    };
    one_moment<P, A>(e, blockIdx.x - a.start[index], seed_of(s[STEPS_DONE]), update);
}

#define LION(NAME, MOMENT)                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                 \
        lion_##NAME(const __grid_constant__ LionArgs a) { lion<F32Master, MOMENT>(a); } \
    extern "C" __global__ void __launch_bounds__(THREADS)                 \
        lion_split_##NAME(const __grid_constant__ LionArgs a) { lion<SplitMaster, MOMENT>(a); }
LION(f32, PlainMoment<float>)
LION(bf16, PlainMoment<bf16>)
LION(f16, BlockScaled<First16>)
LION(fp8, BlockScaled<First8>)
