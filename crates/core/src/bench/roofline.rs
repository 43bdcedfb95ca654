//! The least time a training step can take, part by part: arithmetic over the speed of a large matrix product, bytes
//! that must move once over the speed of memory. What a step took beside it shows where time is left.

use super::moe::MoeWork;
use super::train::TrainBench;
use crate::config::{MasterDtype, OptimizerKind, Resolved};
use ferrotron_engine::quant::LinearQuant;
use ferrotron_tensor::Profile;

/// Speeds of the device, measured in the same run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// TFLOP/s of products.
    pub gemm: f64,
    /// TFLOP/s of narrow products: of the output, and of gradients; none where there are none.
    pub fp8_gemm: Option<(f64, f64)>,
    /// TFLOP/s of attention alone, forward and backward.
    pub attention: (f64, f64),
    /// GB/s of memory, read and write counted.
    pub memory: f64,
}

/// A part of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct RooflinePart {
    /// Its name.
    pub name: &'static str,
    /// The least seconds of a step.
    pub floor_s: f64,
    /// Seconds a step spent in its kernels.
    pub measured_s: f64,
}

/// Which part a kernel belongs to.
fn part_of_kernel(kernel: &str) -> &'static str {
    match kernel {
        k if k.starts_with("gemm") && k.ends_with("fp8)") => FP8_GEMM,
        k if k.starts_with("gemm") => GEMM,
        "quantize" | "amax" | "fp8_transpose" | "emulate" | "delayed_update" | "quantize_stack"
        | "amax_stack" | "transpose_stack" => QUANTIZE,
        k if k.starts_with("attention") => ATTENTION,
        k if k.starts_with("grouped") => GROUPED_GEMM,
        "act_forward" | "act_backward" => ACTIVATION,
        "weighted_act" | "weighted_act_backward" | "grouped_bias" | "grouped_bias_backward" => {
            EXPERT_ACTIVATION
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
        | "pad_routing_map" => PERMUTE,
        "top_k" | "route" | "route_backward" | "aux_loss_stats" | "aux_loss_backward"
        | "aux_loss_weights" | "z_loss" | "z_loss_backward" | "count_tokens" | "expand_topk"
        | "drop_over_capacity" | "sinkhorn" | "quantiles" | "gate_f64" | "gate_f64_backward"
        | "fill_normal_logits" | "mask_padding" | "split_bf16x2" | "accumulate_counts" | "accumulate_f64"
        | "jitter" | "update_expert_bias" | "update_quantiles" => ROUTER,
        "rope" => ROPE,
        "cross_entropy" => LOSS,
        "adam" | "sgd" | "clip_factor" | "grad_square_sum" | "clip_factor_from_square_sum" => OPTIMIZER,
        "add" | "norm_forward" | "add_norm_forward" | "norm_backward" => NORMS,
        _ => OTHER,
    }
}

const GEMM: &str = "matrix products";
const FP8_GEMM: &str = "8-bit products";
const QUANTIZE: &str = "numbers to bytes";
const ATTENTION: &str = "attention";
const NORMS: &str = "residual and norms";
const ACTIVATION: &str = "non-linearity";
const GROUPED_GEMM: &str = "products of experts";
const EXPERT_ACTIVATION: &str = "non-linearity of experts";
const PERMUTE: &str = "rows to experts and back";
const ROUTER: &str = "router";
const ROPE: &str = "positions";
const LOSS: &str = "loss";
const OPTIMIZER: &str = "optimizer";
const OTHER: &str = "everything else";

/// The parts of a step as `b` measured it.
pub fn roofline(r: &Resolved, b: &TrainBench, c: Ceilings) -> Vec<RooflinePart> {
    parts(r, (b.tokens, b.context), &b.profile, b.step_s.len(), c)
}

