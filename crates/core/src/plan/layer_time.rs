//! Time of one layer in one micro-batch, by part and pass.

use super::hardware::{GemmDtype, Hardware};
use super::kernel_time::{attention_seconds, gemm_seconds, memory_seconds};
use super::network::{GroupSpan, collective_seconds};
use crate::model::description::{Collective, Gemm, Group, LayerDescription, Pass, StepShape};
use ferrotron_comm::OpKind;
use ferrotron_engine::attention::Layout;
use ferrotron_engine::quant::LinearGemm;
use std::ops::{Add, AddAssign, Mul};

/// Seconds by what they are spent on.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Seconds {
    /// GEMMs and grouped GEMMs.
    pub gemm: f64,
    /// Core attention.
    pub attention: f64,
    /// Norms, activations, quantization, token permutation, loss.
    pub memory: f64,
    /// Tensor-parallel communication that is not hidden.
    pub tp: f64,
    /// Context-parallel communication that is not hidden.
    pub cp: f64,
    /// Expert-parallel communication that is not hidden.
    pub ep: f64,
    /// Waiting for the host.
    pub host: f64,
}

impl Seconds {
    /// All together.
    pub fn total(&self) -> f64 {
        self.compute() + self.tp + self.cp + self.ep + self.host
    }

    /// Kernels of computation.
    pub fn compute(&self) -> f64 {
        self.gemm + self.attention + self.memory
    }
}

impl Add for Seconds {
    type Output = Seconds;
    fn add(self, o: Seconds) -> Seconds {
        Seconds {
            gemm: self.gemm + o.gemm,
            attention: self.attention + o.attention,
            memory: self.memory + o.memory,
            tp: self.tp + o.tp,
            cp: self.cp + o.cp,
            ep: self.ep + o.ep,
            host: self.host + o.host,
        }
    }
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, o: Seconds) {
        *self = *self + o;
    }
}

impl Mul<f64> for Seconds {
    type Output = Seconds;
    fn mul(self, x: f64) -> Seconds {
        Seconds {
            gemm: self.gemm * x,
            attention: self.attention * x,
            memory: self.memory * x,
            tp: self.tp * x,
            cp: self.cp * x,
            ep: self.ep * x,
            host: self.host * x,
        }
    }
}

/// Time of a layer: forward, and backward split as zero-bubble schedules split it. What is recomputed is part of `input`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerTime {
    /// Forward.
    pub forward: Seconds,
    /// Input gradient.
    pub input: Seconds,
    /// Weight gradient.
    pub weight: Seconds,
}

impl LayerTime {
    /// Forward and backward.
    pub fn total(&self) -> Seconds {
        self.forward + self.input + self.weight
    }
}

impl AddAssign for LayerTime {
    fn add_assign(&mut self, o: LayerTime) {
        self.forward += o.forward;
        self.input += o.input;
        self.weight += o.weight;
    }
}

