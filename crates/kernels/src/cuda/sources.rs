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
    Plain,
    /// With f16 numbers in the place of bf16.
    Half,
    /// With weights of values, in attention, rounded to eight bits.
    Narrow,
}

impl Variant {
    /// What comes before the text.
    pub(super) fn start(self) -> &'static str {
        match self {
            Variant::Plain => "",
            Variant::Half => "#define HALF\n",
            Variant::Narrow => "#define NARROW\n",
        }
    }
}

/// Sources that there are of f16, too: their own names, and as such. Variants are compiled when one is first asked for.
const HALVES: &[(&str, &str)] = &[
    ("activation", "activation.half"),
    ("adam", "adam.half"),
    ("adam_packed", "adam_packed.half"),
    ("attention_backward_keys", "attention_backward_keys.half"),
    ("attention_backward_queries", "attention_backward_queries.half"),
    ("attention_forward", "attention_forward.half"),
    ("attention_rows", "attention_rows.half"),
    ("columns", "columns.half"),
    ("elementwise", "elementwise.half"),
    ("embedding", "embedding.half"),
    ("latent", "latent.half"),
    ("loss", "loss.half"),
    ("merge", "merge.half"),
    ("norm_backward", "norm_backward.half"),
    ("norm_forward", "norm_forward.half"),
    ("product", "product.half"),
    ("rope", "rope.half"),
    ("sgd", "sgd.half"),
];

/// Those of attention whose weights may have eight bits, likewise.
const NARROW: &[(&str, &str)] = &[
    ("attention_forward", "attention_forward.narrow"),
    ("attention_hopper_forward", "attention_hopper_forward.narrow"),
    ("attention_hopper_forward_wide", "attention_hopper_forward_wide.narrow"),
    ("attention_plain", "attention_plain.narrow"),
];

