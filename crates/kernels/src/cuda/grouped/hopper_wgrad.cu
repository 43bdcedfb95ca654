#include "grouped/hopper_mainloop.cuh"
#include "grouped/hopper_pingpong.cuh"

GROUPED_HOPPER(grouped_hopper_wgrad_128_bf16, WGRAD, 128, 6)
GROUPED_HOPPER(grouped_hopper_wgrad_192_bf16, WGRAD, 192, 5)
GROUPED_HOPPER(grouped_hopper_wgrad_256_bf16, WGRAD, 256, 4)
GROUPED_HOPPER_PAIR(grouped_hopper_wgrad_pair_bf16, WGRAD, 256, 4)
GROUPED_PINGPONG(grouped_hopper_wgrad_128x192_bf16, 128, 192, 5)
GROUPED_PINGPONG(grouped_hopper_wgrad_192x128_bf16, 192, 128, 5)