/// The parts of a step of some tokens in documents of a length, with the time `profile` saw in `steps` of them.
fn parts(
    r: &Resolved,
    (tokens, context): (u64, usize),
    profile: &Profile,
    steps: usize,
    c: Ceilings,
) -> Vec<RooflinePart> {
    let (m, tokens) = (&r.model, tokens as f64);
    let flops = m.flops_per_token(context as f64);
    let size = r.config.precision.dtype.dtype().size() as f64;
    let (h, l, v) = (m.hidden as f64, m.layers as f64, m.vocab as f64);
    let moe = MoeWork::of(m, tokens, size);
    let rotated = match &m.mla {
        None => (m.heads + 2 * m.kv_heads) * m.head_dim,
        Some(l) => (m.heads + 1) * l.rope_dim,
    };
    let parameters = m.parameters() as f64;
    // Forward two products of scores, backward five: half of what is counted per token is not needed twice.
    let attention_forward = tokens * flops.attention / 3.0;
    let attention =
        attention_forward / (c.attention.0 * 1e12) + 2.5 * attention_forward / (c.attention.1 * 1e12);
    let fp8 = Fp8Work::of(r, tokens);
    let all = tokens * (flops.projections + flops.mlp + flops.logits) + moe.router_flops;
    let bf16 = all - fp8.output - fp8.gradients - moe.expert_flops;
    let gemm = bf16 / (c.gemm * 1e12);
    let (output, gradients) = c.fp8_gemm.unwrap_or((c.gemm, c.gemm));
    let fp8_gemm = fp8.output / (output * 1e12) + fp8.gradients / (gradients * 1e12);
    let grouped_gemm = (moe.expert_flops - fp8.experts.0 - fp8.experts.1) / (c.gemm * 1e12)
        + fp8.experts.0 / (output * 1e12)
        + fp8.experts.1 / (gradients * 1e12);
    let bytes = |n: f64| n / (c.memory * 1e9);
    let norms = if m.post_norms { 4.0 } else { 2.0 };
    let widths = if m.gated { 3.0 + 5.0 } else { 2.0 + 3.0 };
    let moments = match r.config.optimizer.kind {
        OptimizerKind::Sgd => 1.0,
        _ => 2.0,
    };
    // Master and moments are read and written, the gradient is read, twice with its norm, the weight written; it is
    // read too where it is half of the master.
    let moment = r.config.optimizer.state_dtype.bytes();
    let weight = if size < 4.0 { size } else { 0.0 };
    let master = match r.config.optimizer.master_dtype {
        MasterDtype::F32 => 2.0 * 4.0 + weight,
        MasterDtype::Remainder => 2.0 * 2.0 + 2.0 * weight,
    };
    let update = parameters * (master + 2.0 * moments * moment + 2.0 * 4.0);
    let rotates = (0..m.layers).filter(|i| m.rope(*i).is_some()).count() as f64;
    let floors = [
        (GEMM, gemm),
        (FP8_GEMM, fp8_gemm),
        (QUANTIZE, bytes(fp8.bytes)),
        (ATTENTION, attention),
        (NORMS, bytes((norms * l + 1.0) * 8.0 * tokens * h * size)),
        (ACTIVATION, bytes(moe.dense_ffn * widths * tokens * size)),
        (GROUPED_GEMM, grouped_gemm),
        (EXPERT_ACTIVATION, bytes(moe.activation_bytes)),
        (PERMUTE, bytes(moe.permute_bytes)),
        (ROUTER, bytes(moe.router_bytes)),
        (ROPE, bytes(rotates * 4.0 * tokens * rotated as f64 * size)),
        (LOSS, bytes(3.0 * tokens * v * size)),
        (OPTIMIZER, bytes(update)),
        (OTHER, 0.0),
    ];
    let spent = |name: &str| -> f64 {
        let kernels = profile.iter().filter(|(k, _)| part_of_kernel(k) == name);
        kernels.fold(0.0, |sum, (_, (_, time))| sum + time.as_secs_f64()) / steps.max(1) as f64
    };
    let parts = floors.map(|(name, floor_s)| RooflinePart { name, floor_s, measured_s: spent(name) });
    parts.into_iter().filter(|p| p.floor_s + p.measured_s > 0.0 || p.name == OTHER).collect()
}

/// What a step does in eight bits.
#[derive(Default)]
struct Fp8Work {
    /// FLOPs of outputs.
    output: f64,
    /// FLOPs of gradients of inputs and weights.
    gradients: f64,
    /// Both of experts, which are no part of the others.
    experts: (f64, f64),
    /// Bytes moved to make factors: every operand is read once and written for each of its uses.
    bytes: f64,
}

