//! Every module against an f64 reference of its forward pass, differentiated by finite differences; and the module
//! contracts: saved activations can be moved, weight gradients can be deferred, gradient buffers need no zeroing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod dora;
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
mod lora;
mod microscaled;
mod mla;
mod mlp;
mod moe;
mod norm;
mod support;
mod tensor_parallel;
