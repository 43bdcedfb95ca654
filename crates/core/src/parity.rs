//! One training step under two settings, compared tensor by tensor.

mod bounds;
mod compare;

pub use bounds::{Bounds, update_distance};
pub use compare::{Compared, compare};

use crate::Result;
use crate::config::{Resolved, Scaling, Weights};
use crate::data::source;
use crate::train::{FirstWeights, LogicalValues, Trainer};
use ferrotron_engine::Rank;
use serde::Serialize;

/// What a compared tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The loss of the step.
    Loss,
    /// Outputs of the model.
    Logits,
    /// The gradient of a parameter, before clipping.
    Gradient,
    /// A parameter after the step.
    Weight,
}

impl Kind {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Loss => "loss",
            Kind::Logits => "logits",
            Kind::Gradient => "gradient",
            Kind::Weight => "weight",
        }
    }
}

/// Everything one side has made.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The loss, if there were labels.
    pub loss: Option<f64>,
    /// Learning rate of the step; 0 where there was no update.
    pub lr: f64,
    /// Tensors of each kind.
    pub tensors: Vec<(Kind, Vec<LogicalValues>)>,
}

impl Outcome {
    fn of(&self, kind: Kind) -> Vec<&LogicalValues> {
        self.tensors.iter().filter(|t| t.0 == kind).flat_map(|t| &t.1).collect()
    }
}

/// The first training step of a recipe. `first_weights` fills the model where the recipe starts from given ones. Delayed
/// scaling has the scales that collecting magnitudes in this same step leads to: without any it would say nothing.
pub fn first_step(rank: Rank, resolved: &Resolved, first_weights: Option<&FirstWeights>) -> Result<Outcome> {
    let sources = source::open(resolved)?;
    let fresh = |resolved: &Resolved| -> Result<Trainer> {
        let trainer = Trainer::new(rank.clone(), resolved)?;
        first_weights.map_or(Ok(()), |fill| fill(&trainer))?;
        Ok(trainer)
    };
    let scales = match resolved.config.precision.scaling == Scaling::Delayed {
        true => {
            let mut collecting = resolved.clone();
            collecting.config.precision.calibrate = 1;
            collecting.config.precision.weights = Weights::Bf16;
            let mut trainer = fresh(&collecting)?;
            trainer.train_step(&*sources.train)?;
            trainer.scales()?
        }
        false => None,
    };
    let mut collected = resolved.clone();
    collected.config.precision.calibrate = 0;
    let mut trainer = fresh(&collected)?;
    if let Some(scales) = scales {
        trainer.set_scales(&scales)?;
    }
    let report = trainer.train_step(&*sources.train)?;
    let tensors = vec![(Kind::Gradient, trainer.gradients()?), (Kind::Weight, trainer.weights()?)];
    Ok(Outcome { loss: Some(report.loss), lr: report.lr, tensors })
}
