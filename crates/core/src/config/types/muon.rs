//! Values of `optimizer.muon`.

use super::{OptimizerKind, choice};
use crate::config::KeyType;
use serde::{Deserialize, Serialize};

choice! {
    /// Coefficients of the Newton–Schulz iterations.
    MuonCoefficients {
        /// One row, steep at 0.
        Simple = "simple",
        /// Five rows; singular values from 0.01 on end within 3 % of 1.
        Quintic = "quintic",
        /// Eight rows; eight steps end within 0.05 % of 1.
        PolarExpress = "polar_express",
        /// Five Chebyshev-accelerated rows.
        Cans = "cans",
        /// Four rows of almost-orthogonal preconditioning.
        Aol = "aol",
        /// Eight simple rows and two convergent ones, for ten steps.
        DeepseekV4 = "deepseekv4",
        /// Five rows without a fifth power.
        Cubic5 = "cubic5",
    }
}

choice! {
    /// Factor on an orthogonalized update, by rows and columns of the whole matrix.
    MuonScale {
        /// √max(rows, columns).
        Spectral = "spectral",
        /// √max(1, rows / columns).
        ShapeScaling = "shape_scaling",
        /// √(rows / columns).
        UnitRmsNorm = "unit_rms_norm",
    }
}

choice! {
    /// Where weight decay enters.
    MuonDecay {
        /// p is multiplied by 1 − lr·wd.
        Decoupled = "decoupled",
        /// p is multiplied by 1 − wd.
        Independent = "independent",
        /// wd·p is added to the gradient.
        L2 = "l2",
    }
}

choice! {
    /// Second moment of orthogonalized updates.
    MuonAdaptive {
        /// None.
        None = "none",
        /// One for each element.
        Adamuon = "adamuon",
        /// One for each row, or for each column where there are more of these.
        Normuon = "normuon",
    }
}

choice! {
    /// Dtype of the operands of Newton–Schulz products; sums are f32.
    MuonProducts {
        /// bf16.
        Bf16 = "bf16",
        /// f32.
        F32 = "f32",
    }
}

choice! {
    /// What is orthogonalized of a matrix that tensor-parallel ranks share.
    MuonTpMode {
        /// The whole matrix, on every rank: results do not depend on the layout.
        Duplicated = "duplicated",
        /// The whole matrix, with its Gram matrix summed over the ranks in every iteration.
        Distributed = "distributed",
        /// Each rank's shard by itself: results depend on the layout.
        Blockwise = "blockwise",
    }
}

/// Constants of Muon: `{ momentum = 0.95, coefficients = "quintic" }`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MuonSettings {
    /// Decay of the momentum, a moving average of gradients.
    pub momentum: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
    /// Newton–Schulz iterations.
    pub steps: usize,
    /// Their coefficients.
    pub coefficients: MuonCoefficients,
    /// Factor on the update.
    pub scale: MuonScale,
    /// Factor on the update on top of `scale`; 0.2 with `spectral` matches AdamW's RMS.
    pub extra_scale: f64,
    /// Where weight decay enters.
    pub weight_decay: MuonDecay,
    /// Second moment of the updates.
    pub adaptive: MuonAdaptive,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Operands of the products.
    pub products: MuonProducts,
    /// Tensor parallelism.
    pub tp_mode: MuonTpMode,
    /// Orthogonalize q, k and v of an attention layer separately; else the fused QKV matrix as one.
    pub split_qkv: bool,
    /// Optimizer of everything but the matrices of the layers.
    pub rest: OptimizerKind,
}

impl Default for MuonSettings {
    fn default() -> MuonSettings {
        MuonSettings {
            momentum: 0.95,
            nesterov: true,
            steps: 5,
            coefficients: MuonCoefficients::Quintic,
            scale: MuonScale::Spectral,
            extra_scale: 0.2,
            weight_decay: MuonDecay::Decoupled,
            adaptive: MuonAdaptive::None,
            beta2: 0.95,
            eps: 1e-8,
            products: MuonProducts::Bf16,
            tp_mode: MuonTpMode::Duplicated,
            split_qkv: true,
            rest: OptimizerKind::AdamW,
        }
    }
}

impl KeyType for MuonSettings {
    fn expects() -> String {
        "a table of any of momentum (0.95), nesterov (true), steps (5), coefficients (\"quintic\"), scale (\"spectral\"), \
         extra_scale (0.2), weight_decay (\"decoupled\"), adaptive (\"none\"), beta2 (0.95), eps (1e-8), products (\"bf16\"), \
         tp_mode (\"duplicated\"), split_qkv (true), rest (\"adamw\")"
            .into()
    }
}
