//! Parameters and their counts, from the model's declarations run without a device.

use super::shape::ParallelRanks;
use crate::model::chunk::Chunk;
use crate::model::declare::ModelDeclaration;
use crate::model::layer::Layer;
use crate::model::mtp::MtpLayer;
use crate::model::mtp_config::MtpTraining;
use crate::model::{ChunkUnits, ModelConfig, ModelOptions, Stage};
use crate::optimizer::ParamGroups;
use ferrotron_engine::quant::Policy;
use ferrotron_engine::{Declarations, ExpertParallelRank, GroupRank, Init, ParamSpec, Part, Split};
use ferrotron_tensor::Result;

/// The parameters that a rank holds of the chunks `stages`, as training allocates them.
pub fn declare_params(
    config: &ModelConfig,
    ranks: &ParallelRanks,
    stages: &[Stage],
    options: &ModelOptions,
) -> Result<Vec<ParamSpec>> {
    Ok(declare_chunks(config, ranks, stages, options)?.0)
}

/// The same, and the units of each chunk.
pub(crate) fn declare_chunks(
    config: &ModelConfig,
    ranks: &ParallelRanks,
    stages: &[Stage],
    options: &ModelOptions,
) -> Result<(Vec<ParamSpec>, Vec<ChunkUnits>)> {
    let experts = ExpertParallelRank { ep: ranks.ep, etp: ranks.etp };
    let params = Declarations::on(ranks.tp, experts)
        .with_policy(options.policy.clone())
        .with_lora(options.lora.clone())
        .with_moe_training(&options.moe_training)
        .with_loss(options.loss);
    let mut no_tables = |_| Ok(None);
    let mut model = ModelDeclaration::new(params, config, options.mtp, ranks.pp.size > 1, &mut no_tables);
    let mut units = Vec::with_capacity(stages.len());
    for stage in stages {
        units.push(Chunk::declare(&mut model, stage)?.units().clone());
    }
    Ok((model.finish(&options.groups), units))
}

/// The stage that is a whole model.
fn whole_model(config: &ModelConfig) -> Stage {
    Stage { embedding: true, layers: 0..config.layers, mtp: 0..config.mtp_depth(), loss: true }
}

/// All logical tensors of a model, in order of declaration.
pub fn logical_parts(config: &ModelConfig) -> Result<Vec<Part>> {
    Ok(logical_specs(config, &ModelOptions::default())?.into_iter().flat_map(|s| s.parts).collect())
}

/// The parameters of a model on a single rank, in order of declaration.
pub fn logical_specs(config: &ModelConfig, options: &ModelOptions) -> Result<Vec<ParamSpec>> {
    declare_params(config, &ParallelRanks::single(), &[whole_model(config)], options)
}

/// The module of a logical tensor: `layers.0.mlp.down` of `layers.0.mlp.down.weight`. The experts of a layer have one name:
/// `layers.0.moe.experts.up` of `layers.0.moe.experts.7.up.weight`.
pub fn module_of(tensor: &str) -> String {
    let mut parts: Vec<&str> = tensor.strip_suffix(".weight").unwrap_or(tensor).split('.').collect();
    if let Some(at) = parts.iter().position(|p| *p == "experts")
        && parts.get(at + 1).is_some_and(|n| n.parse::<usize>().is_ok())
    {
        parts.remove(at + 1);
    }
    parts.join(".")
}

/// Tensors of a model that are not parameters: the expert bias f32 `[E]` of each MoE layer that has one.
pub fn logical_buffers(config: &ModelConfig) -> Vec<Part> {
    let part = |name: String| Part {
        name: format!("{name}.moe.expert_bias"),
        shape: vec![config.moe.as_ref().map_or(0, |m| m.experts)],
        init: Init::Constant(0.0),
        split: Split::Replicated,
    };
    let has = |i: usize| config.moe_layer(i).is_some_and(|m| m.expert_bias);
    let decoder = (0..config.layers).filter(|i| has(*i)).map(|i| format!("layers.{i}"));
    let mtp = (0..config.mtp_modules()).filter(|i| has(config.layers + i)).map(|i| format!("mtp.{i}.layer"));
    decoder.chain(mtp).map(part).collect()
}