impl Fp8Work {
    fn of(r: &Resolved, tokens: f64) -> Fp8Work {
        let (policy, m) = (r.policy(), &r.model);
        let mut sum = Fp8Work::default();
        if policy.recipe.is_none_or(|recipe| recipe.emulated()) {
            return sum;
        }
        let up = if m.gated { 2 * m.ffn } else { m.ffn };
        let mut maps: Vec<(&[&str], usize, usize)> =
            m.attention_linears().iter().map(|linear| (linear.names, linear.input, linear.output)).collect();
        maps.extend([(&["mlp.gate", "mlp.up"][..], m.hidden, up), (&["mlp.down"], m.ffn, m.hidden)]);
        let number = |b: bool| f64::from(u8::from(b));
        // Two bytes read, and one written for each use.
        let uses = |a: bool, b: bool| if a || b { 2.0 + number(a) + number(b) } else { 0.0 };
        for layer in 0..m.layers {
            if let Some(x) = m.moe_layer(layer) {
                let width = x.latent.unwrap_or(m.hidden) as f64;
                let inner = x.ffn as f64 * if m.gated { 2.0 } else { 1.0 };
                let rows = tokens * x.topk as f64;
                // The side that faces the tokens is narrowed before they are copied.
                for (what, i, o, [ri, ro]) in
                    [("up", width, inner, [tokens, rows]), ("down", x.ffn as f64, width, [rows, tokens])]
                {
                    let name = format!("layers.{layer}.moe.experts.{what}");
                    let Some(e) = policy.of(&[&name]) else { continue };
                    let flops = 2.0 * rows * i * o;
                    sum.experts.0 += flops * number(e.fprop);
                    sum.experts.1 += flops * (number(e.dgrad) + number(e.wgrad));
                    sum.bytes += ri * i * uses(e.fprop, e.wgrad)
                        + ro * o * uses(e.dgrad, e.wgrad)
                        + x.experts as f64 * i * o * uses(e.fprop, e.dgrad);
                }
            }
            // Experts are counted apart.
            let here = if m.moe_layer(layer).is_some() { maps.len() - 2 } else { maps.len() };
            for &(names, i, o) in &maps[..here] {
                let names: Vec<String> = names.iter().map(|n| format!("layers.{layer}.{n}")).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                sum.add(policy.of(&names), tokens, i, o);
            }
        }
        sum.add(policy.of(&["head"]), tokens, m.hidden, m.vocab);
        sum
    }

