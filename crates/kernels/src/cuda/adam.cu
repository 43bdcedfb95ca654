// Adam with unscaled moments (f32, bf16).
#include "adam.cuh"

#define ADAM(NAME, MASTER, MOMENT, BLOCKS)                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)         \
        adam_##NAME(const __grid_constant__ AdamArgs a) { adam<MASTER, MOMENT, MOMENT, NoQuantizedWeight>(a); }
ADAM(f32, F32Master, PlainMoment<float>, 3)
ADAM(bf16, F32Master, PlainMoment<bf16>, 3)
// Two blocks per SM: with three it would spill registers.
ADAM(split_f32, SplitMaster, PlainMoment<float>, 2)
ADAM(split_bf16, SplitMaster, PlainMoment<bf16>, 3)
