//! How much ranks send each other in a training step: counted as it happens, and predicted from sizes.
//!
//! All numbers are bytes that one rank sends, by the formulas of ring algorithms: of a tensor of B bytes over n ranks,
//! (n−1)/n·B for an all-gather or reduce-scatter and 2(n−1)/n·B for an all-reduce; messages are as long as they are.
//!
//! With micro-batches of N rows on a rank's share of the sequences (sequences padded to 2c tokens each where c > 1, rows
//! padded to t), hidden size h, e bytes per element:
//!
//! - **tp** (t ranks, tokens spread between blocks). Moving the rows of the residual stream once, R = (t−1)·(N/t)·h·e. A
//!   layer moves them ten times: into q, k, v, out of attention, into and out of the MLP (4); and backward their gradients
//!   the other way (4) and the two inputs once more for the weights (2). The embedding moves them twice, the head three
//!   times, and sums of the loss are (t−1)·N·16 bytes. Computing a block again repeats its two. Latent attention moves
//!   narrow rows into its heads instead: forward their r_q + r_kv channels (h without r_q) and the b that keys share,
//!   backward all of them the other way and the first once more. Once a step: an all-reduce
//!   of the f32 gradient of every weight that all ranks hold, an all-gather of that of key heads that some share.
//!   With 8-bit products of one scale per tensor, rows that become bytes before they travel are 1 byte per element instead
//!   of e: into q, k, v and the MLP, those two once more, and gradients into the backward of the two other maps, and into a
//!   narrow head, twice; sums are not. Current scaling agrees on every magnitude by an all-reduce of 4 bytes: of each map
//!   input and gradient of every micro-batch (the input again where its block is computed again), and by one of all weights
//!   once a step. Delayed scaling has one all-reduce of 3·4 bytes for each map a step, over tp and over copies. With scales of
//!   blocks, rows that go forward are bytes, too, with 4 bytes of scale for each 128; inputs once more are where a rank has a
//!   multiple of 128 rows, and gradients then travel as two kinds of bytes, in place of numbers of as many.
//! - **cp** (c ranks): with L = padded tokens / c and K = L·g·(d_k + d_v) keys and values of the rank's g heads, a layer sends on
//!   a ring (c−1)·K·e forward, (c−2)·K·e + (c−1)·K·4 backward (gradients travel in f32, own keys do not); gathered
//!   (c−1)·K·e forward, and backward that and (c−1)·K·4; by heads (c−1)/c·L·(n+g)·(d_k + d_v)·e each way.
//! - Attention in 8 bits agrees on magnitudes of q, k and v by an all-reduce of 3·4 bytes a layer over tp, and one over cp.
//! - **pp**: (N/t)·h·e for each micro-batch and stage boundary, forward; the same on **back** for gradients.
//! - **copies** (dp·cp ranks): an all-reduce of all f32 gradients of the rank, padding included; with ZeRO-1 a
//!   reduce-scatter of those, an all-gather of weights and the square of the norm, one f64. ZeRO-2 has a reduce-scatter for
//!   every micro-batch (and as often the sums over tp that are otherwise once a step). The loss is one f64. Weights that are
//!   bytes travel as such, 1 byte each, where one scale holds for all of a tensor; with scales of blocks they travel as
//!   numbers. With current scaling and ZeRO, ranks agree on the largest magnitude in f32 of every weight of narrow products.
//!   Delayed scaling agrees on three magnitudes of every map.
//!   (What narrow products send over tp is not predicted.)
//! - **ends**: the f32 gradient of a table that the first and the last stage have (a tied embedding, or one that predictions
//!   of further tokens look them up in); with ZeRO of the rank's part of it.
//! - **dp**: the number of tokens, one f64. **model** (tp·pp ranks): the square of the norm, one f64.
//! - Each of D predictions of further tokens is a layer with an embedding before it and a head behind it; it adds one f64 to
//!   the number of tokens and to the loss. (What detached ones spare is not predicted, nor what mixtures send.)

