//! The parts of a measured step next to the least time each can take.

use super::train::TrainBench;
use crate::Result;
use crate::config::Resolved;
use crate::cost::roofline::{Ceilings, KernelCategory, floors};
use ferrotron_tensor::Profile;

/// Floor and measured time of a part of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct RooflinePart {
    /// Its kernels.
    pub category: KernelCategory,
    /// The least seconds of a step.
    pub floor_s: f64,
    /// Seconds a step spent in its kernels.
    pub measured_s: f64,
}

/// The parts of a step as `b` measured it.
pub fn roofline(r: &Resolved, b: &TrainBench, c: Ceilings) -> Result<Vec<RooflinePart>> {
    parts(floors(r, b.tokens, b.context, c)?, &b.profile, b.step_s.len())
}

/// Floors with the time that `profile` saw in `steps` steps.
fn parts(floors: Vec<(KernelCategory, f64)>, profile: &Profile, steps: usize) -> Result<Vec<RooflinePart>> {
    let spent = |part: KernelCategory| -> f64 {
        let kernels = profile.iter().filter(|(k, _)| category_of(k) == part);
        kernels.fold(0.0, |sum, (_, (_, time))| sum + time.as_secs_f64()) / steps.max(1) as f64
    };
    let parts = floors.into_iter();
    let parts =
        parts.map(|(category, floor_s)| RooflinePart { category, floor_s, measured_s: spent(category) });
    Ok(parts.filter(|p| p.floor_s + p.measured_s > 0.0 || p.category == KernelCategory::Other).collect())
}

