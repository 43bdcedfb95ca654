// Adam on weights of narrow products.

#define ADAM(NAME, MASTER, FIRST, SECOND, BLOCKS)                         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)         \
        adam_taken_##NAME(const __grid_constant__ AdamArgs a) { adam<MASTER, FIRST, SECOND, Taken>(a); }
ADAM(f32, WholeMaster, Plain<float>, Plain<float>, 2)
ADAM(bf16, WholeMaster, Plain<bf16>, Plain<bf16>, 3)
ADAM(split_f32, SplitMaster, Plain<float>, Plain<float>, 2)
ADAM(split_bf16, SplitMaster, Plain<bf16>, Plain<bf16>, 3)
