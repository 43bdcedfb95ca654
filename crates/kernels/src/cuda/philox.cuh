// Random words of a Philox stream, as philox.rs of the crate defines it.
#pragma once
#include "args/philox.cuh"

// Philox4x32-10: words 4·block .. 4·block + 3 of the stream.
__device__ __forceinline__ void philox(const PhiloxStream& s, u64 block, u32 (&words)[4]) {
    u32 a = u32(block), b = u32(block >> 32), c = s.lane[0], d = s.lane[1], k = s.key[0], l = s.key[1];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 x = u64(a) * 0xd2511f53u, y = u64(c) * 0xcd9e8d57u;
        a = u32(y >> 32) ^ b ^ k;
        c = u32(x >> 32) ^ d ^ l;
        b = u32(y);
        d = u32(x);
        k += 0x9e3779b9u;
        l += 0xbb67ae85u;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

// The stream of a step's random draws, the same for all threads of a block, which must all call this.
__device__ __forceinline__ PhiloxStream step_stream(const StepStream& s) {
    __shared__ PhiloxStream shared;
    if (threadIdx.x == 0) {
        const u64 step = s.step + (s.device_step ? u64(*reinterpret_cast<const u32*>(s.device_step)) : 0);
        PhiloxStream x;
        x.key[0] = s.seed[0], x.key[1] = s.seed[1], x.lane[0] = s.layer, x.lane[1] = s.site;
        u32 first[4], second[4];
        philox(x, step, first);
        x.key[0] = first[0], x.key[1] = first[1], x.lane[0] = s.domain, x.lane[1] = 0;
        philox(x, u64(first[3]) << 32 | first[2], second);
        shared.key[0] = second[0], shared.key[1] = second[1], shared.lane[0] = second[2], shared.lane[1] = second[3];
    }
    __syncthreads();
    return shared;
}
