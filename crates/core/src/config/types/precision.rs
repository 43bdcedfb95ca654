//! What numbers are computed and kept in.

use super::choice;
use ferrotron_tensor::DType;

choice! {
    /// The element type of weights and activations in compute.
    Precision {
        /// Single precision throughout.
        F32 = "f32",
        /// bf16 compute; master weights and gradient sums stay f32.
        Bf16 = "bf16",
        /// f16 compute under a loss scale; master weights and gradient sums stay f32.
        F16 = "f16",
    }
}

impl Precision {
    /// As tensors know it.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

choice! {
    /// The low-precision recipe of GEMM operands.
    QuantRecipe {
        /// Not at all.
        None = "none",
        /// FP8, one scale per tensor, from its own largest magnitude.
        Fp8Current = "fp8-current",
        /// FP8, one scale per tensor, from those of earlier steps.
        Fp8Delayed = "fp8-delayed",
        /// FP8, one scale per 128 values (activations, gradients) and per 128 x 128 (weights).
        Fp8Block = "fp8-block",
        /// FP8, one power of two per 32 values; emulated.
        Mxfp8 = "mxfp8",
        /// Four bits, one scale per 16 values; emulated.
        Nvfp4 = "nvfp4",
    }
}

choice! {
    /// Which of the two 8-bit formats is used where.
    Fp8Format {
        /// Gradients in E5M2, everything else in E4M3.
        Hybrid = "hybrid",
        /// Everything in E4M3.
        E4m3 = "e4m3",
    }
}

choice! {
    /// How the f32 weights that the optimizer works on are kept.
    MasterDtype {
        /// As they are, beside the weights the model computes with: 4 bytes a parameter.
        F32 = "f32",
        /// As the 16 bits that a bf16 weight lacks: 2 bytes a parameter, the same f32 together. The weight is then the
        /// f32 rounded half away from zero, not half to even.
        Remainder = "remainder",
    }
}

choice! {
    /// How the optimizer's moments are kept; its arithmetic is f32.
    StateDtype {
        /// Single precision.
        F32 = "f32",
        /// bf16, rounded to nearest.
        Bf16 = "bf16",
        /// f16 with a scale for each 32 elements, rounded at random but reproducibly.
        F16 = "f16",
        /// 8 bits with a scale for each 32 elements, rounded at random but reproducibly.
        Fp8 = "fp8",
    }
}

impl StateDtype {
    /// As tensors know it.
    pub const fn dtype(self) -> DType {
        match self {
            StateDtype::F32 => DType::F32,
            StateDtype::Bf16 => DType::BF16,
            StateDtype::F16 => DType::F16,
            StateDtype::Fp8 => DType::U8,
        }
    }

    /// Bytes of an element, scales included.
    pub fn bytes(self) -> f64 {
        let scales = match self {
            StateDtype::F32 | StateDtype::Bf16 => 0.0,
            StateDtype::F16 | StateDtype::Fp8 => 1.0 / ferrotron_kernels::moments::BLOCK as f64,
        };
        self.dtype().size() as f64 + scales
    }
}