use crate::Result;
use crate::model::ModelConfig;
use crate::pipeline::Stage;
use ferrotron_comm::{Communicator, OpKind, Volume};
use ferrotron_engine::attention::Layout;
use ferrotron_engine::data_parallel::{Bucket, BucketPlan, BucketSplit, Placement, Span};
use ferrotron_engine::quant::{LinearQuant, Method, Policy, Role};
use ferrotron_engine::{GroupRank, ParamSpec, Rank, Recompute, Split, Tokens};
use ferrotron_tensor::DType;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes by group.
pub type ByGroup = BTreeMap<&'static str, u64>;

/// What a rank has sent, by group and kind of operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    groups: Vec<(&'static str, Volume)>,
}

impl Traffic {
    /// Everything so far, on the groups of a rank and on the whole world.
    pub fn of(rank: &Rank) -> Traffic {
        let world = rank.world.all();
        let groups: [(&'static str, &Communicator); 13] = [
            ("tp", &rank.tp),
            ("cp", &rank.cp),
            ("pp", &rank.pp),
            ("back", &rank.pp_backward_group),
            ("dp", &rank.dp),
            ("copies", &rank.dp_cp_group),
            ("ends", &rank.embedding_group),
            ("batch", &rank.tp_cp_group),
            ("step", &rank.tp_dp_cp_group),
            ("experts", &rank.etp_ep_group),
            ("etp", &rank.etp),
            ("expert copies", &rank.expert_dp_group),
            ("world", &world),
        ];
        // A group that is the same as another is that one, and counted there.
        let own = |(name, group): &(&'static str, &Communicator)| group.name() == *name;
        Traffic { groups: groups.into_iter().filter(own).map(|(name, g)| (name, g.volume())).collect() }
    }

    /// What was added since `earlier`.
    pub fn since(&self, earlier: &Traffic) -> Traffic {
        let pairs = self.groups.iter().zip(&earlier.groups);
        Traffic { groups: pairs.map(|((name, now), (_, then))| (*name, now.since(then))).collect() }
    }

    /// Bytes of every group that sent any.
    pub fn by_group(&self) -> ByGroup {
        self.groups.iter().map(|(name, v)| (*name, v.total())).filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// The same by kind of operation, `{"tp": {"all-gather": 4096}}`.
    pub fn by_kind(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let kinds = |v: &Volume| -> BTreeMap<String, u64> {
            let all = OpKind::ALL.iter().map(|k| (k.name().to_string(), v.bytes(*k)));
            all.filter(|(_, bytes)| *bytes > 0).collect()
        };
        let all = self.groups.iter().map(|(name, v)| (name.to_string(), kinds(v)));
        all.filter(|(_, kinds)| !kinds.is_empty()).collect()
    }

    /// Bytes altogether.
    pub fn total(&self) -> u64 {
        self.groups.iter().map(|(_, v)| v.total()).sum()
    }
}

/// Sizes of a training step, as one rank sees it.
#[derive(Clone, Copy)]
pub struct StepShape<'a> {
    /// The architecture.
    pub model: &'a ModelConfig,
    /// The rank among those that share every layer.
    pub tp: GroupRank,
    /// The rank among those that share every sequence.
    pub cp: GroupRank,
    /// Ranks that have other sequences.
    pub dp: usize,
    /// The rank's number among those with equal weights.
    pub dp_cp_rank: usize,
    /// Ranks of a pipeline.
    pub pp: usize,
    /// What this rank holds of the layers: its stages, one for each chunk.
    pub stages: &'a [Stage],
    /// The sequences of each of this rank's micro-batches, whole.
    pub batches: &'a [Layout],
    /// Type of compute.
    pub dtype: DType,
    /// What is computed again in backward.
    pub recompute: Recompute,
    /// What is narrow.
    pub policy: &'a Policy,
    /// What this rank holds of the weights.
    pub weights: &'a [ParamSpec],
    /// How their gradients lie in buckets, padding included.
    pub plan: &'a BucketPlan,
    /// What `copies` divide among them: 0 nothing, 1 optimizer state, 2 gradients too.
    pub zero: usize,
}

/// What this rank sends in the step; see the module's formulas. Groups that send nothing are absent.
pub fn predict(s: &StepShape) -> Result<ByGroup> {
    let mut out = ByGroup::new();
    let mut add = |group: &'static str, bytes: u64| {
        if bytes > 0 {
            *out.entry(group).or_default() += bytes;
        }
    };
    let (h, e) = (s.model.hidden as u64, s.dtype.size() as u64);
    let (t, c) = (s.tp.size as u64, s.cp.size as u64);
    // Bytes that rows are shorter by where they travel as 8-bit numbers.
    let mut fp8_savings = 0;
    // Layers that predict further tokens are like others, and each has an embedding before it and a head behind it.
    let further = |stage: &Stage| stage.mtp.clone().map(|d| s.model.layers + d).collect::<Vec<_>>();
    let blocks: Vec<usize> =
        s.stages.iter().flat_map(|stage| stage.layers.clone().chain(further(stage))).collect();
    let numbers = 8 * (1 + s.model.mtp_depth() as u64);
    for batch in s.batches {
        let tokens = Tokens::new(batch, s.cp, s.tp.size)?;
        let rows = tokens.rows().len() as u64;
        let local = tokens.layout().tokens() as u64 / c;
        let moved = (t - 1) * (rows / t) * h * e;
        for spec in s.weights.iter().filter(|_| t > 1) {
            let (channels, magnitudes) = narrow(s, spec, rows / t);
            fp8_savings += (t - 1) * (rows / t) * channels * (e - 1);
            add("tp", magnitudes * all_reduce(t, 4));
            add("tp", (t - 1) * scales(s, spec, rows / t));
        }
        let again = |on: bool| u64::from(on || s.recompute.layer);
        // Channels of a row that a layer moves: into and out of the MLP, the other way backward, the input once more.
        let (forward, backward) = attention_input_channels(s.model);
        let around_heads = (1 + again(s.recompute.attention)) * (forward + h) + backward + h;
        let mlp = 5 * h + again(s.recompute.mlp) * 2 * h;
        add("tp", blocks.len() as u64 * (t - 1) * (rows / t) * (around_heads + mlp) * e);
        for stage in s.stages {
            let depth = stage.mtp.len() as u64;
            add("tp", 2 * moved * (u64::from(stage.embedding) + depth));
            add("tp", (3 * moved + (t - 1) * rows * 16) * (u64::from(stage.loss) + depth));
            // The first stage of all gets nothing from before it, the last gives nothing on.
            add("pp", if stage.loss { 0 } else { rows / t * h * e });
            add("back", if stage.embedding { 0 } else { rows / t * h * e });
        }
        for layer in &blocks {
            let (forward, backward) = attention(s, *layer, local, e);
            let passes = 1 + u64::from(s.recompute.layer || s.recompute.attention);
            add("cp", forward * passes + backward);
            let name = match layer.checked_sub(s.model.layers) {
                None => format!("layers.{layer}.attn"),
                Some(d) => format!("mtp.{}.layer.attn", d.min(s.model.mtp.map_or(0, |m| m.modules() - 1))),
            };
            if s.policy.quantizes_attention(&name) {
                add("tp", passes * all_reduce(t, 12));
                add("cp", passes * all_reduce(c, 12));
            }
        }
    }
    if let Some(tp) = out.get_mut("tp") {
        *tp -= fp8_savings;
    }
    let mut add = |group: &'static str, bytes: u64| {
        if bytes > 0 {
            *out.entry(group).or_default() += bytes;
        }
    };
    let copies = c * s.dp as u64;
    let maps: Vec<_> = s.weights.iter().filter_map(|w| w.quant).collect();
    if maps.iter().any(|m| matches!(m.recipe.method, Method::Delayed { .. })) {
        let scales = 4 * (Role::ALL.len() * maps.len()) as u64;
        add("tp", all_reduce(t, scales));
        add("copies", all_reduce(copies, scales));
    }
    let shared = s.weights.iter().filter(|w| !w.experts).filter_map(|w| w.quant);
    let agreed = shared.filter(|m| m.recipe.method == Method::Current && (m.fprop || m.dgrad));
    add("tp", all_reduce(t, 4 * agreed.count() as u64));
    let zero = if copies > 1 { s.zero } else { 0 };
    // Divided gradients are summed after every micro-batch.
    let rounds = if zero > 1 { s.batches.len() as u64 } else { 1 };
    for spec in s.weights {
        for (part, _, held) in spec.held().filter(|_| t > 1) {
            let bytes = 4 * held.len() as u64;
            if part.holders(s.tp).len() == s.tp.size {
                add("tp", rounds * all_reduce(t, bytes));
            } else if part.shared(s.tp.size) {
                add("tp", rounds * (t - 1) * bytes);
            }
        }
    }
    for bucket in s.plan.buckets() {
        let part = bucket.len as u64 / copies;
        let held = if zero > 0 { part } else { bucket.len as u64 };
        add(
            "copies",
            match zero {
                0 => all_reduce(copies, 4 * held),
                _ => (copies - 1) * part * 4 * rounds + param_gather_bytes(s, bucket, copies as usize),
            },
        );
        add("ends", if bucket.tied_across_stages && s.pp > 1 { all_reduce(2, 4 * held) } else { 0 });
    }
    if let Some(recipe) = s.weights.iter().find_map(|w| w.quant).map(|e| e.recipe) {
        let count = |f: fn(&ParamSpec) -> bool| s.weights.iter().filter(|w| f(w)).count() as u64;
        let magnitudes = match recipe.method {
            Method::Current if zero > 0 => count(|w| w.quant.is_some_and(|e| e.fprop || e.dgrad)),
            _ => 0,
        };
        add("copies", all_reduce(copies, 4 * magnitudes));
    }
    add("copies", all_reduce(copies, numbers));
    add("dp", all_reduce(s.dp as u64, numbers));
    add("pp", all_reduce(s.pp as u64, numbers));
    // The norm.
    add("world", all_reduce(t * s.pp as u64 * copies, 8));
    Ok(out)
}

