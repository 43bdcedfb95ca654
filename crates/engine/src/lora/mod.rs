//! LoRA: a trained low-rank update `s·B·A` beside a frozen weight; with DoRA, its rows are scaled to trained lengths.

mod adapter;
mod dora;
mod experts;
mod targets;

pub(crate) use adapter::Adapter;
pub(crate) use dora::DoraState;
pub use dora::row_norms;
pub(crate) use experts::{ExpertAdapter, Projection};
use std::ops::Range;
pub use targets::Targets as LoraTargets;

/// Which linears have adapters, and of which kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoraPolicy {
    /// Rank r of every adapter; 0 means no adapters.
    pub rank: usize,
    /// Scale s of the update: alpha / rank.
    pub scale: f32,
    /// Which linears.
    pub targets: LoraTargets,
    /// Logical matrices that are stacked in one weight (q, k, v; gate, up) share one A.
    pub fused: bool,
    /// DoRA: rows of the adapted weight are scaled to trained lengths.
    pub dora: bool,
}

/// Where one adapter reads and writes; of experts, inside each.
#[derive(Clone)]
struct Slice {
    /// Columns of h, and rows of the stacked A.
    h: Range<usize>,
    /// Rows of the stacked B and m.
    b: Range<usize>,
    /// Columns of y on this rank, and rows of the weight.
    y: Range<usize>,
}

/// Ending of the name of an adapter's A `[r, in]`, after the name of its module.
pub const LORA_A: &str = ".lora_a.weight";
/// Ending of the name of an adapter's B `[out, r]`.
pub const LORA_B: &str = ".lora_b.weight";
/// Ending of the name of DoRA's m `[out]`.
pub const LORA_M: &str = ".lora_m.weight";

impl LoraPolicy {
    /// Whether a module, such as `layers.3.attn.q`, has an adapter.
    pub fn covers(&self, module: &str) -> bool {
        self.rank > 0 && self.targets.cover(module)
    }
}

/// Module of the A that stacked outputs share: `layers.0.attn.qkv` of q, k and v, `layers.0.mlp.gate_up` of gate and up.
pub fn fused_module(outputs: &[&str]) -> String {
    let leaves: Vec<&str> = outputs.iter().map(|name| name.rsplit('.').next().unwrap_or(name)).collect();
    let between = if leaves.iter().all(|leaf| leaf.len() == 1) { "" } else { "_" };
    let module = outputs.first().and_then(|name| name.rsplit_once('.')).map_or("", |(module, _)| module);
    format!("{module}.{}", leaves.join(between))
}
