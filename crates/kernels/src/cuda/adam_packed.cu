// Adam on packed moments.

#define ADAM(NAME, MASTER, FIRST, SECOND)                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 3)              \
        adam_##NAME(const __grid_constant__ AdamArgs a) { adam<MASTER, Coded<FIRST>, Coded<SECOND>, Nothing>(a); }
ADAM(f16, WholeMaster, First16, Second16)
ADAM(fp8, WholeMaster, First8, Second8)
ADAM(split_f16, SplitMaster, First16, Second16)
ADAM(split_fp8, SplitMaster, First8, Second8)
