#include "grouped/hopper_mainloop.cuh"

GROUPED_HOPPER(grouped_hopper_fprop_128_bf16, FPROP, 128, 6)
GROUPED_HOPPER(grouped_hopper_fprop_192_bf16, FPROP, 192, 5)
GROUPED_HOPPER(grouped_hopper_fprop_256_bf16, FPROP, 256, 4)
GROUPED_HOPPER_PAIR(grouped_hopper_fprop_pair_bf16, FPROP, 256, 4)
GROUPED_HOPPER(grouped_hopper_dgrad_128_bf16, DGRAD, 128, 6)
GROUPED_HOPPER(grouped_hopper_dgrad_192_bf16, DGRAD, 192, 5)
GROUPED_HOPPER(grouped_hopper_dgrad_256_bf16, DGRAD, 256, 4)
GROUPED_HOPPER_PAIR(grouped_hopper_dgrad_pair_bf16, DGRAD, 256, 4)
