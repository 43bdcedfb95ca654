//! Eight-bit matrices on the CPU: the bits every other home must have.
//!
//! A matrix is cut into tiles of 128 x 128; one piece of work is the tiles that make 128 rows of the output, whichever
//! way the matrix is used.

mod amax;
mod delayed;
mod dequantise;
mod emulate;
mod grid;
pub mod hadamard;
mod mxfp8;
mod nvfp4;
mod product;
mod quantise;
mod tile;

pub use amax::amax;
pub(crate) use amax::amax_row;
pub use delayed::delayed_update;
pub use dequantise::{decode, dequantise, turn};
pub use emulate::emulate;
pub use grid::Grid;
pub use mxfp8::{MX_BLOCK, mxfp8_dequantise, mxfp8_quantise, swizzle};
pub use nvfp4::{
    NV_BLOCK, block_scale, global_scale, nvfp4_dequantise, nvfp4_quantise, pack, round_randomly,
};
pub use product::{Factor, Part, product};
pub use quantise::{Blocks, Use, quantise_blocks, quantise_tensor};
pub use tile::Format;
pub(crate) use tile::{encode_row, formats};
