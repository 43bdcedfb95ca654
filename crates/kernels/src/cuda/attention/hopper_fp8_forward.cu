// Instances of the Hopper forward kernel for bytes: channels, warpgroups, tiles of keys and of queries.
#define HOPPER_FP8(NAME, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(HopperFp8<__VA_ARGS__>::THREADS, 1)                        \
        NAME(const __grid_constant__ HopperArgs m) {                                                              \
        HopperFp8<__VA_ARGS__>::run(m);                                                                     \
    }
HOPPER_FP8(attention_fp8_forward_64, 64, 3, 4, 2)
HOPPER_FP8(attention_fp8_forward_128, 128, 2, 4, 2)
