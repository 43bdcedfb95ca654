//! Adapters of a model: in checkpoints of runs with `lora.rank`, and in PEFT folders.

mod config;
mod read;
mod sites;
mod write;

pub use config::PeftConfig;
pub(crate) use config::{ADAPTER_CONFIG, alpha};
pub(crate) use read::ADAPTER_WEIGHTS;
pub use write::write_peft;

use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::native_checkpoint::PREFIX;
use ferrotron_core::checkpoint::Loaded;
use ferrotron_core::train::to_f32;
use ferrotron_engine::lora::{LORA_A, LORA_B, LORA_M, LoraTargets};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The adapters of a model, by logical module (`layers.0.attn.q`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adapters {
    modules: BTreeMap<String, Adapter>,
}

/// The adapter of one linear: its weight is `W + scale·B·A`, with DoRA each row of that scaled to the length `m`.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// A `[rank, inputs]`. Modules may share it.
    pub a: Arc<Vec<f32>>,
    /// B `[outputs, rank]`.
    pub b: Vec<f32>,
    /// DoRA's m `[outputs]`.
    pub magnitude: Option<Vec<f32>>,
    /// Rank of the update.
    pub rank: usize,
    /// Scale of the update: alpha / rank.
    pub scale: f64,
}

impl Adapter {
    /// Input features.
    pub fn inputs(&self) -> usize {
        self.a.len() / self.rank.max(1)
    }

    /// Output features.
    pub fn outputs(&self) -> usize {
        self.b.len() / self.rank.max(1)
    }

    /// Merges it into the weight `[outputs, inputs]`.
    pub fn merge(&self, weight: &mut [f32]) {
        let inputs = self.inputs();
        for (o, row) in weight.chunks_exact_mut(inputs.max(1)).enumerate() {
            for (r, a) in self.a.chunks_exact(inputs.max(1)).enumerate() {
                let b = self.scale as f32 * self.b[o * self.rank + r];
                row.iter_mut().zip(a).for_each(|(w, a)| *w += b * a);
            }
            if let Some(m) = &self.magnitude {
                let norm = row.iter().map(|w| f64::from(*w) * f64::from(*w)).sum::<f64>().sqrt();
                let scale = (f64::from(m[o]) / norm) as f32;
                row.iter_mut().for_each(|w| *w *= scale);
            }
        }
    }
}

impl Adapters {
    /// The adapters in a checkpoint, whose update has this scale.
    pub(crate) fn of_checkpoint(loaded: &Loaded, scale: f64) -> Result<Adapters> {
        let values = |logical: &str| -> Result<Option<(Vec<f32>, Vec<usize>)>> {
            let name = format!("{PREFIX}{logical}");
            let Some(found) = loaded.get(&name) else { return Ok(None) };
            let Some(dtype) = found.dtype.native() else {
                return Err(Error::tensor(logical, format!("element type {} is no weight", found.dtype)));
            };
            let shape = found.shape.clone();
            Ok(Some((to_f32(dtype, &loaded.read(&name)?)?, shape)))
        };
        let mut shared: BTreeMap<String, Arc<Vec<f32>>> = BTreeMap::new();
        let mut modules = BTreeMap::new();
        let names: Vec<String> =
            loaded.tensors().filter_map(|t| t.name.strip_prefix(PREFIX)).map(String::from).collect();
        for module in names.iter().filter_map(|n| n.strip_suffix(LORA_B)) {
            let Some((b, shape)) = values(&format!("{module}{LORA_B}"))? else { continue };
            let owners = || names.iter().filter_map(|n| n.strip_suffix(LORA_A));
            let owner = owners()
                .find(|owner| *owner == module)
                .or_else(|| owners().find(|owner| is_fused(owner, module)))
                .ok_or_else(|| Error::tensor(&format!("{module}{LORA_A}"), "is missing in the checkpoint"))?;
            if !shared.contains_key(owner) {
                let a = values(&format!("{owner}{LORA_A}"))?.map(|(a, _)| a).unwrap_or_default();
                shared.insert(owner.to_string(), Arc::new(a));
            }
            let a = shared.get(owner).cloned().unwrap_or_default();
            let magnitude = values(&format!("{module}{LORA_M}"))?.map(|(m, _)| m);
            let rank = shape.get(1).copied().unwrap_or(0);
            modules.insert(module.to_string(), Adapter { a, b, magnitude, rank, scale });
        }
        Ok(Adapters { modules })
    }

    /// The adapter of a logical module.
    pub fn get(&self, module: &str) -> Option<&Adapter> {
        self.modules.get(module)
    }

