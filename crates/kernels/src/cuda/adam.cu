// Adam on moments that are kept as they are.

#define ADAM(NAME, MASTER, MOMENT, BLOCKS)                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)         \
        adam_##NAME(const __grid_constant__ AdamArgs a) { adam<MASTER, MOMENT, MOMENT, Nothing>(a); }
ADAM(f32, WholeMaster, Plain<float>, 3)
ADAM(bf16, WholeMaster, Plain<bf16>, 3)
// Three blocks would leave it too few registers.
ADAM(split_f32, SplitMaster, Plain<float>, 2)
ADAM(split_bf16, SplitMaster, Plain<bf16>, 3)