/// A linear layer of the whole model, `[input] → [output]`, whose weight may stack several logical matrices.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearInfo {
    /// Modules of the logical matrices, such as `layers.0.attn.q`; of experts, those of the first.
    pub names: Vec<String>,
    /// Input features.
    pub input: usize,
    /// Output features, of all stacked matrices.
    pub output: usize,
    /// How tensor-parallel ranks split it.
    pub split: Split,
    /// There is one for each expert.
    pub experts: bool,
}

impl LinearInfo {
    /// The linear layer of a declared weight; none of embeddings, norms and biases.
    fn of(spec: &ParamSpec) -> Option<LinearInfo> {
        let each = spec.parts.len() / spec.matrices.max(1);
        let parts = &spec.parts[..each];
        let names: Vec<String> =
            parts.iter().map(|p| p.name.strip_suffix(".weight").map(String::from)).collect::<Option<_>>()?;
        let [_, input] = *parts.first()?.shape.as_slice() else { return None };
        let output = parts.iter().map(|p| p.shape[0]).sum();
        Some(LinearInfo { names, input, output, split: parts[0].split, experts: spec.experts })
    }

    /// Elements of its matrices, of one expert where there are several.
    pub fn elements(&self) -> usize {
        self.input * self.output
    }

    /// Whether its first module is `module`, such as `attn.q`.
    pub fn is(&self, module: &str) -> bool {
        self.names.first().is_some_and(|n| n.ends_with(&format!(".{module}")))
    }
}

/// Declarations on one rank that holds a single expert of each layer: names of thousands of experts are not needed to
/// count them.
fn declare_one_expert<T>(
    config: &ModelConfig,
    declare: impl FnOnce(&mut ModelDeclaration) -> Result<T>,
) -> Result<Vec<ParamSpec>> {
    let size = config.moe.as_ref().map_or(1, |m| m.experts.max(1));
    let experts = ExpertParallelRank { ep: GroupRank { rank: 0, size }, etp: GroupRank::SINGLE };
    let params = Declarations::on(GroupRank::SINGLE, experts);
    let mut no_tables = |_| Ok(None);
    let mut model = ModelDeclaration::new(params, config, MtpTraining::default(), false, &mut no_tables);
    declare(&mut model)?;
    Ok(model.finish(&ParamGroups::default()))
}

impl ModelConfig {
    /// Parameters of one layer like layer `i`, of one expert where it has several.
    fn layer_params(&self, i: usize) -> Result<Vec<ParamSpec>> {
        declare_one_expert(self, |m| Layer::declare(&mut m.params, self, i, None))
    }

    /// The linear layers of layer `i`, in order of declaration.
    pub fn linears(&self, i: usize) -> Result<Vec<LinearInfo>> {
        Ok(self.layer_params(i)?.iter().filter_map(LinearInfo::of).collect())
    }

    /// Trainable parameters of the model; a tied matrix counts once.
    pub fn parameters(&self) -> usize {
        usize::try_from(self.parameters_u128()).unwrap_or(usize::MAX)
    }

    /// The same, of which no sizes that [`ModelConfig::validate`] passes on overflow.
    pub(in crate::model) fn parameters_u128(&self) -> u128 {
        let experts = self.moe.as_ref().map_or(1, |m| m.experts as u128);
        self.count_parameters(experts).unwrap_or(u128::MAX)
    }

    /// Parameters that one token uses: of the experts of a layer, top-k.
    pub fn active_parameters(&self) -> usize {
        let topk = self.moe.as_ref().map_or(1, |m| m.topk as u128);
        self.count_parameters(topk).map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
    }