/// What bringing a bucket's weights from their owners to all `n` copies sends: everything but what the next rank has.
fn param_gather_bytes(s: &StepShape, bucket: &Bucket, n: usize) -> u64 {
    let shelf = BucketSplit::new(bucket, |id| s.weights[id.0].fp8_resident());
    let others = (0..n).filter(|r| *r != (s.dp_cp_rank + 1) % n);
    let part = |rank| bucket.held(Placement::Flat, GroupRank { rank, size: n });
    let sum = |f: &dyn Fn(&Range<usize>) -> usize| others.clone().map(|r| f(&part(r))).sum::<usize>();
    let numbers = sum(&|r| shelf.rest(r).len()) * s.dtype.size();
    // With scales of blocks, the numbers of each weight without the gaps between them.
    let inside = |span: &Span, r: &Range<usize>| {
        span.range.end.min(r.end).saturating_sub(span.range.start.max(r.start)) * s.dtype.size()
    };
    let apart = |span: &Span| match s.weights[span.param.0].quant {
        Some(e) if e.fp8_resident && !e.recipe.per_tensor() => sum(&|r| inside(span, r)),
        _ => 0,
    };
    let blocks: usize = bucket.spans.iter().map(apart).sum();
    let bytes = if blocks > 0 { blocks } else { sum(&|r| shelf.separate(r).len()) };
    (numbers + bytes) as u64
}

