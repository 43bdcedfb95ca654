//! The least that the mixtures of a step must do: products of the experts that tokens go to, and bytes that move once.

use crate::model::ModelConfig;

/// Sums over the layers of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct MoeWork {
    /// FLOPs of the routed experts' products, forward and backward.
    pub(super) expert_flops: f64,
    /// FLOPs of the routers' products; model FLOPs leave them out.
    pub(super) router_flops: f64,
    /// Bytes of rows on their way to experts and back: each way a read of one side and a write of the other, forward and
    /// backward.
    pub(super) permute_bytes: f64,
    /// Bytes of the weighted non-linearity, as of an MLP's.
    pub(super) activation_bytes: f64,
    /// Bytes of logits f32 `[tokens, E]`: written and read, and their gradients.
    pub(super) router_bytes: f64,
    /// Widths of all MLPs, shared experts included.
    pub(super) dense_ffn: f64,
}

impl MoeWork {
    /// Of a step of some tokens with elements of `size` bytes.
    pub(super) fn of(m: &ModelConfig, tokens: f64, size: f64) -> MoeWork {
        let mut sum = MoeWork::default();
        let (matrices, widths) = if m.gated { (3.0, 8.0) } else { (2.0, 5.0) };
        for layer in 0..m.layers {
            let Some(x) = m.moe_layer(layer) else {
                sum.dense_ffn += m.ffn as f64;
                continue;
            };
            let (e, rows, f) = (x.experts as f64, tokens * x.topk as f64, x.ffn as f64);
            let width = x.latent.unwrap_or(m.hidden) as f64;
            sum.dense_ffn += x.shared_ffn.unwrap_or(0) as f64;
            sum.expert_flops += 6.0 * rows * matrices * width * f;
            sum.router_flops += 6.0 * tokens * m.hidden as f64 * e;
            sum.permute_bytes += 4.0 * (rows + tokens) * width * size;
            sum.activation_bytes += widths * rows * f * size;
            sum.router_bytes += 4.0 * tokens * e * 4.0;
        }
        sum
    }
}
