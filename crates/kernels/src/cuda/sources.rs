//! The kernel sources, inside the binary: translation units, and the headers that they include.

use super::args::ArgsHeader;
use super::{
    activation, attention, attention_merge, copy, digest, dora, elementwise, embedding, generic_gemm,
    grad_norm, grouped,
};
use super::{
    loss, mla_keys, moe_elementwise, moments, multi_tensor, muon, norm, optim, permute, permute_maps, philox,
    quant,
};
use super::{random_normal, reduce, rope, router, row_bias, split_slots, tensor_map, weighted_activation};
use std::borrow::Cow;

/// A translation unit: one module of kernels.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Path of the file without its extension: `attention/forward` is attention/forward.cu.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// Kernels, by the start of their names, that may spill registers; all others must not.
    pub may_spill: &'static [&'static str],
    /// The only architecture it compiles for, if it uses instructions of one.
    pub only: Option<&'static str>,
    /// What it is compiled for.
    pub variant: Variant,
    /// Other variants that exist of it; they are compiled when one is first launched.
    pub variants: &'static [Variant],
}

/// What a source is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// The text alone.
    Base,
    /// The 16-bit `element` type is f16 instead of bf16.
    F16,
    /// Attention probabilities are rounded to E4M3 before they multiply v.
    Fp8Probs,
}

impl Variant {
    /// Preprocessor definitions before the text.
    pub(super) fn defines(self) -> &'static str {
        match self {
            Variant::Base => "",
            Variant::F16 => "#define ELEMENT_F16\n",
            Variant::Fp8Probs => "#define FP8_PROBS\n",
        }
    }

    /// Suffix of the source's name in messages and file names.
    pub fn suffix(self) -> &'static str {
        match self {
            Variant::Base => "",
            Variant::F16 => ".f16",
            Variant::Fp8Probs => ".fp8",
        }
    }
}

impl Source {
    /// Does it compile for this architecture?
    pub fn is_for(&self, arch: &str) -> bool {
        self.only.is_none_or(|only| only == arch)
    }
}

const ANY: Option<&str> = None;
const HOPPER: Option<&str> = Some("sm_90a");
const BASE: &[Variant] = &[];
const F16: &[Variant] = &[Variant::F16];
const FP8: &[Variant] = &[Variant::Fp8Probs];
const F16_FP8: &[Variant] = &[Variant::F16, Variant::Fp8Probs];

macro_rules! sources {
    ($($name:literal $only:ident $variants:ident;)*) => {
        &[$(Source {
            name: $name,
            text: include_str!(concat!($name, ".cu")),
            may_spill: &[],
            only: $only,
            variant: Variant::Base,
            variants: $variants,
        }),*]
    };
}

/// Every translation unit: its file, the architecture it needs, the variants that exist of it.
pub const SOURCES: &[Source] = sources! {
    "activation" ANY F16;
    "adam" ANY F16;
    "adam_packed" ANY F16;
    "adam_packed_quantize" ANY BASE;
    "adam_quantize" ANY BASE;
    "attention/backward_fused" ANY BASE;
    "attention/backward_keys" ANY F16;
    "attention/backward_preprocess" ANY F16;
    "attention/backward_queries" ANY F16;
    "attention/forward" ANY F16_FP8;
    "attention/generic" ANY FP8;
    "attention/hopper_backward" HOPPER BASE;
    "attention/hopper_backward_pair" HOPPER BASE;
    "attention/hopper_backward_preprocess" ANY BASE;
    "attention/hopper_backward_wide" HOPPER BASE;
    "attention/hopper_forward" HOPPER FP8;
    "attention/hopper_forward_wide" HOPPER FP8;
    "attention/hopper_fp8" HOPPER BASE;
    "attention_merge" ANY F16;
    "copy" ANY BASE;
    "digest" ANY BASE;
    "dora" ANY F16;
    "elementwise" ANY F16;
    "embedding" ANY F16;
    "gemm" ANY F16;
    "grad_norm" ANY BASE;
    "grouped/generic" ANY BASE;
    "grouped/generic_fp8" ANY BASE;
    "grouped/hopper" HOPPER BASE;
    "grouped/hopper_fp8" HOPPER BASE;
    "grouped/hopper_wgrad" HOPPER BASE;
    "grouped/hopper_wgrad_fp8" HOPPER BASE;
    "grouped/mma" ANY BASE;
    "grouped/mma_wgrad" ANY BASE;
    "lion" ANY F16;
    "loss" ANY F16;
    "mla_keys" ANY F16;
    "moe_elementwise" ANY BASE;
    "moments" ANY BASE;
    "muon" ANY F16;
    "norm/backward" ANY F16;
    "norm/forward" ANY F16;
    "permute" ANY BASE;
    "permute_maps" ANY BASE;
    "permute_transposed" ANY BASE;
    "quant/amax" ANY BASE;
    "quant/emulate" ANY BASE;
    "quant/generic" ANY BASE;
    "quant/microscale" ANY BASE;
    "quant/quantize" ANY BASE;
    "quant/transpose_stack" ANY BASE;
    "random_normal" ANY BASE;
    "reduce" ANY F16;
    "rope" ANY F16;
    "router/balance" ANY BASE;
    "router/counts" ANY BASE;
    "router/gate" ANY BASE;
    "router/route" ANY BASE;
    "router/sinkhorn" ANY BASE;
    "router/z_loss" ANY BASE;
    "row_bias" ANY BASE;
    "sgd" ANY F16;
    "split_slots" ANY BASE;
    "weighted_activation" ANY BASE;
};

