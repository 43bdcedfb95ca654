//! Dtypes of compute, of quantized operands and of optimizer state.

use super::choice;
use ferrotron_tensor::DType;

choice! {
    /// Dtype of weights and activations.
    Precision {
        /// f32 throughout.
        F32 = "f32",
        /// bf16 compute; master weights and gradient sums stay f32.
        Bf16 = "bf16",
        /// f16 compute under a loss scale; master weights and gradient sums stay f32.
        F16 = "f16",
    }
}

impl Precision {
    /// The tensor dtype.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

choice! {
    /// Quantization recipe of the GEMMs of linear layers.
    QuantRecipe {
        /// No quantization.
        None = "none",
        /// FP8, one scale per tensor from its amax.
        Fp8Current = "fp8-current",
        /// FP8, one scale per tensor from the amax history of earlier steps.
        Fp8Delayed = "fp8-delayed",
        /// FP8, one scale per 1 x 128 block (activations, gradients) or 128 x 128 block (weights).
        Fp8Block = "fp8-block",
        /// FP8, one power-of-two scale per 32 elements; emulated on devices before Blackwell.
        Mxfp8 = "mxfp8",
        /// FP4, one scale per 16 elements; emulated on devices before Blackwell.
        Nvfp4 = "nvfp4",
    }
}

choice! {
    /// FP8 formats of the operands.
    Fp8Format {
        /// Gradients in E5M2, everything else in E4M3.
        Hybrid = "hybrid",
        /// Everything in E4M3.
        E4m3 = "e4m3",
    }
}

choice! {
    /// Storage of the f32 master weights.
    MasterDtype {
        /// f32 beside the model's weights: 4 bytes per parameter.
        F32 = "f32",
        /// The low 16 bits, which complete the bf16 weight to the same f32: 2 bytes per parameter. The bf16 weight is then
        /// rounded half away from zero, not half to even.
        Remainder = "remainder",
    }
}

impl MasterDtype {
    /// Why FP8 parameters cannot have masters that are remainders.
    pub(crate) const REMAINDER_OF_FP8: &str = "optimizer.master_dtype = \"remainder\" stores the low 16 bits of f32 masters beside \
        bf16 weights; FP8 parameters have no bf16 weights: set \"f32\"";
}

choice! {
    /// Dtype of the optimizer's moments; its arithmetic is f32.
    StateDtype {
        /// f32.
        F32 = "f32",
        /// bf16, rounded to nearest.
        Bf16 = "bf16",
        /// f16 with one scale per 32 elements; stochastic rounding with a fixed seed.
        F16 = "f16",
        /// FP8 with one scale per 32 elements; stochastic rounding with a fixed seed.
        Fp8 = "fp8",
    }
}

impl StateDtype {
    /// The tensor dtype.
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
