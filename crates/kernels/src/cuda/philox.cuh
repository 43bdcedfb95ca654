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
