//! Values of training keys: optimizer, schedules, pipeline schedule and recomputation.

use super::{OneOrMany, choice};
use crate::config::KeyType;
use crate::pipeline::ScheduleKind;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

choice! {
    /// The optimizer.
    OptimizerKind {
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// Adam with weight decay added to the gradient.
        Adam = "adam",
        /// SGD with momentum.
        Sgd = "sgd",
        /// The sign of an interpolated momentum.
        Lion = "lion",
        /// Orthogonalized momentum for the matrices of the layers, optimizer.muon.rest for the others.
        Muon = "muon",
    }
}

choice! {
    /// What groups of FSDP ranks that hold the same shards do with the optimizer state of a shard.
    FsdpOuter {
        /// Every group has all of it (HSDP).
        Replicate = "replicate",
        /// Each has a piece of it, updates that, and gathers the updated weights from the others (HFSDP).
        Optimizer = "optimizer",
    }
}

choice! {
    /// What a run does when a checkpoint cannot be written.
    SaveFailurePolicy {
        /// Trains on and tries again at the next checkpoint.
        Continue = "continue",
        /// Ends with an error.
        Stop = "stop",
    }
}

choice! {
    /// Decay of the learning rate after warm-up.
    Decay {
        /// None.
        Constant = "constant",
        /// Linear to `min_lr`.
        Linear = "linear",
        /// Half a cosine to `min_lr`.
        Cosine = "cosine",
        /// Inverse square root of the step.
        InverseSqrt = "inverse_sqrt",
        /// Warm-up, stable, decay: constant, then decay over the last `wsd_steps`.
        Wsd = "wsd",
    }
}

choice! {
    /// Shape of the decay phase of a WSD schedule, for x from 0 to 1.
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
    /// Change from `weight_decay` to `weight_decay_end`.
    WeightDecayStyle {
        /// None.
        Constant = "constant",
        /// Linear.
        Linear = "linear",
        /// Half a cosine.
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
        /// Each document is a sample of its own length; those of a micro-batch are concatenated without padding.
        PaddingFree = "padding_free",
    }
}

choice! {
    /// Whether a training step is captured as a CUDA graph and replayed.
    CudaGraphMode {
        /// Where it is possible and saves launch latency.
        Auto = "auto",
        /// Always; refused where it is not possible.
        On = "on",
        /// Never.
        Off = "off",
    }
}

choice! {
    /// Pipeline schedule.
    PipelineSchedule {
        /// 1F1B; interleaved where a rank has several model chunks.
        OneForwardOneBackward = "1f1b",
        /// 1F1B with weight gradients deferred to where a rank would idle.
        ZeroBubble = "zero-bubble",
        /// Forward and backward of different micro-batches interleaved: the expert all-to-all of one is in flight while the
        /// other computes. More micro-batches are in memory at a time; results are bit-identical.
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
    /// A module whose activations backward recomputes.
    RecomputeModule {
        /// The norms, and in MoE layers the rows sorted by expert.
        Norm = "norm",
        /// Attention.
        Attention = "attention",
        /// The activation function of the MLP.
        Activation = "activation",
        /// The whole MLP.
        Mlp = "mlp",
    }
}

/// Activation recomputation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Every layer saves its input only.
    Full,
    /// These modules of every layer.
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

choice! {
    /// What to do with a step whose result is rejected twice with the same bits.
    BadStepPolicy {
        /// Save the batch and end the run.
        Stop = "stop",
        /// Go on without its update.
        Skip = "skip",
        /// Go back to the last snapshot and skip the data since.
        Rollback = "rollback",
    }
}