/// The part that a kernel, named as profiles name it, belongs to.
pub fn category_of(kernel: &str) -> KernelCategory {
    match kernel {
        k if k.starts_with("gemm") && k.ends_with("fp8)") => KernelCategory::Fp8Gemm,
        k if k.starts_with("gemm") => KernelCategory::Gemm,
        "quantize" | "amax" | "fp8_transpose" | "emulate" | "delayed_update" | "quantize_stack"
        | "amax_stack" | "transpose_stack" => KernelCategory::Quantize,
        k if k.starts_with("attention") => KernelCategory::Attention,
        k if k.starts_with("grouped") => KernelCategory::GroupedGemm,
        "act_forward" | "act_backward" => KernelCategory::Activation,
        "weighted_act" | "weighted_act_backward" | "grouped_bias" | "grouped_bias_backward" => {
            KernelCategory::ExpertActivation
        }
        "sort_by_expert"
        | "moe_permute"
        | "moe_permute_transposed"
        | "gather_rows"
        | "moe_unpermute_backward"
        | "gather_values"
        | "moe_unpermute"
        | "moe_unpermute_dprobs"
        | "chunk_map"
        | "pad_routing_map" => KernelCategory::Permute,
        "top_k" | "route" | "route_backward" | "aux_loss_stats" | "aux_loss_backward"
        | "aux_loss_weights" | "z_loss" | "z_loss_backward" | "count_tokens" | "expand_topk"
        | "drop_over_capacity" | "sinkhorn" | "quantiles" | "gate_f64" | "gate_f64_backward"
        | "fill_normal_logits" | "mask_padding" | "split_bf16x2" | "accumulate_counts" | "accumulate_f64"
        | "jitter" | "update_expert_bias" | "update_quantiles" => KernelCategory::Router,
        "rope" => KernelCategory::Rope,
        "cross_entropy" => KernelCategory::Loss,
        "adam" | "sgd" | "clip_factor" | "grad_square_sum" | "clip_factor_from_square_sum" => {
            KernelCategory::Optimizer
        }
        "add" | "norm_forward" | "add_norm_forward" | "norm_backward" => KernelCategory::Norms,
        _ => KernelCategory::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload;
    use std::time::Duration;

    fn of(
        r: &Resolved,
        (tokens, context): (u64, usize),
        profile: &Profile,
        steps: usize,
        c: Ceilings,
    ) -> Vec<RooflinePart> {
        parts(floors(r, tokens, context, c).unwrap(), profile, steps).unwrap()
    }

    const CEILINGS: Ceilings =
        Ceilings { gemm: 660.0, fp8_gemm: None, attention: (554.0, 480.0), memory: 4270.0 };
    /// Short sequences with a small head dim are slower.
    const SHORT: Ceilings = Ceilings { gemm: 620.0, attention: (331.0, 256.0), ..CEILINGS };

    /// Ceilings of GEMMs and attention, measured for its shapes.
    const MOE: Ceilings = Ceilings { gemm: 609.0, attention: (543.0, 442.0), ..CEILINGS };

    #[test]
    fn floors_are_those_of_the_yardsticks() {
        // Estimates by hand for these ceilings: 217, 116 and 205 ms.
        for (name, tokens, c, ms) in [
            ("llama-8b-8l", 8192, CEILINGS, 217.0),
            ("gpt2-124m", 65_536, SHORT, 116.0),
            ("moe-8l", 16_384, MOE, 205.0),
        ] {
            let r = workload(name).unwrap().resolve(None).unwrap();
            let total: f64 =
                of(&r, (tokens, r.plan.seq_len), &Profile::new(), 1, c).iter().map(|p| p.floor_s).sum();
            assert!((total * 1e3 / ms - 1.0).abs() < 0.12, "{name}: {:.0} ms instead of {ms}", total * 1e3);
        }
    }

    #[test]
    fn moe_layers_count_top_k_experts() {
        let r = workload("moe-8l").unwrap().resolve(None).unwrap();
        let parts = of(&r, (16_384, 4096), &Profile::new(), 1, MOE);
        let ms = |part: KernelCategory| parts.iter().find(|p| p.category == part).unwrap().floor_s * 1e3;
        // 8 layers x 131072 rows x 3 matrices of 2048 x 768, six FLOPs each, at 609 TFLOP/s.
        assert!((ms(KernelCategory::GroupedGemm) - 48.8).abs() < 0.1, "{}", ms(KernelCategory::GroupedGemm));
        // 8 x 8 x 131072 x 768 and 8 x 4 x (131072 + 16384) x 2048 elements of two bytes at 4.27 TB/s.
        assert!(
            (ms(KernelCategory::ExpertActivation) - 3.02).abs() < 0.01,
            "{}",
            ms(KernelCategory::ExpertActivation)
        );
        assert!((ms(KernelCategory::Permute) - 4.53).abs() < 0.01, "{}", ms(KernelCategory::Permute));
        assert!((ms(KernelCategory::Router) - 0.063).abs() < 0.001, "{}", ms(KernelCategory::Router));
        assert!(!parts.iter().any(|p| p.category == KernelCategory::Activation), "there is no MLP");
        // All GEMMs together are the model's FLOPs and those of the routers.
        let flops = r.model.flops_per_token(4096.0).unwrap();
        let all = 16_384.0 * (flops.projections + flops.mlp + flops.logits + 6.0 * 8.0 * 2048.0 * 128.0);
        assert!(
            ((ms(KernelCategory::GroupedGemm) + ms(KernelCategory::Gemm)) * 609e9 / all - 1.0).abs() < 1e-9
        );
    }

    #[test]
    fn fp8_gemms_have_their_own_ceiling() {
        // The estimate for FP8 with the LM head in bf16: 168 ms.
        let mut recipe = workload("llama-8b-8l").unwrap();
        recipe.set("precision.recipe=fp8-current").unwrap();
        let r = recipe.resolve(None).unwrap();
        let c = Ceilings { fp8_gemm: Some((1260.0, 1205.0)), ..CEILINGS };
        let parts = of(&r, (8192, 8192), &Profile::new(), 1, c);
        let total: f64 = parts.iter().map(|p| p.floor_s * 1e3).sum();
        assert!((total / 168.0 - 1.0).abs() < 0.05, "{total} ms");
        assert!(parts.iter().any(|p| p.category == KernelCategory::Quantize && p.floor_s > 1e-3));
    }

    #[test]
    fn fp8_grouped_gemms_have_it_too() {
        let floors = |set: &[&str]| -> Vec<RooflinePart> {
            let mut recipe = workload("moe-8l").unwrap();
            set.iter().for_each(|s| recipe.set(s).unwrap());
            let r = recipe.resolve(None).unwrap();
            let c = Ceilings { fp8_gemm: Some((1218.0, 1218.0)), ..MOE };
            of(&r, (16_384, 4096), &Profile::new(), 1, c)
        };
        let ms = |parts: &[RooflinePart], part| {
            parts.iter().find(|p| p.category == part).map_or(0.0, |p| p.floor_s * 1e3)
        };
        let (all, none) = (
            floors(&["precision.recipe=fp8-current"]),
            floors(&["precision.recipe=fp8-current", "precision.skip=experts"]),
        );
        assert!(
            (ms(&all, KernelCategory::GroupedGemm) - 24.4).abs() < 0.1,
            "{}",
            ms(&all, KernelCategory::GroupedGemm)
        );
        assert!(
            (ms(&none, KernelCategory::GroupedGemm) - 48.8).abs() < 0.1,
            "{}",
            ms(&none, KernelCategory::GroupedGemm)
        );
        // 8 layers: four bytes for each weight, tokens twice, 131072 rows of 768 and of 1536, at 4.27 TB/s.
        let bytes = 8.0 * 4.0 * (128.0 * 3.0 * 2048.0 * 768.0 + 2.0 * 16_384.0 * 2048.0 + 131_072.0 * 2304.0);
        let casts = ms(&all, KernelCategory::Quantize) - ms(&none, KernelCategory::Quantize);
        assert!((casts - bytes / 4270e6).abs() < 0.01, "{casts}");
    }

    #[test]
    fn every_kernel_counts_once() {
        let r = workload("llama-1b").unwrap().resolve(None).unwrap();
        let names =
            ["gemm (output)", "attention_forward", "norm_backward", "rope", "adam", "copy", "act_forward"];
        let profile: Profile = names.iter().map(|n| (*n, (2, Duration::from_millis(4)))).collect();
        let parts = of(&r, (16_384, 4096), &profile, 2, CEILINGS);
        let total: f64 = parts.iter().map(|p| p.measured_s).sum();
        assert!((total - 0.014).abs() < 1e-9, "{total}");
    }
}
