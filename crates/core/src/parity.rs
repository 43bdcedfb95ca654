//! One training step under two layouts, precisions or devices, compared tensor by tensor.

mod compare;
mod condition;
mod tolerance;

pub use compare::{Comparison, compare};
pub use condition::{DRAWS, move_one_ulp, move_weights, recheck};
pub use tolerance::{Tolerance, update_distance};

use crate::Result;
use crate::config::{QuantRecipe, Resolved};
use crate::data::source;
use crate::train::{InitialWeights, LogicalValues, Trainer};
use ferrotron_engine::Rank;
use serde::Serialize;

/// Kind of a compared tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorKind {
    /// The loss of the step.
    Loss,
    /// Logits of the model.
    Logits,
    /// The gradient of a parameter, before clipping.
    Gradient,
    /// A parameter after the step.
    Weight,
}

impl TensorKind {
    /// Name for display.
    pub fn name(self) -> &'static str {
        match self {
            TensorKind::Loss => "loss",
            TensorKind::Logits => "logits",
            TensorKind::Gradient => "gradient",
            TensorKind::Weight => "weight",
        }
    }
}

/// Everything one side computed.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The loss, if there were labels.
    pub loss: Option<f64>,
    /// Learning rate of the step; 0 where there was no update.
    pub lr: f64,
    /// Tensors of each kind.
    pub tensors: Vec<(TensorKind, Vec<LogicalValues>)>,
}

impl Outcome {
    fn tensors_of(&self, kind: TensorKind) -> Vec<&LogicalValues> {
        self.tensors.iter().filter(|t| t.0 == kind).flat_map(|t| &t.1).collect()
    }
}

/// The first training step of a recipe. `initial_weights` fills the model where the recipe starts from existing
/// weights. Delayed scaling uses the scales that calibration on this same step gives: without any amax history the
/// comparison would be of arbitrary scales.
pub fn first_step(
    rank: Rank,
    resolved: &Resolved,
    initial_weights: Option<&InitialWeights>,
) -> Result<Outcome> {
    let sources = source::open(resolved)?;
    let fresh = |resolved: &Resolved| -> Result<Trainer> {
        let trainer = Trainer::new(rank.clone(), resolved)?;
        initial_weights.map_or(Ok(()), |fill| fill(&trainer))?;
        Ok(trainer)
    };
    let scales = match resolved.config.precision.recipe == QuantRecipe::Fp8Delayed {
        true => {
            let mut calibrating = resolved.clone();
            calibrating.config.precision.calibrate = 1;
            calibrating.config.precision.fp8_params = false;
            let mut trainer = fresh(&calibrating)?;
            trainer.train_step(&*sources.train)?;
            trainer.scales()?
        }
        false => None,
    };
    let mut calibrated = resolved.clone();
    calibrated.config.precision.calibrate = 0;
    let mut trainer = fresh(&calibrated)?;
    if let Some(scales) = scales {
        trainer.set_scales(&scales)?;
    }
    let report = trainer.train_step(&*sources.train)?;
    let tensors =
        vec![(TensorKind::Gradient, trainer.gradients()?), (TensorKind::Weight, trainer.weights()?)];
    Ok(Outcome { loss: Some(report.loss), lr: report.lr, tensors })
}