/// The same sources compiled for something else.
pub fn variants() -> impl Iterator<Item = Source> {
    let both = [(HALVES, Variant::Half), (NARROW, Variant::Narrow)];
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
pub(super) fn narrow_of(source: &'static str) -> &'static str {
    NARROW.iter().find(|(plain, _)| *plain == source).map_or(source, |(_, narrow)| narrow)
}

/// The name of a source with f16 numbers; its own where there is none.
pub(super) fn half_of(source: &'static str) -> &'static str {
    HALVES.iter().find(|(plain, _)| *plain == source).map_or(source, |(_, half)| half)
}

impl Source {
    /// Is it for this architecture?
    pub fn is_for(&self, arch: &str) -> bool {
        self.only.is_none_or(|only| only == arch)
    }
}

const fn source(name: &'static str, text: &'static str) -> Source {
    Source { name, text, may_spill: &[], only: None, variant: Variant::Plain }
}

/// A source for Hopper's own instructions.
const fn hopper(name: &'static str, text: &'static str) -> Source {
    Source { name, text, may_spill: &[], only: Some("sm_90a"), variant: Variant::Plain }
}

/// All of them.
pub const SOURCES: &[Source] = &[
    source(
        "attention_forward",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/forward.cu")
        ),
    ),
    source(
        "attention_backward_keys",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/backward_keys.cu")
        ),
    ),
    source(
        "attention_backward_queries",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/backward_queries.cu")
        ),
    ),
    source(
        "attention_plain",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/plain.cu")
        ),
    ),
    source(
        "attention_rows",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("attention/rows.cu")
        ),
    ),
    hopper(
        "attention_hopper_forward",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_softmax.cuh"),
            include_str!("attention/hopper_forward_load.cuh"),
            include_str!("attention/hopper_forward.cuh"),
            include_str!("attention/hopper_forward.cu")
        ),
    ),
    hopper(
        "attention_bytes",
        concat!(
            // Maxima of scores do not lag.
            "#define NARROW\n",
            include_str!("quant/common.cuh"),
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_product8.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_softmax.cuh"),
            include_str!("attention/hopper_forward_load.cuh"),
            include_str!("attention/hopper_bytes.cu"),
            include_str!("attention/hopper_bytes.cuh"),
            include_str!("attention/hopper_bytes_forward.cu")
        ),
    ),
    hopper(
        "attention_hopper_forward_wide",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
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
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_backward_load.cuh"),
            include_str!("attention/hopper_backward.cu")
        ),
    ),
    hopper(
        "attention_hopper_wide",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_backward_load.cuh"),
            include_str!("attention/hopper_wide.cuh"),
            include_str!("attention/hopper_wide.cu")
        ),
    ),
    hopper(
        "attention_hopper_rows",
        concat!(
            include_str!("shared.cuh"),
            include_str!("attention/common.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("attention/hopper_common.cuh"),
            include_str!("attention/hopper_rows.cu")
        ),
    ),
    source("columns", concat!(include_str!("groups.cuh"), include_str!("columns.cu"))),
    source("copy", include_str!("copy.cu")),
    source(
        "elementwise",
        concat!(include_str!("groups.cuh"), include_str!("philox.cuh"), include_str!("elementwise.cu")),
    ),
    source("embedding", concat!(include_str!("groups.cuh"), include_str!("embedding.cu"))),
    source(
        "adam",
        concat!(
            include_str!("groups.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("optim_list.cuh"),
            include_str!("adam.cuh"),
            include_str!("adam.cu")
        ),
    ),
    source(
        "adam_packed",
        concat!(
            include_str!("groups.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("optim_list.cuh"),
            include_str!("adam.cuh"),
            include_str!("adam_packed.cu")
        ),
    ),
    source(
        "adam_taken",
        concat!(
            include_str!("groups.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("measured.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("optim_list.cuh"),
            include_str!("adam.cuh"),
            include_str!("adam_taken.cuh"),
            include_str!("adam_taken.cu")
        ),
    ),
    source(
        "adam_packed_taken",
        concat!(
            include_str!("groups.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("measured.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("optim_list.cuh"),
            include_str!("adam.cuh"),
            include_str!("adam_taken.cuh"),
            include_str!("adam_packed_taken.cu")
        ),
    ),
    source(
        "sgd",
        concat!(
            include_str!("groups.cuh"),
            include_str!("optim.cuh"),
            include_str!("moments.cuh"),
            include_str!("optim_list.cuh"),
            include_str!("sgd.cu")
        ),
    ),
    source(
        "grad_norm",
        concat!(include_str!("groups.cuh"), include_str!("optim.cuh"), include_str!("grad_norm.cu")),
    ),
    source(
        "moments",
        concat!(include_str!("optim.cuh"), include_str!("moments.cuh"), include_str!("moments.cu")),
    ),
    source(
        "grouped_plain",
        concat!(
            include_str!("product.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/plain.cu")
        ),
    ),
    source(
        "grouped_plain8",
        concat!(
            include_str!("quant/common.cuh"),
            include_str!("quant/matrix.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/plain8.cu")
        ),
    ),
    hopper(
        "grouped_hopper",
        concat!(
            include_str!("shared.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/hopper.cuh"),
            include_str!("grouped/hopper_store.cuh"),
            include_str!("grouped/hopper_consume.cuh"),
            include_str!("grouped/hopper.cu")
        ),
    ),
    hopper(
        "grouped_hopper_grad",
        concat!(
            include_str!("shared.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/hopper.cuh"),
            include_str!("grouped/hopper_store.cuh"),
            include_str!("grouped/hopper_consume.cuh"),
            include_str!("grouped/hopper_grad.cu")
        ),
    ),
    hopper(
        "grouped_hopper8",
        concat!(
            include_str!("shared.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_product8.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/hopper.cuh"),
            include_str!("grouped/hopper_store.cuh"),
            include_str!("grouped/hopper_consume.cuh"),
            include_str!("grouped/hopper8.cuh"),
            include_str!("grouped/hopper8.cu")
        ),
    ),
    hopper(
        "grouped_hopper_grad8",
        concat!(
            include_str!("shared.cuh"),
            include_str!("hopper.cuh"),
            include_str!("hopper_product.cuh"),
            include_str!("hopper_product8.cuh"),
            include_str!("hopper_tiles.cuh"),
            include_str!("grouped/segments.cuh"),
            include_str!("grouped/hopper.cuh"),
            include_str!("grouped/hopper_store.cuh"),
            include_str!("grouped/hopper_consume.cuh"),
            include_str!("grouped/hopper8.cuh"),
            include_str!("grouped/hopper_grad8.cu")
        ),
    ),
    source("product", concat!(include_str!("product.cuh"), include_str!("product.cu"))),
    source("permute", include_str!("permute.cu")),
    source("permute_maps", include_str!("permute_maps.cu")),
    source("turn_stack", concat!(include_str!("quant/turn.cuh"), include_str!("quant/turn_stack.cu"))),
    source("permute_turned", concat!(include_str!("quant/turn.cuh"), include_str!("permute_turned.cu"))),
    source(
        "quantise",
        concat!(
            include_str!("measured.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("quant/turn.cuh"),
            include_str!("quant/quantise.cu")
        ),
    ),
    source(
        "quant_measure",
        concat!(
            include_str!("measured.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("quant/measure.cu")
        ),
    ),
    source(
        "quant_emulate",
        concat!(
            include_str!("measured.cuh"),
            include_str!("philox.cuh"),
            include_str!("quant/common.cuh"),
            include_str!("quant/emulate.cu")
        ),
    ),
    source(
        "quant_plain",
        concat!(
            include_str!("quant/common.cuh"),
            include_str!("quant/matrix.cuh"),
            include_str!("quant/plain.cu")
        ),
    ),
    source(
        "activation",
        concat!(include_str!("measured.cuh"), include_str!("curves.cuh"), include_str!("activation.cu")),
    ),
    source("latent", include_str!("latent.cu")),
    source("loss", include_str!("loss.cu")),
    source("merge", include_str!("merge.cu")),
    source(
        "norm_forward",
        concat!(
            include_str!("measured.cuh"),
            include_str!("norm/common.cuh"),
            include_str!("norm/forward.cu")
        ),
    ),
    source("norm_backward", concat!(include_str!("norm/common.cuh"), include_str!("norm/backward.cu"))),
    source("mix", concat!(include_str!("philox.cuh"), include_str!("mix.cu"))),
    source("normal", concat!(include_str!("philox.cuh"), include_str!("normal.cu"))),
    source("rope", include_str!("rope.cu")),
    source("row_bias", include_str!("row_bias.cu")),
    source(
        "weighted",
        concat!(include_str!("curves.cuh"), include_str!("measured.cuh"), include_str!("weighted.cu")),
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
