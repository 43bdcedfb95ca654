// Accesses to shared memory by its 32-bit addresses.
#pragma once
#include "prelude.cuh"

// threadIdx.x, read again at every call, so that what is derived from it need not stay in registers.
__device__ __forceinline__ int tid() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return int(x);
}
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void st_shared_v4(u32 at, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void st_shared(u32 at, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ u32 ld_shared(u32 at) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ void ld_shared_v4(u32 at, u32& x, u32& y, u32& z, u32& w) {
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(at) : "memory");
}
