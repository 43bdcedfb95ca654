#include "grouped/hopper_fp8.cuh"

GROUPED_HOPPER_FP8(grouped_hopper_wgrad_128_e4m3, WGRAD_FP8, 128, 6, false, false)
GROUPED_HOPPER_FP8(grouped_hopper_wgrad_192_e4m3, WGRAD_FP8, 192, 5, false, false)
GROUPED_HOPPER_FP8_PAIR(grouped_hopper_wgrad_pair_e4m3, WGRAD_FP8, 192, 5, false, false)
GROUPED_HOPPER_FP8(grouped_hopper_wgrad_128_e5m2, WGRAD_FP8, 128, 6, true, false)
GROUPED_HOPPER_FP8(grouped_hopper_wgrad_192_e5m2, WGRAD_FP8, 192, 5, true, false)
GROUPED_HOPPER_FP8_PAIR(grouped_hopper_wgrad_pair_e5m2, WGRAD_FP8, 192, 5, true, false)
