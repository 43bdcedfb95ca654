//! Writes a PEFT folder.

use super::config::{Written, alpha};
use super::read::{A, ADAPTER_WEIGHTS, B, INNER, MAGNITUDE, WRAPPED};
use super::sites::{Site, sites};
use super::{ADAPTER_CONFIG, Adapter, Adapters};
use crate::cast::cast;
use crate::companions::write_companions;
use crate::config::HfConfig;
use crate::error::{Error, Result};
use crate::replaceable::OutputKind;
use crate::staged_folder::StagedFolder;
use ferrotron_core::tensorfile::{TensorDecl, TensorFileWriter};
use ferrotron_tensor::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// The adapter of a site, as PEFT keeps it.
struct Stored {
    a: Vec<f32>,
    b: Vec<f32>,
    magnitude: Option<Vec<f32>>,
    rank: usize,
    scale: f64,
}

/// Writes the adapters of a base model as a PEFT folder, and returns the bytes of their tensors. `folder` is the base model's, if it
/// is on this machine: PEFT finds it by that name. Its files are copied, but those of the tokenizer from the folder `companions` if there
/// is one; texts of `more` by name come in place of them.
pub fn write_peft(
    out: &Path,
    adapters: &Adapters,
    (base, folder): (&HfConfig, Option<&Path>),
    (companions, more): (Option<&Path>, &[(&str, &str)]),
    (dtype, overwrite): (DType, bool),
) -> Result<u64> {
    let all = sites(base, false)?;
    let mut stored: Vec<(&Site, Stored)> = Vec::new();
    for site in &all {
        stored.extend(collect(site, adapters)?.map(|s| (site, s)));
    }
    let written: BTreeSet<&str> =
        stored.iter().flat_map(|(s, _)| s.parts.iter().map(String::as_str)).collect();
    if let Some((module, _)) = adapters.iter().find(|(module, _)| !written.contains(module)) {
        let what =
            format!("PEFT has no place for an adapter of {module} in the family {}", base.family().name);
        return Err(Error::CannotExpress(what));
    }
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (site, s) in &stored {
        let nested = site.experts.is_some_and(|(parameter, _)| parameter == "gate_up_proj")
            && stored.iter().filter(|(other, _)| other.module == site.module).count() > 1;
        let prefix = format!("{WRAPPED}{}{}", site.module, if nested { INNER } else { "" });
        let ranks = s.rank * site.experts.map_or(1, |(_, n)| n);
        tensors.insert(format!("{prefix}{A}"), (vec![ranks, site.inputs], s.a.clone()));
        tensors.insert(format!("{prefix}{B}"), (vec![site.rows(), ranks], s.b.clone()));
        if let Some(m) = &s.magnitude {
            tensors.insert(format!("{prefix}{MAGNITUDE}"), (vec![site.rows()], m.clone()));
        }
    }
    let decls: Vec<TensorDecl> = tensors
        .iter()
        .map(|(name, (shape, _))| TensorDecl {
            name: name.clone(),
            dtype: dtype.into(),
            shape: shape.clone(),
        })
        .collect();
    let staged = StagedFolder::create(out, OutputKind::Peft, overwrite)?;
    let base_path = folder.and_then(|f| f.canonicalize().ok());
    staged.write(ADAPTER_CONFIG, description(&all, &stored, base, base_path.as_deref()).text().as_bytes())?;
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut file = TensorFileWriter::create(&staged.path(ADAPTER_WEIGHTS), &decls, &metadata)?;
    let mut bytes = 0;
    for (name, (_, values)) in &tensors {
        let values: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut cast_to = vec![0; values.len() / 4 * dtype.size()];
        cast(&values, DType::F32, &mut cast_to, dtype);
        bytes += cast_to.len() as u64;
        file.write(name, &cast_to)?;
    }
    file.finish()?;
    write_companions(&staged, (folder, companions), more)?;
    staged.publish()?;
    Ok(bytes)
}

