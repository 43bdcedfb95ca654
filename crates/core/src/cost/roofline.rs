//! The least time a training step can take, part by part: FLOPs over the speed of a large GEMM, bytes that must move
//! once over the speed of memory. What the recipe recomputes counts again.

use crate::Result;
use crate::config::{MasterDtype, OptimizerKind, Resolved};
use crate::model::description::{Gemm, ModelDescription, StepShape};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::quant::LinearGemm;

/// Speeds of the device, measured in the same run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// TFLOP/s of GEMMs in the compute dtype.
    pub gemm: f64,
    /// TFLOP/s of FP8 GEMMs, of fprop and of dgrad and wgrad; none where the recipe has none.
    pub fp8_gemm: Option<(f64, f64)>,
    /// TFLOP/s of attention alone, forward and backward.
    pub attention: (f64, f64),
    /// GB/s of memory, reads and writes counted.
    pub memory: f64,
}

/// A part of a training step: kernels that share a floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelCategory {
    /// Dense GEMMs in the compute dtype.
    Gemm,
    /// Dense FP8 GEMMs.
    Fp8Gemm,
    /// Casts to FP8, amax and transposes.
    Quantize,
    /// Core attention.
    Attention,
    /// Residual additions and norms.
    Norms,
    /// Activation functions of dense MLPs.
    Activation,
    /// Grouped GEMMs of experts, whatever their precision.
    GroupedGemm,
    /// Activation functions and biases of experts.
    ExpertActivation,
    /// Token permutation to experts and back.
    Permute,
    /// Routing and its losses.
    Router,
    /// Rotary embedding.
    Rope,
    /// Cross-entropy.
    Loss,
    /// Optimizer and gradient norm.
    Optimizer,
    /// Kernels without a floor of their own.
    Other,
}

impl KernelCategory {
    /// Name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            KernelCategory::Gemm => "GEMMs",
            KernelCategory::Fp8Gemm => "FP8 GEMMs",
            KernelCategory::Quantize => "FP8 quantization",
            KernelCategory::Attention => "attention",
            KernelCategory::Norms => "residual and norms",
            KernelCategory::Activation => "activation",
            KernelCategory::GroupedGemm => "grouped GEMMs",
            KernelCategory::ExpertActivation => "activation of experts",
            KernelCategory::Permute => "token permutation",
            KernelCategory::Router => "router",
            KernelCategory::Rope => "RoPE",
            KernelCategory::Loss => "loss",
            KernelCategory::Optimizer => "optimizer",
            KernelCategory::Other => "everything else",
        }
    }
}

/// The least seconds of each part of a step of `tokens` tokens in documents of `context`, on one device.
pub fn floors(r: &Resolved, tokens: u64, context: usize, c: Ceilings) -> Result<Vec<(KernelCategory, f64)>> {
    let m = &r.model;
    let batch = Layout::Rows { count: tokens as usize / context.max(1), len: context };
    let shape = StepShape::whole_model(r, batch);
    let work = Work::of(&shape, &ModelDescription::new(&shape)?);
    let attention_flops = tokens as f64 * m.flops_per_token(context as f64)?.attention / 3.0;
    let (tokens, size) = (tokens as f64, shape.dtype.size() as f64);
    let (h, l, v) = (m.hidden as f64, m.layers as f64, m.vocab as f64);
    let (fprop, backward) = c.fp8_gemm.unwrap_or((c.gemm, c.gemm));
    let gemm = |w: &GemmFlops| (w.bf16 / c.gemm + w.fp8_fprop / fprop + w.fp8_backward / backward) / 1e12;
    let dense = GemmFlops { bf16: 0.0, ..work.dense };
    let again = r.config.train.recompute.modules();
    let times = |recomputed: bool| if recomputed { 2.0 } else { 1.0 };
    // Forward has two GEMMs of the scores, backward five.
    let forwards = times(again.layer || again.attention);
    let attention = attention_flops * (forwards / c.attention.0 + 2.5 / c.attention.1) / 1e12;
    let bytes = |n: f64| n / (c.memory * 1e9);
    let norms = [m.pre_norms, m.post_norms].map(|on| if on { 2.0 } else { 0.0 }).iter().sum::<f64>();
    // Reads and writes of forward and backward.
    let forwards = times(again.layer || again.mlp || again.activation);
    let widths = if m.gated { forwards * 3.0 + 5.0 } else { forwards * 2.0 + 3.0 };
    // With a residual addition forward moves four widths, as does backward.
    let norm_widths = 4.0 * times(again.layer || again.norm) + 4.0;
    let rotated = match &m.mla {
        None => (m.heads + 2 * m.kv_heads) * m.head_dim,
        Some(l) => (m.heads + 1) * l.rope_dim,
    };
    let rotates = (0..m.layers).filter(|i| m.rope(*i).is_some()).count() as f64;
    Ok(vec![
        (KernelCategory::Gemm, work.dense.bf16 / (c.gemm * 1e12)),
        (KernelCategory::Fp8Gemm, gemm(&dense)),
        (KernelCategory::Quantize, bytes(work.quantized_bytes)),
        (KernelCategory::Attention, attention),
        (KernelCategory::Norms, bytes((norms * l * norm_widths + 8.0) * tokens * h * size)),
        (KernelCategory::Activation, bytes(work.activations * widths * size)),
        (KernelCategory::GroupedGemm, gemm(&work.experts)),
        (KernelCategory::ExpertActivation, bytes(work.expert_activations * widths * size)),
        (KernelCategory::Permute, bytes(work.permuted * size)),
        (KernelCategory::Router, bytes(work.router_logits * 4.0)),
        (KernelCategory::Rope, bytes(rotates * 4.0 * tokens * rotated as f64 * size)),
        (KernelCategory::Loss, bytes(3.0 * tokens * v * size)),
        (KernelCategory::Optimizer, bytes(m.parameters() as f64 * update_bytes(r))),
        (KernelCategory::Other, 0.0),
    ])
}

