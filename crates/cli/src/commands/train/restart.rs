//! In-job restart of `train`: when it applies, and what another generation of the job changes.

use super::Args;
use crate::args::Global;
use crate::output::{self, UsageError};
use anyhow::Result;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::ranks::{Faults, Launcher};

/// Restarts of a job that has spares and does not say how many it may make.
const RESTARTS_WITH_SPARES: u64 = 100;

/// How the job restarts; none where a failure ends it.
pub fn faults(args: &Args, recipe: &Recipe, resolved: &Resolved, global: &Global) -> Result<Option<Faults>> {
    let mut keys = resolved.config.fault.clone();
    if args.spares > 0 && !recipe.is_set("fault.restarts") {
        keys.restarts = RESTARTS_WITH_SPARES;
    }
    let job = global.launch.job()?;
    if args.spares > 0 && job.is_none() {
        let what = "--spares: there are no launched processes; start them with `ferrotron launch`, srun or Kubernetes";
        return Err(UsageError::new(what).into());
    }
    let Some(job) = job.filter(|_| keys.restarts > 0) else { return Ok(None) };
    let why = match job.launcher {
        Launcher::Torchrun => "torchrun restarts all processes itself (--max-restarts)",
        Launcher::OpenMpi | Launcher::SlurmMpi => {
            "MPI ends a job when a process dies; its launcher starts it again"
        }
        _ => "",
    };
    if !why.is_empty() {
        if args.spares > 0 {
            return Err(UsageError::new(format!("--spares: {why}")).into());
        }
        if global.launch.leads() && !global.json {
            output::note(format_args!("fault.restarts has no effect: {why}"));
        }
        return Ok(None);
    }
    let shrink = if keys.shrink { smaller(recipe, resolved)? } else { Vec::new() };
    Ok(Some(Faults { keys, shrink }))
}

/// World sizes with fewer data-parallel replicas that the recipe allows, largest first.
fn smaller(recipe: &Recipe, resolved: &Resolved) -> Result<Vec<usize>> {
    let layout = resolved.config.parallel.layout();
    let (world, dp) = (layout.world()?, resolved.config.parallel.dp.max(1));
    let sizes = (1..dp).rev().map(|fewer| world / dp * fewer);
    Ok(sizes.filter(|size| of_size(recipe, *size).is_ok()).collect())
}

/// The recipe resolved for another number of ranks.
fn of_size(recipe: &Recipe, size: usize) -> ferrotron_core::Result<Resolved> {
    let mut recipe = recipe.clone();
    let parallel = &recipe.config.parallel;
    let others = parallel.layout().world()? / parallel.dp.max(1);
    recipe.put_key("parallel.dp", i64::try_from(size / others.max(1)).unwrap_or(i64::MAX))?;
    let resolved = ferrotron_bridge::recipe::resolve_with(&mut recipe, &|_, _, _| {});
    resolved.map(|(resolved, _)| resolved).map_err(|e| ferrotron_core::Error::Invalid(e.to_string()))
}

/// The resolved recipe of a generation with `size` ranks.
pub fn resolved(recipe: &Recipe, resolved: &Resolved, size: usize) -> ferrotron_core::Result<Resolved> {
    match resolved.config.parallel.layout().world()? == size {
        true => Ok(resolved.clone()),
        false => of_size(recipe, size),
    }
}
