//! The kernel sources, inside the binary.

/// What every source starts with.
pub(super) const PRELUDE: &str = include_str!("prelude.cuh");

/// A source: one module of kernels.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Name, as in `loss.cu`.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// Kernels (by the start of their names) that may run out of registers; all others say they never do.
    pub may_spill: &'static [&'static str],
    /// The only architecture it is for, if it uses instructions of one.
    pub only: Option<&'static str>,
    /// What differs from the text itself.
    pub variant: Variant,
}

/// What a source is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// As it is written.
    Base,
    /// With f16 numbers in the place of bf16.
    F16,
    /// With weights of values, in attention, rounded to eight bits.
    Fp8Probs,
}

impl Variant {
    /// What comes before the text.
    pub(super) fn defines(self) -> &'static str {
        match self {
            Variant::Base => "",
            Variant::F16 => "#define ELEMENT_F16\n",
            Variant::Fp8Probs => "#define FP8_PROBS\n",
        }
    }
}

/// Sources that there are of f16, too: their own names, and as such. Variants are compiled when one is first asked for.
const F16_SOURCES: &[(&str, &str)] = &[
    ("activation", "activation.f16"),
    ("adam", "adam.f16"),
    ("adam_packed", "adam_packed.f16"),
    ("attention_backward_keys", "attention_backward_keys.f16"),
    ("attention_backward_queries", "attention_backward_queries.f16"),
    ("attention_forward", "attention_forward.f16"),
    ("attention_preprocess", "attention_preprocess.f16"),
    ("reduce", "reduce.f16"),
    ("elementwise", "elementwise.f16"),
    ("embedding", "embedding.f16"),
    ("mla_keys", "mla_keys.f16"),
    ("loss", "loss.f16"),
    ("attention_merge", "attention_merge.f16"),
    ("norm_backward", "norm_backward.f16"),
    ("norm_forward", "norm_forward.f16"),
    ("gemm", "gemm.f16"),
    ("rope", "rope.f16"),
    ("sgd", "sgd.f16"),
];

/// Those of attention whose weights may have eight bits, likewise.
const FP8_SOURCES: &[(&str, &str)] = &[
    ("attention_forward", "attention_forward.fp8"),
    ("attention_hopper_forward", "attention_hopper_forward.fp8"),
    ("attention_hopper_forward_wide", "attention_hopper_forward_wide.fp8"),
    ("attention_generic", "attention_generic.fp8"),
];

/// The same sources compiled for something else.
pub fn variants() -> impl Iterator<Item = Source> {
    let both = [(F16_SOURCES, Variant::F16), (FP8_SOURCES, Variant::Fp8Probs)];
    both.into_iter().flat_map(|(list, variant)| {
        list.iter().filter_map(move |(plain, name)| {
            let found = SOURCES.iter().find(|s| s.name == *plain)?;
            // One register, however many there are.
            let may_spill: &[&str] =
                if *plain == "activation" { &["gated_backward"] } else { found.may_spill };
            Some(Source { name, variant, may_spill, ..*found })
        })
    })
}

