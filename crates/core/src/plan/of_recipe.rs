//! What the planner says of a recipe as it stands, with its own layout.

use super::hardware::{GemmDtype, Hardware};
use super::step_time::{Candidate, StepTime, Workload};
use crate::Result;
use crate::config::{QuantRecipe, Resolved};
use crate::cost::MemoryEstimate;
use crate::cost::memory::MemoryBytes;

impl GemmDtype {
    /// All of them.
    pub const ALL: [GemmDtype; 4] = [GemmDtype::Bf16, GemmDtype::Fp8, GemmDtype::Mxfp8, GemmDtype::Nvfp4];

    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            GemmDtype::Bf16 => "bf16",
            GemmDtype::Fp8 => "fp8",
            GemmDtype::Mxfp8 => "mxfp8",
            GemmDtype::Nvfp4 => "nvfp4",
        }
    }

    /// Operands of the quantized GEMMs of a recipe.
    pub fn of(recipe: QuantRecipe) -> GemmDtype {
        match recipe {
            QuantRecipe::None => GemmDtype::Bf16,
            QuantRecipe::Mxfp8 => GemmDtype::Mxfp8,
            QuantRecipe::Nvfp4 => GemmDtype::Nvfp4,
            _ => GemmDtype::Fp8,
        }
    }
}

impl Candidate {
    /// The layout of a recipe.
    pub fn of_recipe(r: &Resolved) -> Candidate {
        let p = &r.config.parallel;
        Candidate {
            layout: p.layout(),
            zero: p.zero,
            micro_batch: r.plan.micro_batch,
            recompute: r.config.train.recompute.modules(),
            schedule: p.schedule.schedule_kind(),
            dtype: GemmDtype::of(r.config.precision.recipe),
        }
    }
}

/// Time of a step and memory of the stage that needs most, of a recipe as it stands.
pub fn of_recipe(r: &Resolved, hw: &Hardware) -> Result<(StepTime, MemoryBytes)> {
    let gpus = r.config.parallel.layout().world()?;
    let workload = Workload { recipe: r.clone(), gpus, gradient_bytes: 4.0, overlap_param_gather: true };
    let time = workload.step_time(hw, &Candidate::of_recipe(r))?;
    Ok((time, MemoryEstimate::of(r)?.largest()?))
}
