//! GPUs and networks as numbers: what the planner knows of a machine.
//!
//! One TOML file describes a kind of GPU with the links around it. Those of common GPUs are inside the program; another one
//! is read from a file that a user writes or `bench calibrate` measures.

use crate::cost::USABLE_PERCENT;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Operands of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmDtype {
    /// bf16 or f16.
    Bf16,
    /// FP8 with one scale per tensor or block of 128.
    Fp8,
    /// FP8 with one scale per 32 elements.
    Mxfp8,
    /// FP4 with one scale per 16 elements.
    Nvfp4,
}

/// A kind of GPU and its links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Its name, as in `64xH100`.
    pub name: String,
    /// Device memory that a process can allocate, in GiB.
    pub memory_gib: f64,
    /// Streaming multiprocessors.
    pub sms: usize,
    /// GEMMs by the dtype of their operands; what is absent the GPU can't do.
    pub gemm: GemmRates,
    /// Core attention.
    pub attention: AttentionRates,
    /// Memory-bound kernels: GB/s of reads and writes.
    pub memory_gb_s: f64,
    /// Between GPUs of an NVLink domain.
    pub nvlink: Link,
    /// Between domains: each GPU's share of the network.
    pub network: Link,
    /// GB/s between host and device memory, one way.
    pub host_gb_s: f64,
    /// Time that one kernel costs beside its work, in µs: launch, ramp-up and tail.
    pub kernel_us: f64,
    /// What computation hides of communication.
    pub overlap: Overlap,
    /// Time of an MoE layer's forward or backward beside its kernels, in µs: counts of tokens per expert on their way to
    /// the host, and launches that wait for them.
    pub moe_sync_us: f64,
    /// Tokens cross the network once for each domain that has some of their experts, and are copied there.
    #[serde(default)]
    pub dispatch_per_domain: bool,
}

/// GEMM rates by dtype.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmRates {
    /// bf16.
    pub bf16: GemmCurve,
    /// FP8.
    pub fp8: Option<GemmCurve>,
    /// MXFP8.
    pub mxfp8: Option<GemmCurve>,
    /// NVFP4.
    pub nvfp4: Option<GemmCurve>,
    /// Rate of grouped GEMMs as a fraction of that of one GEMM with as many tiles: experts' tiles are scheduled dynamically and
    /// change operands.
    pub grouped: f64,
}

/// TFLOP/s of a GEMM `[m, k]·[k, n]` as a curve: `peak · achieved · k/(k + half_k) · filled`, where `filled` is the part of the
/// last wave of tiles that has work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmCurve {
    /// Dense TFLOP/s of the data sheet.
    pub peak: f64,
    /// Fraction of it that large GEMMs reach, at the clock that power allows.
    pub achieved: f64,
    /// Length of the contracted axis at which half of that is reached: prologue, epilogue and writing the result.
    pub half_k: f64,
}

/// Core attention: TFLOP/s over the visible pairs, reached with long sequences.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRates {
    /// Forward.
    pub forward: f64,
    /// Backward.
    pub backward: f64,
    /// Tokens that a query sees at which half of that is reached.
    pub half_length: f64,
}

impl AttentionRates {
    /// Part of the rates that is reached where a query sees `seen` tokens on average. Small heads use the tensor cores less.
    pub fn reached(&self, head_dim: usize, seen: f64) -> f64 {
        let narrow = (head_dim as f64 / 128.0).clamp(0.25, 1.0).powf(0.35);
        seen / (seen + self.half_length) * narrow
    }
}

/// A link between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// GPUs that it joins: of NVLink the domain. None: any number.
    pub gpus: Option<usize>,
    /// GB/s of one GPU in one direction that collectives reach.
    pub gb_s: f64,
    /// The least time of a collective, in µs.
    pub latency_us: f64,
}

/// Fractions of communication that computation hides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlap {
    /// Tensor-parallel all-gathers and reduce-scatters.
    pub tp: f64,
    /// Token dispatch and combine of experts.
    pub ep: f64,
    /// Gradients and weights of data parallelism: the part of computation that may run beside them.
    pub dp: f64,
}

/// Descriptions inside the program.
const EMBEDDED: [&str; 6] = [
    include_str!("hardware/h100.toml"),
    include_str!("hardware/h200.toml"),
    include_str!("hardware/b200.toml"),
    include_str!("hardware/gb200.toml"),
    include_str!("hardware/b300.toml"),
    include_str!("hardware/gb300.toml"),
];

impl Hardware {
    /// Every description inside the program.
    pub fn embedded() -> Result<Vec<Hardware>> {
        EMBEDDED.iter().map(|text| Hardware::parse(text, "inside the program")).collect()
    }

    /// The description of that name inside the program, or the file at that path.
    pub fn find(name: &str) -> Result<Hardware> {
        let all = Hardware::embedded()?;
        if let Some(found) = all.iter().find(|h| h.name.eq_ignore_ascii_case(name)) {
            return Ok(found.clone());
        }
        let path = Path::new(name);
        if path.extension().is_some_and(|e| e == "toml") {
            let text = std::fs::read_to_string(path).map_err(|e| Error::io_doing(path, "read", e))?;
            return Hardware::parse(&text, name);
        }
        let known: Vec<&str> = all.iter().map(|h| h.name.as_str()).collect();
        Err(Error::Invalid(format!(
            "no GPU is called {name:?}; known are {}, and a .toml file describes any other",
            known.join(", ")
        )))
    }

