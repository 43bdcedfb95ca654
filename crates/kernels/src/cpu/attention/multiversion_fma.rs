//! Like `multiversion!`, for bodies that must know whether fused multiply-add is there.

/// `leveled! { fn name(a: A, b: B) = body; }` defines `name(isa, a, b)`, which runs `body::<FMA>(a, b)` compiled
/// for the level; `body` must be `#[inline(always)]`.
macro_rules! leveled {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")]
            fn v4($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn v3($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            match isa {
                // SAFETY: `isa` comes from `Isa::detect` or `Isa::all`, which ask the CPU.
                $crate::cpu::Isa::Avx512 | $crate::cpu::Isa::Amx => return unsafe { v4($($arg),*) },
                // SAFETY: as above.
                $crate::cpu::Isa::Avx2 => return unsafe { v3($($arg),*) },
                $crate::cpu::Isa::Portable => {}
            }
            let _ = isa;
            // Every 64-bit ARM CPU has fused multiply-add.
            $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    };
}
pub(super) use leveled;
