#include "grouped/hopper_fp8.cuh"

GROUPED_HOPPER_FP8(grouped_hopper_fprop_fast_e4m3, FPROP_FP8, 256, 4, false, true)
GROUPED_HOPPER_FP8_PAIR(grouped_hopper_fprop_fast_pair_e4m3, FPROP_FP8, 256, 4, false, true)
GROUPED_HOPPER_FP8(grouped_hopper_fprop_128_e4m3, FPROP_FP8, 128, 6, false, false)
GROUPED_HOPPER_FP8(grouped_hopper_fprop_192_e4m3, FPROP_FP8, 192, 5, false, false)
GROUPED_HOPPER_FP8_PAIR(grouped_hopper_fprop_pair_e4m3, FPROP_FP8, 192, 5, false, false)
GROUPED_HOPPER_FP8(grouped_hopper_fprop_fast_e5m2, FPROP_FP8, 256, 4, true, true)
GROUPED_HOPPER_FP8_PAIR(grouped_hopper_fprop_fast_pair_e5m2, FPROP_FP8, 256, 4, true, true)
GROUPED_HOPPER_FP8(grouped_hopper_fprop_128_e5m2, FPROP_FP8, 128, 6, true, false)
GROUPED_HOPPER_FP8(grouped_hopper_fprop_192_e5m2, FPROP_FP8, 192, 5, true, false)
GROUPED_HOPPER_FP8_PAIR(grouped_hopper_fprop_pair_e5m2, FPROP_FP8, 192, 5, true, false)
