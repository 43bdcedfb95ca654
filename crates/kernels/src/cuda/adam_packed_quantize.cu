// Adam with block-scaled moments that also quantizes the new weights.
#include "adam_quantize.cuh"

// GPUs without an FP8 conversion instruction need registers to emulate it.
#if __CUDA_ARCH__ >= 890
#define BLOCKS 3
#else
#define BLOCKS 2
#endif

#define ADAM(NAME, MASTER, FIRST, SECOND)                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)         \
        adam_quantize_##NAME(const __grid_constant__ AdamArgs a) { adam<MASTER, BlockScaled<FIRST>, BlockScaled<SECOND>, QuantizedWeight>(a); }
ADAM(f16, F32Master, First16, Second16)
ADAM(fp8, F32Master, First8, Second8)
ADAM(split_f16, SplitMaster, First16, Second16)
ADAM(split_fp8, SplitMaster, First8, Second8)
