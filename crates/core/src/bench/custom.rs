//! Workloads of any shape in one line:
//! `custom/L=4/d=1024/h=16/kv=4/hd=64/ffn=2816/V=32000/T=1536/B=3`.

use crate::config::Recipe;
use crate::{Error, Result};

/// Prefix of a custom workload's name.
pub(super) const PREFIX: &str = "custom/";

/// Letters and the recipe keys they set.
const SIZES: &[(&str, &[&str])] = &[
    ("L", &["model.layers"]),
    ("d", &["model.hidden"]),
    ("h", &["model.heads"]),
    ("kv", &["model.kv_heads"]),
    ("hd", &["model.head_dim"]),
    ("ffn", &["model.ffn"]),
    ("V", &["model.vocab"]),
    ("T", &["data.seq_len", "model.max_positions"]),
    ("B", &["train.micro_batch", "train.global_batch"]),
    ("experts", &["moe.experts"]),
    ("topk", &["moe.topk"]),
];
/// Letters that may be left out.
const OPTIONAL: &[&str] = &["B", "experts", "topk"];
/// Switches, their defaults, and the assignments for off and on.
const SWITCHES: &[(&str, bool, &[&str], &[&str])] = &[
    ("bias", false, &[], &["model.qkv_bias=true", "model.proj_bias=true", "model.mlp_bias=true"]),
    ("rope", true, &["model.positions=learned"], &["model.rope_theta=500000"]),
    ("rms", true, &["model.norm=layernorm"], &[]),
    ("swiglu", true, &["model.activation=gelu_tanh", "model.gated=false"], &["model.gated=true"]),
    ("tied", false, &["model.tied=false"], &["model.tied=true"]),
];

/// The recipe of a custom workload.
pub(super) fn recipe(name: &str) -> Result<Recipe> {
    let bad = |what: String| Error::Invalid(format!("work '{name}': {what}"));
    let mut recipe = Recipe::open("tiny")?;
    let mut switches: Vec<bool> = SWITCHES.iter().map(|s| s.1).collect();
    let mut batch = false;
    let mut seen: Vec<&str> = Vec::new();
    for item in name.strip_prefix(PREFIX).unwrap_or(name).split('/') {
        let (key, value) =
            item.split_once('=').ok_or_else(|| bad(format!("'{item}' is not of the form key=value")))?;
        if let Some((_, keys)) = SIZES.iter().find(|s| s.0 == key) {
            keys.iter().try_for_each(|k| recipe.set(&format!("{k}={value}")))?;
            batch |= key == "B";
            seen.push(key);
        } else if let Some(i) = SWITCHES.iter().position(|s| s.0 == key) {
            switches[i] = value == "1";
        } else {
            let known: Vec<&str> = SIZES.iter().map(|s| s.0).chain(SWITCHES.iter().map(|s| s.0)).collect();
            return Err(bad(format!("'{key}' is not one of {}", known.join(", "))));
        }
    }
    if let Some((missing, _)) = SIZES.iter().find(|(k, _)| !OPTIONAL.contains(k) && !seen.contains(k)) {
        return Err(bad(format!("{missing}= is missing")));
    }
    if !batch {
        recipe.set("train.micro_batch=1")?;
        recipe.set("train.global_batch=1")?;
    }
    for ((_, _, off, on), is) in SWITCHES.iter().zip(switches) {
        (if is { on } else { off }).iter().try_for_each(|assignment| recipe.set(assignment))?;
    }
    // No sample is generated: the sizes may be too small for it.
    for assignment in
        ["data.path=embedded", "optimizer.state_dtype=bf16", "precision.dtype=bf16", "generate.tokens=0"]
    {
        recipe.set(assignment)?;
    }
    Ok(recipe)
}

#[cfg(test)]
mod tests {
    use crate::bench::workload;

    #[test]
    fn a_line_says_it_all() {
        let name = "custom/L=3/d=384/h=4/kv=2/hd=96/ffn=1000/V=5003/T=1536/B=3/bias=1/tied=1";
        let r = workload(name).unwrap().resolve(None).unwrap();
        let m = &r.model;
        assert_eq!((m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim), (3, 384, 4, 2, 96));
        assert_eq!((m.ffn, m.vocab, m.tied, m.gated, m.qkv_bias), (1000, 5003, true, true, true));
        assert_eq!((r.plan.seq_len, r.plan.micro_batch, r.config.train.global_batch), (1536, 3, 3));
        let mixed = workload("custom/L=2/d=64/h=2/kv=1/hd=32/ffn=48/V=256/T=64/experts=16/topk=4");
        let moe = mixed.unwrap().resolve(None).unwrap().model.moe.unwrap();
        assert_eq!((moe.experts, moe.topk, moe.ffn), (16, 4, 48));
        let plain = workload("custom/L=1/d=64/h=1/kv=1/hd=64/ffn=128/V=256/T=64/rope=0/rms=0/swiglu=0");
        let m = plain.unwrap().resolve(None).unwrap().model;
        assert!(!m.gated && !m.tied && m.rope(0).is_none());
    }

    #[test]
    fn mistakes_are_named() {
        for (name, what) in [
            ("custom/L=1/d=64/h=1/kv=1/hd=64/ffn=128/V=256", "T= is missing"),
            ("custom/L=1/depth=2", "'depth' is not one of"),
            ("custom/L", "key=value"),
        ] {
            let error = workload(name).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
