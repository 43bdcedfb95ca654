//! Eight-bit matrices on the CPU: the bits every other home must have.
//!
//! A matrix is cut into tiles of 128 x 128; one piece of work is the tiles that make 128 rows of the output, whichever
//! way the matrix is used.

mod amax;
mod delayed;
mod dequantise;
mod product;
mod quantise;
mod tile;

pub use amax::amax;
pub use delayed::delayed_update;
pub use dequantise::{decode, dequantise};
pub use product::{Factor, product};
pub use quantise::{Blocks, Use, quantise_blocks, quantise_tensor};
pub use tile::Format;
pub(crate) use tile::formats;
