//! FP8 quantization on the CPU, the bitwise reference of all devices.
//!
//! A matrix is processed in 128x128 tiles; a unit of work is the tiles of 128 output rows, in either orientation.

mod amax;
mod delayed;
mod dequantize;
mod emulate;
mod encode;
mod fp8_gemm;
pub mod hadamard;
mod mxfp8;
mod nvfp4;
mod quantize;
mod small_blocks;

pub use amax::amax;
pub(crate) use amax::amax_row;
pub use delayed::delayed_update;
pub use dequantize::{decode, dequantize, transpose};
pub use emulate::emulate;
pub use encode::Format;
pub(crate) use encode::{encode_row, formats};
pub use fp8_gemm::{Fp8Operand, Fp8OperandRows, fp8_gemm};
pub use mxfp8::{MX_BLOCK, mxfp8_dequantize, mxfp8_quantize, swizzle};
pub use nvfp4::{
    NV_BLOCK, block_scale, global_scale, nvfp4_dequantize, nvfp4_quantize, pack, round_randomly,
};
pub use quantize::{Blocks, Orientation, quantize_blocks, quantize_tensor};
pub use small_blocks::SmallBlocks;