macro_rules! headers {
    ($($name:literal,)*) => {
        &[$(($name, include_str!($name))),*]
    };
}

/// Headers, by the name that `#include` gives.
const HEADERS: &[(&str, &str)] = headers![
    "activation.cuh",
    "adam.cuh",
    "adam_quantize.cuh",
    "amax.cuh",
    "attention/common.cuh",
    "attention/hopper_backward_load.cuh",
    "attention/hopper_backward_pair_load.cuh",
    "attention/hopper_backward_wide.cuh",
    "attention/hopper_common.cuh",
    "attention/hopper_forward.cuh",
    "attention/hopper_forward_load.cuh",
    "attention/hopper_fp8.cuh",
    "attention/hopper_softmax.cuh",
    "gemm_tile.cuh",
    "grouped/hopper_fp8.cuh",
    "grouped/hopper_load.cuh",
    "grouped/hopper_mainloop.cuh",
    "grouped/hopper_pingpong.cuh",
    "grouped/hopper_store.cuh",
    "grouped/mma.cuh",
    "grouped/segments.cuh",
    "hopper.cuh",
    "hopper_tiles.cuh",
    "moments.cuh",
    "multi_tensor.cuh",
    "norm/common.cuh",
    "one_moment.cuh",
    "optim.cuh",
    "philox.cuh",
    "prelude.cuh",
    "quant/common.cuh",
    "quant/matrix.cuh",
    "quant/microscaling.cuh",
    "quant/transpose.cuh",
    "router/common.cuh",
    "router/select.cuh",
    "shared_memory.cuh",
    "tensor_core.cuh",
    "vec.cuh",
    "wgmma.cuh",
    "wgmma_fp8.cuh",
];

/// Headers written from `kernel_args!`: `args/<module>.cuh`.
pub(super) const ARGS_HEADERS: &[&ArgsHeader] = &[
    &activation::ARGS,
    &attention::hopper::ARGS,
    &attention::hopper_fp8::ARGS,
    &attention::problem::ARGS,
    &attention::tile_table::ARGS,
    &attention_merge::ARGS,
    &copy::ARGS,
    &digest::ARGS,
    &dora::ARGS,
    &elementwise::ARGS,
    &embedding::ARGS,
    &generic_gemm::ARGS,
    &grad_norm::ARGS,
    &grouped::generic::ARGS,
    &grouped::generic_fp8::ARGS,
    &grouped::hopper::ARGS,
    &loss::ARGS,
    &mla_keys::ARGS,
    &moe_elementwise::ARGS,
    &moments::ARGS,
    &multi_tensor::ARGS,
    &muon::ARGS,
    &norm::backward::ARGS,
    &norm::forward::ARGS,
    &optim::ARGS,
    &permute::ARGS,
    &permute_maps::ARGS,
    &philox::ARGS,
    &quant::amax::ARGS,
    &quant::emulate::ARGS,
    &quant::generic::ARGS,
    &quant::microscale::ARGS,
    &quant::quantize::ARGS,
    &quant::stack::ARGS,
    &random_normal::ARGS,
    &reduce::ARGS,
    &rope::ARGS,
    &router::counts::ARGS,
    &router::gate::ARGS,
    &router::losses::ARGS,
    &router::route::ARGS,
    &router::sinkhorn::ARGS,
    &row_bias::ARGS,
    &split_slots::ARGS,
    &tensor_map::ARGS,
    &weighted_activation::ARGS,
];

/// The variants of all sources but the base.
pub fn variants() -> impl Iterator<Item = Source> {
    SOURCES.iter().flat_map(|s| {
        s.variants.iter().map(|variant| {
            // One register, whatever the launch bounds.
            let spills = (s.name, *variant) == ("activation", Variant::F16);
            let may_spill: &[&str] = if spills { &["gated_backward"] } else { s.may_spill };
            Source { variant: *variant, may_spill, ..*s }
        })
    })
}

/// A header by the name that `#include` gives.
pub(super) fn header(name: &str) -> Option<Cow<'static, str>> {
    let written = HEADERS.iter().find(|(header, _)| *header == name).map(|(_, text)| Cow::Borrowed(*text));
    written.or_else(|| ARGS_HEADERS.iter().find(|h| h.name == name).map(|h| Cow::Owned(h.text())))
}

/// Names of the headers that a text includes itself.
pub(super) fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('"').next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// All headers that a text includes, directly or not.
    fn closure(text: &str, found: &mut HashSet<String>) {
        for name in includes(text) {
            let inner = header(name).unwrap_or_else(|| panic!("there is no header {name}"));
            if found.insert(name.to_string()) {
                closure(&inner, found);
            }
        }
    }

    #[test]
    fn every_include_exists_and_every_header_is_included() {
        let mut found = HashSet::new();
        SOURCES.iter().for_each(|s| closure(s.text, &mut found));
        for name in HEADERS.iter().map(|(name, _)| *name).chain(ARGS_HEADERS.iter().map(|h| h.name)) {
            assert!(found.contains(name), "{name} is not included");
        }
    }
}
