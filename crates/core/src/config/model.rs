//! The architecture that the `[model]` section describes.

use super::resolve::Derivations;
use super::{Config, KEYS, MlaDims, ModelSection, MoeSection, PositionKind, Recipe, moe, nearest, write};
use crate::error::{Error, Result};
use crate::model::config::{MlaConfig, ModelConfig, ModelSizes, Positions, RopeConfig, inverse_sqrt};
use crate::model::preset::PRESETS;

/// Keys that may differ from the configuration of a Hugging Face folder; its weights fit all the same.
const FREE_BESIDE_HF: &[&str] = &["model.max_positions", "model.init_std", "model.window"];

/// Keys of `[moe]` that may not differ from it: shapes of the weights, then what the router computes with them. Sinkhorn has
/// functions of its own, which it checks itself.
const MOE_SHAPES: &[&str] = &[
    "moe.experts",
    "moe.ffn",
    "moe.layer_freq",
    "moe.dense_layers",
    "moe.router_bias",
    "moe.bias",
    "moe.latent",
    "moe.shared_ffn",
    "moe.shared_gate",
];
const MOE_FUNCTIONS: &[&str] = &["moe.score_function", "moe.pre_softmax", "moe.groups", "moe.route_scale"];

impl Recipe {
    /// The architecture: that of the preset or of the Hugging Face folder (`hf`, read by the caller from model.hf),
    /// overridden by explicit sizes; or explicit sizes alone.
    pub fn model_config(&self, hf: Option<&ModelConfig>) -> Result<ModelConfig> {
        self.architecture(hf, &mut Derivations::default())
    }

    pub(super) fn architecture(
        &self,
        hf: Option<&ModelConfig>,
        derived: &mut Derivations,
    ) -> Result<ModelConfig> {
        let m = &self.config.model;
        let mut c = match (&m.preset, &m.hf, hf) {
            (Some(name), _, _) => ModelConfig::preset(name).ok_or_else(|| self.no_preset(name))?,
            (None, Some(_), Some(theirs)) => {
                self.fits_weights(theirs)?;
                theirs.clone()
            }
            (None, Some(dir), None) => {
                return self.refuse("model.hf", format!("the architecture of {dir} has not been read"));
            }
            (None, None, _) => self.sizes_alone(derived)?,
        };
        if let Some(layers) = m.layers.filter(|l| *l != c.layers) {
            if !c.local_layers.is_empty() && layers > c.local_layers.len() {
                let what = "the preset says which of its layers have a sliding window, so it cannot have more layers";
                return self.refuse("model.layers", what);
            }
            c.local_layers.truncate(layers);
            c.layers = layers;
        }
        if let Some(d) = m.head_dim.filter(|d| *d != c.head_dim) {
            // RoPE and softmax scale that follow from the old head dim follow the new one.
            for rope in [rope_mut(&mut c.positions), c.rope_local.as_mut()].into_iter().flatten() {
                if rope.rotary_dim == c.head_dim {
                    rope.rotary_dim = d;
                }
            }
            if c.attn_scale == inverse_sqrt(c.head_dim) {
                c.attn_scale = inverse_sqrt(d);
            }
            c.head_dim = d;
        }
        put(&mut c.hidden, m.hidden);
        put(&mut c.heads, m.heads);
        put(&mut c.kv_heads, m.kv_heads);
        put(&mut c.ffn, m.ffn);
        put(&mut c.vocab, m.vocab);
        put(&mut c.max_positions, m.max_positions);
        put(&mut c.norm.kind, m.norm);
        put(&mut c.norm.eps, m.norm_eps.map(|x| x as f32));
        put(&mut c.activation, m.activation);
        put(&mut c.gated, m.gated);
        put(&mut c.qkv_bias, m.qkv_bias);
        put(&mut c.proj_bias, m.proj_bias);
        put(&mut c.mlp_bias, m.mlp_bias);
        put(&mut c.qk_norm, m.qk_norm);
        put(&mut c.attn_sink, m.attn_sink);
        put(&mut c.tied, m.tied);
        put(&mut c.init_std, m.init_std.map(|x| x as f32));
        match (m.positions, &c.positions) {
            (Some(PositionKind::Learned), Positions::Rope(_)) => {
                (c.positions, c.rope_local) = (Positions::Learned, None);
            }
            (Some(PositionKind::Rope), Positions::Learned) => {
                c.positions = Positions::Rope(RopeConfig::plain(1e4, c.head_dim))
            }
            _ => {}
        }
        if let Some(mla) = m.mla.map(MlaConfig::from) {
            // The Hugging Face configuration has more than the key, such as the softmax scale.
            if c.mla != Some(mla) {
                c = c.with_mla(mla);
            }
            self.fits_mla(&c)?;
        } else if c.mla.is_some() && m.heads.is_some() {
            c.kv_heads = c.heads;
        }
        if let Some(theta) = m.rope_theta {
            match rope_mut(&mut c.positions) {
                Some(rope) => rope.theta = theta,
                None => {
                    return self
                        .refuse("model.rope_theta", "positions are learned; set model.positions = \"rope\"");
                }
            }
        }
        if let Some(window) = m.window {
            c.window = Some(window);
            if c.local_layers.is_empty() {
                c.local_layers = vec![true; c.layers.min(MAX_LAYERS)];
            }
        }
        self.apply_moe(&mut c, derived)?;
        self.apply_mtp(&mut c)?;
        Ok(c)
    }

