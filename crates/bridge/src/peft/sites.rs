//! Where PEFT keeps the adapters of logical modules.

use crate::config::HfConfig;
use crate::error::Result;
use crate::expected::{HfTensor, hf_tensors};

/// One adapter of a PEFT folder. A weight of the base model that stacks several logical ones has one adapter for all of them,
/// and so have the weights of all experts.
#[derive(Debug, PartialEq)]
pub(super) struct Site {
    /// The module of the base model that is wrapped, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Of experts: the parameter of the module that is wrapped, and how many experts it stacks.
    pub experts: Option<(&'static str, usize)>,
    /// Logical modules whose outputs are stacked; of experts those of the first, then those of the next.
    pub parts: Vec<String>,
    /// Output features of these parts, of one expert.
    pub outputs: Vec<usize>,
    /// Input features.
    pub inputs: usize,
    /// Rows of the parts alternate.
    pub interleaved: bool,
    /// The base model stores the weight `[in, out]`.
    pub transposed: bool,
}

impl Site {
    /// Its name in patterns.
    pub fn name(&self) -> String {
        match self.experts {
            Some((parameter, _)) => format!("{}.{parameter}", self.module),
            None => self.module.clone(),
        }
    }

    /// Logical modules of an expert, or all there are.
    pub fn each_expert(&self) -> impl Iterator<Item = &[String]> {
        self.parts.chunks(self.outputs.len().max(1))
    }

    /// The row of B for output `i` of part `part`.
    pub fn row(&self, part: usize, i: usize) -> usize {
        match self.interleaved {
            true => i * self.outputs.len() + part,
            false => self.outputs[..part].iter().sum::<usize>() + i,
        }
    }

    /// Rows of B.
    pub fn rows(&self) -> usize {
        self.outputs.iter().sum()
    }
}

/// The sites of a model. Experts have two, of all experts each, as transformers 5 keeps their weights; `single` adds one for each
/// matrix of an expert, as earlier versions had.
pub(super) fn sites(config: &HfConfig, single: bool) -> Result<Vec<Site>> {
    let (family, model) = (config.family(), config.model());
    let tensors = hf_tensors(family, model, family.prefix)?;
    let is_expert = |t: &HfTensor| t.parts.iter().any(|p| p.tensor.name.contains(".moe.experts."));
    let mut out = Vec::new();
    for t in tensors.iter().filter(|t| is_linear(t) && (!is_expert(t) || (single && t.blocks.is_none()))) {
        let part = |p: &crate::HfPart| module_of(&p.tensor.name).to_string();
        out.push(Site {
            module: module_of(&t.name).to_string(),
            experts: None,
            parts: t.parts.iter().map(part).collect(),
            outputs: t.parts.iter().map(|p| p.tensor.shape[0]).collect(),
            inputs: t.parts.first().map_or(0, |p| p.tensor.shape[1]),
            interleaved: t.layout.interleaved,
            transposed: t.layout.transposed,
        });
    }
    let Some(moe) = &model.moe else { return Ok(out) };
    let interleaved = tensors.iter().any(|t| is_expert(t) && t.layout.interleaved);
    for layer in 0..model.layers {
        let of = |leaf: &str| {
            let name = format!("layers.{layer}.moe.experts.0.{leaf}.weight");
            let all = tensors.iter().flat_map(|t| &t.parts);
            let found = all.map(|p| &p.tensor).find(|t| t.name == name)?;
            Some((leaf.to_string(), found.shape.clone()))
        };
        for (parameter, leaves) in [("gate_up_proj", &["gate", "up"][..]), ("down_proj", &["down"])] {
            let found: Vec<(String, Vec<usize>)> = leaves.iter().filter_map(|leaf| of(leaf)).collect();
            let Some((_, first)) = found.first() else { continue };
            let names = |e: usize| {
                let found = &found;
                found.iter().map(move |(leaf, _)| format!("layers.{layer}.moe.experts.{e}.{leaf}"))
            };
            out.push(Site {
                module: format!("{}layers.{layer}.mlp.experts", family.prefix),
                experts: Some((parameter, moe.experts)),
                parts: (0..moe.experts).flat_map(names).collect(),
                outputs: found.iter().map(|(_, shape)| shape[0]).collect(),
                inputs: first[1],
                interleaved: interleaved && leaves.len() > 1,
                transposed: false,
            });
        }
    }
    Ok(out)
}

/// Whether a tensor is the weight of a linear layer of the decoder; a router's is not.
fn is_linear(t: &HfTensor) -> bool {
    t.parts.iter().all(|p| {
        let name = &p.tensor.name;
        p.tensor.shape.len() == 2
            && name.starts_with("layers.")
            && name.ends_with(".weight")
            && !name.ends_with(".router.weight")
    })
}

fn module_of(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_core::model::config::ModelConfig;
    use ferrotron_tensor::DType;

    fn of(preset: &str, single: bool) -> Vec<Site> {
        let model = ModelConfig::preset(preset).unwrap();
        sites(&HfConfig::from_model(&model, DType::F32).unwrap(), single).unwrap()
    }

    #[test]
    fn dense_models_have_a_site_for_each_linear() {
        let all = of("qwen3-0.6b", false);
        assert_eq!(all.len(), 28 * 7);
        let q = all.iter().find(|s| s.module == "model.layers.3.self_attn.q_proj").unwrap();
        assert_eq!((&q.parts[..], q.inputs, q.rows()), (&["layers.3.attn.q".to_string()][..], 1024, 2048));
        let fused = of("gpt2-124m", false);
        let qkv = fused.iter().find(|s| s.module == "transformer.h.0.attn.c_attn").unwrap();
        assert_eq!((qkv.outputs.as_slice(), qkv.inputs, qkv.row(2, 5)), (&[768; 3][..], 768, 2 * 768 + 5));
    }
}
