//! Quantization: from the `[precision]` keys to the policy that modules consult, and what is refused.

use super::lora::leaves;
use super::resolve::Derivations;
use super::{Config, Fp8Format, MasterDtype, Precision, QuantRecipe, Recipe, Resolved};
use crate::error::Result;
use crate::model::{logical_specs, module_of};
use ferrotron_engine::quant::{self, Method, Policy};
use ferrotron_engine::{ParamSpec, Split};
use ferrotron_kernels::{BLOCK, DelayedScaling};

/// FP8 GEMMs need dimensions that are multiples of this.
const WIDTH: usize = 16;
/// The largest margin of delayed scaling, in powers of two.
const MAX_MARGIN: u32 = 64;

/// Reads `precision.skip`: layers at the ends by `first 1` and `last 2`, everything else by name.
fn parse_skip(list: &[String], policy: &mut Policy) -> std::result::Result<(), String> {
    for text in list {
        let ends = [("first ", &mut policy.first), ("last ", &mut policy.last)];
        let end =
            ends.into_iter().find_map(|(word, end)| Some((text.trim().strip_prefix(word)?.trim(), end)));
        match end {
            Some((count, end)) => {
                *end = count.parse().map_err(|_| format!("'{text}': write such as \"first 1\""))?;
            }
            None => policy.except.push(text.trim().parse()?),
        }
    }
    Ok(())
}

impl Config {
    /// Which GEMMs of a model of so many layers are quantized, and how; the error is what is wrong with precision.skip.
    fn policy(&self, layers: usize) -> std::result::Result<Policy, String> {
        let p = &self.precision;
        let mut policy = Policy { layers, attention: p.fp8_attention, ..Policy::default() };
        parse_skip(&p.skip.0, &mut policy)?;
        let method = match p.recipe {
            QuantRecipe::None => return Ok(policy),
            QuantRecipe::Fp8Current => Method::Current,
            QuantRecipe::Fp8Delayed => Method::Delayed {
                // With a history of one step, max and most-recent are the same.
                update: DelayedScaling {
                    margin: p.margin.min(MAX_MARGIN) as i32,
                    most_recent: p.amax_history == 1,
                },
                history: p.amax_history,
            },
            QuantRecipe::Fp8Block => Method::Block,
            QuantRecipe::Mxfp8 => Method::Mxfp8,
            QuantRecipe::Nvfp4 => Method::Nvfp4,
        };
        let hybrid = p.format == Some(Fp8Format::Hybrid);
        let recipe = quant::Recipe { method, hybrid, pow2: p.pow2_scales.unwrap_or(false) };
        let stored = p.fp8_params;
        Ok(Policy { recipe: Some(recipe), head: p.fp8_lm_head, fp8_resident: stored, ..policy })
    }
}

impl Resolved {
    /// Which GEMMs are quantized, and how. Invalid keys were refused before.
    pub fn policy(&self) -> Policy {
        self.config.policy(self.model.layers).unwrap_or_default()
    }
}

impl Recipe {
    /// Derives the keys that depend on precision.recipe.
    pub(super) fn derive_precision(&self, c: &mut Config, derived: &mut Derivations) {
        let p = &mut c.precision;
        if p.fp8_attention {
            let reason = "forward in E4M3 on Hopper, for head dimensions up to 128 (a multiple of 16) without soft cap, packing or \
                          parallel.cp: faster than bf16 only with head dimensions above 64 and long sequences; elsewhere emulated, \
                          for its numerics and not for speed; backward in bf16";
            derived.add("precision.fp8_attention", true, reason);
        }
        if p.recipe == QuantRecipe::None {
            return;
        }
        let per_tensor = matches!(p.recipe, QuantRecipe::Fp8Current | QuantRecipe::Fp8Delayed);
        if p.format.is_none() {
            let (value, reason) = match per_tensor {
                true => {
                    (Fp8Format::Hybrid, "gradients need the range of E5M2, the rest the precision of E4M3")
                }
                false => (Fp8Format::E4m3, "small blocks need precision more than range"),
            };
            p.format = Some(derived.add("precision.format", value, reason));
        }
        if p.pow2_scales.is_none() {
            let (value, reason) = match p.recipe {
                QuantRecipe::Fp8Block => (true, "multiplying by a power of two is exact"),
                _ => (false, "a scale per tensor uses the full range of the format"),
            };
            p.pow2_scales = Some(derived.add("precision.pow2_scales", value, reason));
        }
        if matches!(p.recipe, QuantRecipe::Mxfp8 | QuantRecipe::Nvfp4) {
            let reason = "on GPUs before Blackwell emulated: bf16 GEMMs of values rounded to the format, for its numerics, not for speed";
            derived.add("precision.recipe", p.recipe, reason);
        }
    }

