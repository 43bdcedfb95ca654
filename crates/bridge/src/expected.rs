//! The Hugging Face tensors a model has, from its family's rules.

use crate::error::{Error, Result};
use crate::family::{Family, HEAD, Rule};
use crate::logical::{LogicalTensor, logical_buffers, logical_tensors};
use crate::view::{FusedLayout, View};
use ferrotron_core::model::config::ModelConfig;
use std::collections::HashMap;
use std::ops::Range;

/// A layer: its number in the files, and what its parameters' logical names begin with.
struct LayerNames {
    hf: usize,
    logical: String,
}

/// The decoder's layers and, after them, the layers of the MTP modules.
fn layer_names(family: &Family, model: &ModelConfig) -> Vec<LayerNames> {
    let decoder = (0..model.layers).map(|i| LayerNames { hf: i, logical: format!("layers.{i}.") });
    let modules = if family.mtp.is_empty() { 0 } else { model.mtp.map_or(0, |m| m.modules()) };
    let mtp = (0..modules).map(|j| LayerNames { hf: model.layers + j, logical: format!("mtp.{j}.layer.") });
    decoder.chain(mtp).collect()
}

/// A Hugging Face tensor and the parameters that share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfTensor {
    /// Its name in the files.
    pub name: String,
    /// Its shape in the files.
    pub shape: Vec<usize>,
    /// The parameters it holds, block by block.
    pub parts: Vec<HfPart>,
    /// Experts whose parts make a block each, where all of them are in one tensor.
    pub(crate) blocks: Option<usize>,
    pub(crate) layout: FusedLayout,
}

/// A parameter and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfPart {
    /// The parameter.
    pub tensor: LogicalTensor,
    /// Where its elements are.
    pub view: View,
}

impl HfTensor {
    /// Is it no parameter, but something else that belongs to the model?
    pub fn is_buffer(&self) -> bool {
        self.parts.iter().all(|p| p.tensor.buffer)
    }

    /// The parts of each block: one expert's, or all there are.
    pub(crate) fn each_block(&self) -> impl Iterator<Item = &[HfPart]> {
        self.parts.chunks((self.parts.len() / self.blocks.unwrap_or(1).max(1)).max(1))
    }

    /// The same tensors stored `[out, in]`.
    pub(crate) fn untransposed(&self) -> HfTensor {
        let parts: Vec<LogicalTensor> = self.parts.iter().map(|p| p.tensor.clone()).collect();
        let layout = FusedLayout { transposed: false, ..self.layout };
        fuse(self.name.clone(), parts, self.blocks, layout)
    }
}

/// Every tensor of the model, in the model's own order, buffers last. `prefix` is the family's or nothing.
pub(crate) fn hf_tensors(family: &Family, model: &ModelConfig, prefix: &str) -> Result<Vec<HfTensor>> {
    let mut logical = logical_tensors(model);
    logical.extend(logical_buffers(model));
    let by_name: HashMap<&str, usize> =
        logical.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
    let experts = model.moe.as_ref().map_or(0, |m| m.experts);
    let mut used = vec![false; logical.len()];
    let mut out: Vec<(usize, HfTensor)> = Vec::new();

    let mut apply = |rule: &Rule, name: String, layer: &str, experts: Range<usize>, blocks: Option<usize>| {
        let mut parts = Vec::new();
        for e in experts {
            for p in rule.parts {
                // A rule for something this model does not have (a bias, a head) does not hold.
                let Some(&i) = by_name.get(logical_name(p, layer, e).as_str()) else { return };
                parts.push(i);
            }
        }
        let first = parts.iter().copied().min().unwrap_or_default();
        parts.iter().for_each(|&i| used[i] = true);
        let parts = parts.into_iter().map(|i| logical[i].clone()).collect();
        out.push((first, fuse(name, parts, blocks, rule.layout)));
    };
    let all_layers = layer_names(family, model);
    for rule in family.tensors.iter().copied().flatten() {
        let layers = if rule.hf.contains("{i}") { &all_layers[..] } else { &all_layers[..1] };
        let of_experts = rule.parts.iter().any(|p| p.contains("{e}"));
        for layer in layers {
            let (logical, name) = (&layer.logical, |e| format!("{prefix}{}", hf_name(rule.hf, layer.hf, e)));
            match (of_experts, rule.hf.contains("{e}")) {
                (true, true) => (0..experts).for_each(|e| apply(rule, name(e), logical, e..e + 1, None)),
                (true, false) if experts > 0 => apply(rule, name(0), logical, 0..experts, Some(experts)),
                (true, false) => {}
                (false, _) => apply(rule, name(0), logical, 0..1, None),
            }
        }
    }
    for (j, layer) in all_layers[model.layers..].iter().enumerate() {
        for rule in family.mtp {
            let name = format!("{prefix}{}", hf_name(rule.hf, layer.hf, 0));
            apply(rule, name, &format!("mtp.{j}."), 0..1, None);
        }
    }
    apply(&HEAD, HEAD.hf.into(), "", 0..1, None);

    if let Some(t) = logical.iter().zip(&used).find_map(|(t, used)| (!used).then_some(t)) {
        return Err(Error::CannotExpress(format!("the family {} has no place for {}", family.name, t.name)));
    }
    out.sort_by_key(|(i, _)| *i);
    Ok(out.into_iter().map(|(_, t)| t).collect())
}

/// The name in the files that a rule's pattern stands for.
fn hf_name(pattern: &str, layer: usize, expert: usize) -> String {
    pattern.replace("{i}", &layer.to_string()).replace("{e}", &expert.to_string())
}

/// The logical name that a rule's pattern stands for in the layer whose names begin with `layer`.
fn logical_name(pattern: &str, layer: &str, expert: usize) -> String {
    pattern.replace("layers.{i}.", layer).replace("mtp.{j}.", layer).replace("{e}", &expert.to_string())
}

/// A tensor of `parts`: of so many experts in turn, or of all of them at once.
pub(crate) fn fuse(
    name: String,
    parts: Vec<LogicalTensor>,
    blocks: Option<usize>,
    layout: FusedLayout,
) -> HfTensor {
    let count = blocks.unwrap_or(1);
    let cols = parts.first().and_then(|t| t.shape.get(1).copied());
    let one = parts.iter().take(parts.len() / count.max(1));
    let rows: Vec<usize> = one.map(|t| t.shape.first().copied().unwrap_or(1)).collect();
    let mut shape = vec![rows.iter().sum()];
    shape.extend(cols);
    if layout.transposed {
        shape.reverse();
    }
    if let Some(blocks) = blocks {
        shape.insert(0, blocks);
    }
    let views = (0..count).flat_map(|b| layout.views(&rows, cols.unwrap_or(1), b));
    let parts = parts.into_iter().zip(views).map(|(tensor, view)| HfPart { tensor, view }).collect();
    HfTensor { name, shape, parts, blocks, layout }
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
