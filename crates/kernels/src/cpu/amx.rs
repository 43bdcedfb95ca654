//! The AMX matrix unit: asking for it, configuring its tiles, and the one 32x32 block product everything on it
//! is made of. Stable Rust has no intrinsics for it, so it is driven by `asm!`.
//!
//! The unit reads denormal inputs as zero and flushes denormal sums to zero; infinities and NaN follow IEEE.

#[cfg(target_arch = "x86_64")]
pub(crate) mod pack;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
pub(crate) use tiles::{Tiles, mm_32x32};

/// Is there an AMX bf16 unit (and AVX512-BF16, which every CPU with it has), and may this process use it? Asks Linux for the tile state, once for the whole
/// process and before compute threads start; asking again does no harm.
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
