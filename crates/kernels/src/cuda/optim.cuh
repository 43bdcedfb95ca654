// What the sources of the optimizer share.
//
// A launch takes a list by value: no table to upload, nothing to keep alive. Block b works on the tensor whose blocks
// `start[e]..start[e + 1]` hold b. Each sum and product is rounded by itself, as on the CPU: a step gives the same
// bits on both, in groups or one by one.
#pragma once
#include "prelude.cuh"

constexpr int THREADS = 256;

// The last e with start[e] <= block.
template <class A> __device__ __forceinline__ int entry_of(const A& p, u32 block) {
    int low = 0, high = int(p.count);
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (p.start[middle] <= block) low = middle;
        else high = middle;
    }
    return low;
}

// Places in the buffer of step scalars, and in the counter of steps.
enum { LR = 0, WEIGHT_DECAY = 1, BIAS1 = 2, BIAS2 = 3, CLIP = 4, GRAD_NORM = 5, STEPS_DONE = 6, LOSS_SCALE = 7 };
enum { STEPS = 0, POWER1 = 1, POWER2 = 2 };
// In the state of a loss scale.
enum { SCALE = 0, GROWTH = 1, HYSTERESIS = 2 };

// Neither infinite nor NaN.
__device__ __forceinline__ bool is_number(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
