//! Our own names: one logical tensor per parameter, never fused, matrices `[out, in]`.

use ferrotron_core::model::config::ModelConfig;
use ferrotron_core::model::logical_parts;
use ferrotron_tensor::DType;
use std::collections::HashMap;

/// A parameter of the model under its logical name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogicalTensor {
    /// `layers.0.attn.q.weight` and the like.
    pub name: String,
    /// `[out, in]` for matrices, `[n]` for gains and biases.
    pub shape: Vec<usize>,
    /// Is it no parameter: f32 whatever the weights are, without a gradient?
    pub buffer: bool,
}

impl LogicalTensor {
    /// Elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The element type a model wants a tensor in, if it computes in `dtype`: what is no parameter stays f32.
pub(crate) fn load_dtype(logical: &str, dtype: DType) -> DType {
    if logical.ends_with(".moe.expert_bias") { DType::F32 } else { dtype }
}

/// Every tensor of a model that is no parameter.
pub fn logical_buffers(c: &ModelConfig) -> Vec<LogicalTensor> {
    let buffers = ferrotron_core::model::logical_buffers(c).into_iter();
    buffers.map(|p| LogicalTensor { name: p.name, shape: p.shape, buffer: true }).collect()
}

/// Every parameter of a model, as the model declares it: embedding, layers, LM head, MTP layers. The matrices of an
/// expert stand together, and a bias follows its weight.
pub fn logical_tensors(c: &ModelConfig) -> Vec<LogicalTensor> {
    let mut modules: Vec<Vec<LogicalTensor>> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for p in logical_parts(c).unwrap_or_default() {
        let place = *places.entry(module(&p.name).to_string()).or_insert(modules.len());
        modules.resize_with(modules.len().max(place + 1), Vec::new);
        modules[place].push(LogicalTensor { name: p.name, shape: p.shape, buffer: false });
    }
    modules.into_iter().flatten().collect()
}

/// What a parameter stands together with: its expert, or the linear layer or norm of which it is weight or bias.
fn module(name: &str) -> &str {
    if let Some((before, rest)) = name.split_once(".experts.") {
        let expert = rest.split('.').next().unwrap_or_default();
        return &name[..before.len() + ".experts.".len() + expert.len()];
    }
    name.rsplit_once('.').map_or(name, |(module, _)| module)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_core::model::MtpConfig;
    use ferrotron_core::model::preset::PRESETS;

    #[test]
    fn tensors_hold_every_parameter() {
        for name in PRESETS {
            let mut c = ModelConfig::preset(name).unwrap();
            c.mtp = c.layers.is_multiple_of(2).then_some(MtpConfig { layers: 2, shared_layer: false });
            let tensors = logical_tensors(&c);
            let total: usize = tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum();
            assert_eq!(total, c.parameters(), "{name}");
            let mut names: Vec<_> = tensors.iter().map(|t| &t.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), tensors.len(), "{name}: a name twice");
        }
    }
}
