//! Low-precision products: from keys to the policy that modules consult, and what cannot work.

use super::resolve::Derivations;
use super::{Beside, Config, Format, Master, Precision, Recipe, Resolved, Scaling, Weights};
use crate::error::Result;
use crate::train::weights_in_bytes;
use ferrotron_engine::Split;
use ferrotron_engine::precision::{self, Method, Policy};
use ferrotron_kernels::{BLOCK, Delayed};

/// Widths of products must be multiples of this.
const WIDTH: usize = 16;

/// What is left alone: layers at the ends by `first 1` and `last 2`, everything else by name.
fn parse_except(list: &[String], policy: &mut Policy) -> std::result::Result<(), String> {
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
    /// Which products of a model of so many layers are narrow, and how; or what is wrong with precision.except.
    fn policy(&self, layers: usize) -> std::result::Result<Policy, String> {
        let p = &self.precision;
        let mut policy = Policy { layers, attention: p.also.has(Beside::Attention), ..Policy::default() };
        parse_except(&p.except.0, &mut policy)?;
        let method = match p.scaling {
            Scaling::None => return Ok(policy),
            Scaling::Current => Method::Current,
            Scaling::Delayed => Method::Delayed {
                // The largest of one step is the most recent.
                update: Delayed { margin: p.margin.min(64) as i32, most_recent: p.history == 1 },
                history: p.history,
            },
            Scaling::Block => Method::Block,
            Scaling::Mxfp8 => Method::Mxfp8,
            Scaling::Nvfp4 => Method::Nvfp4,
        };
        let hybrid = p.format == Some(Format::Hybrid);
        let recipe = precision::Recipe { method, hybrid, pow2: p.power_of_two.unwrap_or(false) };
        let stored = p.weights == Weights::Fp8;
        Ok(Policy { recipe: Some(recipe), head: p.also.has(Beside::Head), stored, ..policy })
    }
}

impl Resolved {
    /// Which products are narrow, and how. What is wrong with the keys was refused before.
    pub fn policy(&self) -> Policy {
        self.config.policy(self.model.layers).unwrap_or_default()
    }
}

impl Recipe {
    /// Keys that depend on the scaling.
    pub(super) fn derive_precision(&self, c: &mut Config, derived: &mut Derivations) {
        let p = &mut c.precision;
        if p.also.has(Beside::Attention) {
            let reason = "forward in E4M3: products of bytes on Hopper, for heads of up to 128 channels (a multiple of 16) without \
                          soft cap, packing or parallel.cp; else emulated, to see what that does and not for speed; backward is bf16";
            derived.add("precision.also", Beside::Attention, reason);
        }
        if p.scaling == Scaling::None {
            return;
        }
        let per_tensor = matches!(p.scaling, Scaling::Current | Scaling::Delayed);
        if p.format.is_none() {
            let (value, reason) = match per_tensor {
                true => (Format::Hybrid, "gradients need range more than digits: E5M2, the rest E4M3"),
                false => (Format::E4m3, "small blocks need digits more than range"),
            };
            p.format = Some(derived.add("precision.format", value, reason));
        }
        if p.power_of_two.is_none() {
            let (value, reason) = match p.scaling {
                Scaling::Block => (true, "scaling by a power of two is exact"),
                _ => (false, "one scale for a whole tensor uses all of the format's range"),
            };
            p.power_of_two = Some(derived.add("precision.power_of_two", value, reason));
        }
        if matches!(p.scaling, Scaling::Mxfp8 | Scaling::Nvfp4) {
            let reason = "emulated: products are bf16 ones of numbers rounded to the format, for Blackwell's numerics \
                          and not for speed";
            derived.add("precision.scaling", p.scaling, reason);
        }
    }