    /// Refuses combinations that quantized GEMMs do not support.
    pub(super) fn check_precision(&self, r: &Resolved) -> Result<()> {
        let (p, m) = (&r.config.precision, &r.model);
        let policy = match r.config.policy(m.layers) {
            Ok(policy) => policy,
            Err(what) => return self.refuse("precision.skip", what),
        };
        if p.calibrate > 0 && p.recipe != QuantRecipe::Fp8Delayed {
            return self.refuse(
                "precision.calibrate",
                "only delayed scaling needs calibration; set precision.recipe = \"fp8-delayed\", or leave this out",
            );
        }
        if p.stats_every > 0 && p.recipe == QuantRecipe::None {
            return self.refuse(
                "precision.stats_every",
                "there are no quantized operands: set precision.recipe, or leave this out",
            );
        }
        if p.margin > MAX_MARGIN {
            let what = format!("is a number of powers of two, at most {MAX_MARGIN}");
            return self.refuse("precision.margin", what);
        }
        self.check_loss_scale(r)?;
        self.check_weights(r, &policy)?;
        self.check_head(r, &policy)?;
        if policy.attention && p.dtype != Precision::Bf16 {
            let what = "FP8 attention needs bf16; set precision.dtype = \"bf16\", or leave it out";
            return self.refuse("precision.fp8_attention", what);
        }
        if policy.recipe.is_none() {
            return match p.skip.0.is_empty() || policy.attention {
                true => Ok(()),
                false => self.refuse(
                    "precision.skip",
                    "there is nothing to skip: set precision.recipe, or leave this out",
                ),
            };
        }
        if p.dtype != Precision::Bf16 {
            return self.refuse(
                "precision.recipe",
                "quantized GEMMs need bf16; set precision.dtype = \"bf16\", or precision.recipe = \"none\"",
            );
        }
        if p.amax_history == 0 {
            return self.refuse("precision.amax_history", "must be at least 1 step");
        }
        if p.recipe == QuantRecipe::Fp8Delayed && (policy.first > 0 || policy.last > 0) {
            return self.refuse(
                "precision.skip",
                "delayed scaling has scales for all layers; set precision.recipe = \"fp8-current\", or leave first and last out",
            );
        }
        let specs = logical_specs(m, &r.model_options())?;
        self.check_skip(&policy, &specs)?;
        self.check_widths(r, &specs)?;
        self.check_experts(r, &policy)
    }

    /// Refuses exceptions that name nothing, and those that leave nothing to quantize.
    fn check_skip(&self, policy: &Policy, specs: &[ParamSpec]) -> Result<()> {
        let matrices = specs.iter().flat_map(|s| &s.parts).filter(|p| p.shape.len() == 2);
        let mut modules: Vec<String> = matrices.map(|p| module_of(&p.name)).collect();
        let scores: Vec<String> = modules
            .iter()
            .filter_map(|m| Some(format!("{}.attn.scores", m.split_once(".attn.")?.0)))
            .collect();
        modules.push("head".into());
        modules.extend(scores);
        // Runs of earlier versions, which took any name, stay readable.
        let names_none = |e: &&quant::Exception| !modules.iter().any(|module| e.covers(module));
        if let Some(e) = policy.except.iter().find(names_none).filter(|_| self.is_users("precision.skip")) {
            let what =
                format!("\"{e}\" names no module of the model; its modules are called {}", leaves(&modules));
            return self.refuse("precision.skip", what);
        }
        if !specs.iter().any(|s| s.quant.is_some()) {
            let what = "leaves no GEMM to quantize; skip less, or set precision.recipe = \"none\"";
            return self.refuse("precision.skip", what);
        }
        Ok(())
    }

    /// Refuses quantized linears, other than experts and the LM head, with a side that FP8 GEMMs do not support.
    fn check_widths(&self, r: &Resolved, specs: &[ParamSpec]) -> Result<()> {
        let (m, tp) = (&r.model, r.config.parallel.tp);
        for spec in specs.iter().filter(|s| s.quant.is_some() && !s.experts) {
            let Some(first) = spec
                .parts
                .first()
                .filter(|p| module_of(&p.name).contains('.') && !p.name.starts_with("embed."))
            else {
                continue;
            };
            let attention = first.name.contains(".attn.");
            let key = match () {
                () if attention && m.mla.is_some() => "model.mla",
                () if attention => "model.head_dim",
                () if first.name.contains(".shared.") => "moe.shared_ffn",
                () if first.name.contains(".mlp.") => "model.ffn",
                () => "model.hidden",
            };
            let columns = matches!(first.split, Split::Columns { .. });
            let input = first.shape.get(1).map_or(0, |n| if columns { n / tp } else { *n });
            // A rank has at least one head of the keys.
            let least = if attention && m.mla.is_none() { m.head_dim } else { 0 };
            let outputs = spec.parts.iter().map(|part| match part.split {
                Split::Rows { .. } => (part.shape[0] / tp).max(least),
                _ => part.shape[0],
            });
            // The matrices of MLA that are stacked are one GEMM.
            let outputs: Vec<usize> =
                if key == "model.mla" { vec![outputs.sum()] } else { outputs.collect() };
            let mut sides = [(input, columns)].into_iter().chain(outputs.into_iter().map(|n| (n, !columns)));
            if let Some((width, own)) = sides.find(|(width, _)| !width.is_multiple_of(WIDTH)) {
                let what = format!(
                    "FP8 GEMMs need dimensions that are multiples of {WIDTH} on every rank, and one of {} is {width}; change the \
                     size, or name the module in precision.skip",
                    module_of(&first.name)
                );
                return self.refuse(if own { key } else { "model.hidden" }, what);
            }
        }
        Ok(())
    }