    fn no_preset(&self, name: &str) -> Error {
        let what = format!("no preset is called {name:?}; presets are {}", PRESETS.join(", "));
        let hint = nearest(name, PRESETS.iter().copied()).map(|n| format!("did you mean {n}?"));
        self.error("model.preset", what, hint)
    }

    /// An architecture from sizes alone: that of Llama unless other keys change it.
    fn sizes_alone(&self, derived: &mut Derivations) -> Result<ModelConfig> {
        let m = &self.config.model;
        let (Some(layers), Some(hidden), Some(heads), Some(vocab)) = (m.layers, m.hidden, m.heads, m.vocab)
        else {
            let given = [("layers", m.layers), ("hidden", m.hidden), ("heads", m.heads), ("vocab", m.vocab)];
            let missing: Vec<_> =
                given.iter().filter(|(_, v)| v.is_none()).map(|(n, _)| format!("model.{n}")).collect();
            let what = if missing.len() == given.len() {
                format!(
                    "no model: set model.preset (one of {}) or model.hf (a Hugging Face folder)",
                    PRESETS.join(", ")
                )
            } else {
                format!("sizes without a preset must be complete: set {} as well", missing.join(", "))
            };
            return Err(Error::Config { file: None, line: None, key: None, what, hint: None });
        };
        if heads == 0 || hidden == 0 {
            return self
                .refuse(if heads == 0 { "model.heads" } else { "model.hidden" }, "must be at least 1");
        }
        let kv_heads = m.kv_heads.unwrap_or_else(|| derived.add("model.kv_heads", heads, "as model.heads"));
        let head_dim = match m.head_dim {
            Some(d) => d,
            None if let Some(l) = m.mla => {
                let width = l.nope_dim.saturating_add(l.rope_dim);
                derived.add("model.head_dim", width, "nope_dim + rope_dim of model.mla")
            }
            None if hidden % heads == 0 => derived.add("model.head_dim", hidden / heads, "hidden / heads"),
            None => {
                let what = format!(
                    "{heads} heads do not divide the width {hidden}; change one or set model.head_dim"
                );
                return self.refuse("model.heads", what);
            }
        };
        let gated = m.gated.unwrap_or(true);
        let ffn = match m.ffn {
            Some(f) => f,
            None if gated => {
                let f = (hidden.saturating_mul(8) / 3).div_ceil(64).saturating_mul(64);
                derived.add("model.ffn", f, "8/3 of hidden for a gated MLP, rounded up to a multiple of 64")
            }
            None => derived.add("model.ffn", hidden.saturating_mul(4), "4 times hidden"),
        };
        let positions = match (m.max_positions, self.config.data.seq_len) {
            (Some(p), _) => p,
            (None, Some(s)) => derived.add("model.max_positions", s, "as data.seq_len"),
            (None, None) => derived.add("model.max_positions", 1024, "neither it nor data.seq_len is set"),
        };
        let sizes =
            ModelSizes { layers, hidden, ffn, heads, kv_heads, head_dim, vocab, max_positions: positions };
        Ok(ModelConfig { gated, ..ModelConfig::plain(sizes) })
    }

