//! Every module against a slow f64 twin of its forward pass, whose derivatives are taken by differences; and the
//! promises around modules: what is saved can move, weight gradients can wait, buffers need no zeros.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod embedding;
mod fp8;
mod fp8_layers;
mod fp8_lm_head;
mod fp8_oracle;
mod fp8_state;
mod fp8_tensor_parallel;
mod gradients;
mod linear;
mod lm_head;
mod mla;
mod mlp;
mod norm;
mod support;
mod tensor_parallel;