    /// Modules and their adapters, in order of names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Adapter)> {
        self.modules.iter().map(|(name, adapter)| (name.as_str(), adapter))
    }

    /// Number of adapted linears.
    pub fn len(&self) -> usize {
        self.modules.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.modules.is_empty()
    }

    /// The values of an adapter's tensor by its logical name, such as `layers.0.attn.q.lora_a.weight`.
    pub fn tensor(&self, logical: &str) -> Option<&[f32]> {
        let of = |ending: &str| logical.strip_suffix(ending).and_then(|module| self.get(module));
        if let Some(module) = logical.strip_suffix(LORA_A) {
            // Of an A that several modules share, any of them has it.
            let shared = || self.iter().find(|(name, _)| is_fused(module, name)).map(|(_, adapter)| adapter);
            return self.get(module).or_else(shared).map(|adapter| &adapter.a[..]);
        }
        let b = of(LORA_B).map(|adapter| &adapter.b[..]);
        b.or_else(|| of(LORA_M).and_then(|adapter| adapter.magnitude.as_deref()))
    }

    /// Names for `lora.targets` that select these modules of a base model, and no others.
    pub(crate) fn targets(&self, base: &HfConfig) -> Result<Vec<String>> {
        let all = linears(base)?;
        // Hugging Face's names, which no router has.
        let spelled = |module: &str| match module.rsplit('.').next().unwrap_or(module) {
            "out" | "o" => "o_proj".to_string(),
            leaf @ ("q" | "k" | "v" | "gate" | "up" | "down") => format!("{leaf}_proj"),
            leaf => leaf.to_string(),
        };
        let apart = |module: &str| match module.contains(".experts.") {
            true => format!("*.experts.*.{}", spelled(module)),
            false => spelled(module),
        };
        let names = |spell: &dyn Fn(&str) -> String| -> Vec<String> {
            self.iter().map(|(module, _)| spell(module)).collect::<BTreeSet<_>>().into_iter().collect()
        };
        let exact = |include: Vec<String>| {
            let chosen = LoraTargets { include, ..LoraTargets::default() };
            self.apart(&all, &chosen).is_none().then_some(chosen.include)
        };
        Ok(exact(vec![LoraTargets::ALL.into()])
            .or_else(|| exact(names(&spelled)))
            .or_else(|| exact(names(&apart)))
            .unwrap_or_else(|| self.modules.keys().cloned().collect()))
    }

    /// The first module of a base model that is chosen and has no adapter, or has one and is not chosen.
    pub(crate) fn first_apart(&self, base: &HfConfig, chosen: &LoraTargets) -> Result<Option<String>> {
        Ok(self.apart(&linears(base)?, chosen).cloned())
    }

    fn apart<'a>(&self, all: &'a [String], chosen: &LoraTargets) -> Option<&'a String> {
        all.iter().find(|module| chosen.cover(module) != self.get(module).is_some())
    }

    /// Whether modules share A, and all do that could: `lora.fused` is for the whole model. Of others (q, k and v with an A each
    /// beside experts whose gate and up share theirs, as PEFT has it) every module gets a copy.
    pub(crate) fn share_a(&self) -> bool {
        let distinct: BTreeSet<*const Vec<f32>> = self.modules.values().map(|m| Arc::as_ptr(&m.a)).collect();
        distinct.len() < self.modules.len() && self.with_own_a().is_none()
    }

    /// Two modules that `lora.fused` would give one A, and that have different ones.
    pub(crate) fn with_own_a(&self) -> Option<(&str, &str)> {
        const STACKED: [&[&str]; 3] = [&["q", "k", "v"], &["gate", "up"], &["q_a", "kv_a"]];
        self.modules.iter().find_map(|(name, adapter)| {
            let (parent, leaf) = name.rsplit_once('.')?;
            let beside = STACKED.iter().filter(|all| all.contains(&leaf)).flat_map(|all| all.iter());
            let mut others = beside.filter(|other| **other != leaf);
            others.find_map(|other| {
                let (key, value) = self.modules.get_key_value(&format!("{parent}.{other}"))?;
                (!Arc::ptr_eq(&adapter.a, &value.a)).then_some((name.as_str(), key.as_str()))
            })
        })
    }

    /// Merges the adapter of a logical weight, if it has one.
    pub(crate) fn merge(&self, logical: &str, weight: &mut [f32]) -> Result<bool> {
        let Some(adapter) = logical.strip_suffix(".weight").and_then(|module| self.get(module)) else {
            return Ok(false);
        };
        let (outputs, inputs) = (adapter.outputs(), adapter.inputs());
        if outputs * inputs != weight.len() {
            let what = format!("has an adapter for {outputs} x {inputs} weights, but has {}", weight.len());
            return Err(Error::tensor(logical, what));
        }
        adapter.merge(weight);
        Ok(true)
    }
}

