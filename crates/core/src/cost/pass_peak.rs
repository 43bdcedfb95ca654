//! The moment of a micro-batch that needs most memory.
//!
//! | moment | live, beside what micro-batches in flight have saved |
//! |---|---|
//! | the loss | the logits, or their gradient; their copy for a soft cap, or FP8 copies for the LM head's backward |
//! | backward of a feed-forward block | recomputed tensors of its layer, gradients of the activation function's input and output |
//! | backward of an attention block | the same, less what the feed-forward block has freed; gradients of q, k, v and heads |
//!
//! The loss is over before the backward of a layer begins, so that logits and recomputed tensors never add up. Weight
//! gradients of a layer are computed at the end of its backward: inputs and output gradients of its linear layers live
//! until then, while inputs of norms and of activation functions are freed on the way.

use crate::Result;
use crate::model::description::{
    Block, Gemm, LayerDescription, Lifetime, ModelDescription, SavedTensor, StepShape,
};
use ferrotron_engine::ParamSpec;
use ferrotron_engine::quant::LinearGemm;
use ferrotron_tensor::DType;

/// Bytes of one micro-batch at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moment {
    /// Saved tensors that are freed by then: layers behind the one that runs.
    pub(super) freed: usize,
    /// What is computed and freed again.
    pub(super) workspace: usize,
}

/// Bytes that linear layers of a block compute in backward.
#[derive(Clone, Copy, Default)]
struct BlockGradients {
    /// At most at once.
    most: usize,
    /// Output gradients that wait for wgrad when the block is done.
    kept: usize,
}

/// Sizes of a step that the moments are computed from.
pub(super) struct PassMoments<'a> {
    shape: &'a StepShape,
    model: &'a ModelDescription,
    /// Bytes of an element, and of one hidden state of every token on this rank.
    element: usize,
    hidden: usize,
    /// Tokens of the tensor-parallel group, and those that attention computes.
    tokens: usize,
    attended: usize,
}

