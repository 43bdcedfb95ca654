//! Every module against a slow f64 twin of its forward pass, whose derivatives are taken by differences; and the
//! promises around modules: what is saved can move, weight gradients can wait, buffers need no zeros.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod embedding;
mod gradients;
mod head;
mod latent;
mod linear;
mod mlp;
mod narrow;
mod narrow_blocks;
mod narrow_head;
mod narrow_oracle;
mod narrow_spread;
mod narrow_state;
mod norm;
mod spread;
mod support;