/// The time of a layer of a description.
pub(super) fn layer_time(
    hw: &Hardware,
    shape: &StepShape,
    layer: &LayerDescription,
    dtype: GemmDtype,
) -> LayerTime {
    let mut out = LayerTime::default();
    let mut recomputed = Seconds::default();
    for g in &layer.gemms {
        let seconds = gemm_seconds(hw, g, dtype, shape.micro_batches > 1);
        match g.gemm {
            LinearGemm::Fprop => out.forward.gemm += seconds,
            LinearGemm::Dgrad => out.input.gemm += seconds,
            LinearGemm::Wgrad => out.weight.gemm += seconds,
        }
        if g.recomputed {
            recomputed.gemm += seconds;
        }
    }
    if let Some(a) = &layer.attention {
        let (count, length) = match &shape.micro_batch {
            Layout::Rows { count, len } => (*count as f64, *len as f64),
            Layout::Packed { offsets } => (1.0, offsets.last().copied().unwrap_or(0) as f64),
        };
        let tokens = count * length / shape.ranks.cp.size as f64;
        let [forward, backward] = attention_seconds(hw, a, tokens, length);
        out.forward.attention += forward;
        out.input.attention += backward;
        if shape.recompute.layer || shape.recompute.attention {
            recomputed.attention += forward;
        }
    }
    let moved = MovedBytes::of(shape, layer, dtype);
    out.forward.memory += memory_seconds(hw, moved.forward, moved.kernels);
    out.input.memory += memory_seconds(hw, moved.backward, moved.kernels);
    recomputed.memory += memory_seconds(hw, moved.recomputed, moved.recomputed_kernels);
    // Tokens sent to experts of other ranks are counted on the host.
    let moe = shape.ranks.ep.size > 1
        && layer.gemms.iter().any(|g| g.experts > 1 || g.names[0].contains(".experts."));
    if moe {
        out.forward.host += hw.moe_sync_us * 1e-6;
        out.input.host += hw.moe_sync_us * 1e-6;
    }
    for c in &layer.collectives {
        let seconds = match (c.group, c.kind) {
            (Group::EtpEp, OpKind::AllToAll) => dispatch_seconds(hw, shape, c),
            _ => collective_seconds(hw, &shape.ranks, c),
        };
        let part = match c.pass {
            Pass::Forward => &mut out.forward,
            Pass::Recompute => &mut recomputed,
            Pass::Backward => &mut out.input,
        };
        add_exposed(hw, part, c, seconds);
    }
    // A ring of context parallelism is hidden by the attention of the step before.
    for part in [&mut out.forward, &mut out.input, &mut recomputed] {
        part.cp = (part.cp - 0.9 * part.attention).max(0.05 * part.cp);
    }
    out.input += recomputed;
    out
}

/// Seconds of an all-to-all to or from experts. Of the k experts of a token, spread over n domains, n·(1 − (1 − 1/n)^k) domains are
/// distinct: so often it crosses the network where each domain gets it once.
fn dispatch_seconds(hw: &Hardware, shape: &StepShape, c: &Collective) -> f64 {
    let span = GroupSpan::of(c.group, &shape.ranks);
    let all = span.seconds(hw, c.kind, c.bytes);
    let domains = span.size as f64 / span.in_domain(hw) as f64;
    let Some(moe) = shape.model.moe.as_ref().filter(|_| hw.dispatch_per_domain && domains > 1.0) else {
        return all;
    };
    let k = moe.topk as f64;
    let distinct = domains * (1.0 - (1.0 - 1.0 / domains).powf(k));
    span.seconds(hw, c.kind, (c.bytes as f64 * (distinct / k).min(1.0)) as u64)
}

/// Adds what computation does not hide.
fn add_exposed(hw: &Hardware, part: &mut Seconds, c: &Collective, seconds: f64) {
    match c.group {
        Group::Cp => part.cp += seconds,
        Group::EtpEp | Group::Etp => part.ep += seconds * (1.0 - hw.overlap.ep),
        _ => part.tp += seconds * (1.0 - hw.overlap.tp),
    }
}

/// Bytes that memory-bound kernels of a layer read and write.
struct MovedBytes {
    forward: f64,
    backward: f64,
    recomputed: f64,
    /// Kernels of one pass, and of what is recomputed.
    kernels: f64,
    recomputed_kernels: f64,
}