    /// The description inside the program of a GPU, by the name that its driver gives: GB200 contains B200, the longest name
    /// counts.
    pub fn of_gpu(name: &str) -> Result<Option<Hardware>> {
        let known = Hardware::embedded()?.into_iter();
        Ok(known.filter(|h| name.contains(&h.name)).max_by_key(|h| h.name.len()))
    }

    /// Reads a description.
    pub fn parse(text: &str, origin: &str) -> Result<Hardware> {
        let hardware: Hardware = toml::from_str(text)
            .map_err(|e| Error::Invalid(format!("hardware description {origin}: {e}")))?;
        hardware.check(origin)?;
        Ok(hardware)
    }

    /// The description as a file.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::Invalid(format!("hardware description {}: {e}", self.name)))
    }

    fn check(&self, origin: &str) -> Result<()> {
        let curves = [Some(self.gemm.bf16), self.gemm.fp8, self.gemm.mxfp8, self.gemm.nvfp4];
        let curve = |c: &GemmCurve| [c.peak, c.achieved, c.half_k];
        let (a, o) = (self.attention, self.overlap);
        let mut positive: Vec<f64> = curves.iter().flatten().flat_map(curve).collect();
        positive.push(self.gemm.grouped);
        positive.extend([self.memory_gib, self.sms as f64, a.forward, a.backward, a.half_length]);
        positive.extend([self.memory_gb_s, self.nvlink.gb_s, self.network.gb_s, self.host_gb_s]);
        let fractions = [o.tp, o.ep, o.dp, self.gemm.grouped];
        let times = [self.kernel_us, self.moe_sync_us, self.nvlink.latency_us, self.network.latency_us];
        if positive.iter().any(|x| !x.is_finite() || *x <= 0.0) {
            return Err(Error::Invalid(format!(
                "hardware description {origin}: a rate or size is not above 0"
            )));
        }
        if fractions.iter().any(|x| !(0.0..=1.0).contains(x)) {
            return Err(Error::Invalid(format!(
                "hardware description {origin}: a fraction is not from 0 to 1"
            )));
        }
        if times.iter().any(|x| !x.is_finite() || *x < 0.0) {
            return Err(Error::Invalid(format!("hardware description {origin}: a time is below 0")));
        }
        Ok(())
    }

    /// The curve of a dtype, if the GPU has such GEMMs.
    pub fn curve(&self, dtype: GemmDtype) -> Option<GemmCurve> {
        match dtype {
            GemmDtype::Bf16 => Some(self.gemm.bf16),
            GemmDtype::Fp8 => self.gemm.fp8,
            GemmDtype::Mxfp8 => self.gemm.mxfp8,
            GemmDtype::Nvfp4 => self.gemm.nvfp4,
        }
    }

    /// Replaces the curve of a dtype.
    pub fn set_curve(&mut self, dtype: GemmDtype, curve: GemmCurve) {
        match dtype {
            GemmDtype::Bf16 => self.gemm.bf16 = curve,
            GemmDtype::Fp8 => self.gemm.fp8 = Some(curve),
            GemmDtype::Mxfp8 => self.gemm.mxfp8 = Some(curve),
            GemmDtype::Nvfp4 => self.gemm.nvfp4 = Some(curve),
        }
    }

    /// Bytes of device memory.
    pub fn memory(&self) -> usize {
        (self.memory_gib * f64::from(1 << 30)) as usize
    }

    /// Bytes that a plan may use.
    pub fn usable_memory(&self) -> usize {
        self.memory() / 100 * USABLE_PERCENT
    }

    /// GPUs of an NVLink domain.
    pub fn domain(&self) -> usize {
        self.nvlink.gpus.unwrap_or(usize::MAX)
    }
}

/// A number of GPUs of a kind, `64xH100`.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// How many.
    pub gpus: usize,
    /// Of which kind.
    pub hardware: Hardware,
}

impl Machine {
    /// Parses `64xH100`, `H100` or `8xfile.toml`.
    pub fn parse(text: &str) -> Result<Machine> {
        let (count, name) = match text.split_once(['x', 'X', '*']) {
            Some((count, name)) if !count.is_empty() && count.chars().all(|c| c.is_ascii_digit()) => {
                let gpus = count.parse::<usize>().ok().filter(|n| (1..=1 << 20).contains(n));
                let wrong = || {
                    Error::Invalid(format!(
                        "{text:?}: the number of GPUs must be 1 to {}, as in 8xH100",
                        1 << 20
                    ))
                };
                (gpus.ok_or_else(wrong)?, name)
            }
            _ => (1, text),
        };
        Ok(Machine { gpus: count, hardware: Hardware::find(name.trim())? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_a_number_and_a_name() {
        let m = Machine::parse("64xH100").unwrap();
        assert_eq!((m.gpus, m.hardware.name.as_str()), (64, "H100"));
        assert_eq!(Machine::parse("gb200").unwrap().gpus, 1);
        for (text, part) in
            [("0xH100", "the number of GPUs"), ("8xH900", "known are H100"), ("8xno.toml", "no.toml")]
        {
            let e = Machine::parse(text).unwrap_err().to_string();
            assert!(e.contains(part), "{text}: {e}");
        }
    }

    #[test]
    fn wrong_descriptions_are_refused() {
        let text = EMBEDDED[0];
        let refused = |text: String| Hardware::parse(&text, "test").unwrap_err().to_string();
        assert!(refused(text.replace("memory_gib", "memory_gigs")).contains("memory_gigs"));
        assert!(refused(text.replace("sms = 132", "sms = 0")).contains("not above 0"));
        assert!(refused(text.replace("\ntp = 0", "\ntp = 3")).contains("from 0 to 1"));
    }
}