/// Modules of a base model that adapters may be asked for, routers among them.
fn linears(base: &HfConfig) -> Result<Vec<String>> {
    let mut all: Vec<String> = sites::sites(base, false)?.into_iter().flat_map(|s| s.parts).collect();
    all.extend((0..base.model().layers).map(|i| format!("layers.{i}.moe.router")));
    Ok(all)
}

/// Whether `owner` is the module of an A that `module` shares, as `lora::fused_module` names it: `layers.0.attn.qkv` of
/// `layers.0.attn.q`, `layers.0.mlp.gate_up` of `layers.0.mlp.up`.
fn is_fused(owner: &str, module: &str) -> bool {
    match (owner.rsplit_once('.'), module.rsplit_once('.')) {
        (Some((a, fused)), Some((b, leaf))) if a == b => match fused {
            "qkv" => ["q", "k", "v"].contains(&leaf),
            _ => fused.starts_with(&format!("{leaf}_")) || fused.ends_with(&format!("_{leaf}")),
        },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_adds_the_update_and_dora_scales_rows() {
        // W 2 x 3, rank 2.
        let a = Arc::new(vec![1.0, 2.0, 3.0, -1.0, 0.5, 0.0]);
        let b = vec![0.5, 1.0, -2.0, 0.25];
        let mut adapter = Adapter { a, b, magnitude: None, rank: 2, scale: 2.0 };
        let w = [1.0f32, 1.0, 1.0, 0.0, 4.0, 0.0];
        let mut merged = w;
        adapter.merge(&mut merged);
        let exact = [0.0, 4.0, 4.0, -4.5, -3.75, -12.0];
        assert_eq!(merged, exact);
        adapter.magnitude = Some(vec![3.0, 1.0]);
        let mut dora = w;
        adapter.merge(&mut dora);
        for (row, m) in dora.chunks(3).zip([3.0f32, 1.0]) {
            let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            assert!((norm - m).abs() < 1e-6, "{norm}");
        }
        assert!((dora[1] / dora[2] - 1.0).abs() < 1e-6 && dora[0] == 0.0);
    }

    /// `lora.fused` is for the whole model: experts whose gate and up share A do not make q, k and v share theirs.
    #[test]
    fn only_adapters_that_all_share_are_fused() {
        let adapter =
            |a: &Arc<Vec<f32>>| Adapter { a: a.clone(), b: vec![0.0], magnitude: None, rank: 1, scale: 1.0 };
        let [one, two, three] = [1.0, 2.0, 3.0].map(|x| Arc::new(vec![x]));
        let of = |list: &[(&str, &Arc<Vec<f32>>)]| Adapters {
            modules: list.iter().map(|(name, a)| (format!("layers.0.{name}"), adapter(a))).collect(),
        };
        let experts = [("moe.experts.0.gate", &one), ("moe.experts.0.up", &one)];
        assert!(of(&experts).share_a() && of(&experts).with_own_a().is_none());
        let both = of(&[&experts[..], &[("attn.q", &two), ("attn.k", &three)]].concat());
        assert!(!both.share_a());
        assert_eq!(both.with_own_a(), Some(("layers.0.attn.k", "layers.0.attn.q")));
        assert!(
            of(&[&experts[..], &[("attn.q", &two), ("attn.k", &two), ("attn.out", &three)]].concat())
                .share_a()
        );
        assert!(!of(&[("attn.q", &one), ("attn.out", &two)]).share_a());
    }

    #[test]
    fn a_shared_matrix_is_found_by_its_modules() {
        assert!(is_fused("layers.0.attn.qkv", "layers.0.attn.k"));
        assert!(is_fused("layers.0.mlp.gate_up", "layers.0.mlp.up"));
        assert!(!is_fused("layers.1.attn.qkv", "layers.0.attn.k"));
        assert!(!is_fused("layers.0.attn.q", "layers.0.attn.q"));
        assert!(!is_fused("layers.0.attn.kv_a", "layers.0.attn.q"));
        for leaf in ["q_a", "kv_a"] {
            assert!(is_fused("layers.0.attn.q_a_kv_a", &format!("layers.0.attn.{leaf}")));
        }
    }
}