/// The name of a source of attention with weights of eight bits.
pub(super) fn fp8_source(source: &'static str) -> &'static str {
    FP8_SOURCES.iter().find(|(plain, _)| *plain == source).map_or(source, |(_, narrow)| narrow)
}

/// The name of a source with f16 numbers; its own where there is none.
pub(super) fn f16_source(source: &'static str) -> &'static str {
    F16_SOURCES.iter().find(|(plain, _)| *plain == source).map_or(source, |(_, half)| half)
}

impl Source {
    /// Is it for this architecture?
    pub fn is_for(&self, arch: &str) -> bool {
        self.only.is_none_or(|only| only == arch)
    }
}

const fn source(name: &'static str, text: &'static str) -> Source {
    Source { name, text, may_spill: &[], only: None, variant: Variant::Base }
}

/// A source for Hopper's own instructions.
const fn hopper(name: &'static str, text: &'static str) -> Source {
    Source { name, text, may_spill: &[], only: Some("sm_90a"), variant: Variant::Base }
}

/// All of them.
pub const SOURCES: &[Source] = &[
    source(
        "attention_forward",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/forward.cu")
        ),
    ),
    source(
        "attention_backward_keys",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/backward_keys.cu")
        ),
    ),
    source(
        "attention_backward_queries",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/backward_queries.cu")
        ),
    ),
    source(
        "attention_generic",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/generic.cu")
        ),
    ),
    source(
        "attention_preprocess",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/backward_preprocess.cu")
        ),
    ),
    hopper(
        "attention_hopper_forward",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_softmax.cuh"),
            include_str!("attention/hopper_forward_load.cuh"),
            include_str!("attention/hopper_forward.cuh"),
            include_str!("attention/hopper_forward.cu")
        ),
    ),
    hopper(
        "attention_fp8",
        concat!(
            // Maxima of scores do not lag.
            "#define FP8_PROBS\n",
            include_str!("quant/common.cuh"),
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("wgmma_fp8.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_softmax.cuh"),
            include_str!("attention/hopper_forward_load.cuh"),
            include_str!("attention/hopper_fp8_quantize.cu"),
            include_str!("attention/hopper_fp8.cuh"),
            include_str!("attention/hopper_fp8_forward.cu")
        ),
    ),
    hopper(
        "attention_hopper_forward_wide",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_softmax.cuh"),
            include_str!("attention/hopper_forward_load.cuh"),
            include_str!("attention/hopper_forward.cuh"),
            include_str!("attention/hopper_forward_wide.cu")
        ),
    ),
    hopper(
        "attention_hopper_backward",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_backward_load.cuh"),
            include_str!("attention/hopper_backward.cu")
        ),
    ),
    hopper(
        "attention_hopper_backward_wide",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_backward_load.cuh"),
            include_str!("attention/hopper_backward_wide.cuh"),
            include_str!("attention/hopper_backward_wide.cu")
        ),
    ),
    hopper(
        "attention_hopper_preprocess",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_backward_preprocess.cu")
        ),
    ),
    source("reduce", concat!(include_str!("vec.cuh"), include_str!("reduce.cu"))),
    source("copy", include_str!("copy.cu")),
    source(
        "elementwise",
        concat!(include_str!("vec.cuh"), include_str!("philox.cuh"), include_str!("elementwise.cu")),
    ),
    source("embedding", concat!(include_str!("vec.cuh"), include_str!("embedding.cu"))),
    source(
        "adam",
        concat!(
            include_str!("vec.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("multi_tensor.cuh"),
            include_str!("adam.cuh"),
            include_str!("adam.cu")
        ),
    ),
    source(
        "adam_packed",
        concat!(
            include_str!("vec.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("multi_tensor.cuh"),
            include_str!("adam.cuh"),
            include_str!("adam_packed.cu")
        ),
    ),
    source(
        "adam_quantize",
        concat!(
            include_str!("vec.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("amax.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("multi_tensor.cuh"),
            include_str!("adam.cuh"),
            include_str!("adam_quantize.cuh"),
            include_str!("adam_quantize.cu")
        ),
    ),
    source(
        "adam_packed_quantize",
        concat!(
            include_str!("vec.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("amax.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("multi_tensor.cuh"),
            include_str!("adam.cuh"),
            include_str!("adam_quantize.cuh"),
            include_str!("adam_packed_quantize.cu")
        ),
    ),
    source(
        "sgd",
        concat!(
            include_str!("vec.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("multi_tensor.cuh"),
            include_str!("sgd.cu")
        ),
    ),
    source(
        "grad_norm",
        concat!(include_str!("vec.cuh"), include_str!("optim.cuh"), include_str!("grad_norm.cu")),
    ),
    source(
        "moments",
        concat!(include_str!("optim.cuh"), include_str!("moments.cuh"), include_str!("moments.cu")),
    ),
    source(
        "grouped_generic",
        concat!(
            include_str!("gemm_tile.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/generic.cu")
        ),
    ),
    source(
        "grouped_generic_fp8",
        concat!(
            include_str!("quant/common.cuh"),
            include_str!("quant/matrix.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/generic_fp8.cu")
        ),
    ),
    hopper(
        "grouped_hopper",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/hopper_load.cuh"),
            include_str!("grouped/hopper_store.cuh"),
            include_str!("grouped/hopper_mainloop.cuh"),
            include_str!("grouped/hopper.cu")
        ),
    ),
    hopper(
        "grouped_hopper_wgrad",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/hopper_load.cuh"),
            include_str!("grouped/hopper_store.cuh"),
            include_str!("grouped/hopper_mainloop.cuh"),
            include_str!("grouped/hopper_wgrad.cu")
        ),
    ),
    hopper(
        "grouped_hopper_fp8",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("wgmma_fp8.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/hopper_load.cuh"),
            include_str!("grouped/hopper_store.cuh"),
            include_str!("grouped/hopper_mainloop.cuh"),
            include_str!("grouped/hopper_fp8.cuh"),
            include_str!("grouped/hopper_fp8.cu")
        ),
    ),
    hopper(
        "grouped_hopper_wgrad_fp8",
        concat!(
            include_str!("shared_memory.cuh"),
            include_str!("hopper.cuh"),
            include_str!("wgmma.cuh"),
            include_str!("wgmma_fp8.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/hopper_load.cuh"),
            include_str!("grouped/hopper_store.cuh"),
            include_str!("grouped/hopper_mainloop.cuh"),
            include_str!("grouped/hopper_fp8.cuh"),
            include_str!("grouped/hopper_wgrad_fp8.cu")
        ),
    ),
    source("gemm", concat!(include_str!("gemm_tile.cuh"), include_str!("gemm.cu"))),
    source("permute", include_str!("permute.cu")),
    source("permute_maps", include_str!("permute_maps.cu")),
    source(
        "transpose_stack",
        concat!(include_str!("quant/transpose.cuh"), include_str!("quant/transpose_stack.cu")),
    ),
    source(
        "permute_transposed",
        concat!(include_str!("quant/transpose.cuh"), include_str!("permute_transposed.cu")),
    ),
    source(
        "quantize",
        concat!(
            include_str!("amax.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("quant/transpose.cuh"),
            include_str!("quant/quantize.cu")
        ),
    ),
    source(
        "quant_amax",
        concat!(include_str!("amax.cuh"), include_str!("quant/common.cuh"), include_str!("quant/amax.cu")),
    ),
    source(
        "quant_emulate",
        concat!(
            include_str!("amax.cuh"),
            include_str!("philox.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("quant/emulate.cu")
        ),
    ),
    source(
        "quant_generic",
        concat!(
            include_str!("quant/common.cuh"),
            include_str!("quant/matrix.cuh"),
            include_str!("quant/generic.cu")
        ),
    ),
    source(
        "activation",
        concat!(include_str!("amax.cuh"), include_str!("activation.cuh"), include_str!("activation.cu")),
    ),
    source("mla_keys", include_str!("mla_keys.cu")),
    source("loss", include_str!("loss.cu")),
    source("attention_merge", include_str!("attention_merge.cu")),
    source(
        "norm_forward",
        concat!(include_str!("amax.cuh"), include_str!("norm/common.cuh"), include_str!("norm/forward.cu")),
    ),
    source("norm_backward", concat!(include_str!("norm/common.cuh"), include_str!("norm/backward.cu"))),
    source("moe_elementwise", concat!(include_str!("philox.cuh"), include_str!("moe_elementwise.cu"))),
    source("random_normal", concat!(include_str!("philox.cuh"), include_str!("random_normal.cu"))),
    source("rope", include_str!("rope.cu")),
    source("row_bias", include_str!("row_bias.cu")),
    source(
        "weighted_activation",
        concat!(
            include_str!("activation.cuh"),
            include_str!("amax.cuh"),
            include_str!("weighted_activation.cu")
        ),
    ),
    source("router_route", concat!(include_str!("router/common.cuh"), include_str!("router/route.cu"))),
    source("router_balance", concat!(include_str!("router/common.cuh"), include_str!("router/balance.cu"))),
    source("router_z_loss", concat!(include_str!("router/common.cuh"), include_str!("router/z_loss.cu"))),
    source(
        "router_counts",
        concat!(
            include_str!("router/common.cuh"),
            include_str!("router/select.cuh"),
            include_str!("router/counts.cu")
        ),
    ),
    source(
        "router_sinkhorn",
        concat!(
            include_str!("router/common.cuh"),
            include_str!("router/select.cuh"),
            include_str!("router/sinkhorn.cu")
        ),
    ),
    source("router_gate", include_str!("router/gate.cu")),
];
