//! One key of `config.json` ↔ one field of the model's configuration.

use crate::error::Result;
use crate::family::{Absent, Field, Key};
use crate::json::Object;
use ferrotron_core::model::config::{Activation, MlaConfig, ModelConfig};
use serde_json::{Map, Value, json};

/// `1/√x`, rounded to f32 once.
pub(super) fn inverse_sqrt(x: f64) -> f32 {
    (1.0 / x.sqrt()) as f32
}

impl Key {
    /// The name this object uses. Null counts as absent, except where it has a meaning of its own (soft caps).
    fn spelling(&self, o: &Object) -> Option<&'static str> {
        let null_counts = matches!(self.absent, Absent::Cap(_) | Absent::Rank(_));
        self.names.iter().copied().find(|n| match o.map.get(*n) {
            Some(v) => null_counts || !v.is_null(),
            None => false,
        })
    }

    /// Sets the field from the object, or from the default of a missing key.
    pub(super) fn read(&self, o: &Object, c: &mut ModelConfig) -> Result<()> {
        let name = self.spelling(o);
        let shown = self.names.first().copied().unwrap_or("(derived)");
        match self.field {
            Field::Layers => c.layers = self.size(o, name, c)?,
            Field::Hidden => c.hidden = self.size(o, name, c)?,
            Field::Ffn => c.ffn = self.size(o, name, c)?,
            Field::Heads => c.heads = self.size(o, name, c)?,
            // Null is as many as query heads, also where the family's class has another default.
            Field::KvHeads if name.is_none() && self.names.iter().any(|n| o.map.contains_key(*n)) => {
                c.kv_heads = c.heads;
            }
            Field::KvHeads => c.kv_heads = self.size(o, name, c)?,
            Field::Vocab => c.vocab = self.size(o, name, c)?,
            Field::MaxPositions => c.max_positions = self.size(o, name, c)?,
            Field::HeadDim => {
                c.head_dim = self.size(o, name, c)?;
                c.attn_scale = inverse_sqrt(c.head_dim as f64);
            }
            Field::NormEps => c.norm.eps = self.real(o, name)? as f32,
            Field::InitStd => c.init_std = self.real(o, name)? as f32,
            Field::QueryScalar => c.attn_scale = inverse_sqrt(self.real(o, name)?),
            Field::AttnSoftcap => c.attn_softcap = self.cap(o, name)?,
            Field::FinalSoftcap => c.final_softcap = self.cap(o, name)?,
            Field::Tied => c.tied = self.flag(o, name)?,
            Field::MlpBias => c.mlp_bias = self.flag(o, name)?,
            Field::AttentionBias => {
                let on = self.flag(o, name)?;
                (c.qkv_bias, c.proj_bias) = (on, on);
            }
            Field::QueryRank => {
                let rank = match (name, self.absent) {
                    (Some(n), _) => o.size(n)?,
                    (None, Absent::Rank(rank)) => rank,
                    _ => None,
                };
                latent(c).q_lora_rank = rank;
            }
            Field::KeyRank => latent(c).kv_lora_rank = self.size(o, name, c)?,
            Field::NopeDim => latent(c).nope_dim = self.size(o, name, c)?,
            Field::RopeDim => {
                latent(c).rope_dim = self.size(o, name, c)?;
                // `nope_dim` has been read before: the two make up a query's head.
                let m = *latent(c);
                c.head_dim = m.nope_dim.saturating_add(m.rope_dim);
                c.attn_scale = inverse_sqrt(c.head_dim as f64);
            }
            Field::ValueDim => latent(c).v_dim = self.size(o, name, c)?,
            Field::QueryWidth | Field::RotaryWidth => {}
            Field::Moe(mix) => super::moe::read(self, mix, name, o, c)?,
            Field::ScaleScores => {
                if !self.flag(o, name)? {
                    c.attn_scale = 1.0;
                }
            }
            Field::ScaleByLayer => c.attn_scale_by_layer = self.flag(o, name)?,
            Field::Activation(_) => {
                let word = match name {
                    Some(n) => o.text(n)?.unwrap_or_default(),
                    None => match self.absent {
                        Absent::Word(w) => w,
                        _ => return Err(o.missing(shown)),
                    },
                };
                c.activation = match word {
                    "silu" | "swish" => Activation::Silu,
                    "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
                    "gelu" => Activation::GeluErf,
                    "relu2" => Activation::SquaredRelu,
                    other => {
                        return Err(o.wrong(
                            name.unwrap_or(shown),
                            format_args!(
                                "is {other:?}, which is not supported (silu, gelu, gelu_new, gelu_pytorch_tanh, relu2 are)"
                            ),
                        ));
                    }
                };
            }
        }
        Ok(())
    }

    pub(super) fn size(&self, o: &Object, name: Option<&str>, c: &ModelConfig) -> Result<usize> {
        if let Some(n) = name {
            return Ok(o.size(n)?.unwrap_or_default());
        }
        let shown = self.names.first().copied().unwrap_or("head_dim");
        match self.absent {
            Absent::Size(n) => Ok(n),
            Absent::Heads => Ok(c.heads),
            Absent::FourHidden => Ok(c.hidden.saturating_mul(4)),
            Absent::HiddenPerHead => match c.hidden.checked_rem(c.heads) {
                Some(0) => Ok(c.hidden / c.heads),
                _ => Err(o.wrong(
                    shown,
                    format_args!(
                        "cannot be derived: hidden size {} is not a multiple of {} heads",
                        c.hidden, c.heads
                    ),
                )),
            },
            _ => Err(o.missing(shown)),
        }
    }

    pub(super) fn real(&self, o: &Object, name: Option<&str>) -> Result<f64> {
        match (name, self.absent) {
            (Some(n), _) => Ok(o.real(n)?.unwrap_or_default()),
            (None, Absent::Real(x)) => Ok(x),
            _ => Err(o.missing(self.names.first().copied().unwrap_or_default())),
        }
    }

    fn cap(&self, o: &Object, name: Option<&str>) -> Result<Option<f32>> {
        let cap = match (name, self.absent) {
            (Some(n), _) => o.real(n)?,
            (None, Absent::Cap(cap)) => cap,
            _ => None,
        };
        Ok(cap.map(|x| x as f32))
    }

    pub(super) fn flag(&self, o: &Object, name: Option<&str>) -> Result<bool> {
        match (name, self.absent) {
            (Some(n), _) => Ok(o.flag(n)?.unwrap_or_default()),
            // Null is false, whatever the default.
            (None, Absent::Flag(on)) => Ok(on && !self.names.iter().any(|n| o.map.contains_key(*n))),
            _ => Err(o.missing(self.names.first().copied().unwrap_or_default())),
        }
    }

    /// Writes the field under the name the file already uses, or the first one.
    pub(super) fn write(&self, c: &ModelConfig, map: &mut Map<String, Value>) {
        let Some(&name) = self.names.iter().find(|n| map.contains_key(**n)).or(self.names.first()) else {
            return;
        };
        map.insert(name.to_string(), self.value(c));
    }

    /// The field as JSON.
    pub(super) fn value(&self, c: &ModelConfig) -> Value {
        match self.field {
            Field::Layers => json!(c.layers),
            Field::Hidden => json!(c.hidden),
            Field::Ffn => json!(c.ffn),
            Field::Heads => json!(c.heads),
            Field::KvHeads => json!(c.kv_heads),
            Field::HeadDim => json!(c.head_dim),
            Field::Vocab => json!(c.vocab),
            Field::MaxPositions => json!(c.max_positions),
            Field::NormEps => real(c.norm.eps),
            Field::InitStd => real(c.init_std),
            Field::Tied => json!(c.tied),
            Field::MlpBias => json!(c.mlp_bias),
            Field::AttentionBias => json!(c.qkv_bias || c.proj_bias),
            Field::AttnSoftcap => c.attn_softcap.map_or(Value::Null, real),
            Field::FinalSoftcap => c.final_softcap.map_or(Value::Null, real),
            Field::QueryScalar => query_scalar(c.attn_scale),
            Field::QueryRank => c.mla.and_then(|m| m.q_lora_rank).map_or(Value::Null, |n| json!(n)),
            Field::KeyRank => json!(c.mla.map_or(0, |m| m.kv_lora_rank)),
            Field::NopeDim => json!(c.mla.map_or(0, |m| m.nope_dim)),
            Field::RopeDim | Field::RotaryWidth => json!(c.mla.map_or(0, |m| m.rope_dim)),
            Field::ValueDim => json!(c.mla.map_or(0, |m| m.v_dim)),
            Field::QueryWidth => json!(c.head_dim),
            Field::Moe(mix) => super::moe::value(mix, c),
            Field::ScaleScores => json!(c.attn_scale == inverse_sqrt(c.head_dim as f64)),
            Field::ScaleByLayer => json!(c.attn_scale_by_layer),
            Field::Activation(tanh) => json!(match c.activation {
                Activation::Silu => "silu",
                Activation::GeluErf => "gelu",
                Activation::SquaredRelu => "relu2",
                Activation::GeluTanh => tanh,
            }),
        }
    }
}

/// The model's MLA configuration, for keys to fill in. The norms of compressed q and kv have an eps of 1e-6, whatever
/// `rms_norm_eps` says.
fn latent(c: &mut ModelConfig) -> &mut MlaConfig {
    c.mla.get_or_insert(MlaConfig {
        q_lora_rank: None,
        kv_lora_rank: 0,
        nope_dim: 0,
        rope_dim: 0,
        v_dim: 0,
        norm_eps: 1e-6,
    })
}

/// The shortest decimal that rounds to this f32: 1e-5 stays 1e-5.
pub(super) fn real(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, |x| json!(x))
}

/// The `query_pre_attn_scalar` of a scale: an integer if that gives the same bits.
fn query_scalar(scale: f32) -> Value {
    let exact = 1.0 / (f64::from(scale) * f64::from(scale));
    let whole = exact.round();
    if (1.0..1e9).contains(&whole) && inverse_sqrt(whole) == scale {
        json!(whole as u64)
    } else {
        json!(exact)
    }
}