/// An all-reduce of `bytes` over `n` ranks.
fn all_reduce(n: u64, bytes: u64) -> u64 {
    2 * (n - 1) * bytes / n
}

/// Channels of a row that travel into the heads of attention: forward, and backward as gradients and once more.
fn attention_input_channels(m: &ModelConfig) -> (u64, u64) {
    let (all, shared) = match &m.mla {
        None => (m.hidden, 0),
        Some(l) => (l.q_lora_rank.unwrap_or(m.hidden) + l.kv_lora_rank, l.rope_dim),
    };
    ((all + shared) as u64, (2 * all + shared) as u64)
}

/// A narrow map over ranks.
struct Map {
    e: LinearQuant,
    /// Are its outputs partial sums?
    summed: bool,
    /// Channels of what is gathered for it: its input, or the gradient of its partial output; none of own tokens.
    width: u64,
    /// How often it is computed in a micro-batch.
    passes: u64,
    /// A layer may be used repeatedly.
    uses: u64,
}

fn map(s: &StepShape, spec: &ParamSpec) -> Option<Map> {
    let (Some(e), Some(part), false) = (spec.quant, spec.parts.first(), spec.experts) else { return None };
    let (summed, whole) = (matches!(part.split, Split::Columns { .. }), part.split == Split::Replicated);
    let width = if whole { 0 } else { part.shape[usize::from(!summed)] as u64 };
    let (attention, r) = (part.name.contains(".attn."), s.recompute);
    let again = r.layer || if attention { r.attention } else { r.mlp };
    // The head is computed once, and its table has other uses.
    let head = !part.name.starts_with("layers.") && !part.name.starts_with("mtp.");
    let uses = if head { 1 + s.model.mtp_depth() as u64 } else { u64::from(spec.uses) };
    Some(Map { e, summed, width, passes: 1 + u64::from(again && !head), uses })
}

