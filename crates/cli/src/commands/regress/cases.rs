//! The cases of `regress`, from `tests/regression/cases.toml`.

use anyhow::{Context, Result};
use serde::Deserialize;
use std::collections::BTreeMap;

const CASES: &str = include_str!("../../../../../tests/regression/cases.toml");

/// All cases and what they share.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cases {
    /// The recipe that all share.
    base: toml::Table,
    gpu: Gpu,
    tolerance: Tolerances,
    /// The cases by name.
    #[serde(rename = "case")]
    pub all: BTreeMap<String, Case>,
}

/// What a GPU changes in the shared recipe.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Gpu {
    set: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tolerances {
    cpu: Tolerance,
    gpu: Tolerance,
}

/// Relative tolerances.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tolerance {
    /// Of losses of a step.
    pub loss: f64,
    /// Of the gradient norm of a step.
    pub grad_norm: f64,
    /// Of peak bytes of tensors.
    pub memory: f64,
    /// By how much a step may take longer.
    pub step_time: f64,
    /// By how much a kernel may take longer.
    pub kernel_time: f64,
}

/// Tolerances that a case replaces on the CPU.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct OwnTolerance {
    loss: Option<f64>,
    grad_norm: Option<f64>,
}

/// One case.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// What it is, in a line.
    pub about: String,
    #[serde(default)]
    set: Vec<String>,
    /// Set on a GPU beside `set`.
    #[serde(default)]
    gpu: Vec<String>,
    /// The step in which the run is killed, to be resumed.
    pub killed_in: Option<u64>,
    /// In place of a run, the time of the kernels whose names begin so.
    pub kernels: Option<String>,
    /// Its ranks share one GPU and take turns as the host's threads do, so that there its time says little.
    #[serde(default)]
    pub shares_gpu: bool,
    #[serde(default)]
    tolerance: OwnTolerance,
}

impl Cases {
    /// Those of this program.
    pub fn built_in() -> Result<Cases> {
        toml::from_str(CASES).context("tests/regression/cases.toml")
    }

    /// The recipe that all cases share, as TOML.
    pub fn base(&self) -> Result<String> {
        Ok(toml::to_string(&self.base)?)
    }

    /// What a case sets in that recipe; later settings replace earlier ones.
    pub fn set(&self, case: &Case, on_gpu: bool) -> Vec<String> {
        let of_gpu = |list: &[String]| if on_gpu { list.to_vec() } else { Vec::new() };
        [of_gpu(&self.gpu.set), case.set.clone(), of_gpu(&case.gpu)].concat()
    }

    /// The tolerances of a case. On a GPU all cases compute in 16 bits, and have one.
    pub fn tolerance(&self, case: &Case, on_gpu: bool) -> Tolerance {
        if on_gpu {
            return self.tolerance.gpu;
        }
        let all = self.tolerance.cpu;
        let own = &case.tolerance;
        Tolerance {
            loss: own.loss.unwrap_or(all.loss),
            grad_norm: own.grad_norm.unwrap_or(all.grad_norm),
            ..all
        }
    }
}
