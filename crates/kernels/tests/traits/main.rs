//! One conformance suite for the kernel traits, run on every home they have: each instruction-set level of this
//! machine, in f32 and bf16, against naive f64. Another device joins by joining the list in `homes.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod attention_bytes;
mod attention_fp8;
mod fused;
mod gemm;
mod grouped;
mod grouped8;
mod homes;
mod latent;
mod loss_scale;
mod maps;
mod measured;
mod merge;
mod moments;
mod norm;
mod optim;
mod permute;
mod permute_maps;
mod quant;
mod quant_micro;
mod quant_oracle;
mod quant_product;
mod quant_turned;
mod refusals;
mod rope;
mod router;
mod router_capacity;
mod router_losses;
mod router_oracle;
mod row_bias;
mod shards;
mod stack;
mod tables;
mod taken;
mod weighted;

#[path = "../rows/golden.rs"]
#[allow(dead_code)]
mod golden;

#[path = "../attention/oracle.rs"]
#[allow(dead_code)]
mod oracle;
