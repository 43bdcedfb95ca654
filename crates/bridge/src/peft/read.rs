//! Reads the adapters of a PEFT folder.

use super::sites::{Site, sites};
use super::{ADAPTER_CONFIG, Adapter, Adapters, PeftConfig};
use crate::cast::{cast, is_castable};
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::finite;
use crate::problems::Problem;
use ferrotron_core::tensorfile::TensorFile;
use ferrotron_core::train::to_f32;
use ferrotron_tensor::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Name of the weights in a PEFT folder.
pub(crate) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// What PEFT puts before the name of a module.
pub(super) const WRAPPED: &str = "base_model.model.";
pub(super) const A: &str = ".lora_A.weight";
pub(super) const B: &str = ".lora_B.weight";
pub(super) const MAGNITUDE: &str = ".lora_magnitude_vector";
/// The parameter of a module that was wrapped first, where two were.
pub(super) const INNER: &str = ".base_layer";

impl Adapters {
    /// The adapters of a PEFT folder for a base model.
    pub fn from_peft(dir: &Path, base: &HfConfig) -> Result<Adapters> {
        let config = PeftConfig::from_dir(dir)?;
        let path = dir.join(ADAPTER_WEIGHTS);
        if !path.is_file() && dir.join("adapter_model.bin").is_file() {
            let what =
                "has its weights in adapter_model.bin, a pickle; save it again with safe_serialization=True";
            return Err(Error::unsupported(&dir.display().to_string(), what));
        }
        let mut file = Files { file: TensorFile::open(&path)?, used: BTreeSet::new() };
        let mut modules = BTreeMap::new();
        for site in sites(base, true)? {
            file.read_site(&site, &config, &mut modules)?;
        }
        let unknown = |t: &&str| !file.used.contains(*t);
        let names: Vec<&str> = file.file.tensors().iter().map(|t| t.name.as_str()).collect();
        let problems: Vec<Problem> =
            names.iter().filter(|t| unknown(t)).map(|t| Problem::Unexpected(t.to_string())).collect();
        if !problems.is_empty() {
            return Err(Error::Tensors { origin: path.display().to_string(), problems });
        }
        if modules.is_empty() {
            return Err(Error::config(&path.display().to_string(), "holds no adapter"));
        }
        Ok(Adapters { modules })
    }
}

struct Files {
    file: TensorFile,
    used: BTreeSet<String>,
}

impl Files {
    /// The adapters of a site, if the file has any.
    fn read_site(
        &mut self,
        site: &Site,
        config: &PeftConfig,
        out: &mut BTreeMap<String, Adapter>,
    ) -> Result<()> {
        let (rank, scale) = config.of(&site.name());
        let count = site.experts.map_or(1, |(_, n)| n);
        let rank_all = rank * count;
        let wrapped = format!("{WRAPPED}{}", site.module);
        let is_here = |prefix: &String| {
            let fits = |ending: &str, axis: usize, n: usize| {
                self.file.get(&format!("{prefix}{ending}")).is_some_and(|t| t.shape.get(axis) == Some(&n))
            };
            // Two parameters of the experts are told apart by their shapes.
            match site.experts {
                None => self.file.get(&format!("{prefix}{A}")).is_some(),
                Some(_) => fits(A, 1, site.inputs) && fits(B, 0, site.rows()),
            }
        };
        let Some(prefix) = [wrapped.clone(), format!("{wrapped}{INNER}")].into_iter().find(is_here) else {
            return Ok(());
        };
        let a = self.values(&format!("{prefix}{A}"), &[rank_all, site.inputs])?;
        let b = self.values(&format!("{prefix}{B}"), &[site.rows(), rank_all])?;
        let name = format!("{prefix}{MAGNITUDE}");
        if !config.dora && self.file.get(&name).is_some() {
            let what = format!(
                "is DoRA's, but `use_dora` in {ADAPTER_CONFIG} is false; set it to true, or remove the tensor"
            );
            return Err(Error::tensor(&name, what));
        }
        let magnitude = config.dora.then(|| self.values(&name, &[site.rows()])).transpose()?;
        for (e, parts) in site.each_expert().enumerate() {
            let block = rank * site.inputs;
            let all = Arc::new(a[e * block..(e + 1) * block].to_vec());
            let split: Vec<Vec<f32>> = (0..parts.len())
                .map(|p| {
                    let rows = (0..site.outputs[p]).map(|i| site.row(p, i));
                    // B of experts is [rows, rank, experts].
                    rows.flat_map(|row| (0..rank).map(move |r| (row, r)))
                        .map(|(row, r)| b[row * rank_all + r * count + e])
                        .collect()
                })
                .collect();
            let apart = is_block_diagonal(&split, rank);
            for (p, (module, b)) in parts.iter().zip(split).enumerate() {
                let magnitude = magnitude
                    .as_ref()
                    .map(|m| (0..site.outputs[p]).map(|i| m[site.row(p, i)]).collect::<Vec<f32>>());
                let adapter = match apart {
                    false => Adapter { a: all.clone(), b, magnitude, rank, scale },
                    true => {
                        let own = rank / parts.len();
                        let a = all[p * own * site.inputs..(p + 1) * own * site.inputs].to_vec();
                        let columns = |row: &[f32]| row[p * own..(p + 1) * own].to_vec();
                        let b = b.chunks_exact(rank).flat_map(columns).collect();
                        Adapter { a: Arc::new(a), b, magnitude, rank: own, scale }
                    }
                };
                out.insert(module.clone(), adapter);
            }
        }
        Ok(())
    }

    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(found) = self.file.get(name) else {
            return Err(Error::tensor(name, format!("is missing in {}", self.file.path().display())));
        };
        if found.shape != shape {
            let what = format!(
                "has shape {:?}, but the base model and {} need {shape:?}",
                found.shape,
                super::ADAPTER_CONFIG
            );
            return Err(Error::tensor(name, what));
        }
        let Some(dtype) = found.dtype.native().filter(|d| is_castable(*d)) else {
            let what = format!(
                "dtype {} of {} cannot be read as an adapter (F32, BF16 and F16 can)",
                found.dtype,
                self.file.path().display()
            );
            return Err(Error::tensor(name, what));
        };
        let stored = self.file.read(name)?;
        let mut bytes = vec![0; stored.len() / dtype.size() * DType::F32.size()];
        cast(&stored, dtype, &mut bytes, DType::F32);
        finite::check(name, DType::F32, &bytes)?;
        self.used.insert(name.to_string());
        Ok(to_f32(DType::F32, &bytes)?)
    }
}

/// Whether each of several parts uses ranks of its own: part p of n the p-th n-th of them. Their adapters are independent then.
fn is_block_diagonal(parts: &[Vec<f32>], rank: usize) -> bool {
    let n = parts.len();
    if n < 2 || !rank.is_multiple_of(n) {
        return false;
    }
    let own = rank / n;
    let elsewhere = |p: usize, r: usize| !(p * own..(p + 1) * own).contains(&r);
    let zero = |(p, b): (usize, &Vec<f32>)| {
        b.chunks_exact(rank).all(|row| row.iter().enumerate().all(|(r, x)| *x == 0.0 || !elsewhere(p, r)))
    };
    // Untrained adapters have B = 0, and may share A: only what differs is apart.
    parts.iter().flatten().any(|x| *x != 0.0) && parts.iter().enumerate().all(zero)
}
