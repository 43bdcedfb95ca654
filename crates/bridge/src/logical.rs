//! Our own names: one logical tensor per parameter, never fused, matrices `[out, in]`.

use ferrotron_core::model::config::{ModelConfig, NormKind, Positions};
use ferrotron_core::model::logical_parts;
use ferrotron_tensor::DType;

/// A parameter of the model under its logical name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogicalTensor {
    /// `layers.0.attn.q.weight` and the like.
    pub name: String,
    /// `[out, in]` for matrices, `[n]` for gains and biases.
    pub shape: Vec<usize>,
    /// Is it no parameter: f32 whatever the weights are, without a gradient?
    pub buffer: bool,
}

impl LogicalTensor {
    /// Elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The element type a model wants a tensor in, if it computes in `dtype`: what is no parameter stays f32.
pub(crate) fn load_dtype(logical: &str, dtype: DType) -> DType {
    if logical.ends_with(".moe.expert_bias") { DType::F32 } else { dtype }
}

/// Every tensor of a model that is no parameter.
pub fn logical_buffers(c: &ModelConfig) -> Vec<LogicalTensor> {
    let buffers = ferrotron_core::model::logical_buffers(c).into_iter();
    buffers.map(|p| LogicalTensor { name: p.name, shape: p.shape, buffer: true }).collect()
}

/// Every parameter of a model: embedding, layers, head, and what predicts further tokens.
pub fn logical_tensors(c: &ModelConfig) -> Vec<LogicalTensor> {
    let mut out = Vec::new();
    let mut push = |name: String, shape: &[usize]| {
        out.push(LogicalTensor { name, shape: shape.to_vec(), buffer: false })
    };
    let (h, f, d) = (c.hidden, c.ffn, c.head_dim);
    let (q, kv) = (c.heads * d, c.kv_heads * d);
    let norm_bias = c.norm.kind == NormKind::LayerNorm;

    push("embed.tokens".into(), &[c.vocab, h]);
    if matches!(c.positions, Positions::Learned) {
        push("embed.positions".into(), &[c.max_positions, h]);
    }
    for i in 0..c.layers {
        let mut push = |name: &str, shape: &[usize]| push(format!("layers.{i}.{name}"), shape);
        let norm = |push: &mut dyn FnMut(&str, &[usize]), name: &str| {
            push(&format!("{name}.weight"), &[h]);
            if norm_bias {
                push(&format!("{name}.bias"), &[h]);
            }
        };
        let linear =
            |push: &mut dyn FnMut(&str, &[usize]), name: &str, rows: usize, cols: usize, bias: bool| {
                push(&format!("{name}.weight"), &[rows, cols]);
                if bias {
                    push(&format!("{name}.bias"), &[rows]);
                }
            };
        norm(&mut push, "attn_norm");
        match &c.mla {
            None => {
                linear(&mut push, "attn.q", q, h, c.qkv_bias);
                linear(&mut push, "attn.k", kv, h, c.qkv_bias);
                linear(&mut push, "attn.v", kv, h, c.qkv_bias);
                if c.qk_norm {
                    push("attn.q_norm.weight", &[d]);
                    push("attn.k_norm.weight", &[d]);
                }
            }
            Some(m) => {
                match m.q_lora_rank {
                    Some(rank) => {
                        linear(&mut push, "attn.q_a", rank, h, c.qkv_bias);
                        push("attn.q_a_norm.weight", &[rank]);
                        linear(&mut push, "attn.q_b", q, rank, false);
                    }
                    None => linear(&mut push, "attn.q", q, h, false),
                }
                linear(&mut push, "attn.kv_a", m.kv_lora_rank + m.rope_dim, h, c.qkv_bias);
                push("attn.kv_a_norm.weight", &[m.kv_lora_rank]);
                linear(&mut push, "attn.kv_b", c.heads * (m.nope_dim + m.v_dim), m.kv_lora_rank, false);
            }
        }
        if c.attn_sink {
            push("attn.sink", &[c.heads]);
        }
        let out = if c.mla.is_some() { "attn.o" } else { "attn.out" };
        linear(&mut push, out, h, c.heads * c.value_dim(), c.proj_bias);
        if c.post_norms {
            norm(&mut push, "attn_post_norm");
        }
        norm(&mut push, "mlp_norm");
        let mlp = |push: &mut dyn FnMut(&str, &[usize]), name: &str, width, f, bias| {
            if c.gated {
                linear(push, &format!("{name}.gate"), f, width, bias);
            }
            linear(push, &format!("{name}.up"), f, width, bias);
            linear(push, &format!("{name}.down"), width, f, bias);
        };
        match c.moe_layer(i) {
            None => mlp(&mut push, "mlp", h, f, c.mlp_bias),
            Some(m) => {
                linear(&mut push, "moe.router", m.experts, h, m.router_bias);
                if let Some(latent) = m.latent {
                    linear(&mut push, "moe.latent_down", latent, h, false);
                    linear(&mut push, "moe.latent_up", h, latent, false);
                }
                for e in 0..m.experts {
                    mlp(&mut push, &format!("moe.experts.{e}"), m.latent.unwrap_or(h), m.ffn, m.bias);
                }
                if let Some(shared) = m.shared_ffn {
                    mlp(&mut push, "moe.shared", h, shared, false);
                    if m.shared_gate {
                        linear(&mut push, "moe.shared_gate", 1, h, false);
                    }
                }
            }
        }
        if c.post_norms {
            norm(&mut push, "mlp_post_norm");
        }
    }
    push("final_norm.weight".into(), &[h]);
    if norm_bias {
        push("final_norm.bias".into(), &[h]);
    }
    if !c.tied {
        push("head.weight".into(), &[c.vocab, h]);
    }
    // Layers that predict further tokens, as the model declares them.
    let further = c.mtp.map(|_| logical_parts(c).unwrap_or_default()).unwrap_or_default();
    let further = further.into_iter().filter(|p| p.name.starts_with("mtp."));
    out.extend(further.map(|p| LogicalTensor { name: p.name, shape: p.shape, buffer: false }));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_core::model::MtpConfig;
    use ferrotron_core::model::preset::PRESETS;

    #[test]
    fn tensors_hold_every_parameter() {
        for name in PRESETS {
            let mut c = ModelConfig::preset(name).unwrap();
            c.mtp = c.layers.is_multiple_of(2).then_some(MtpConfig { layers: 2, shared_layer: false });
            let tensors = logical_tensors(&c);
            let total: usize = tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum();
            assert_eq!(total, c.parameters(), "{name}");
            let mut names: Vec<_> = tensors.iter().map(|t| &t.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), tensors.len(), "{name}: a name twice");
        }
    }
}
