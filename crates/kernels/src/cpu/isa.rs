//! Instruction-set dispatch of the CPU kernels. The level is a value chosen when the kernels are created, so that tests can run
//! every kernel on each level the machine supports.

/// Instruction-set levels, each including the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Baseline of the architecture.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F/BW/DQ/VL.
    Avx512,
    /// AVX-512 and AMX bf16 tiles, enabled by the operating system for this process.
    Amx,
}

impl Isa {
    /// The best level of this machine. Requests AMX from the operating system where the CPU has it, so call it before compute
    /// threads start.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            match (avx2, avx512) {
                (true, true) if super::amx::available() => Isa::Amx,
                (true, true) => Isa::Avx512,
                (true, false) => Isa::Avx2,
                _ => Isa::Portable,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Portable
    }

    /// All levels of this machine, lowest first.
    pub fn all() -> Vec<Isa> {
        let best = Isa::detect();
        [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Amx].into_iter().filter(|i| *i <= best).collect()
    }

    /// Name for display.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
            Isa::Amx => "AVX-512 + AMX bf16",
        }
    }
}

/// Compiles one function body per instruction-set level and dispatches on `isa`.
///
/// `multiversion! { pub fn add(x: &mut [f32], y: &[f32]) { … } }` defines `add(isa: Isa, x, y)`. The body is
/// plain Rust that the compiler vectorizes for each level; everything it calls in a hot loop must be
/// `#[inline(always)]` so that it is compiled for that level too.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident : $bound:path),* $(,)?>)?
     ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$($g: $bound),*>)? (isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($g: $bound),*>)? ($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")]
            fn v4 $(<$($g: $bound),*>)? ($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn v3 $(<$($g: $bound),*>)? ($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            match isa {
                // SAFETY: `isa` comes from `Isa::detect` or `Isa::all`, which ask the CPU.
                $crate::cpu::Isa::Avx512 | $crate::cpu::Isa::Amx => return unsafe { v4($($arg),*) },
                // SAFETY: as above.
                $crate::cpu::Isa::Avx2 => return unsafe { v3($($arg),*) },
                $crate::cpu::Isa::Portable => {}
            }
            let _ = isa;
            body($($arg),*)
        }
    };
}
pub(crate) use multiversion;
