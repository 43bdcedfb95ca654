//! A mixture-of-experts layer: router, token dispatch, experts, shared expert.
//!
//! Dropless all-to-all dispatch sends as many rows as the router decides. The description assumes balanced routing:
//! every expert gets `T·k/E` rows of each rank, or its capacity if that is less. It is exact where that cannot vary:
//! capacity padded per rank, all-gather dispatch, experts on one rank, and `k = E`.

use super::Pass;
use super::layer::{Input, LayerBuilder};
use super::shape::Group;
use crate::model::MoeConfig;
use ferrotron_comm::OpKind;
use ferrotron_engine::ParamSpec;
use ferrotron_engine::attention::Layout;
use ferrotron_engine::moe::{AuxLossKind, Dispatcher, RouterDtype, RoutingMethod};
use ferrotron_kernels::{BLOCK, capacity};
use ferrotron_tensor::DType;

/// How the rows of a micro-batch reach the experts of this rank.
struct DispatchedRows {
    /// Rows as they arrive: tokens, or one row for each selection after an all-to-all.
    arrived: usize,
    /// Selections of the experts on this rank.
    routed: usize,
    /// Rows this rank sends to each other rank of the group, of all-to-all dispatch.
    to_each: Option<usize>,
    /// Must ranks exchange the tokens per expert first?
    counts: bool,
}

