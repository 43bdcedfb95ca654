//! Golden vectors as the tests of this folder read them.

pub use shared::*;

use ferrotron_tensor::bf16;

#[path = "../../../../tests/support/golden.rs"]
mod shared;

/// bf16 values of a tensor.
pub fn bf16s(t: &Tensors, name: &str) -> Vec<bf16> {
    t.bf16_bits(name).into_iter().map(bf16::from_bits).collect()
}

/// Distance of two bf16 values in units in the last place.
pub fn bf16_ulps(a: bf16, b: bf16) -> u32 {
    let order = |x: bf16| {
        let bits = i32::from(x.to_bits());
        if bits & 0x8000 != 0 { -(bits & 0x7fff) } else { bits }
    };
    order(a).abs_diff(order(b))
}
