//! One decoder layer: `r = x + attention(norm(x))`, `y = r + mlp(norm(r))`, with norms after the blocks too, or only there
//! (post-norms), where the family has them.

use super::config::{ModelConfig, NormKind};
use super::description::Block;
use super::feed_forward::{FeedForward, FeedForwardSaved};
use super::moe_config::act_of;
use super::pre_norm::{PreNorm, PreNormSaved, Wanted};
use ferrotron_engine::attention::{
    Attention, AttentionConfig, KvCache, Layout, MlaConfig, MultiLatentAttention, RopeTable, SelfAttention,
    SelfAttentionSaved,
};
use ferrotron_engine::moe::{Moe, SavedRouting};
use ferrotron_engine::{
    Checkpointed, Declarations, HiddenStates, Mlp, MlpConfig, Module, NormLayer, NormSaved, Saved,
    SavedTensor, StepContext, WeightGrad, run_to_completion,
};
use ferrotron_kernels::{AttentionParams, MaskAlign, Norm};
use ferrotron_tensor::{Result, Tensor};

/// Dropout sites of a layer.
const AFTER_ATTENTION: u32 = 1;
const AFTER_MLP: u32 = 2;

/// A decoder layer.
pub struct Layer {
    index: u32,
    attn_norm: PreNorm,
    attn: SelfAttention,
    attn_post: Option<NormLayer>,
    mlp_norm: PreNorm,
    mlp: FeedForward,
    mlp_post: Option<NormLayer>,
}

/// What backward needs; recomputed blocks are absent.
pub struct LayerSaved {
    mlp_post: Option<NormSaved>,
    mlp: Option<FeedForwardSaved>,
    /// Where the MoE block is recomputed: its routing.
    routing: Option<SavedRouting>,
    mlp_norm: PreNormSaved,
    attn_post: Option<NormSaved>,
    attn: Option<SelfAttentionSaved>,
    attn_norm: PreNormSaved,
}

impl Saved for LayerSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.mlp_post.modules(f);
        self.mlp.modules(f);
        self.routing.tensors(&mut |t| f(Module::Router, t));
        self.mlp_norm.tensors(&mut |t| f(Module::MlpNorm, t));
        self.attn_post.modules(f);
        self.attn.modules(f);
        self.attn_norm.tensors(&mut |t| f(Module::AttnNorm, t));
    }

    fn routing(&self) -> Option<&SavedRouting> {
        self.mlp.routing().or(self.routing.as_ref())
    }
}

impl LayerSaved {
    /// Calls `f` with every saved tensor and the block it belongs to.
    pub(super) fn blocks(&mut self, f: &mut dyn FnMut(Block, &mut SavedTensor)) {
        if let Some(saved) = &mut self.mlp {
            let block = saved.block();
            saved.tensors(&mut |t| f(block, t));
        }
        self.routing.tensors(&mut |t| f(Block::Moe, t));
        self.attn.tensors(&mut |t| f(Block::Attention, t));
        let mut norms = |t: &mut SavedTensor| f(Block::Norm, t);
        self.mlp_post.tensors(&mut norms);
        self.mlp_norm.tensors(&mut norms);
        self.attn_post.tensors(&mut norms);
        self.attn_norm.tensors(&mut norms);
    }
}

/// The same for a layer under full recomputation, which saves its input and routing alone.
pub(super) fn checkpointed_blocks(
    saved: &mut Checkpointed<LayerSaved>,
    f: &mut dyn FnMut(Block, &mut SavedTensor),
) {
    match saved {
        Checkpointed::Full(saved) => saved.blocks(f),
        Checkpointed::Input { x, routing } => {
            f(Block::Norm, x);
            routing.tensors(&mut |t| f(Block::Moe, t));
        }
    }
}

/// The configured norm as kernels take it.
pub(super) fn norm_of(c: &ModelConfig) -> Norm {
    Norm {
        subtract_mean: c.norm.kind == NormKind::LayerNorm,
        eps: c.norm.eps,
        zero_centred: c.norm.zero_centred,
    }
}

