//! Choices of GEMM algorithms. Algorithms round differently, so the ranks of a job share one table of choices, which is
//! stored with the run and used again when it is resumed.

use serde::{Deserialize, Serialize};

/// What the choice of an algorithm depends on besides the GEMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmLibrary {
    /// The GPU: name, architecture, multiprocessors.
    pub card: String,
    /// CUDA version that the driver supports, 13000 for 13.0.
    pub driver: u32,
    /// Version of cuBLASLt, 130000 for 13.0.0.
    pub cublaslt: usize,
    /// Version of the tuning method and of the names of GEMMs.
    pub method: u32,
}

impl GemmLibrary {
    /// What differs from `self` to `now`, as `driver 12080 → 13000`; empty if they are equal.
    pub fn differences(&self, now: &GemmLibrary) -> Vec<String> {
        let fields = |l: &GemmLibrary| {
            [
                ("GPU", l.card.clone()),
                ("driver", l.driver.to_string()),
                ("cuBLASLt", l.cublaslt.to_string()),
                ("tuning method", l.method.to_string()),
            ]
        };
        let both = fields(self).into_iter().zip(fields(now));
        both.filter(|(a, b)| a != b).map(|((what, a), (_, b))| format!("{what} {a} → {b}")).collect()
    }
}

/// The algorithm chosen for a GEMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmChoice {
    /// The GEMM: sizes, dtypes, alignments, epilogue.
    pub gemm: String,
    /// The library's code of the algorithm in hexadecimal, or another word that the kernels understand.
    pub algorithm: String,
}

/// When a choice that the kernels make is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewChoices {
    /// At once: this rank is alone.
    Used,
    /// Once it is in the table that all ranks share. Until then the first algorithm of the library's heuristic, which is
    /// the same on all ranks, is used.
    Proposed,
}
