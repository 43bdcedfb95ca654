//! One conformance suite for the kernel traits, run on every device: each instruction-set level of this
//! machine, in f32 and bf16, against naive f64. `devices.rs` lists the devices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adam_fp8_weights;
mod attention;
mod attention_fp8;
mod attention_fp8_probs;
mod attention_merge;
mod attention_parts;
mod devices;
mod digest;
mod dora;
mod elementwise;
mod embedding_loss;
mod fp8_gemm;
mod fp8_grouped_gemm;
mod fp8_transpose;
mod fused;
mod gemm;
mod golden_muon;
mod grouped_bias;
mod grouped_gemm;
mod invalid_arguments;
mod loss_scale;
mod microscaled_gemm;
mod microscaling;
mod mla;
mod moments;
mod muon;
mod norm;
mod optimizer;
mod permutation;
mod permutation_maps;
mod quant;
mod quant_oracle;
mod quantize_stack;
mod rope;
mod router;
mod router_capacity;
mod router_logits;
mod router_losses;
mod router_oracle;
mod split_slots;
mod vocab_parallel;
mod weighted_activation;
mod with_amax;

#[path = "../cpu/golden.rs"]
#[allow(dead_code)]
mod golden;

#[path = "../attention/oracle.rs"]
#[allow(dead_code)]
mod oracle;