/// Declares the attention of layer `index` as `<name>.*`.
fn attention(
    d: &mut Declarations,
    c: &ModelConfig,
    (name, index): (&str, usize),
    std: (f32, f32),
    rope: Option<RopeTable>,
) -> Result<SelfAttention> {
    let local = c.window.filter(|_| c.is_local(index));
    let scores = AttentionParams {
        scale: c.layer_attn_scale(index),
        softcap: c.attn_softcap,
        causal: true,
        align: MaskAlign::TopLeft,
        // With a window of W, a token attends to itself and the W-1 tokens before it.
        left: local.map(|w| w.saturating_sub(1)),
        right: None,
        fp8: false,
    };
    Ok(match &c.mla {
        None => {
            let config = AttentionConfig {
                hidden: c.hidden,
                heads: c.heads,
                kv_heads: c.kv_heads,
                head_dim: c.head_dim,
                qkv_bias: c.qkv_bias,
                out_bias: c.proj_bias,
                scores,
                qk_norm: c.qk_norm.then(|| norm_of(c)),
                qk_norm_all_heads: c.qk_norm_all_heads,
                sink: c.attn_sink,
                std,
            };
            SelfAttention::MultiHead(Attention::declare(d, name, config, rope)?.into())
        }
        Some(m) => {
            let config = MlaConfig {
                hidden: c.hidden,
                heads: c.heads,
                q_rank: m.q_lora_rank,
                kv_rank: m.kv_lora_rank,
                nope: m.nope_dim,
                rope: m.rope_dim,
                v: m.v_dim,
                norm: Norm { subtract_mean: false, eps: m.norm_eps, zero_centred: false },
                down_bias: c.qkv_bias,
                out_bias: c.proj_bias,
                sink: c.attn_sink,
                scores,
                std,
            };
            SelfAttention::Mla(MultiLatentAttention::declare(d, name, config, rope)?.into())
        }
    })
}

impl Layer {
    /// Declares layer `index` as `layers.<index>.*`.
    pub fn declare(
        d: &mut Declarations,
        c: &ModelConfig,
        index: usize,
        rope: Option<RopeTable>,
    ) -> Result<Layer> {
        Layer::declare_as(d, c, &format!("layers.{index}"), index, rope)
    }

    /// Declares layer `index` as `<name>.*`.
    pub(super) fn declare_as(
        d: &mut Declarations,
        c: &ModelConfig,
        name: &str,
        index: usize,
        rope: Option<RopeTable>,
    ) -> Result<Layer> {
        let norm = norm_of(c);
        // Blocks write into the residual stream 2L times: a smaller initial output keeps its variance from growing.
        let std = (c.init_std, c.init_std / (2.0 * c.layers as f32).sqrt());
        let post = |d: &mut Declarations, kind: &str| {
            c.post_norms.then(|| NormLayer::declare(d, &format!("{name}.{kind}"), c.hidden, norm)).transpose()
        };
        Ok(Layer {
            index: index as u32,
            attn_norm: PreNorm::declare(d, &format!("{name}.attn_norm"), c)?,
            attn: attention(d, c, (&format!("{name}.attn"), index), std, rope)?,
            attn_post: post(d, "attn_post_norm")?,
            mlp_norm: PreNorm::declare(d, &format!("{name}.mlp_norm"), c)?,
            mlp: match c.moe_layer(index) {
                Some(m) => {
                    let shape = c.moe_shape(m, std);
                    FeedForward::Moe(Box::new(Moe::declare(d, &format!("{name}.moe"), index as u32, &shape)?))
                }
                None => FeedForward::Dense(Mlp::declare(
                    d,
                    &format!("{name}.mlp"),
                    MlpConfig {
                        hidden: c.hidden,
                        ffn: c.ffn,
                        act: act_of(c),
                        gated: c.gated,
                        bias: c.mlp_bias,
                        std,
                    },
                )?),
            },
            mlp_post: post(d, "mlp_post_norm")?,
        })
    }

