//! Tensors of the peer's state dict as our logical tensors.

use ferrotron_core::model::ModelConfig;
use std::collections::BTreeMap;

/// Tensors by name.
pub type Named = BTreeMap<String, Vec<f32>>;

/// Cuts one of the peer's tensors into ours: rows of `linear_qkv` are, per key/value group, the queries of the group, its
/// key and its value; `linear_fc1` is `[gate; up]`.
pub fn ours(c: &ModelConfig, theirs: &str, values: &[f32]) -> Named {
    let one = |name: String| BTreeMap::from([(name, values.to_vec())]);
    match theirs {
        "embedding.word_embeddings.weight" => return one("embed.tokens".into()),
        "embedding.position_embeddings.weight" => return one("embed.positions".into()),
        "output_layer.weight" => return one("head.weight".into()),
        _ => {}
    }
    if let Some(kind) = theirs.strip_prefix("decoder.final_layernorm.") {
        return one(format!("final_norm.{kind}"));
    }
    let unknown = || -> ! { panic!("{theirs} is no tensor of the format") };
    if let Some((layer, rest)) = theirs.strip_prefix("decoder.layers.").and_then(|r| r.split_once('.')) {
        return of_layer(c, &format!("layers.{layer}"), rest, values).unwrap_or_else(|| unknown());
    }
    let Some((depth, rest)) = theirs.strip_prefix("mtp.layers.").and_then(|r| r.split_once('.')) else {
        unknown()
    };
    if let Some(rest) = rest.strip_prefix("transformer_layer.") {
        return of_layer(c, &format!("mtp.{depth}.layer"), rest, values).unwrap_or_else(|| unknown());
    }
    match rest.split_once('.') {
        Some((norm @ ("enorm" | "hnorm"), kind)) => one(format!("mtp.{depth}.{norm}.{kind}")),
        Some(("final_layernorm", kind)) => one(format!("mtp.{depth}.norm.{kind}")),
        Some(("eh_proj", "weight")) => one(format!("mtp.{depth}.eh.weight")),
        _ => unknown(),
    }
}

/// The tensors of a layer, under `prefix`; none for a name that no layer has.
fn of_layer(c: &ModelConfig, prefix: &str, theirs: &str, values: &[f32]) -> Option<Named> {
    let own = |name: &str| Some(BTreeMap::from([(format!("{prefix}.{name}"), values.to_vec())]));
    // The first matrix of an MLP, or its bias.
    let first = |name: &str, kind: &str| {
        if !c.gated {
            return own(&format!("{name}.up.{kind}"));
        }
        let (gate, up) = values.split_at(values.len() / 2);
        let part = |half: &str, v: &[f32]| (format!("{prefix}.{name}.{half}.{kind}"), v.to_vec());
        Some(BTreeMap::from([part("gate", gate), part("up", up)]))
    };
    let mlp = |name: &str, matrix: &str| match matrix.split_once('.')? {
        ("linear_fc1", kind @ ("weight" | "bias")) => first(name, kind),
        ("linear_fc2", kind @ ("weight" | "bias")) => own(&format!("{name}.down.{kind}")),
        _ => None,
    };
    if let Some(expert) = theirs.strip_prefix("mlp.experts.local_experts.") {
        let (e, matrix) = expert.split_once('.')?;
        return mlp(&format!("moe.experts.{e}"), matrix);
    }
    if let Some(matrix) = theirs.strip_prefix("mlp.shared_experts.linear") {
        return mlp("moe.shared", &format!("linear{matrix}"));
    }
    if let Some(matrix) = theirs.strip_prefix("mlp.linear") {
        return mlp("mlp", &format!("linear{matrix}"));
    }
    if let Some(kind) = theirs.strip_prefix("self_attention.linear_qkv.") {
        let width = if kind == "weight" { c.hidden } else { 1 };
        let (head, queries) = (c.head_dim * width, c.heads / c.kv_heads);
        let mut parts = [Vec::new(), Vec::new(), Vec::new()];
        for group in values.chunks((queries + 2) * head) {
            let (q, kv) = group.split_at(queries * head);
            parts[0].extend_from_slice(q);
            parts[1].extend_from_slice(&kv[..head]);
            parts[2].extend_from_slice(&kv[head..]);
        }
        let names = ["q", "k", "v"].map(|n| format!("{prefix}.attn.{n}.{kind}"));
        return Some(names.into_iter().zip(parts).collect());
    }
    let (module, kind) = theirs.rsplit_once('.')?;
    match module {
        "input_layernorm" => own(&format!("attn_norm.{kind}")),
        "pre_mlp_layernorm" => own(&format!("mlp_norm.{kind}")),
        "self_attention.q_layernorm" => own(&format!("attn.q_norm.{kind}")),
        "self_attention.k_layernorm" => own(&format!("attn.k_norm.{kind}")),
        "self_attention.linear_proj" => own(&format!("attn.out.{kind}")),
        "self_attention.core_attention" if kind == "softmax_offset" => own("attn.sink"),
        "mlp.router" if kind == "expert_bias" => own("moe.expert_bias"),
        "mlp.router" => own(&format!("moe.router.{kind}")),
        "mlp.shared_experts" if kind == "gate_weight" => own("moe.shared_gate.weight"),
        _ => None,
    }
}
