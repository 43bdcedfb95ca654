//! Which linears have adapters: by names as Hugging Face, Megatron or this project spell them.

use crate::pattern::matches_pattern;

/// Selected and excluded linears.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// Names or patterns; [`Targets::ALL`] for every linear of the layers but routers.
    pub include: Vec<String>,
    /// Names or patterns that have none.
    pub exclude: Vec<String>,
}

impl Targets {
    /// Selects every linear of attention, MLP and experts.
    pub const ALL: &str = "all-linear";

    /// Whether a module, such as `layers.3.attn.q`, is selected.
    pub fn cover(&self, module: &str) -> bool {
        let spellings = spellings(module);
        let any = |list: &[String]| list.iter().any(|t| selects(t, module, &spellings));
        any(&self.include) && !any(&self.exclude)
    }

    /// Whether one name or pattern selects a module.
    pub fn selects(target: &str, module: &str) -> bool {
        selects(target, module, &spellings(module))
    }
}

fn selects(target: &str, module: &str, spellings: &[String]) -> bool {
    if target == Targets::ALL {
        return !module.ends_with(".router");
    }
    spellings.iter().any(|name| match target.contains('*') {
        true => matches_pattern(target, name),
        // Whole names between dots: "q_proj", "mlp.down_proj", "layers.3".
        false => format!(".{name}.").contains(&format!(".{target}.")),
    })
}

/// Segments of a logical name, as Hugging Face, Megatron Core, and Megatron Core with a linear for each projection call them.
const SEGMENTS: [[&str; 4]; 17] = [
    ["attn", "self_attn", "self_attention", "self_attention"],
    ["moe", "mlp", "mlp", "mlp"],
    ["q", "q_proj", "linear_qkv", "linear_q"],
    ["k", "k_proj", "linear_qkv", "linear_k"],
    ["v", "v_proj", "linear_qkv", "linear_v"],
    ["out", "o_proj", "linear_proj", "linear_proj"],
    ["o", "o_proj", "linear_proj", "linear_proj"],
    ["q_a", "q_a_proj", "linear_q_down_proj", "linear_q_down_proj"],
    ["q_b", "q_b_proj", "linear_q_up_proj", "linear_q_up_proj"],
    ["kv_a", "kv_a_proj_with_mqa", "linear_kv_down_proj", "linear_kv_down_proj"],
    ["kv_b", "kv_b_proj", "linear_kv_up_proj", "linear_kv_up_proj"],
    ["gate", "gate_proj", "linear_fc1", "linear_fc1_gate"],
    ["up", "up_proj", "linear_fc1", "linear_fc1_up"],
    ["down", "down_proj", "linear_fc2", "linear_fc2"],
    ["router", "gate", "router", "router"],
    ["shared", "shared_expert", "shared_experts", "shared_experts"],
    ["layers", "model.layers", "decoder.layers", "decoder.layers"],
];

/// All spellings of a logical module name.
fn spellings(module: &str) -> Vec<String> {
    (0..4)
        .map(|style| {
            let segment = |s| SEGMENTS.iter().find(|row| row[0] == s).map_or(s, |row| row[style]);
            module.split('.').map(segment).collect::<Vec<_>>().join(".")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(include: &[&str], exclude: &[&str]) -> Targets {
        let list = |x: &[&str]| x.iter().map(|s| s.to_string()).collect();
        Targets { include: list(include), exclude: list(exclude) }
    }

    #[test]
    fn names_of_every_spelling_select() {
        for (target, module, yes) in [
            ("q_proj", "layers.3.attn.q", true),
            ("q_proj", "layers.3.attn.k", false),
            ("linear_qkv", "layers.3.attn.v", true),
            ("linear_fc1", "layers.3.mlp.gate", true),
            ("linear_fc1_gate", "layers.3.mlp.up", false),
            ("attn.q", "layers.3.attn.q", true),
            ("*.layers.0.*.linear_qkv", "layers.0.attn.k", true),
            ("*.layers.0.*.linear_qkv", "layers.10.attn.k", false),
            ("layers.1", "layers.10.attn.k", false),
            ("model.layers.1.self_attn.o_proj", "layers.1.attn.out", true),
            ("down_proj", "layers.1.moe.experts.7.down", true),
            ("experts", "layers.1.moe.experts.7.down", true),
            ("experts", "layers.1.moe.shared.down", false),
            ("gate", "layers.1.moe.router", true),
            ("router", "layers.1.moe.router", true),
            ("gate_proj", "layers.1.moe.router", false),
            (Targets::ALL, "layers.1.moe.router", false),
            (Targets::ALL, "layers.1.mlp.up", true),
        ] {
            assert_eq!(Targets::selects(target, module), yes, "{target} {module}");
        }
    }

    #[test]
    fn exclusions_win() {
        let t = targets(&["all-linear"], &["layers.0", "*.v_proj"]);
        assert!(t.cover("layers.1.attn.q"));
        assert!(!t.cover("layers.0.attn.q"));
        assert!(!t.cover("layers.1.attn.v"));
        assert!(!targets(&[], &[]).cover("layers.1.attn.q"));
    }
}