impl MovedBytes {
    fn of(shape: &StepShape, layer: &LayerDescription, dtype: GemmDtype) -> MovedBytes {
        let m = &shape.model;
        let size = shape.dtype.size() as f64;
        let rows = shape.micro_batch.tokens() as f64 / (shape.ranks.cp.size * shape.ranks.tp.size) as f64;
        let h = m.hidden as f64;
        let again = shape.recompute;
        let mut out = MovedBytes {
            forward: 0.0,
            backward: 0.0,
            recomputed: 0.0,
            kernels: 0.0,
            recomputed_kernels: 0.0,
        };
        let mut add = |forward: f64, backward: f64, kernels: f64, recomputed: bool| {
            out.forward += forward;
            out.backward += backward;
            out.kernels += kernels;
            if recomputed {
                out.recomputed += forward;
                out.recomputed_kernels += kernels;
            }
        };
        if layer.attention.is_some() {
            let norms = [m.pre_norms, m.post_norms].iter().filter(|on| **on).count() as f64 * 2.0;
            // With the residual addition a norm moves four widths each way.
            add(
                norms * 4.0 * rows * h * size,
                norms * 4.0 * rows * h * size,
                norms,
                again.layer || again.norm,
            );
            let q = (m.heads * m.head_dim + 2 * m.kv_heads * m.head_dim) as f64 / shape.ranks.tp.size as f64;
            let attended = rows * shape.ranks.tp.size as f64;
            let rotates = (0..m.layers).any(|i| m.rope(i).is_some());
            let passes = 2.0 * (f64::from(u8::from(m.qk_norm)) + f64::from(u8::from(rotates)));
            add(
                passes * attended * q * size,
                passes * attended * q * size,
                2.0,
                again.layer || again.attention,
            );
        }
        for g in layer.gemms.iter().filter(|g| g.gemm == LinearGemm::Fprop) {
            let name = g.names[0].as_str();
            let experts = name.contains(".experts.");
            let elements = g.m as f64 * g.k as f64;
            if name.ends_with(".down") {
                // Without a gate the GEMM before it writes the activation beside its result.
                let (forward, backward) = if m.gated { (3.0, 5.0) } else { (1.0, 3.0) };
                let recomputed = again.layer || again.mlp || again.activation;
                add(forward * elements * size, backward * elements * size, 1.0, recomputed);
            }
            if experts && name.ends_with(".down") {
                // Dispatch and combine: a row per token on one side, one per selected expert on the other.
                let moved = 2.0 * (g.m as f64 + rows) * g.n as f64 * size;
                add(moved, moved, 6.0, again.layer || again.mlp);
            }
            if name.ends_with(".router") {
                add(
                    4.0 * g.m as f64 * g.n as f64 * 4.0,
                    2.0 * g.m as f64 * g.n as f64 * 4.0,
                    6.0,
                    again.layer,
                );
            }
            if name == "head" || name == "embed.tokens" {
                // The loss reads the logits twice and writes their gradient.
                add(3.0 * g.m as f64 * g.n as f64 * size, 0.0, 3.0, g.recomputed);
            }
            if g.fp8 {
                let trained = layer.gemms.iter().any(|w| w.gemm == LinearGemm::Wgrad && w.names == g.names);
                let (forward, backward) = quantized_bytes(g, dtype, trained);
                add(forward, backward, 2.0, g.recomputed);
            }
        }
        out
    }
}

/// Bytes moved to quantize input and output gradient of a linear layer: each is read in 2 bytes and written in the orientations
/// that GEMMs read, of which weight gradients need the second. Weights are quantized after the optimizer's step.
fn quantized_bytes(g: &Gemm, dtype: GemmDtype, trained: bool) -> (f64, f64) {
    let Some([read, written]) = cast_bytes(dtype) else { return (0.0, 0.0) };
    let orientations = if trained { 2.0 } else { 1.0 };
    let (x, y) = (g.m as f64 * g.k as f64, g.m as f64 * g.n as f64);
    let each = read + orientations * written;
    (each * x, each * y)
}

/// Bytes that a cast reads of an element and writes in each orientation; none without a cast. Per-tensor scaling reads once more
/// for the amax, unless the kernel before has computed it, as half of them do.
pub(super) fn cast_bytes(dtype: GemmDtype) -> Option<[f64; 2]> {
    match dtype {
        GemmDtype::Bf16 => None,
        GemmDtype::Fp8 => Some([3.0, 1.0]),
        GemmDtype::Mxfp8 => Some([2.0, 1.0]),
        GemmDtype::Nvfp4 => Some([2.0, 0.6]),
    }
}
