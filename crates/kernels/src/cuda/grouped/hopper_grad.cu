GROUPED_HOPPER(grouped_hopper_weight_128_bf16, WEIGHT, 128, 6)
GROUPED_HOPPER(grouped_hopper_weight_192_bf16, WEIGHT, 192, 5)
GROUPED_HOPPER(grouped_hopper_weight_256_bf16, WEIGHT, 256, 4)
GROUPED_HOPPER_PAIR(grouped_hopper_weight_pair_bf16, WEIGHT, 256, 4)
