//! Settings of offloading.

use super::choice;
use crate::config::KeyType;
use crate::config::OffloadSection;
use ferrotron_engine::Module;
use ferrotron_engine::data_parallel::HostShards;
use ferrotron_engine::offload::OffloadChoice;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

choice! {
    /// A module whose saved activations are offloaded.
    OffloadModule {
        /// The layer's input, with train.recompute = "full".
        LayerInput = "layer_input",
        /// Input of the norm before attention.
        AttnNorm = "attn_norm",
        /// Input of the QKV projection.
        QkvLinear = "qkv_linear",
        /// Query, key, value and output of core attention.
        CoreAttn = "core_attn",
        /// Input of the output projection of attention.
        AttnProj = "attn_proj",
        /// Input of the norm before the MLP.
        MlpNorm = "mlp_norm",
        /// Input of the first linear of the MLP.
        Fc1 = "fc1",
        /// Input of the activation function of the MLP.
        MlpAct = "mlp_act",
        /// Input of the second linear of the MLP.
        Fc2 = "fc2",
        /// Input of the router.
        Router = "router",
        /// Input of the experts' first linear.
        ExpertFc1 = "expert_fc1",
        /// Input of the experts' activation function.
        MoeAct = "moe_act",
        /// Input of the experts' second linear.
        ExpertFc2 = "expert_fc2",
    }
}

choice! {
    /// What updates optimizer state that is in host memory.
    OptimizerCompute {
        /// The faster of both, by rates measured in the first steps.
        Auto = "auto",
        /// The device: state streams through it in chunks.
        Device = "device",
        /// The CPU, in place: gradients are copied to the host and weights back.
        Cpu = "cpu",
    }
}

impl OffloadModule {
    fn module(self) -> Module {
        match self {
            OffloadModule::LayerInput => Module::LayerInput,
            OffloadModule::AttnNorm => Module::AttnNorm,
            OffloadModule::QkvLinear => Module::QkvLinear,
            OffloadModule::CoreAttn => Module::CoreAttn,
            OffloadModule::AttnProj => Module::AttnProj,
            OffloadModule::MlpNorm => Module::MlpNorm,
            OffloadModule::Fc1 => Module::Fc1,
            OffloadModule::MlpAct => Module::MlpAct,
            OffloadModule::Fc2 => Module::Fc2,
            OffloadModule::Router => Module::Router,
            OffloadModule::ExpertFc1 => Module::ExpertFc1,
            OffloadModule::MoeAct => Module::MoeAct,
            OffloadModule::ExpertFc2 => Module::ExpertFc2,
        }
    }
}

impl OffloadSection {
    /// Which shards of weights and gradients are in host memory.
    pub fn host_shards(&self) -> HostShards {
        HostShards { weights: self.weights, gradients: self.gradients }
    }
}

/// Which activations are offloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadedActivations {
    /// None.
    Off,
    /// As many as the link moves while the device computes, and as many as must move for a step to fit.
    Auto,
    /// Those of the first layers of each chunk.
    Layers(usize),
    /// Those of some modules.
    Modules(Vec<OffloadModule>),
}

impl OffloadedActivations {
    /// Whether any may move.
    pub fn is_on(&self) -> bool {
        !matches!(self, OffloadedActivations::Off | OffloadedActivations::Layers(0))
    }

    /// What the engine offloads; of an automatic choice, nothing before it is made.
    pub fn choice(&self) -> Option<OffloadChoice> {
        match self {
            OffloadedActivations::Off | OffloadedActivations::Layers(0) => None,
            OffloadedActivations::Auto => Some(OffloadChoice::Auto { needed: 0, layers: 0 }),
            OffloadedActivations::Layers(count) => Some(OffloadChoice::Layers(*count)),
            OffloadedActivations::Modules(list) => {
                Some(OffloadChoice::Modules(list.iter().map(|m| m.module()).collect()))
            }
        }
    }
}

/// How much of the optimizer state is in host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OffloadedState {
    /// A fraction of its bytes.
    Fraction(f64),
    /// As much as must be there for a step to fit on the device.
    Auto,
}

impl OffloadedState {
    /// The fraction; of an automatic choice, nothing before it is made.
    pub fn fraction(self) -> f64 {
        match self {
            OffloadedState::Fraction(fraction) => fraction,
            OffloadedState::Auto => 0.0,
        }
    }
}

impl Serialize for OffloadedState {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            OffloadedState::Fraction(fraction) => fraction.serialize(s),
            OffloadedState::Auto => s.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for OffloadedState {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(f64),
            Text(String),
        }
        match Form::deserialize(d)? {
            Form::Number(fraction) => Ok(OffloadedState::Fraction(fraction)),
            Form::Text(text) if text == "auto" => Ok(OffloadedState::Auto),
            Form::Text(text) => Err(D::Error::custom(format!("\"{text}\" is no fraction"))),
        }
    }
}

impl KeyType for OffloadedState {
    fn expects() -> String {
        "a fraction from 0 to 1, or \"auto\"".into()
    }
}

impl Serialize for OffloadedActivations {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            OffloadedActivations::Off => s.serialize_str("off"),
            OffloadedActivations::Auto => s.serialize_str("auto"),
            OffloadedActivations::Layers(count) => count.serialize(s),
            OffloadedActivations::Modules(list) => list.serialize(s),
        }
    }
}

impl<'de> Deserialize<'de> for OffloadedActivations {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Count(usize),
            One(String),
            Many(Vec<String>),
        }
        let list = match Form::deserialize(d)? {
            Form::Count(count) => return Ok(OffloadedActivations::Layers(count)),
            Form::One(text) if text == "off" => return Ok(OffloadedActivations::Off),
            Form::One(text) if text == "auto" => return Ok(OffloadedActivations::Auto),
            Form::One(text) => vec![text],
            Form::Many(list) => list,
        };
        let modules =
            list.iter().map(|m| m.parse().map_err(D::Error::custom)).collect::<Result<Vec<_>, _>>()?;
        Ok(if modules.is_empty() {
            OffloadedActivations::Off
        } else {
            OffloadedActivations::Modules(modules)
        })
    }
}

impl KeyType for OffloadedActivations {
    fn expects() -> String {
        let names: Vec<&str> = OffloadModule::ALL.iter().map(|m| m.name()).collect();
        format!("\"off\", \"auto\", a number of layers or a list of \"{}\"", names.join("\", \""))
    }
}
