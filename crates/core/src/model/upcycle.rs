//! Upcycling a dense model into an MoE model: each MLP is cut into g slices, and every group of g experts holds one
//! copy of it.
//!
//! E experts make r = E/g groups. Expert e holds slice e mod g of the MLP: rows of gate and up, the same columns of
//! down. The router has r random rows, each repeated g times, so that a token is routed to whole groups. Routing
//! probabilities scale the sum of the slices by 1/α, where α = g with a softmax over the top-k logits and r·g²/k with
//! a softmax over all experts; expert weights are scaled by α^⅓ (α^½ without a gate, but for squared ReLU) to
//! compensate. With α = 1 the new model computes what the dense one does.

use super::config::Activation;
use super::moe_config::MoeConfig;
use super::{ModelConfig, logical_parts};
use crate::{Error, Result};
use ferrotron_engine::initial_values;

/// Target of an upcycling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpcycleConfig {
    /// Experts per layer (E).
    pub experts: usize,
    /// Experts per token (k).
    pub topk: usize,
    /// Slices of an MLP (g).
    pub granularity: usize,
    /// Softmax over all experts before top-k.
    pub pre_softmax: bool,
    /// Seed of the router's random rows.
    pub seed: u64,
}

/// A dense model and its upcycled architecture.
#[derive(Clone, Debug)]
pub struct Upcycled {
    config: UpcycleConfig,
    dense: ModelConfig,
    model: ModelConfig,
}

impl UpcycleConfig {
    /// The upcycled architecture of `dense`, or why there is none.
    pub fn apply(self, dense: &ModelConfig) -> Result<Upcycled> {
        let UpcycleConfig { experts, topk, granularity: g, .. } = self;
        let refuse = |what: String| Err(Error::Invalid(format!("upcycling: {what}")));
        if dense.moe.is_some() {
            return refuse("the model has experts already; give a dense one".into());
        }
        if dense.mlp_bias {
            return refuse("the model's MLPs have biases, which pieces cannot share".into());
        }
        if g == 0 || !dense.ffn.is_multiple_of(g) {
            return refuse(format!("granularity={g} does not divide the width {} of an MLP", dense.ffn));
        }
        if experts == 0 || !experts.is_multiple_of(g) {
            return refuse(format!("experts={experts} is no multiple of granularity={g}"));
        }
        if topk == 0 || !topk.is_multiple_of(g) {
            return refuse(format!(
                "topk={topk} is no multiple of granularity={g}, so that tokens would not go to values MLPs; use {}",
                topk.max(1).next_multiple_of(g)
            ));
        }
        let plain = MoeConfig::plain(experts, topk, dense.ffn / g);
        let moe = MoeConfig { pre_softmax: self.pre_softmax, ..plain };
        if moe.router_is_constant() {
            return refuse("topk=1 gives every token the probability 1; add pre_softmax=true".into());
        }
        // No MLP of the old width is left.
        let model = ModelConfig { moe: Some(moe), ffn: dense.ffn / g, ..dense.clone() };
        model.validate().map_err(|e| Error::Invalid(format!("upcycling: {e}")))?;
        Ok(Upcycled { config: self, dense: dense.clone(), model })
    }
}

impl Upcycled {
    /// The MoE model.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Factor on the weights of experts.
    pub fn scale(&self) -> f64 {
        let UpcycleConfig { experts, topk, granularity, pre_softmax, .. } = self.config;
        let (g, k, r) = (granularity as f64, topk as f64, (experts / granularity.max(1)) as f64);
        let alpha = if pre_softmax { r * g * g / k } else { g };
        // Squared ReLU grows with the square of its input, as a gated product does.
        let cubic = self.dense.gated || self.dense.activation == Activation::SquaredRelu;
        if cubic { alpha.cbrt() } else { alpha.sqrt() }
    }

    /// The dense tensor that a tensor of the MoE model is made of; none for routers.
    pub fn source_name(&self, name: &str) -> Option<String> {
        match name.split_once(".moe.") {
            None => Some(name.into()),
            Some((layer, rest)) => {
                let (_, kind) = rest.strip_prefix("experts.")?.split_once('.')?;
                Some(format!("{layer}.mlp.{kind}"))
            }
        }
    }

    /// A logical tensor of the MoE model, row-major; `source` returns tensors of the dense model.
    pub fn values(&self, name: &str, source: &dyn Fn(&str) -> Result<Vec<f32>>) -> Result<Vec<f32>> {
        let (h, f, g) = (self.dense.hidden, self.dense.ffn, self.config.granularity);
        let width = f / g;
        let Some(source_name) = self.source_name(name) else { return self.router_weight(name) };
        let values = source(&source_name)?;
        if source_name == name {
            return Ok(values);
        }
        if values.len() != f * h {
            return Err(Error::Invalid(format!(
                "{source_name}: {} values for an MLP of {f}×{h}",
                values.len()
            )));
        }
        let expert = name.split_once(".experts.").and_then(|(_, rest)| rest.split('.').next()?.parse().ok());
        let Some(expert) = expert.filter(|e: &usize| *e < self.config.experts) else {
            return Err(Error::Invalid(format!("{name}: there is no such expert")));
        };
        let (first, scale) = (expert % g * width, self.scale());
        let scaled = |x: &f32| (f64::from(*x) * scale) as f32;
        Ok(match source_name.ends_with(".down.weight") {
            true => values.chunks(f).flat_map(|row| &row[first..first + width]).map(scaled).collect(),
            false => values[first * h..(first + width) * h].iter().map(scaled).collect(),
        })
    }

    /// The first r rows of a random router, each repeated g times.
    fn router_weight(&self, name: &str) -> Result<Vec<f32>> {
        let part = logical_parts(&self.model)?.into_iter().find(|p| p.name == name);
        let part = part.ok_or_else(|| Error::Invalid(format!("{name}: the model has no such tensor")))?;
        let (h, g) = (self.model.hidden, self.config.granularity);
        let rows = initial_values(self.config.seed, &part, 0..self.config.experts / g * h);
        Ok(rows.chunks(h).flat_map(|row| std::iter::repeat_n(row, g)).flatten().copied().collect())
    }
}

impl std::str::FromStr for UpcycleConfig {
    type Err = String;

    /// Parses `experts=8,topk=2,granularity=1,pre_softmax=false,seed=0`; only `experts` is required.
    fn from_str(text: &str) -> std::result::Result<UpcycleConfig, String> {
        let mut config = UpcycleConfig { experts: 0, topk: 0, granularity: 1, pre_softmax: false, seed: 0 };
        for item in text.split(',').map(str::trim).filter(|s| !s.is_empty()) {
            let (key, value) = item
                .split_once('=')
                .ok_or_else(|| format!("{item:?} is not key=value, such as experts=8"))?;
            let number =
                || value.parse::<usize>().map_err(|_| format!("{key} needs a whole number, not {value:?}"));
            match key {
                "experts" => config.experts = number()?,
                "topk" => config.topk = number()?,
                "granularity" => config.granularity = number()?,
                "pre_softmax" => {
                    config.pre_softmax =
                        value.parse().map_err(|_| format!("{key} is true or false, not {value:?}"))?;
                }
                "seed" => config.seed = number()? as u64,
                _ => {
                    return Err(format!(
                        "unknown key {key:?}; the keys are experts, topk, granularity, pre_softmax, seed"
                    ));
                }
            }
        }
        if config.experts == 0 {
            return Err("experts is missing: how many? such as experts=8".into());
        }
        if config.topk == 0 {
            // Two copies of the MLP per token.
            config.topk = 2 * config.granularity;
        }
        Ok(config)
    }
}
