//! Choices of a run: update rule, schedules, the order of work and what is computed again.

use super::{OneOrMany, choice};
use crate::config::KeyType;
use crate::pipeline::ScheduleKind;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

choice! {
    /// The update rule.
    OptimizerKind {
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// Adam with weight decay added to the gradient.
        Adam = "adam",
        /// Gradient descent with momentum.
        Sgd = "sgd",
    }
}

choice! {
    /// How the learning rate falls after warm-up.
    Decay {
        /// It does not.
        Constant = "constant",
        /// In a straight line to `min_lr`.
        Linear = "linear",
        /// Along half a cosine to `min_lr`.
        Cosine = "cosine",
        /// As one over the square root of the step.
        InverseSqrt = "inverse_sqrt",
        /// Warm-up, stable, decay: constant, then down over the last `wsd_steps`.
        Wsd = "wsd",
    }
}

choice! {
    /// The shape of the last part of a warm-up, stable, decay schedule.
    WsdStyle {
        /// 1 − x
        Linear = "linear",
        /// (1 + cos πx) / 2
        Cosine = "cosine",
        /// 2 · 0.5^x − 1
        Exponential = "exponential",
        /// 1 − √x
        MinusSqrt = "minus_sqrt",
    }
}

choice! {
    /// How weight decay goes from `weight_decay` to `weight_decay_end`.
    WeightDecayStyle {
        /// It stays.
        Constant = "constant",
        /// In a straight line.
        Linear = "linear",
        /// Along half a cosine.
        Cosine = "cosine",
    }
}

choice! {
    /// How documents become training sequences.
    Packing {
        /// Concatenated in shuffled order and cut every data.seq_len tokens.
        None = "none",
        /// Whole documents packed into each sequence by best fit, with padding at its end.
        Documents = "documents",
    }
}

choice! {
    /// Whether whole steps are captured once and replayed.
    CudaGraphMode {
        /// Where that is possible and pays.
        Auto = "auto",
        /// Always; refused where it is not possible.
        On = "on",
        /// Never.
        Off = "off",
    }
}

choice! {
    /// The order of work in a pipeline.
    PipelineSchedule {
        /// One forward, one backward in turn; interleaved where a rank has several chunks of layers.
        OneForwardOneBackward = "1f1b",
        /// The same, with weight gradients put off to where a rank would wait.
        ZeroBubble = "zero-bubble",
        /// A forward and a backward of different micro-batches interleaved: one's expert exchange is in flight while the other
        /// computes. More micro-batches are in memory at a time; the results are the same bits.
        Paired = "paired",
    }
}

impl PipelineSchedule {
    /// The kind of schedule that the pipeline builds.
    pub fn schedule_kind(self) -> ScheduleKind {
        match self {
            PipelineSchedule::OneForwardOneBackward => ScheduleKind::OneForwardOneBackward,
            PipelineSchedule::ZeroBubble => ScheduleKind::ZeroBubble,
            PipelineSchedule::Paired => ScheduleKind::Paired,
        }
    }
}

choice! {
    /// A part of a layer that recomputation can drop and run again in the backward pass.
    RecomputeModule {
        /// The norms.
        Norm = "norm",
        /// The attention core: scores, softmax, weighted sum.
        Attention = "attention",
        /// The MLP's non-linearity.
        Activation = "activation",
        /// The whole MLP.
        Mlp = "mlp",
    }
}

/// What the forward pass drops and the backward pass computes again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Every layer keeps its input only.
    Full,
    /// These parts of every layer.
    Modules(Vec<RecomputeModule>),
}

impl Recompute {
    /// The modules whose outputs backward recomputes.
    pub fn modules(&self) -> ferrotron_engine::Recompute {
        use ferrotron_engine::Recompute as Modules;
        match self {
            Recompute::None => Modules::default(),
            Recompute::Full => Modules { layer: true, ..Modules::default() },
            Recompute::Modules(list) => Modules {
                layer: false,
                attention: list.contains(&RecomputeModule::Attention),
                mlp: list.contains(&RecomputeModule::Mlp),
                activation: list.contains(&RecomputeModule::Activation),
                norm: list.contains(&RecomputeModule::Norm),
            },
        }
    }
}

impl Serialize for Recompute {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Recompute::None => s.serialize_str("none"),
            Recompute::Full => s.serialize_str("full"),
            Recompute::Modules(list) => list.serialize(s),
        }
    }
}

impl<'de> Deserialize<'de> for Recompute {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match OneOrMany::deserialize(d)?.0.as_slice() {
            [] => Ok(Recompute::None),
            [one] if one == "none" => Ok(Recompute::None),
            [one] if one == "full" => Ok(Recompute::Full),
            many => many
                .iter()
                .map(|m| m.parse().map_err(D::Error::custom))
                .collect::<Result<_, _>>()
                .map(Recompute::Modules),
        }
    }
}

impl KeyType for Recompute {
    fn expects() -> String {
        format!(
            "\"none\", \"full\" or a list of \"{}\"",
            RecomputeModule::ALL.iter().map(|m| m.name()).collect::<Vec<_>>().join("\", \"")
        )
    }
}
