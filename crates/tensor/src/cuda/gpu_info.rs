//! Properties of a GPU, which of them can be used, and cards that stand for older ones.

use crate::{Error, Result};

/// Environment variable that makes every GPU stand for an older one, such as `sm_86`: kernels are chosen and compiled for
/// that architecture, with no more shared memory than it has, so that they can be tested without such a card.
pub const AS_VARIABLE: &str = "FERROTRON_AS";

/// Oldest compute capability that kernels compile for.
const OLDEST: (u32, u32) = (8, 0);
/// Oldest driver, by the CUDA version it supports: that of the libraries that are opened beside it, whose machine code
/// older drivers do not load.
const OLDEST_DRIVER: u32 = 13_000;
/// Architectures that a newer card can stand for, and the shared memory of a block there, in KiB.
const STAND_INS: [(&str, (u32, u32), u32); 3] =
    [("sm_80", (8, 0), 163), ("sm_86", (8, 6), 99), ("sm_89", (8, 9), 99)];

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Device ordinal, as in `cuda:N`.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Compute capability (major, minor) that kernels are chosen and compiled for; (9, 0) is Hopper. The card's own, unless
    /// it stands for an older one ([`AS_VARIABLE`]).
    pub capability: (u32, u32),
    /// The card's own compute capability.
    pub native: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block may have, in bytes.
    pub shared_memory: u32,
    /// Total memory in bytes.
    pub memory: usize,
    /// CUDA version the driver supports, 13000 for 13.0.
    pub driver: u32,
}

impl GpuInfo {
    /// Whether it stands for an older card.
    pub fn stands_for_another(&self) -> bool {
        self.capability != self.native
    }

    /// The same card, standing for the architecture `name` if there is one.
    pub(super) fn standing_for(mut self, name: Option<&str>) -> Result<GpuInfo> {
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(self) };
        let (major, minor) = self.native;
        let older: Vec<_> =
            STAND_INS.iter().filter(|(_, capability, _)| *capability <= self.native).collect();
        let Some((_, capability, kib)) = older.iter().find(|(known, ..)| *known == name) else {
            let names: Vec<&str> = older.iter().map(|(known, ..)| *known).collect();
            return Err(Error::NoCuda(format!(
                "{AS_VARIABLE}={name}: the {} (sm_{major}{minor}) can stand for {}",
                self.name,
                if names.is_empty() { "no other card".into() } else { names.join(", ") }
            )));
        };
        self.capability = *capability;
        self.shared_memory = self.shared_memory.min(kib << 10);
        Ok(self)
    }

    /// Fails where the card or its driver is too old. Newer functions of the driver may be called only after that.
    pub(super) fn check_usable(&self) -> Result<()> {
        let GpuInfo { name, native: (major, minor), driver, .. } = self;
        if self.native < OLDEST {
            let what = format!("{name} has compute capability {major}.{minor}, but 8.0 or newer is needed");
            return Err(Error::NoCuda(what));
        }
        if *driver < OLDEST_DRIVER {
            let version = |v: u32| format!("{}.{}", v / 1000, v % 1000 / 10);
            return Err(Error::NoCuda(format!(
                "the NVIDIA driver supports CUDA {} at most, but {} is needed: install driver 580 or newer",
                version(*driver),
                version(OLDEST_DRIVER)
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(native: (u32, u32), shared_memory: u32) -> GpuInfo {
        GpuInfo {
            ordinal: 0,
            name: "card".into(),
            capability: native,
            native,
            multiprocessors: 100,
            shared_memory,
            memory: 1 << 30,
            driver: 13_000,
        }
    }

    #[test]
    fn a_card_stands_for_older_ones_with_their_shared_memory() {
        let hopper = || card((9, 0), 227 << 10);
        for (name, capability, kib) in [("sm_80", (8, 0), 163), ("sm_86", (8, 6), 99), ("sm_89", (8, 9), 99)]
        {
            let other = hopper().standing_for(Some(name)).unwrap();
            assert_eq!((other.capability, other.shared_memory), (capability, kib << 10));
            assert!(other.stands_for_another() && other.native == (9, 0));
        }
        for none in [None, Some("")] {
            assert_eq!(hopper().standing_for(none).unwrap(), hopper());
        }
        // A card with less keeps its own limit.
        assert_eq!(card((8, 9), 99 << 10).standing_for(Some("sm_80")).unwrap().shared_memory, 99 << 10);
        assert!(!card((8, 6), 99 << 10).standing_for(Some("sm_86")).unwrap().stands_for_another());
    }

    #[test]
    fn a_card_does_not_stand_for_newer_or_unknown_ones() {
        for name in ["sm_89", "sm_90a", "86", "nonsense"] {
            let error = card((8, 6), 99 << 10).standing_for(Some(name)).unwrap_err().to_string();
            assert!(
                error.contains(name) && error.contains("sm_80, sm_86") && !error.contains("86, sm_89"),
                "{error}"
            );
        }
        let error = card((7, 5), 64 << 10).standing_for(Some("sm_80")).unwrap_err().to_string();
        assert!(error.contains("no other card"), "{error}");
    }

    #[test]
    fn old_cards_and_drivers_are_refused_with_the_way_out() {
        assert!(card((8, 0), 163 << 10).check_usable().is_ok());
        assert!(card((12, 0), 99 << 10).check_usable().is_ok());
        let error = card((7, 5), 64 << 10).check_usable().unwrap_err().to_string();
        assert!(error.contains("7.5") && error.contains("8.0 or newer"), "{error}");
        for (driver, text) in [(12_040, "CUDA 12.4"), (11_080, "CUDA 11.8"), (0, "CUDA 0.0")] {
            let error = GpuInfo { driver, ..card((9, 0), 227 << 10) }.check_usable().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("driver 580 or newer"), "{error}");
        }
    }
}