    /// Refuses sizes of experts that FP8 grouped GEMMs do not support.
    fn check_experts(&self, r: &Resolved, policy: &Policy) -> Result<()> {
        let (m, p) = (&r.model, &r.config.parallel);
        let Some(moe) = &m.moe else { return Ok(()) };
        let narrow = |layer: usize| {
            let name = |what: &str| format!("layers.{layer}.moe.experts.{what}");
            [name("up"), name("down")].iter().any(|n| policy.of(&[n]).is_some())
        };
        if !(0..m.layers).any(|i| moe.is_moe_layer(i) && narrow(i)) {
            return Ok(());
        }
        let block = r.config.precision.recipe == QuantRecipe::Fp8Block;
        let (each, what) =
            if block { (BLOCK, "block scaling of") } else { (WIDTH, "an FP8 grouped GEMM of") };
        let input = match moe.latent {
            Some(latent) => ("moe.latent", latent),
            None => ("model.hidden", m.hidden),
        };
        let widths = [input, ("moe.ffn", moe.ffn / p.etp.unwrap_or(p.tp))];
        match widths.into_iter().find(|(_, width)| !width.is_multiple_of(each)) {
            None => Ok(()),
            Some((key, width)) => self.refuse(
                key,
                format!(
                    "{what} experts needs dimensions that are multiples of {each} on every rank, and one is {width}; change the \
                     size, or set precision.skip = \"experts\""
                ),
            ),
        }
    }

    /// Refuses an FP8 LM head whose vocabulary the tensor cores do not support.
    fn check_head(&self, r: &Resolved, policy: &Policy) -> Result<()> {
        let (p, tp, vocab) = (&r.config.precision, r.config.parallel.tp, r.model.vocab);
        let head = p.fp8_lm_head;
        let Some(recipe) = policy.recipe.filter(|_| head) else {
            let nothing = "an FP8 LM head needs a recipe: set precision.recipe, or leave this out";
            return if head { self.refuse("precision.fp8_lm_head", nothing) } else { Ok(()) };
        };
        if recipe.emulated() || vocab.is_multiple_of(WIDTH * tp) {
            return Ok(());
        }
        // A single rank pads the vocabulary; with tensor parallelism or blocks the padding would lie between shards.
        let what = match tp {
            1 if recipe.per_tensor() => return Ok(()),
            1 => format!("block scaling needs a vocabulary that is a multiple of {WIDTH}"),
            _ => format!("parallel.tp = {tp} needs a vocabulary that is a multiple of {}", WIDTH * tp),
        };
        self.refuse(
            "precision.fp8_lm_head",
            format!("{what} for this, and it is {vocab}; set another model.vocab, or leave it out"),
        )
    }

    /// Refuses FP8 parameters where no GEMM uses them.
    fn check_weights(&self, r: &Resolved, policy: &Policy) -> Result<()> {
        let p = &r.config.precision;
        let what = match p.recipe {
            _ if !p.fp8_params => return Ok(()),
            QuantRecipe::None => "FP8 parameters need an FP8 recipe; set precision.recipe, or leave this out",
            QuantRecipe::Mxfp8 | QuantRecipe::Nvfp4 => {
                "emulated recipes compute from bf16 weights; set precision.recipe = \"fp8-current\", or leave this out"
            }
            _ if r.config.optimizer.master_dtype == MasterDtype::Remainder => MasterDtype::REMAINDER_OF_FP8,
            _ if p.calibrate > 0 => {
                "calibration computes with bf16 weights, and these are FP8; leave precision.calibrate or this out"
            }
            _ if r.model.fp8_resident_parameters(policy)? == 0 => {
                "no weight is used by FP8 GEMMs alone, so none can be FP8; shorten precision.skip, or leave this out"
            }
            _ => return Ok(()),
        };
        self.refuse("precision.fp8_params", what)
    }
}