    /// A map from i to o channels.
    fn add(&mut self, e: Option<LinearQuant>, tokens: f64, i: usize, o: usize) {
        let Some(e) = e else { return };
        let (i, o) = (i as f64, o as f64);
        let flops = 2.0 * tokens * i * o;
        let number = |b: bool| f64::from(u8::from(b));
        self.output += flops * number(e.fprop);
        self.gradients += flops * (number(e.dgrad) + number(e.wgrad));
        // Two bytes read, and one written for each use.
        let uses = |a: bool, b: bool| if a || b { 2.0 + number(a) + number(b) } else { 0.0 };
        self.bytes += tokens * i * uses(e.fprop, e.wgrad)
            + tokens * o * uses(e.dgrad, e.wgrad)
            + i * o * uses(e.fprop, e.dgrad);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload;
    use std::time::Duration;

    const CEILINGS: Ceilings =
        Ceilings { gemm: 660.0, fp8_gemm: None, attention: (554.0, 480.0), memory: 4270.0 };
    /// Short sequences of narrow heads are slower.
    const SHORT: Ceilings = Ceilings { gemm: 620.0, attention: (331.0, 256.0), ..CEILINGS };

    /// The ceilings of its products and attention, measured for its shapes.
    const MOE: Ceilings = Ceilings { gemm: 609.0, attention: (543.0, 442.0), ..CEILINGS };

    #[test]
    fn floors_are_those_of_the_yardsticks() {
        // Estimates made by hand for these ceilings: 217, 116 and 205 ms.
        for (name, tokens, c, ms) in [
            ("llama-8b-8l", 8192, CEILINGS, 217.0),
            ("gpt2-124m", 65_536, SHORT, 116.0),
            ("moe-8l", 16_384, MOE, 205.0),
        ] {
            let r = workload(name).unwrap().resolve(None).unwrap();
            let total: f64 =
                parts(&r, (tokens, r.plan.seq_len), &Profile::new(), 1, c).iter().map(|p| p.floor_s).sum();
            assert!((total * 1e3 / ms - 1.0).abs() < 0.12, "{name}: {:.0} ms instead of {ms}", total * 1e3);
        }
    }

    #[test]
    fn moe_layers_count_top_k_experts() {
        let r = workload("moe-8l").unwrap().resolve(None).unwrap();
        let parts = parts(&r, (16_384, 4096), &Profile::new(), 1, MOE);
        let ms = |name: &str| parts.iter().find(|p| p.name == name).unwrap().floor_s * 1e3;
        // 8 layers x 131072 rows x 3 matrices of 2048 x 768, six FLOPs each, at 609 TFLOP/s.
        assert!((ms(GROUPED_GEMM) - 48.8).abs() < 0.1, "{}", ms(GROUPED_GEMM));
        // 8 x 8 x 131072 x 768 and 8 x 4 x (131072 + 16384) x 2048 elements of two bytes at 4.27 TB/s.
        assert!((ms(EXPERT_ACTIVATION) - 3.02).abs() < 0.01, "{}", ms(EXPERT_ACTIVATION));
        assert!((ms(PERMUTE) - 4.53).abs() < 0.01, "{}", ms(PERMUTE));
        assert!((ms(ROUTER) - 0.063).abs() < 0.001, "{}", ms(ROUTER));
        assert!(!parts.iter().any(|p| p.name == ACTIVATION), "there is no MLP");
        // All matrix products together are the model's, and those of the routers.
        let flops = r.model.flops_per_token(4096.0);
        let all = 16_384.0 * (flops.projections + flops.mlp + flops.logits + 6.0 * 8.0 * 2048.0 * 128.0);
        assert!(((ms(GROUPED_GEMM) + ms(GEMM)) * 609e9 / all - 1.0).abs() < 1e-9);
    }

    #[test]
    fn fp8_gemms_have_their_own_ceiling() {
        // The estimate of the yardsticks for FP8 with the head in bf16: 168 ms.
        let mut recipe = workload("llama-8b-8l").unwrap();
        recipe.set("precision.recipe=fp8-current").unwrap();
        let r = recipe.resolve(None).unwrap();
        let c = Ceilings { fp8_gemm: Some((1260.0, 1205.0)), ..CEILINGS };
        let parts = parts(&r, (8192, 8192), &Profile::new(), 1, c);
        let total: f64 = parts.iter().map(|p| p.floor_s * 1e3).sum();
        assert!((total / 168.0 - 1.0).abs() < 0.05, "{total} ms");
        assert!(parts.iter().any(|p| p.name == QUANTIZE && p.floor_s > 1e-3));
    }

    #[test]
    fn fp8_grouped_gemms_have_it_too() {
        let floors = |set: &[&str]| -> Vec<RooflinePart> {
            let mut recipe = workload("moe-8l").unwrap();
            set.iter().for_each(|s| recipe.set(s).unwrap());
            let r = recipe.resolve(None).unwrap();
            let c = Ceilings { fp8_gemm: Some((1218.0, 1218.0)), ..MOE };
            super::parts(&r, (16_384, 4096), &Profile::new(), 1, c)
        };
        let ms = |parts: &[RooflinePart], name| {
            parts.iter().find(|p| p.name == name).map_or(0.0, |p| p.floor_s * 1e3)
        };
        let (all, none) = (
            floors(&["precision.recipe=fp8-current"]),
            floors(&["precision.recipe=fp8-current", "precision.skip=experts"]),
        );
        assert!((ms(&all, GROUPED_GEMM) - 24.4).abs() < 0.1, "{}", ms(&all, GROUPED_GEMM));
        assert!((ms(&none, GROUPED_GEMM) - 48.8).abs() < 0.1, "{}", ms(&none, GROUPED_GEMM));
        // 8 layers: four bytes for each weight, tokens twice, 131072 rows of 768 and of 1536, at 4.27 TB/s.
        let bytes = 8.0 * 4.0 * (128.0 * 3.0 * 2048.0 * 768.0 + 2.0 * 16_384.0 * 2048.0 + 131_072.0 * 2304.0);
        let casts = ms(&all, QUANTIZE) - ms(&none, QUANTIZE);
        assert!((casts - bytes / 4270e6).abs() < 0.01, "{casts}");
    }

    #[test]
    fn every_kernel_counts_once() {
        let r = workload("llama-1b").unwrap().resolve(None).unwrap();
        let names =
            ["gemm (output)", "attention_forward", "norm_backward", "rope", "adam", "copy", "act_forward"];
        let profile: Profile = names.iter().map(|n| (*n, (2, Duration::from_millis(4)))).collect();
        let parts = parts(&r, (16_384, 4096), &profile, 2, CEILINGS);
        let total: f64 = parts.iter().map(|p| p.measured_s).sum();
        assert!((total - 0.014).abs() < 1e-9, "{total}");
    }
}
