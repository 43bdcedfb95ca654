// Hopper forward kernels for heads of up to 128 channels; `short` ones for few visible keys per query.
#include "attention/hopper_forward.cuh"

HOPPER_FORWARD(attention_hopper_forward_64_bf16, 64, 64, 3, 128, 3, 2, false)
HOPPER_FORWARD(attention_hopper_forward_short_64_bf16, 64, 64, 4, 64, 4, 2, false)
HOPPER_FORWARD(attention_hopper_forward_96_bf16, 96, 96, 3, 96, 3, 1, false)
HOPPER_FORWARD(attention_hopper_forward_128_bf16, 128, 128, 2, 128, 2, 2, false)
HOPPER_FORWARD(attention_hopper_forward_short_128_bf16, 128, 128, 3, 64, 3, 1, false)
