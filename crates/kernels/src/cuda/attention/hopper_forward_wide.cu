// Hopper forward kernels for wide heads, and for logits with a soft cap. With 256 channels of output in registers,
// tiles of 64 keys are as much as fits.
#include "attention/hopper_forward.cuh"

HOPPER_FORWARD(attention_hopper_forward_192_bf16, 192, 128, 2, 128, 2, 1, false)
HOPPER_FORWARD(attention_hopper_forward_256_bf16, 256, 256, 2, 64, 2, 1, false)
HOPPER_FORWARD(attention_hopper_forward_capped_128_bf16, 128, 128, 2, 128, 2, 2, true)
HOPPER_FORWARD(attention_hopper_forward_capped_256_bf16, 256, 256, 2, 64, 2, 1, true)