impl<'a> PassMoments<'a> {
    pub(super) fn new(shape: &'a StepShape, model: &'a ModelDescription) -> Result<PassMoments<'a>> {
        let (rows, element) = (shape.rows()?, shape.dtype.size());
        let hidden = rows.local * shape.model.hidden * element;
        Ok(PassMoments { shape, model, element, hidden, tokens: rows.all, attended: rows.attended })
    }

    /// Stored bytes of embedding and decoder layers, and of the output with its MTP layers.
    pub(super) fn stored(&self) -> [usize; 2] {
        let mut out = [0; 2];
        for layer in &self.model.layers {
            out[usize::from(is_output(layer))] += layer.saved_bytes(Lifetime::Stored);
        }
        out
    }

    /// The moment of the loss; none on a stage without it.
    pub(super) fn loss(&self) -> Option<Moment> {
        let output = self.model.layers.iter().find(|l| l.name == "output")?;
        let dlogits = output.saved.iter().find(|t| t.name == "dlogits").map_or(0, SavedTensor::bytes);
        let logits = output.saved_bytes(Lifetime::Recomputed);
        // The soft cap's gradient reads the capped logits, which the loss overwrites.
        let capped = if self.shape.model.final_softcap.is_some() { dlogits } else { 0 };
        // Forward holds the hidden states even if their FP8 copy is saved, or nothing.
        let is_saved = output.saved.iter().any(|t| t.name == "final");
        let forward = capped + if is_saved { 0 } else { self.hidden };
        let backward = self.hidden + self.fp8_logits();
        Some(Moment { freed: 0, workspace: logits + forward.max(backward) })
    }

    /// Moments of the backward of every layer. Layers that a pass has computed later are freed.
    pub(super) fn layers(&self) -> Vec<Moment> {
        let [_, output] = self.stored();
        let mut out = Vec::new();
        for stage in &self.shape.stages {
            let mut freed = output;
            for i in stage.layers.clone().rev() {
                let name = format!("layers.{i}");
                let Some(layer) = self.model.layers.iter().find(|l| l.name == name) else { continue };
                out.extend(self.blocks(layer).map(|workspace| Moment { freed, workspace }));
                freed += layer.saved_bytes(Lifetime::Stored);
            }
        }
        // MTP layers come first in backward, after the gradients of all logits but those of the last one.
        let mut freed = 0;
        let head = |l: &LayerDescription| {
            let of = |t: &&SavedTensor| t.block == Block::Output && t.lifetime == Lifetime::Stored;
            l.saved.iter().filter(of).map(SavedTensor::bytes).sum::<usize>()
        };
        let main = self.model.layers.iter().find(|l| l.name == "output").map_or(0, head);
        let mtp: Vec<_> = self.model.layers.iter().filter(|l| l.name.starts_with("mtp.")).collect();
        for (depth, layer) in mtp.iter().enumerate().rev() {
            let before = depth.checked_sub(1).map_or(0, |d| head(mtp[d]));
            let done = freed + main + head(layer) + before;
            // The gradient of the decoder's output waits.
            out.extend(self.blocks(layer).map(|w| Moment { freed: done, workspace: w + self.hidden }));
            freed += layer.saved_bytes(Lifetime::Stored);
        }
        out
    }

    /// Workspace of a layer's backward in its feed-forward and in its attention block.
    fn blocks(&self, layer: &LayerDescription) -> [usize; 2] {
        let (r, m) = (self.shape.recompute, &self.shape.model);
        let recomputed = |of: &dyn Fn(&SavedTensor) -> bool| -> usize {
            let of = |t: &&SavedTensor| t.lifetime == Lifetime::Recomputed && of(t);
            layer.saved.iter().filter(of).map(SavedTensor::bytes).sum()
        };
        let attention_later = r.attention && !r.layer;
        // Both blocks' recomputed norm outputs; a router keeps its own.
        let is_moe = layer.saved.iter().any(|t| t.block == Block::Moe);
        let normed = if r.norm && m.pre_norms && !r.layer { self.hidden } else { 0 };
        let normed_mlp = if is_moe { 0 } else { normed };
        let mlp = self.feed_forward(layer);
        let post = if m.post_norms { self.hidden } else { 0 };
        // The gradient of the output. A norm after the block frees its input for the gradient of it.
        let first = recomputed(&|t| t.block != Block::Attention || !attention_later)
            + normed_mlp
            + mlp.restored
            + self.hidden
            + mlp.gradients.most;
        // Freed by the feed-forward block: the input of its activation function and those of the norms around it.
        let freed: usize = layer.saved.iter().filter(|t| is_freed_first(t)).map(SavedTensor::bytes).sum();
        // Gradients of the output, of the block's input and of the residual stream between the blocks.
        let second = recomputed(&|_| true)
            + normed_mlp
            + normed
            + mlp.restored
            + 3 * self.hidden
            + 2 * post
            + mlp.gradients.kept
            + self.attention(layer);
        [first, second.saturating_sub(freed)]
    }

    /// Gradients inside the MLP or MoE block.
    fn feed_forward(&self, layer: &LayerDescription) -> FeedForward {
        let e = self.element;
        let dgrads = |part: &str, down: bool| {
            let is = |g: &&Gemm| {
                let name = g.names.first().map_or("", String::as_str);
                let of_part = name.split('.').any(|p| p == part);
                g.gemm == LinearGemm::Dgrad
                    && of_part
                    && name.ends_with(".down") == down
                    && !name.contains(".lora_")
            };
            layer.gemms.iter().find(is)
        };
        let mut out = FeedForward::default();
        let mut experts = BlockGradients::default();
        for part in ["mlp", "shared", "experts"] {
            let (Some(up), Some(down)) = (dgrads(part, false), dgrads(part, true)) else { continue };
            let routed = part == "experts";
            let chunk = self.shape.mlp_chunk.map(|c| c * self.shape.ranks.tp.size).filter(|_| !routed);
            // Of experts, rows sorted by expert and aligned.
            let sorted = layer.saved.iter().find(|t| routed && t.name == "experts.h").map(|t| t.shape[0]);
            let all = sorted.unwrap_or(up.m);
            let rows = all.min(chunk.unwrap_or(usize::MAX));
            let is_chunked = rows < all;
            let (dh, da) = (rows * up.k * e, rows * down.n * e);
            let kept = |g: &Gemm, bytes: usize| match self.wgrad(layer, g) {
                None => 0,
                Some(true) => bytes / e,
                Some(false) => bytes,
            };
            if self.shape.recompute.activation && !is_chunked {
                out.restored += if self.wgrad(layer, down) == Some(true) { da / e } else { da };
            }
            if routed {
                // Gradients of expert outputs, sorted by expert, and of expert inputs. The latter are summed for every token
                // beside the router's gradient.
                let (dy, dx) = (rows * down.k * e, rows * up.n * e + 2 * self.hidden);
                let dy = if down.fp8 { dy / e } else { dy };
                experts = BlockGradients { most: dy + (da + dh).max(dx), kept: dy + kept(up, dh) };
            } else if is_chunked {
                // Weight gradients are summed over the chunks in f32.
                let trained = [up, down].into_iter().filter(|g| self.wgrad(layer, g).is_some());
                let sums: usize = trained.map(|g| 4 * g.n * g.k).sum();
                let dx = up.m * up.n * e;
                out.gradients = BlockGradients { most: da + dh + dx + sums, kept: sums };
            } else {
                // The gradient of the output in FP8, for wgrad; in the compute dtype it is the residual stream's.
                let dy = if self.wgrad(layer, down) == Some(true) { down.m * down.k } else { 0 };
                out.gradients = BlockGradients { most: dy + da + dh, kept: dy + kept(up, dh) };
            }
        }
        // The shared expert's backward comes first; its input gradient waits for that of the routed experts.
        let shared = out.gradients;
        if experts.most > 0 {
            let waits = if shared.most > 0 { self.hidden } else { 0 };
            out.gradients.most = shared.most.max(waits + experts.most);
            out.gradients.kept = shared.kept + experts.kept;
        }
        out
    }

    /// Gradients inside the attention block: of q, k and v, of what they are projected from, and of the heads' outputs.
    fn attention(&self, layer: &LayerDescription) -> usize {
        let of = |g: &&Gemm| {
            let adapter = g.names.iter().any(|n| n.contains(".lora_"));
            g.gemm == LinearGemm::Dgrad && g.block == Block::Attention && !adapter
        };
        let mut all: Vec<&Gemm> = layer.gemms.iter().filter(of).collect();
        let Some(out) = all.pop() else { return 0 };
        let mut most: usize = out.m * out.n * self.element;
        most += all.iter().map(|g| g.m * g.k * self.element).sum::<usize>();
        let normed = layer.saved.iter().find(|t| t.name == "attn.normed_qk");
        most += normed.map_or(0, SavedTensor::bytes);
        // Kernels sum dq in f32.
        most += layer.attention.map_or(0, |a| self.attended * a.heads * a.head_dim * DType::F32.size());
        most
    }

    /// Whether the output gradient of a linear layer waits for wgrad, of its weight or of adapters, and whether in FP8.
    fn wgrad(&self, layer: &LayerDescription, of: &Gemm) -> Option<bool> {
        let is = |g: &&Gemm| g.gemm == LinearGemm::Wgrad && g.names == of.names;
        let own = layer.gemms.iter().find(is).map(|g| g.fp8);
        let adapter = |name: &String| {
            of.names.iter().any(|n| name.strip_prefix(n).is_some_and(|rest| rest.starts_with(".lora_")))
        };
        let adapted = layer.gemms.iter().any(|g| g.names.iter().any(adapter));
        if adapted { Some(false) } else { own }
    }

    /// FP8 copies of the logits' gradient, for dgrad and wgrad of an FP8 LM head.
    fn fp8_logits(&self) -> usize {
        let name = if self.shape.model.tied { "embed.tokens" } else { "head.weight" };
        let is = |p: &&ParamSpec| p.parts.first().is_some_and(|part| part.name == name);
        let head = self.model.params.iter().find(is);
        let Some((vocab, quant)) = head.and_then(|p| p.quant.map(|q| (p.shape[0], q))) else { return 0 };
        let size = if quant.recipe.emulated() { self.element } else { 1 };
        2 * size * self.tokens * vocab
    }

    /// FP8 copies of weights that outlive a layer's pass: of all of them between several micro-batches, of experts between
    /// forward and backward of one. None where weights are sharded.
    pub(super) fn fp8_weights(&self) -> usize {
        if self.shape.zero_stage() >= 3 {
            return 0;
        }
        let cached = self.shape.micro_batches > 1;
        let of = |p: &ParamSpec| {
            let Some(q) = p.quant else { return 0 };
            let size = if q.recipe.emulated() { self.shape.dtype.size() } else { DType::E4M3.size() };
            let copies = match (p.fp8_resident(), cached) {
                // The transpose for dgrad; that of a dense frozen weight is made each time.
                (true, true) => usize::from(q.dgrad && (p.experts || !p.group.base)),
                (true, false) => 0,
                (false, true) => 2,
                (false, false) => usize::from(p.experts && q.fprop && q.dgrad),
            };
            copies * size * p.numel()
        };
        self.model.params.iter().map(of).sum()
    }
}

/// Of a feed-forward block.
#[derive(Default)]
struct FeedForward {
    gradients: BlockGradients,
    /// The recomputed output of its activation function.
    restored: usize,
}

fn is_output(layer: &LayerDescription) -> bool {
    layer.name == "output" || layer.name.starts_with("mtp.")
}

/// Whether the backward of the feed-forward block frees a tensor before that of attention begins.
fn is_freed_first(t: &SavedTensor) -> bool {
    let name = t.name.as_str();
    matches!(
        name,
        "mlp.h"
            | "shared.h"
            | "experts.h"
            | "mlp_norm.x"
            | "mlp_post_norm.x"
            | "attn_post_norm.x"
            | "shared_gate.y"
    )
}
