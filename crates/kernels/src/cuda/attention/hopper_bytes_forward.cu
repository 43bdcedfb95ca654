// Instances of the Hopper forward kernel for bytes: channels, warpgroups, tiles of keys and of queries.
#define HOPPER_BYTES(NAME, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(HopperBytes<__VA_ARGS__>::THREADS, 1)                        \
        NAME(const __grid_constant__ Mapped m) {                                                              \
        HopperBytes<__VA_ARGS__>::run(m);                                                                     \
    }
HOPPER_BYTES(attention_bytes_forward_64, 64, 3, 4, 2)
HOPPER_BYTES(attention_bytes_forward_128, 128, 2, 4, 2)