    /// Refuses what cannot work with narrow products.
    pub(super) fn check_precision(&self, r: &Resolved) -> Result<()> {
        let (p, m, tp) = (&r.config.precision, &r.model, r.config.parallel.tp);
        let policy = match r.config.policy(m.layers) {
            Ok(policy) => policy,
            Err(what) => return self.refuse("precision.except", what),
        };
        if p.calibrate > 0 && p.scaling != Scaling::Delayed {
            return self.refuse(
                "precision.calibrate",
                "only delayed scaling begins with scales of earlier steps; set precision.scaling = \"delayed\", or leave \
                 this out",
            );
        }
        if p.stats_every > 0 && p.scaling == Scaling::None {
            return self.refuse(
                "precision.stats_every",
                "there are no 8-bit operands to look at: set precision.scaling, or leave this out",
            );
        }
        self.check_loss_scale(r)?;
        self.check_weights(r, &policy)?;
        self.check_head(r, &policy)?;
        if policy.attention && p.dtype != Precision::Bf16 {
            let what =
                "attention in 8 bits stands beside bf16; set precision.dtype = \"bf16\", or leave it out";
            return self.refuse("precision.also", what);
        }
        if policy.recipe.is_none() {
            return match p.except.0.is_empty() || policy.attention {
                true => Ok(()),
                false => self.refuse(
                    "precision.except",
                    "there is nothing to except: set precision.scaling, or leave this out",
                ),
            };
        }
        if p.dtype != Precision::Bf16 {
            return self.refuse(
                "precision.scaling",
                "8-bit products stand beside bf16; set precision.dtype = \"bf16\", or precision.scaling = \"none\"",
            );
        }
        if p.history == 0 {
            return self.refuse("precision.history", "must be at least 1 step");
        }
        if p.scaling == Scaling::Delayed && (policy.first > 0 || policy.last > 0) {
            return self.refuse(
                "precision.except",
                "delayed scaling keeps its scales for all layers alike; take precision.scaling = \"current\", or leave \
                 first and last out",
            );
        }
        let mut widths = vec![("model.hidden", m.hidden), ("model.ffn", m.ffn / tp)];
        match &m.mla {
            None => {
                let keys = m.head_dim * (m.kv_heads / tp).max(1);
                widths.extend([("model.head_dim", m.head_dim * m.heads / tp), ("model.head_dim", keys)]);
            }
            Some(_) => widths.extend(m.attention_maps().iter().flat_map(|map| {
                let share = |split: bool, n: usize| ("model.mla", if split { n / tp } else { n });
                let (rows, columns) =
                    (matches!(map.split, Split::Rows { .. }), matches!(map.split, Split::Columns { .. }));
                [share(columns, map.input), share(rows, map.output)]
            })),
        }
        for (key, width) in widths {
            if !width.is_multiple_of(WIDTH) {
                let what = format!(
                    "8-bit products need widths that are multiples of {WIDTH} on every rank, and one is {width}; change \
                     the size, or except the maps with precision.except"
                );
                return self.refuse(key, what);
            }
        }
        self.check_experts(r, &policy)
    }

    /// Refuses widths of experts that their narrow products cannot have.
    fn check_experts(&self, r: &Resolved, policy: &Policy) -> Result<()> {
        let (m, p) = (&r.model, &r.config.parallel);
        let Some(moe) = &m.moe else { return Ok(()) };
        let narrow = |layer: usize| {
            let name = |what: &str| format!("layers.{layer}.moe.experts.{what}");
            [name("up"), name("down")].iter().any(|n| policy.of(&[n]).is_some())
        };
        if !(0..m.layers).any(|i| moe.is_mixture(i) && narrow(i)) {
            return Ok(());
        }
        let block = r.config.precision.scaling == Scaling::Block;
        let (each, what) = if block { (BLOCK, "block scaling of") } else { (WIDTH, "8-bit products of") };
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
                    "{what} experts needs widths that are multiples of {each} on every rank, and one is {width}; change \
                     the size, or set precision.except = \"experts\""
                ),
            ),
        }
    }

    /// Refuses an output matrix in 8 bits where matrix units have no such product of it.
    fn check_head(&self, r: &Resolved, policy: &Policy) -> Result<()> {
        let (p, tp, vocab) = (&r.config.precision, r.config.parallel.tp, r.model.vocab);
        let head = p.also.has(Beside::Head);
        let Some(recipe) = policy.recipe.filter(|_| head) else {
            let nothing =
                "there are no narrow products of maps: set precision.scaling, or leave \"head\" out";
            return if head { self.refuse("precision.also", nothing) } else { Ok(()) };
        };
        if recipe.emulated() || vocab.is_multiple_of(WIDTH * tp) {
            return Ok(());
        }
        // One rank pads the vocabulary; columns of other ranks would follow on the padding, and blocks of gradients too.
        let what = match tp {
            1 if recipe.per_tensor() => return Ok(()),
            1 => format!("blocks of an output matrix need a vocabulary that is a multiple of {WIDTH}"),
            _ => format!("over {tp} ranks it needs a vocabulary that is a multiple of {}", WIDTH * tp),
        };
        self.refuse(
            "precision.also",
            format!("{what} for \"head\", and it is {vocab}; set another model.vocab, or leave it out"),
        )
    }

    /// Refuses weights in bytes where there is nothing that takes them.
    fn check_weights(&self, r: &Resolved, policy: &Policy) -> Result<()> {
        let p = &r.config.precision;
        let what = match p.scaling {
            _ if p.weights == Weights::Bf16 => return Ok(()),
            Scaling::None => "weights in bytes need 8-bit products; set precision.scaling, or leave this out",
            Scaling::Mxfp8 | Scaling::Nvfp4 => {
                "emulated products are made of bf16 weights; take precision.scaling = \"current\", or leave this out"
            }
            _ if r.config.optimizer.master == Master::Remainder => {
                "a remainder completes bf16 weights, and these are bytes; set optimizer.master = \"f32\", or leave this out"
            }
            _ if p.calibrate > 0 => {
                "calibration computes in bf16 weights, and these are bytes; leave precision.calibrate or this out"
            }
            _ if weights_in_bytes(&r.model, policy).sum() == 0 => {
                "no weight is in 8-bit products alone, so none would be bytes; shorten precision.except, or leave this out"
            }
            _ => return Ok(()),
        };
        self.refuse("precision.weights", what)
    }
}