    /// Refuses an explicit architecture that the weights of a Hugging Face folder do not have.
    fn fits_weights(&self, theirs: &ModelConfig) -> Result<()> {
        if theirs.moe.is_none() && self.config.moe.experts.is_some() {
            let what = "the weights of model.hf are of a dense model; leave the key out, or make an MoE model of them first \
                        (ferrotron convert --upcycle)";
            return self.refuse("moe.experts", what);
        }
        let full = Config {
            model: section(&ModelSection::default(), theirs),
            moe: moe::section(&MoeSection::default(), theirs),
            ..Config::default()
        };
        let sinkhorn = self.config.moe.balance.0.iter().any(|word| word == "sinkhorn");
        let fixed = |key: &str| match theirs.moe {
            Some(_) => MOE_SHAPES.contains(&key) || (!sinkhorn && MOE_FUNCTIONS.contains(&key)),
            None => false,
        };
        for key in KEYS.iter() {
            let is_moe = fixed(key.key);
            if !is_moe && (key.section != "model" || FREE_BESIDE_HF.contains(&key.key)) {
                continue;
            }
            let (ours, theirs) = (self.config.get(key.section, key.name), full.get(key.section, key.name));
            let theirs = match (ours, theirs) {
                (Some(ours), Some(theirs)) if ours != theirs => write::value(&theirs),
                (Some(_), None) if is_moe => "none".into(),
                _ => continue,
            };
            let what = format!("the weights of model.hf were made for {theirs}; leave the key out");
            return self.refuse(key.key, what);
        }
        Ok(())
    }
}

/// Most layers of a model; per-layer lists stop here, and validation refuses more.
pub(super) const MAX_LAYERS: usize = 1 << 14;

/// The `[model]` section of an architecture, as far as it has keys.
pub(super) fn section(from: &ModelSection, c: &ModelConfig) -> ModelSection {
    let rope = match &c.positions {
        Positions::Rope(rope) => Some(rope.theta),
        Positions::Learned => None,
    };
    ModelSection {
        preset: from.preset.clone(),
        hf: from.hf.clone(),
        layers: Some(c.layers),
        hidden: Some(c.hidden),
        heads: Some(c.heads),
        kv_heads: Some(c.kv_heads),
        head_dim: Some(c.head_dim),
        ffn: Some(c.ffn),
        vocab: Some(c.vocab),
        max_positions: Some(c.max_positions),
        norm: Some(c.norm.kind),
        norm_eps: Some(decimal(c.norm.eps)),
        activation: Some(c.activation),
        gated: Some(c.gated),
        qkv_bias: Some(c.qkv_bias),
        proj_bias: Some(c.proj_bias),
        mlp_bias: Some(c.mlp_bias),
        qk_norm: Some(c.qk_norm),
        attn_sink: Some(c.attn_sink),
        mla: c.mla.map(MlaDims::from),
        positions: Some(if rope.is_some() { PositionKind::Rope } else { PositionKind::Learned }),
        rope_theta: rope,
        window: c.window,
        tied: Some(c.tied),
        init_std: Some(decimal(c.init_std)),
    }
}

/// The f64 that prints like `x`: 0.02 and not 0.019999999552965164.
pub(super) fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

fn put<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

fn rope_mut(positions: &mut Positions) -> Option<&mut RopeConfig> {
    match positions {
        Positions::Rope(rope) => Some(rope),
        Positions::Learned => None,
    }
}
