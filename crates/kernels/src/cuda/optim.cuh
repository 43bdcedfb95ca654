// What the optimizer's kernels share.
//
// A launch takes its list of tensors by value: no table to upload, nothing to keep alive. Block b works on the tensor
// e with start[e] ≤ b < start[e + 1]. Every sum and product is rounded by itself, without FMA, as on the CPU: a step
// gives the same bits on both.
#pragma once
#include "prelude.cuh"

constexpr int THREADS = 256;

// Binary search for the last e with start[e] <= block.
template <class A> __device__ __forceinline__ int entry_of(const A& p, u32 block) {
    int low = 0, high = int(p.count);
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (p.start[middle] <= block) low = middle;
        else high = middle;
    }
    return low;
}

// Indices of the step's scalars, and of the step counter.
enum { LR = 0, WEIGHT_DECAY = 1, BIAS1 = 2, BIAS2 = 3, CLIP = 4, GRAD_NORM = 5, STEPS_DONE = 6, LOSS_SCALE = 7 };
enum { STEPS = 0, BETA1_POWER = 1, BETA2_POWER = 2 };
// Indices of the gradient scaler's state.
enum { SCALE = 0, GROWTH = 1, HYSTERESIS = 2 };

// Finite.
__device__ __forceinline__ bool is_number(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
