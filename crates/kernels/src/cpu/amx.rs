//! Intel AMX: requesting it, configuring its tiles, and the 32x32 block GEMM that all bf16 GEMMs are built of. Stable Rust has no
//! AMX intrinsics, so it uses `asm!`.
//!
//! AMX treats subnormal inputs as zero and flushes subnormal sums to zero; infinities and NaN follow IEEE.

#[cfg(target_arch = "x86_64")]
pub(crate) mod pack;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
pub(crate) use tiles::{Tiles, mm_32x32};

/// Whether the CPU has AMX bf16 (and AVX512-BF16, which every CPU with AMX has) and this process may use it. Requests the tile
/// state from Linux for the whole process, so it must run before compute threads start; repeated calls are harmless.
pub fn available() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    {
        use std::arch::{asm, x86_64::__cpuid_count};
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const AVX512_BF16: u32 = 1 << 5; // of (7, 1).eax
        if __cpuid_count(0, 0).eax < 7
            || __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) != AMX_BF16 | AMX_TILE
            || __cpuid_count(7, 0).eax < 1
            || __cpuid_count(7, 1).eax & AVX512_BF16 == 0
        {
            return false;
        }
        // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
        let (mut result, request, feature) = (158i64, 0x1023u64, 18u64);
        // SAFETY: a system call that reads and writes no memory of ours; rcx and r11 are declared clobbered.
        unsafe {
            asm!("syscall", inout("rax") result, in("rdi") request, in("rsi") feature,
                 out("rcx") _, out("r11") _, options(nostack, nomem));
        }
        result == 0
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}