    /// `[T, hidden] → [T, hidden]`; yields while MoE tokens are dispatched.
    pub async fn forward(
        &self,
        p: &StepContext<'_>,
        x: HiddenStates,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<(HiddenStates, Checkpointed<LayerSaved>)> {
        let (y, x, saved) = self.run(p, x, layout, positions).await?;
        Ok((y, Checkpointed::new(p.recompute.layer, &x, saved)))
    }

    /// The output, the formed input, and what backward needs.
    async fn run(
        &self,
        p: &StepContext<'_>,
        x: HiddenStates,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<(HiddenStates, Tensor, LayerSaved)> {
        let p = &self.attn_norm.context(p);
        let wanted = Wanted { amax: self.attn.needs_input_amax(p), kept: p.recompute.attention };
        let (normed, x, attn_norm) = self.attn_norm.forward(p, x, wanted)?;
        let (a, mut attn) = self.attn.forward(p, &normed, layout, positions)?;
        let (a, attn_post) = post_forward(p, &self.attn_post, a)?;
        let a = p.dropout(self.index, AFTER_ATTENTION, a)?;
        let wanted = Wanted { amax: self.mlp.needs_input_amax(p), kept: p.recompute.mlp };
        let r = HiddenStates { x: x.clone(), pending: Some(a) };
        let (normed, r, mlp_norm) = self.mlp_norm.forward(p, r, wanted)?;
        let (m, mut mlp, mlp_post) = if p.recomputing && self.mlp_post.is_none() {
            // Backward does not read the layer's output.
            (None, self.mlp.recompute(p, &normed).await?, None)
        } else {
            let (m, mlp) = self.mlp.forward(p, &normed).await?;
            let (m, mlp_post) = post_forward(p, &self.mlp_post, m)?;
            (Some(p.dropout(self.index, AFTER_MLP, m)?), mlp, mlp_post)
        };
        if p.recompute.norm {
            attn.drop_input();
            mlp.drop_input();
        }
        let attn = (!p.recompute.attention).then_some(attn);
        let routing = mlp.routing().filter(|_| p.recompute.mlp).cloned();
        let mlp = (!p.recompute.mlp).then_some(mlp);
        let y = HiddenStates { x: r, pending: m };
        Ok((y, x, LayerSaved { mlp_post, mlp, routing, mlp_norm, attn_post, attn, attn_norm }))
    }

    /// Gradient of the input; yields while MoE gradients are dispatched.
    pub async fn backward(
        &self,
        p: &StepContext<'_>,
        saved: Checkpointed<LayerSaved>,
        layout: &Layout,
        positions: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, WeightGrad)> {
        let s = match saved {
            Checkpointed::Full(saved) => saved,
            Checkpointed::Input { x, routing } => {
                let p = p.for_recompute(routing.as_ref());
                self.run(&p, HiddenStates::of((*x).clone()), layout, positions).await?.2
            }
        };
        let p = &self.attn_norm.context(p);
        let dm = p.dropout(self.index, AFTER_MLP, dy.clone())?;
        let (dm, mut grads) = post_backward(p, &self.mlp_post, s.mlp_post, dm)?;
        let mlp = match s.mlp {
            None => {
                let measure = self.mlp.needs_input_amax(p);
                let normed = self.mlp_norm.recompute(p, &s.mlp_norm, measure)?;
                self.mlp.recompute(&p.for_recompute(s.routing.as_ref()), normed).await?
            }
            Some(mut saved) => {
                if p.recompute.norm && saved.needs_input() {
                    saved.restore_input(&self.mlp_norm.recompute(p, &s.mlp_norm, false)?.values);
                }
                saved
            }
        };
        let (dn, g) = self.mlp.backward(p, mlp, &dm).await?;
        grads = grads.and(g);
        let (dr, g) = self.mlp_norm.backward(p, s.mlp_norm, &dn, dy)?;
        grads = grads.and(g);
        let da = p.dropout(self.index, AFTER_ATTENTION, dr.clone())?;
        let (da, g) = post_backward(p, &self.attn_post, s.attn_post, da)?;
        grads = grads.and(g);
        let attn = match s.attn {
            None => {
                let measure = self.attn.needs_input_amax(p);
                let normed = self.attn_norm.recompute(p, &s.attn_norm, measure)?;
                self.attn.forward(p, &normed, layout, positions)?.1
            }
            Some(mut saved) => {
                if p.recompute.norm {
                    saved.restore_input(&self.attn_norm.recompute(p, &s.attn_norm, false)?.values);
                }
                saved
            }
        };
        let (dn, g) = self.attn.backward(p, attn, layout, positions, &da)?;
        grads = grads.and(g);
        let (dx, g) = self.attn_norm.backward(p, s.attn_norm, &dn, &dr)?;
        Ok((dx, grads.and(g)))
    }

    /// An empty KV cache for `batch` sequences of up to `capacity` tokens.
    pub fn cache(&self, p: &StepContext, batch: usize, capacity: usize) -> Result<KvCache> {
        self.attn.cache(p, batch, capacity)
    }

    /// Forward of new tokens over the cached ones.
    pub fn decode(
        &self,
        p: &StepContext,
        x: &Tensor,
        cache: &mut KvCache,
        layout: &Layout,
        positions: &Tensor,
    ) -> Result<Tensor> {
        let wanted = Wanted { amax: self.attn.needs_input_amax(p), kept: false };
        let (normed, x, _) = self.attn_norm.forward(p, HiddenStates::of(x.clone()), wanted)?;
        let a = self.attn.decode(p, &normed, cache, layout, positions)?;
        let (a, _) = post_forward(p, &self.attn_post, a)?;
        let wanted = Wanted { amax: self.mlp.needs_input_amax(p), kept: false };
        let (normed, r, _) = self.mlp_norm.forward(p, HiddenStates { x, pending: Some(a) }, wanted)?;
        let (m, _) = post_forward(p, &self.mlp_post, run_to_completion(self.mlp.forward(p, &normed))?.0)?;
        let y = p.empty(r.shape())?;
        p.rank.kernels.add(&p.rank.compute, &r, &m, &y)?;
        Ok(y)
    }
}

fn post_forward(p: &StepContext, norm: &Option<NormLayer>, x: Tensor) -> Result<(Tensor, Option<NormSaved>)> {
    match norm {
        None => Ok((x, None)),
        Some(n) => n.forward(p, &x).map(|(y, s)| (y, Some(s))),
    }
}

fn post_backward(
    p: &StepContext,
    norm: &Option<NormLayer>,
    saved: Option<NormSaved>,
    dy: Tensor,
) -> Result<(Tensor, WeightGrad)> {
    match (norm, saved) {
        (Some(n), Some(s)) => n.backward(p, s, &dy, None),
        _ => Ok((dy, WeightGrad::default())),
    }
}
