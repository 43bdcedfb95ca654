//! Multi-head latent attention (MLA) as the value of one key.

use super::model::decimal;
use super::{KeyType, Recipe};
use crate::error::Result;
use crate::model::config::{MlaConfig, ModelConfig};
use serde::{Deserialize, Serialize};

/// Dimensions of MLA: `{ kv_lora_rank = 512, nope_dim = 128, rope_dim = 64, v_dim = 128 }`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlaDims {
    /// Rank of the compressed queries; unset: queries are projected from the hidden states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q_lora_rank: Option<usize>,
    /// Rank of the compressed keys and values.
    pub kv_lora_rank: usize,
    /// Head dimension of q and k without RoPE.
    pub nope_dim: usize,
    /// Head dimension of q and k with RoPE.
    pub rope_dim: usize,
    /// Head dimension of v.
    pub v_dim: usize,
    /// Epsilon of the norms of the compressed rows.
    #[serde(default = "eps")]
    pub norm_eps: f64,
}

fn eps() -> f64 {
    1e-6
}

impl KeyType for MlaDims {
    fn expects() -> String {
        "a table such as { kv_lora_rank = 512, nope_dim = 128, rope_dim = 64, v_dim = 128 }, with q_lora_rank and \
         norm_eps (1e-6) where wanted"
            .into()
    }
}

impl From<MlaDims> for MlaConfig {
    fn from(l: MlaDims) -> MlaConfig {
        MlaConfig {
            q_lora_rank: l.q_lora_rank,
            kv_lora_rank: l.kv_lora_rank,
            nope_dim: l.nope_dim,
            rope_dim: l.rope_dim,
            v_dim: l.v_dim,
            norm_eps: l.norm_eps as f32,
        }
    }
}

impl From<MlaConfig> for MlaDims {
    fn from(m: MlaConfig) -> MlaDims {
        MlaDims {
            q_lora_rank: m.q_lora_rank,
            kv_lora_rank: m.kv_lora_rank,
            nope_dim: m.nope_dim,
            rope_dim: m.rope_dim,
            v_dim: m.v_dim,
            norm_eps: decimal(m.norm_eps),
        }
    }
}

impl Recipe {
    /// Refuses sizes that contradict model.mla.
    pub(super) fn fits_mla(&self, c: &ModelConfig) -> Result<()> {
        let m = &self.config.model;
        for (key, given, set, why) in [
            ("model.head_dim", m.head_dim, c.head_dim, "nope_dim + rope_dim of model.mla"),
            (
                "model.kv_heads",
                m.kv_heads,
                c.kv_heads,
                "model.heads, as every head of model.mla has keys of its own",
            ),
        ] {
            if given.is_some_and(|given| given != set) {
                return self.refuse(key, format!("must be {set}, {why}; leave the key out"));
            }
        }
        Ok(())
    }
}
