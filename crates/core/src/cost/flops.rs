//! Model FLOPs per trained token.
//!
//! 6 = 2 (multiply and add) × 3 (forward, and twice that in backward). Causal attention counts half of the square.
//! Recomputation, the router, the embedding lookup, norms and activations count nothing.

use crate::Result;
use crate::config::Resolved;
use crate::model::{LinearInfo, ModelConfig, logical_specs};
use ferrotron_engine::ParamKind;

/// FLOPs of training one token, by part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenFlops {
    /// Attention projections, `6·Σ in·out` of every layer; and `6·2h·h` of each MTP layer.
    pub projections: f64,
    /// Scores and values: `6·Q·s` per layer with `Q = n·(d_k + d_v)/2`, and `6·2·Q·(W − W·(W−1)/(2s))` per layer with
    /// a window `W < s`.
    pub attention: f64,
    /// MLPs, `6·Σ in·out`; of an MoE layer, k of the E experts and what all tokens share.
    pub mlp: f64,
    /// LM head: `6·h·V`, again for each MTP layer.
    pub logits: f64,
}

impl Resolved {
    /// FLOPs of training one token of sequences of `length` tokens, as [`ModelConfig::flops_per_token`] counts them. Frozen
    /// linear layers have no wgrad: 4 instead of 6 for each multiplication. Adapters count `6·r·(in + out)`.
    pub fn flops_per_token(&self, length: f64) -> Result<TokenFlops> {
        let all = self.model.flops_per_token(length)?;
        if !self.config.has_lora() {
            return Ok(all);
        }
        let frozen = |x: f64| x * 2.0 / 3.0;
        let mut flops = TokenFlops {
            projections: frozen(all.projections),
            mlp: frozen(all.mlp),
            logits: frozen(all.logits),
            ..all
        };
        let topk = self.model.moe.as_ref().map_or(1.0, |moe| moe.topk as f64);
        for spec in logical_specs(&self.model, &self.model_options())? {
            if spec.kind() == ParamKind::Adapter {
                let used = if spec.experts { topk / spec.matrices.max(1) as f64 } else { 1.0 };
                let attention = spec.parts.first().is_some_and(|p| p.name.contains(".attn."));
                let part = if attention { &mut flops.projections } else { &mut flops.mlp };
                *part += 6.0 * used * spec.numel() as f64;
            }
        }
        Ok(flops)
    }
}

impl TokenFlops {
    /// All parts together.
    pub fn total(&self) -> f64 {
        self.projections + self.attention + self.mlp + self.logits
    }
}

/// Multiplications of a token in a layer's linear layers: attention's, and those of the MLP or MoE.
fn layer_products(m: &ModelConfig, i: usize) -> Result<[f64; 2]> {
    let topk = m.moe_layer(i).map_or(1.0, |moe| moe.topk as f64);
    let counted = |l: &LinearInfo| !(l.is("moe.router") || l.is("moe.shared_gate"));
    let mut sums = [0.0; 2];
    for linear in m.linears(i)?.iter().filter(|l| counted(l)) {
        let attention = linear.names[0].contains(".attn.");
        let experts = if linear.experts { topk } else { 1.0 };
        sums[usize::from(!attention)] += experts * linear.input as f64 * linear.output as f64;
    }
    Ok(sums)
}