/// Bytes that the optimizer moves for a parameter: master and moments are read and written, the gradient is read twice
/// (once for its norm), the weight written; it is read too where it is the upper half of the master.
pub(crate) fn update_bytes(r: &Resolved) -> f64 {
    let o = &r.config.optimizer;
    let size = r.config.precision.dtype.dtype().size() as f64;
    let weight = if size < 4.0 { size } else { 0.0 };
    let moments = if matches!(o.kind, OptimizerKind::AdamW | OptimizerKind::Adam) { 2.0 } else { 1.0 };
    let master = match o.master_dtype {
        MasterDtype::F32 => 2.0 * 4.0 + weight,
        MasterDtype::Remainder => 2.0 * 2.0 + 2.0 * weight,
    };
    master + 2.0 * moments * o.state_dtype.bytes() + 2.0 * 4.0
}

/// FLOPs by precision.
#[derive(Clone, Copy, Debug, Default)]
struct GemmFlops {
    bf16: f64,
    fp8_fprop: f64,
    fp8_backward: f64,
}

impl GemmFlops {
    fn add(&mut self, g: &Gemm) {
        *match (g.fp8, g.gemm) {
            (false, _) => &mut self.bf16,
            (true, LinearGemm::Fprop) => &mut self.fp8_fprop,
            (true, _) => &mut self.fp8_backward,
        } += g.flops();
    }
}

/// Sums over the layers of a model.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    dense: GemmFlops,
    experts: GemmFlops,
    /// Bytes moved to quantize operands: each is read once and written for each orientation.
    quantized_bytes: f64,
    /// Elements of the outputs of activation functions, of dense MLPs and of experts.
    activations: f64,
    expert_activations: f64,
    /// Elements that token permutation reads and writes, forward and backward.
    permuted: f64,
    /// Router logits, written and read, and their gradients.
    router_logits: f64,
}

impl Work {
    fn of(shape: &StepShape, description: &ModelDescription) -> Work {
        let mut work = Work::default();
        for g in description.gemms() {
            let name = g.names[0].as_str();
            let of = if name.contains(".moe.experts.") { &mut work.experts } else { &mut work.dense };
            of.add(g);
            // Recomputation ends with what backward reads: not with the last linear of an MLP.
            if g.recomputed && !name.ends_with(".mlp.down") {
                of.add(g);
            }
        }
        let tokens = shape.micro_batch.tokens() as f64;
        let fprop = description.gemms().filter(|g| g.gemm == LinearGemm::Fprop);
        for g in fprop {
            let (rows, i, o) = (g.m as f64, g.k as f64, g.n as f64);
            let (name, elements) = (g.names[0].as_str(), rows * i);
            let is = |module: &str| name.ends_with(module);
            let experts = name.contains(".moe.experts.");
            match () {
                () if experts && is(".down") => {
                    work.expert_activations += elements;
                    // Dispatch and combine: one row per token on one side, one per selected expert on the other.
                    work.permuted += 4.0 * (rows + tokens) * o;
                }
                () if is(".mlp.down") || is(".shared.down") => work.activations += elements,
                () if is(".moe.router") => work.router_logits += 4.0 * rows * o,
                () => {}
            }
            let quant = description.quant(name).filter(|q| !q.recipe.emulated());
            let Some(q) = quant else { continue };
            // Two bytes are read and one written for each orientation.
            let uses = |a: bool, b: bool| match u8::from(a) + u8::from(b) {
                0 => 0.0,
                n => 2.0 + f64::from(n),
            };
            // The side of experts that faces the tokens is quantized before they are permuted.
            let (in_rows, out_rows) = match experts {
                true if is(".down") => (rows, tokens),
                true => (tokens, rows),
                false => (rows, rows),
            };
            work.quantized_bytes += in_rows * i * uses(q.fprop, q.wgrad)
                + out_rows * o * uses(q.dgrad, q.wgrad)
                + g.experts as f64 * i * o * uses(q.fprop, q.dgrad);
        }
        work
    }
}