/// Bytes of the scales of blocks that travel with what a rank has `rows` of, for a map in a micro-batch: of rows, and of
/// columns where blocks of tokens are the rank's own. There two bytes of an element of a gradient travel in place of the two
/// of a number, one for each product.
fn scales(s: &StepShape, spec: &ParamSpec, rows: u64) -> u64 {
    let Some(Map { e, summed, width, passes, uses }) = map(s, spec).filter(|m| m.e.recipe.per_block()) else {
        return 0;
    };
    let of_rows = 4 * width.div_ceil(128) * rows.next_multiple_of(4);
    let of_cols = 4 * (rows / 128) * width.next_multiple_of(4);
    let own = rows.is_multiple_of(128);
    uses * match summed {
        true if own && e.dgrad && e.wgrad => of_rows + of_cols,
        true => 0,
        false => u64::from(e.fprop) * passes * of_rows + if own { u64::from(e.wgrad) * of_cols } else { 0 },
    }
}

/// Channels of a row that travel as bytes for a map in a micro-batch, and how many magnitudes of its input and gradient
/// ranks agree on.
fn narrow(s: &StepShape, spec: &ParamSpec, rows: u64) -> (u64, u64) {
    let Some(Map { e, summed, width, passes, uses }) = map(s, spec) else { return (0, 0) };
    let (per_tensor, current) = (e.recipe.per_tensor(), e.recipe.method == Method::Current);
    // Blocks along tokens travel as bytes where they are a rank's own.
    let own = e.recipe.per_block() && rows.is_multiple_of(128);
    let bytes = match summed {
        true => u64::from(per_tensor && e.dgrad && e.wgrad),
        false => {
            u64::from((per_tensor || e.recipe.per_block()) && e.fprop) * passes
                + u64::from((per_tensor || own) && e.wgrad)
        }
    };
    let magnitudes = u64::from(e.fprop || e.wgrad) * passes + u64::from(e.dgrad || e.wgrad);
    (uses * bytes * width, uses * magnitudes * u64::from(current))
}

/// What the attention of a layer sends over cp, forward and backward.
fn attention(s: &StepShape, layer: usize, local: u64, e: u64) -> (u64, u64) {
    let (c, t, m) = (s.cp.size as u64, s.tp.size, s.model);
    let (heads, groups) = (m.heads / t, m.kv_heads.div_ceil(t));
    let (n, g, d) = (heads as u64, groups as u64, (m.head_dim + m.value_dim()) as u64);
    let keys = local * g * d;
    let window = m.is_local(layer);
    let divide = heads.is_multiple_of(s.cp.size) && groups.is_multiple_of(s.cp.size);
    match (window, divide) {
        _ if c == 1 => (0, 0),
        (false, _) => ((c - 1) * keys * e, (c - 2) * keys * e + (c - 1) * keys * 4),
        (true, false) => ((c - 1) * keys * e, (c - 1) * keys * (e + 4)),
        (true, true) => {
            let one_way = (c - 1) * local * (n + g) * d * e / c;
            (one_way, one_way)
        }
    }
}
