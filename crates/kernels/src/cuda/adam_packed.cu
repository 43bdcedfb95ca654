// Adam with block-scaled moments (16 or 8 bits).
#include "adam.cuh"

#define ADAM(NAME, MASTER, FIRST, SECOND)                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 3)              \
        adam_##NAME(const __grid_constant__ AdamArgs a) { adam<MASTER, BlockScaled<FIRST>, BlockScaled<SECOND>, NoQuantizedWeight>(a); }
ADAM(f16, F32Master, First16, Second16)
ADAM(fp8, F32Master, First8, Second8)
ADAM(split_f16, SplitMaster, First16, Second16)
ADAM(split_fp8, SplitMaster, First8, Second8)