    /// Parameters with so many experts in each MoE layer.
    fn count_parameters(&self, experts: u128) -> Result<u128> {
        let count = |specs: Vec<ParamSpec>| -> u128 {
            let each = |s: &ParamSpec| s.numel() as u128 * if s.experts { experts } else { 1 };
            specs.iter().map(each).sum()
        };
        // Layers differ only in whether they are MoE layers: one of each kind is declared.
        let moe = self.moe_layer_count();
        let of_kind = |is_moe: bool| (0..self.layers).find(|i| self.moe_layer(*i).is_some() == is_moe);
        let mut total = 0;
        for (kind, layers) in [(of_kind(true), moe), (of_kind(false), self.layers - moe)] {
            if let Some(i) = kind {
                total += layers as u128 * count(self.layer_params(i)?);
            }
        }
        if self.mtp_modules() > 0 {
            let layer = declare_one_expert(self, |m| MtpLayer::declare(m, 0))?;
            total += self.mtp_modules() as u128 * count(layer);
        }
        let ends = ModelConfig { mtp: None, ..self.clone() };
        let stage = Stage { layers: 0..0, ..whole_model(&ends) };
        total += count(declare_one_expert(&ends, |m| Chunk::declare(m, &stage))?);
        Ok(total)
    }

    /// Elements of the weights that are FP8 between steps under a policy.
    pub fn fp8_resident_parameters(&self, policy: &Policy) -> Result<usize> {
        let options = ModelOptions { policy: policy.clone(), ..ModelOptions::default() };
        let specs = declare_params(self, &ParallelRanks::single(), &[whole_model(self)], &options)?;
        Ok(specs.iter().filter(|s| s.fp8_resident()).map(ParamSpec::numel).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::MlaConfig;
    use crate::model::preset::PRESETS;
    use crate::model::{MoeConfig, MtpConfig};

    fn mla(q_lora_rank: Option<usize>) -> MlaConfig {
        MlaConfig { q_lora_rank, kv_lora_rank: 48, nope_dim: 32, rope_dim: 16, v_dim: 24, norm_eps: 1e-6 }
    }

    /// The count from one layer of each kind against the declarations of the whole model.
    #[test]
    fn parameters_are_those_declared() {
        let mut models: Vec<ModelConfig> =
            PRESETS.iter().map(|name| ModelConfig::preset(name).unwrap()).collect();
        let tiny = ModelConfig::preset("tiny").unwrap();
        for bias in [false, true] {
            let mut c = ModelConfig { qkv_bias: bias, proj_bias: bias, attn_sink: bias, ..tiny.clone() };
            models.push(c.clone().with_mla(mla(Some(40))));
            models.push(c.clone().with_mla(mla(None)));
            c.mtp = Some(MtpConfig { layers: 2, shared_layer: bias });
            c.tied = bias;
            models.push(c.clone());
            let moe = MoeConfig {
                layers: vec![false, true, true, false],
                bias,
                router_bias: bias,
                latent: bias.then_some(32),
                shared_ffn: Some(48),
                shared_gate: bias,
                ..MoeConfig::plain(4, 2, 64)
            };
            models.push(ModelConfig { moe: Some(moe), ..c });
        }
        for c in models {
            c.validate().unwrap();
            let declared: usize =
                logical_parts(&c).unwrap().iter().map(|p| p.shape.iter().product::<usize>()).sum();
            assert_eq!(c.parameters(), declared, "{c:?}");
        }
    }

    #[test]
    fn linears_stack_what_is_one_gemm() {
        let tiny = ModelConfig::preset("tiny").unwrap();
        let names = |c: &ModelConfig| -> Vec<String> {
            c.linears(0).unwrap().iter().map(|l| l.names.join("+").replace("layers.0.", "")).collect()
        };
        assert_eq!(names(&tiny), ["attn.q+attn.k+attn.v", "attn.out", "mlp.gate+mlp.up", "mlp.down"]);
        let latent = tiny.clone().with_mla(mla(Some(40)));
        assert_eq!(names(&latent)[..4], ["attn.q_a+attn.kv_a", "attn.q_b", "attn.kv_b", "attn.o"]);
        let moe = ModelConfig { moe: Some(MoeConfig::plain(1 << 20, 2, 64)), ..tiny };
        assert_eq!(
            names(&moe)[2..],
            ["moe.router", "moe.experts.0.gate+moe.experts.0.up", "moe.experts.0.down"]
        );
        assert_eq!(moe.linears(0).unwrap()[3].output, 128);
    }
}
