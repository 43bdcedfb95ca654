//! The Hugging Face tensors a model has, from its family's rules.

use crate::error::{Error, Result};
use crate::family::{Family, HEAD, Rule};
use crate::logical::{LogicalTensor, logical_tensors};
use ferrotron_core::model::config::ModelConfig;
use std::collections::HashMap;

/// A Hugging Face tensor: the rows of `parts` one after the other, then transposed if `transposed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfTensor {
    /// Its name in the files.
    pub name: String,
    /// Its shape in the files.
    pub shape: Vec<usize>,
    /// The parameters it holds.
    pub parts: Vec<LogicalTensor>,
    /// Is it stored `[in, out]`?
    pub transposed: bool,
}

/// Every tensor of the model, in the model's own order. `prefix` is the family's or nothing.
pub(crate) fn hf_tensors(family: &Family, model: &ModelConfig, prefix: &str) -> Result<Vec<HfTensor>> {
    let logical = logical_tensors(model);
    let by_name: HashMap<&str, (usize, &LogicalTensor)> =
        logical.iter().enumerate().map(|(i, t)| (t.name.as_str(), (i, t))).collect();
    let mut used = vec![false; logical.len()];
    let mut out: Vec<(usize, HfTensor)> = Vec::new();

    let mut apply = |rule: &Rule, prefix: &str, layer: usize| {
        let fill = |pattern: &str| pattern.replace("{i}", &layer.to_string());
        let parts: Option<Vec<_>> =
            rule.parts.iter().map(|p| by_name.get(fill(p).as_str()).copied()).collect();
        // A rule for something this model does not have (a bias, a head) does not hold.
        let Some(parts) = parts else { return };
        let first = parts.iter().map(|&(i, _)| i).min().unwrap_or_default();
        for &(i, _) in &parts {
            used[i] = true;
        }
        let parts: Vec<LogicalTensor> = parts.into_iter().map(|(_, t)| t.clone()).collect();
        let shape = stacked_shape(&parts, rule.transposed);
        let name = format!("{prefix}{}", fill(rule.hf));
        out.push((first, HfTensor { name, shape, parts, transposed: rule.transposed }));
    };
    for rule in family.tensors.iter().copied().flatten() {
        let layers = if rule.hf.contains("{i}") { model.layers } else { 1 };
        for i in 0..layers {
            apply(rule, prefix, i);
        }
    }
    apply(&HEAD, "", 0);

    if let Some(t) = logical.iter().zip(&used).find_map(|(t, used)| (!used).then_some(t)) {
        return Err(Error::CannotExpress(format!("the family {} has no place for {}", family.name, t.name)));
    }
    out.sort_by_key(|(i, _)| *i);
    Ok(out.into_iter().map(|(_, t)| t).collect())
}

fn stacked_shape(parts: &[LogicalTensor], transposed: bool) -> Vec<usize> {
    let mut shape = parts.first().map(|t| t.shape.clone()).unwrap_or_default();
    if let Some(rows) = shape.first_mut() {
        *rows = parts.iter().filter_map(|t| t.shape.first()).sum();
    }
    if transposed {
        shape.reverse();
    }
    shape
}

/// Does `name` match `pattern`, where `{i}` stands for a layer below `layers`?
pub(crate) fn matches(pattern: &str, name: &str, layers: usize) -> bool {
    let Some((before, after)) = pattern.split_once("{i}") else { return pattern == name };
    name.strip_prefix(before)
        .and_then(|rest| rest.strip_suffix(after))
        .is_some_and(|i| i.parse::<usize>().is_ok_and(|n| n < layers && n.to_string() == i))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::{GPT2, LLAMA};

    #[test]
    fn patterns() {
        let p = "layers.{i}.self_attn.rotary_emb.inv_freq";
        assert!(matches(p, "layers.11.self_attn.rotary_emb.inv_freq", 12));
        for bad in ["layers.12.self_attn.rotary_emb.inv_freq", "layers..self_attn.rotary_emb.inv_freq"] {
            assert!(!matches(p, bad, 12), "{bad}");
        }
        assert!(!matches(p, "layers.01.self_attn.rotary_emb.inv_freq", 12));
        assert!(!matches(p, "layers.+1.self_attn.rotary_emb.inv_freq", 12));
    }

    #[test]
    fn fused_matrices_have_their_published_shapes() {
        let c = ModelConfig::preset("gpt2-124m").unwrap();
        let all = hf_tensors(&GPT2, &c, "transformer.").unwrap();
        let find = |n: &str| all.iter().find(|t| t.name == n).unwrap();
        assert_eq!(find("transformer.h.3.attn.c_attn.weight").shape, [768, 2304]);
        assert_eq!(find("transformer.h.3.attn.c_attn.bias").shape, [2304]);
        assert_eq!(find("transformer.h.11.mlp.c_fc.weight").shape, [768, 3072]);
        assert_eq!(all.len(), 2 + 12 * 12 + 2);
    }

    #[test]
    fn a_family_without_a_place_for_a_tensor_says_so() {
        let c = ModelConfig::preset("qwen3-0.6b").unwrap();
        let e = hf_tensors(&LLAMA, &c, "model.").unwrap_err().to_string();
        assert!(e.contains("layers.0.attn.q_norm.weight"), "{e}");
    }
}