impl LayerBuilder<'_> {
    /// The MoE block declared as `<name>.*`.
    pub(super) fn moe(&mut self, name: &str, moe: &MoeConfig) {
        let (h, rows, dtype) = (self.shape.model.hidden, self.rows.local, self.shape.dtype);
        let training = self.shape.options.moe_training.clone();
        // The router keeps the block's input, so recomputing norms frees nothing here.
        let router_input = if training.jitter > 0.0 { "moe.jittered" } else { "normed_mlp" };
        self.linear(&format!("{name}.router"), Input::Kept(router_input));
        let logits = if training.router_dtype == RouterDtype::Model { dtype } else { DType::F32 };
        self.save("moe.logits", &[rows, moe.experts], logits);
        self.save_for_recompute("moe.topk", &[rows, moe.topk], DType::I32);
        self.router_losses(moe);
        let width = moe.latent.unwrap_or(h);
        if moe.latent.is_some() {
            self.linear(&format!("{name}.latent_down"), Input::Kept("normed_mlp"));
        }
        self.experts(&format!("{name}.experts"), moe, width);
        if moe.latent.is_some() {
            self.linear(&format!("{name}.latent_up"), Input::Kept("moe.combined"));
        }
        if moe.shared_ffn.is_some() {
            let keep = self.shape.recomputes_norms();
            let input = if keep { Input::Kept("normed_mlp") } else { Input::Saved("normed_mlp") };
            self.mlp(&format!("{name}.shared"), input, true);
        }
        if moe.shared_gate {
            self.linear(&format!("{name}.shared_gate"), Input::Kept("normed_mlp"));
            self.save("shared_gate.logits", &[rows, 1], dtype);
            self.save("shared_gate.probs", &[rows, 1], DType::F32);
            self.save("shared_gate.y", &[rows, h], dtype);
        }
    }

    /// Collectives of auxiliary losses and of a capacity that all ranks of a micro-batch share.
    fn router_losses(&mut self, moe: &MoeConfig) {
        let training = self.shape.options.moe_training.clone();
        let (rows, e, k) = (self.rows.local, moe.experts, moe.topk);
        let sequences = match &self.shape.micro_batch {
            Layout::Rows { count, .. } => *count,
            Layout::Packed { offsets } => offsets.len().saturating_sub(1),
        };
        for (kind, _) in &training.balance {
            let group = if *kind == AuxLossKind::Global { Group::TpDpCp } else { Group::TpCp };
            let segments = if *kind == AuxLossKind::Sequence { sequences.max(1) } else { 1 };
            let bytes = self.all_reduce(group, segments * e * DType::I64.size());
            self.send(group, OpKind::AllReduce, bytes, Pass::Forward);
            self.save_for_recompute(&format!("moe.aux_weights.{kind:?}"), &[segments, e], DType::F32);
        }
        let others = self.shape.ranks.size(Group::TpCp) - 1;
        if training.z_loss > 0.0 {
            let bytes = self.all_reduce(Group::TpCp, 2 * DType::F64.size());
            self.send(Group::TpCp, OpKind::AllReduce, bytes, Pass::Forward);
            self.save_for_recompute("moe.z_loss", &[2], DType::F64);
        }
        if matches!(training.routing_method, RoutingMethod::Quantiles { .. }) {
            let dtype = match training.router_dtype {
                RouterDtype::Model => self.shape.dtype,
                _ => DType::F32,
            };
            let bytes = (others * rows * e * dtype.size()) as u64;
            self.send(Group::TpCp, OpKind::AllGather, bytes, Pass::Forward);
        }
        if training.capacity.is_some_and(|c| !c.per_rank) {
            // Indices i32 and probabilities f32.
            for _ in 0..2 {
                self.forward(Group::TpCp, OpKind::AllGather, (others * rows * k * 4) as u64);
            }
        }
    }

    fn dispatched(&self, moe: &MoeConfig) -> DispatchedRows {
        let training = &self.shape.options.moe_training;
        let (rows, k) = (self.rows.local, moe.topk);
        let (ep, etp) = (self.shape.ranks.ep.size, self.shape.ranks.etp.size);
        let group = ep * etp;
        match training.dispatcher {
            _ if group == 1 => {
                DispatchedRows { arrived: rows, routed: rows * k, to_each: None, counts: false }
            }
            Dispatcher::AllGather => {
                let arrived = rows * group;
                DispatchedRows { arrived, routed: arrived * k / ep, to_each: None, counts: false }
            }
            Dispatcher::AllToAll => {
                let own = moe.experts / ep;
                let bound = training.capacity.map(|c| (c, capacity(rows, k, moe.experts, c.factor)));
                let (each, counts) = match bound {
                    // Every expert gets its capacity of each rank, and one row more.
                    Some((c, bound)) if c.pad && c.per_rank => (own * (bound + 1), false),
                    Some((_, bound)) => ((rows * k / ep).min(own * bound), true),
                    None => (rows * k / ep, true),
                };
                let arrived = each * group;
                DispatchedRows { arrived, routed: arrived, to_each: Some(each), counts }
            }
        }
    }

    /// Grouped GEMMs of this rank's experts, and the dispatch of tokens to and from them.
    fn experts(&mut self, name: &str, moe: &MoeConfig, width: usize) {
        let (gated, dtype) = (self.shape.model.gated, self.shape.dtype);
        let own = moe.experts / self.shape.ranks.ep.size;
        let first = self.shape.ranks.ep.rank * own;
        let up = format!("{name}.{first}.{}", if gated { "gate" } else { "up" });
        let (Some(up), Some(down)) = (self.weight(&up), self.weight(&format!("{name}.{first}.down"))) else {
            return;
        };
        let adapters = [up, down].map(|spec| self.adapter(spec));
        let scaled = [up, down].map(|spec| self.is_dora(spec).then(|| spec.matrix()[0]));
        let [up, down] = &[up, down].map(|spec| self.without_wgrad(spec));
        let biased = moe.bias;
        let rows = self.dispatched(moe);
        self.gemms(up, rows.routed);
        self.gemms(down, rows.routed);
        self.dispatch(moe, (up, down), (width, biased), &rows);
        let align = if up.quant.is_some() || down.quant.is_some() { BLOCK } else { 1 };
        // Rows sorted by expert; memory is for the worst alignment.
        let selected = if rows.to_each.is_some() { rows.arrived } else { rows.arrived * moe.topk };
        let sorted = (selected + own * (align - 1)).next_multiple_of(align);
        let names = ["lora.experts.up", "lora.experts.down"];
        for ((adapter, scaled), name) in adapters.into_iter().zip(scaled).zip(names) {
            if let Some(out) = scaled {
                self.save(&format!("{name}.unscaled"), &[sorted, out], dtype);
            }
            if let Some([a, b]) = adapter {
                self.gemms(a, rows.routed);
                self.gemms(b, rows.routed);
                self.save(name, &[sorted, a.matrix()[0]], dtype);
            }
        }
        let ([inner, _], [_, ffn]) = (up.matrix(), down.matrix());
        self.save("experts.h", &[sorted, inner], dtype);
        self.save("experts.probs", &[sorted], DType::F32);
        match up.quant {
            // Tokens arrive in FP8 and are saved in arrival order.
            Some(q) if sends_fp8_tokens(up) => self.save_fp8("experts.x", [rows.arrived, width], &q),
            Some(q) if q.wgrad && !q.recipe.emulated() => {
                self.save_fp8("experts.x", [width, sorted], &q);
            }
            // Kept in arrival order and sorted again. On one rank that is the input of the block, which the router keeps.
            _ if self.shape.recomputes_norms() && rows.arrived < sorted => {
                if self.shape.ranks.ep.size * self.shape.ranks.etp.size > 1 || moe.latent.is_some() {
                    self.save("experts.x", &[rows.arrived, width], dtype);
                }
            }
            _ => self.save("experts.x", &[sorted, width], dtype),
        }
        match down.quant {
            _ if self.shape.recompute.activation => {}
            Some(q) if q.wgrad && !q.recipe.emulated() => {
                self.save_fp8("experts.activation", [ffn, sorted], &q);
            }
            _ => self.save("experts.activation", &[sorted, ffn], dtype),
        }
    }

    /// Collectives of dispatch and combine, forward and backward.
    fn dispatch(
        &mut self,
        moe: &MoeConfig,
        (up, down): (&ParamSpec, &ParamSpec),
        (width, biased): (usize, bool),
        rows: &DispatchedRows,
    ) {
        let element = self.shape.dtype.size();
        let ranks = &self.shape.ranks;
        let (group, etp) = (ranks.size(Group::EtpEp), ranks.etp.size);
        let fp8_width = |fp8: bool| if fp8 { width.next_multiple_of(16) } else { width * element };
        let x = fp8_width(sends_fp8_tokens(up));
        let dy =
            fp8_width(down.quant.is_some_and(|q| q.recipe.per_tensor() && q.dgrad && q.wgrad) && !biased);
        // Current scaling: amax of what is dispatched over all ranks it may reach, of what experts make over theirs.
        let amax = |used: &dyn Fn(&ferrotron_engine::quant::LinearQuant) -> bool, spec: &ParamSpec| {
            spec.quant.is_some_and(|q| q.recipe.measures() && used(&q))
        };
        let tokens = amax(&|q| q.fprop || q.wgrad, up);
        let activations = amax(&|q| q.fprop || q.wgrad, down);
        let gradients = amax(&|q| q.dgrad || q.wgrad, down);
        let inner_gradients = amax(&|q| q.dgrad || q.wgrad, up);
        let over_tp = !group.is_multiple_of(ranks.tp.size);
        for (used, spans_dispatch, is_forward) in [
            (tokens, true, true),
            (activations, false, true),
            (gradients, true, false),
            (inner_gradients, false, false),
        ] {
            let groups: &[Group] = match spans_dispatch {
                true if over_tp => &[Group::Tp, Group::EtpEp],
                true => &[Group::EtpEp],
                false => &[Group::Etp],
            };
            for g in groups.iter().filter(|_| used) {
                let bytes = self.all_reduce(*g, 4);
                match is_forward {
                    true => self.forward(*g, OpKind::AllReduce, bytes),
                    false => self.backward(*g, OpKind::AllReduce, bytes),
                }
            }
        }
        if group == 1 {
            return;
        }
        let others = group - 1;
        let (local, k) = (self.rows.local, moe.topk);
        match rows.to_each {
            Some(each) => {
                if rows.counts {
                    let counts = moe.experts * etp * 4 / group * others;
                    self.forward(Group::EtpEp, OpKind::AllToAll, counts as u64);
                }
                let bytes = |row: usize| (others * each * row) as u64;
                // Tokens, probabilities and results; gradients of results, of tokens and of probabilities.
                for row in [x, 4, width * element] {
                    self.forward(Group::EtpEp, OpKind::AllToAll, bytes(row));
                }
                for row in [dy, width * element, 4] {
                    self.backward(Group::EtpEp, OpKind::AllToAll, bytes(row));
                }
            }
            None => {
                let bytes = |row: usize| (others * local * row) as u64;
                // Indices, probabilities and tokens are gathered, results reduce-scattered.
                for row in [4 * k, 4 * k, x] {
                    self.forward(Group::EtpEp, OpKind::AllGather, bytes(row));
                }
                self.forward(Group::EtpEp, OpKind::ReduceScatter, bytes(width * element));
                self.backward(Group::EtpEp, OpKind::AllGather, bytes(dy));
                for row in [width * element, 4 * k] {
                    self.backward(Group::EtpEp, OpKind::ReduceScatter, bytes(row));
                }
            }
        }
    }
}

/// Whether tokens are quantized before dispatch: one FP8 tensor then serves fprop and wgrad.
fn sends_fp8_tokens(up: &ParamSpec) -> bool {
    up.quant.is_some_and(|q| q.recipe.per_tensor() && q.fprop && q.wgrad)
}