impl ModelConfig {
    /// FLOPs of training one token of sequences of `length` tokens. With packed sequences of unequal
    /// lengths sᵢ, `length` is Σsᵢ²/Σsᵢ.
    pub fn flops_per_token(&self, length: f64) -> Result<TokenFlops> {
        let (h, mtp, layers) = (self.hidden as f64, self.mtp_depth() as f64, self.layers + self.mtp_depth());
        let is_moe = |i: usize| self.moe_layer(i).is_some();
        // Linear layers differ only between dense and MoE layers.
        let of_kind = |moe: bool| -> Result<[f64; 2]> {
            let Some(i) = (0..layers).find(|i| is_moe(*i) == moe) else { return Ok([0.0; 2]) };
            let count = (0..layers).filter(|i| is_moe(*i) == moe).count() as f64;
            Ok(layer_products(self, i)?.map(|x| count * x))
        };
        let ([projections, mlp], [moe_projections, moe]) = (of_kind(false)?, of_kind(true)?);
        let q = self.heads as f64 * (self.head_dim + self.value_dim()) as f64 / 2.0;
        let local = (0..layers).filter(|&i| self.is_local(i)).count() as f64;
        let windowed = match self.window {
            Some(w) if (w as f64) < length => {
                let w = w as f64;
                2.0 * q * (w - w * (w - 1.0) / (2.0 * length))
            }
            _ => q * length,
        };
        Ok(TokenFlops {
            projections: 6.0 * (projections + moe_projections + mtp * 2.0 * h * h),
            attention: 6.0 * ((layers as f64 - local) * q * length + local * windowed),
            mlp: 6.0 * (mlp + moe),
            logits: 6.0 * h * self.vocab as f64 * (1.0 + mtp),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::MtpConfig;
    use crate::model::config::MlaConfig;

    /// Published figures in GFLOP per token, to their last digit.
    #[test]
    fn published_vectors() {
        let vectors = [
            ("llama-8b", 8192, 51.470, 0.0005),
            ("llama-70b", 8192, 449.22, 0.005),
            ("llama-405b", 8192, 2523.96, 0.005),
            ("gpt2-124m", 1024, 0.798, 0.0005),
            ("gpt2-1558m", 1024, 9.80, 0.005),
            ("qwen3-30b-a3b", 4096, 23.006, 0.0005),
            ("qwen3-235b-a22b", 4096, 148.03, 0.005),
            ("deepseek-v3", 4096, 249.81, 0.005),
            ("gpt-oss-120b", 4096, 32.63, 0.005),
            ("mixtral-8x7b", 4096, 79.71, 0.005),
        ];
        let count =
            |c: &ModelConfig, length: i32| c.flops_per_token(f64::from(length)).unwrap().total() / 1e9;
        let preset = |name: &str| ModelConfig::preset(name).unwrap();
        for (name, length, giga, digit) in vectors {
            let got = count(&preset(name), length);
            assert!((got - giga).abs() <= digit, "{name}: {got} instead of {giga}");
        }
        // The vocabulary padded to a multiple of 1024; one MTP layer.
        let padded = ModelConfig { vocab: 32_768, ..preset("mixtral-8x22b") };
        let mtp = Some(MtpConfig { layers: 1, shared_layer: false });
        let with_mtp = ModelConfig { mtp, ..preset("deepseek-v3") };
        assert!((count(&padded, 4096) - 242.20).abs() <= 0.005);
        assert!((count(&with_mtp, 4096) - 259.99).abs() <= 0.005, "{}", count(&with_mtp, 4096));
    }

    /// The attention of DeepSeek-V3: its published 249.81 GFLOP per token at 4096 tokens, without prediction layers,
    /// less three dense layers, 58 of 8 chosen experts and a shared one, and the output matrix.
    #[test]
    fn latent_attention_is_counted_as_published() {
        let (h, n, length) = (7168usize, 128, 4096.0);
        let c = ModelConfig { hidden: h, heads: n, layers: 61, ..ModelConfig::preset("tiny").unwrap() };
        let c = c.with_mla(MlaConfig {
            q_lora_rank: Some(1536),
            kv_lora_rank: 512,
            nope_dim: 128,
            rope_dim: 64,
            v_dim: 128,
            norm_eps: 1e-6,
        });
        let got = c.flops_per_token(length).unwrap();
        let mlp = 6.0 * 3.0 * h as f64 * (3.0 * 18_432.0 + 58.0 * 9.0 * 2048.0);
        let head = 6.0 * h as f64 * 129_280.0;
        let total = (got.projections + got.attention + mlp + head) / 1e9;
        assert!((total - 249.81).abs() <= 0.005, "{total}");
    }

    /// A window's formula against counting the visible pairs: every token of a sequence sees
    /// min(t, W) others and itself included, at 2·2·Q FLOPs forward each, times three.
    #[test]
    fn windows_count_visible_pairs() {
        let mut c = ModelConfig::preset("gemma3-1b").unwrap();
        let length = 4096usize;
        let q = (c.heads * c.head_dim) as f64;
        let full = c.flops_per_token(length as f64).unwrap();
        let w = c.window.unwrap();
        let pairs: usize = (1..=length).map(|t| t.min(w)).sum();
        let local = c.local_layers.iter().filter(|&&x| x).count() as f64;
        let counted = 12.0 * q * pairs as f64 / length as f64 * local;
        let global = 6.0 * q * length as f64 * (c.layers as f64 - local);
        assert!(((full.attention - global) / counted - 1.0).abs() < 1e-12);

        c.window = Some(length);
        let wide = c.flops_per_token(length as f64).unwrap();
        c.window = None;
        c.local_layers.clear();
        assert_eq!(
            wide,
            c.flops_per_token(length as f64).unwrap(),
            "a window as long as the sequence changes nothing"
        );
    }
}
