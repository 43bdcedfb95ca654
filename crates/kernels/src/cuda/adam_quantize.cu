// Adam with unscaled moments that also quantizes the new weights.
#include "adam_quantize.cuh"

#define ADAM(NAME, MASTER, FIRST, SECOND, BLOCKS)                         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)         \
        adam_quantize_##NAME(const __grid_constant__ AdamArgs a) { adam<MASTER, FIRST, SECOND, QuantizedWeight>(a); }
ADAM(f32, F32Master, PlainMoment<float>, PlainMoment<float>, 2)
ADAM(bf16, F32Master, PlainMoment<bf16>, PlainMoment<bf16>, 3)
ADAM(split_f32, SplitMaster, PlainMoment<float>, PlainMoment<float>, 2)
ADAM(split_bf16, SplitMaster, PlainMoment<bf16>, PlainMoment<bf16>, 3)