/// The adapters of a site's modules as one; none if no module has one.
fn collect(site: &Site, adapters: &Adapters) -> Result<Option<Stored>> {
    let found: Vec<Vec<Option<&Adapter>>> =
        site.each_expert().map(|parts| parts.iter().map(|m| adapters.get(m)).collect()).collect();
    let Some(first) = found.iter().flatten().flatten().next() else { return Ok(None) };
    let (scale, one) = (first.scale, first.rank);
    let uniform = found.iter().all(|parts| {
        let same = |a: &Option<&Adapter>, b: &Option<&Adapter>| a.is_some() == b.is_some();
        parts.iter().zip(&found[0]).all(|(a, b)| same(a, b))
            && parts.iter().flatten().all(|a| a.rank == one && a.scale == scale)
    });
    if !uniform {
        let what =
            format!("{}: PEFT needs adapters of one rank and scale for all that it stacks", site.name());
        return Err(Error::CannotExpress(what));
    }
    // Modules that share A need it once; others have ranks of their own.
    let shares = |parts: &[Option<&Adapter>]| {
        let mut all = parts.iter();
        let first = all.next().copied().flatten();
        first.is_some_and(|f| all.all(|a| a.is_some_and(|a| Arc::ptr_eq(&a.a, &f.a))))
    };
    let shared = found.iter().all(|parts| shares(parts));
    let adapted = found[0].iter().flatten().count();
    let rank = if shared { one } else { one * adapted };
    let count = found.len();
    let mut stored = Stored {
        a: Vec::with_capacity(count * rank * site.inputs),
        b: vec![0.0; site.rows() * rank * count],
        magnitude: first.magnitude.is_some().then(|| vec![1.0; site.rows()]),
        rank,
        scale,
    };
    for (e, parts) in found.iter().enumerate() {
        let mut begin = 0;
        for (p, adapter) in parts.iter().enumerate() {
            let Some(adapter) = adapter else { continue };
            if begin == 0 || !shared {
                stored.a.extend_from_slice(&adapter.a);
            }
            let first = if shared { 0 } else { begin };
            for (i, row) in adapter.b.chunks_exact(one).enumerate() {
                for (r, x) in row.iter().enumerate() {
                    stored.b[(site.row(p, i) * rank + first + r) * count + e] = *x;
                }
                if let (Some(to), Some(m)) = (&mut stored.magnitude, &adapter.magnitude) {
                    to[site.row(p, i)] = m[i];
                }
            }
            begin += one;
        }
    }
    if stored.magnitude.is_some() && (site.experts.is_some() || adapted < found[0].len()) {
        let what = format!("{}: PEFT has DoRA for whole linear layers only", site.name());
        return Err(Error::CannotExpress(what));
    }
    Ok(Some(stored))
}

/// The configuration of these adapters.
fn description<'a>(
    all: &[Site],
    stored: &[(&Site, Stored)],
    base: &HfConfig,
    folder: Option<&'a Path>,
) -> Written<'a> {
    let key = |s: &Stored| (s.rank, alpha(s.rank, s.scale));
    // Most adapters have the same rank; the others are named by patterns.
    let mut counts: Vec<((usize, f64), usize)> = Vec::new();
    for (_, s) in stored {
        match counts.iter_mut().find(|(k, _)| *k == key(s)) {
            Some((_, n)) => *n += 1,
            None => counts.push((key(s), 1)),
        }
    }
    let (rank, alpha) = counts.iter().max_by_key(|(_, n)| *n).map_or((1, 1.0), |(k, _)| *k);
    let leaf = |name: &str| name.rsplit('.').next().unwrap_or(name).to_string();
    let mut patterns: Vec<(String, usize, f64)> = Vec::new();
    for (site, s) in stored.iter().filter(|(_, s)| key(s) != (rank, alpha)) {
        let name = site.name();
        let alike = stored.iter().all(|(t, u)| leaf(&t.name()) != leaf(&name) || key(u) == key(s));
        let pattern = if alike { format!(".*\\.{}", leaf(&name)) } else { name.replace('.', "\\.") };
        let (rank, alpha) = key(s);
        if patterns.iter().all(|(p, ..)| *p != pattern) {
            patterns.push((pattern, rank, alpha));
        }
    }
    let names = |experts: bool| -> Vec<String> {
        let chosen: Vec<String> =
            stored.iter().filter(|(s, _)| s.experts.is_some() == experts).map(|(s, _)| s.name()).collect();
        // Short names where they select no other module; PEFT reads short names of experts' matrices in its own way.
        let short = |name: &String| match experts {
            true => format!("mlp.experts.{}", leaf(name)),
            false => leaf(name),
        };
        let brief: BTreeSet<String> = chosen.iter().map(short).collect();
        let selected = all
            .iter()
            .filter(|s| s.experts.is_some() == experts)
            .filter(|s| brief.contains(&short(&s.name())))
            .count();
        let exact = selected == chosen.len() && (experts || base.model().moe.is_none());
        if exact { brief.into_iter().collect() } else { chosen }
    };
    let dora = stored.iter().any(|(_, s)| s.magnitude.is_some());
    let transposed = stored.iter().any(|(s, _)| s.transposed);
    Written {
        base: folder,
        rank,
        alpha,
        dora,
        transposed,
        modules: names(false),
        parameters: names(true),
        patterns,
    }
}
