//! Builds the program of every rank by running the trainer itself: one step on a device without memory, in a job whose
//! other ranks do not exist.
//!
//! A rank's calls depend on its coordinates, not on its data. Ranks with the same coordinates but for data parallelism run
//! the same program and are built once. Of those that differ in other coordinates most do too, with other peers: all are
//! built with a few micro-batches, and of those that make the same calls then, up to which peers they have, one is built
//! with all micro-batches of the step.

use super::calls::{CallTable, Program};
use super::groups::GroupTable;
use super::matching::SimulatedJob;
use crate::config::Resolved;
use crate::cost::summary::schedule as pipeline_schedule;
use crate::cost::{ByGroup, Traffic};
use crate::data::{Batches, Row};
use crate::grid::Grid;
use crate::optimizer::UpdateRule;
use crate::pipeline::Schedule;
use crate::ranks::join;
use crate::train::Trainer;
use crate::{Error, Result};
use ferrotron_comm::{RecordedCall, RecordedGroup, World};
use ferrotron_engine::Rank;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// A job of simulated ranks, and what building them showed.
pub struct BuiltJob {
    /// Groups and calls.
    pub job: SimulatedJob,
    /// Every rank's program by number.
    pub program_of: Vec<usize>,
    /// The distinct programs.
    pub programs: Vec<BuiltProgram>,
    /// Ranks that were built, with some or all micro-batches.
    pub built: usize,
}

/// A program that some ranks run.
pub struct BuiltProgram {
    /// The first rank that runs it.
    pub rank: usize,
    /// Calls before the first step: initial weights.
    pub start_calls: usize,
    /// Calls of the step.
    pub step_calls: usize,
    /// Bytes that a rank sends in the step, by process group.
    pub sent: ByGroup,
    /// Peak of the memory that the rank allocates.
    pub allocated: usize,
}

/// What one built rank did.
struct BuiltRank {
    groups: Vec<RecordedGroup>,
    start: Vec<RecordedCall>,
    step: Vec<RecordedCall>,
    sent: ByGroup,
    allocated: usize,
}

/// Samples of full length, of token 0.
struct Samples {
    seq: usize,
}

impl Batches for Samples {
    fn seq(&self) -> usize {
        self.seq
    }

    fn samples(&self) -> u64 {
        1 << 40
    }

    fn resets(&self) -> bool {
        false
    }

    fn row(&self, _: u64, row: &mut Row) -> Result<()> {
        row.tokens.resize(self.seq, 0);
        row.labels.resize(self.seq, 0);
        row.positions.extend(0..self.seq as i32);
        row.starts.push(0);
        Ok(())
    }
}

/// A step that every rank is built with.
struct Step {
    recipe: Resolved,
    schedule: Arc<Schedule>,
}

impl Step {
    /// A step of so many micro-batches.
    fn new(r: &Resolved, grid: &Grid, micro_batches: usize) -> Result<Step> {
        let mut recipe = r.clone();
        recipe.config.train.ramp = None;
        recipe.config.train.global_batch = micro_batches * r.plan.micro_batch * grid.dp();
        let schedule = Arc::new(pipeline_schedule(&recipe)?);
        Ok(Step { recipe, schedule })
    }
}

/// Starts rank `rank` of the recipe's layout and runs one step.
fn build_rank(step: &Step, grid: &Grid, rank: usize) -> Result<BuiltRank> {
    let r = &step.recipe;
    let (world, log) = World::simulated(rank, grid.world());
    let rank = join(Rank::meta(r.config.train.seed)?, &world, grid)?;
    let groups = log.groups();
    let mut trainer = Trainer::new(rank.clone(), r)?;
    trainer.set_schedule(step.schedule.clone());
    let (start, before) = (log.take(), Traffic::of(&rank));
    trainer.train_step(&Samples { seq: r.plan.seq_len })?;
    let sent = Traffic::of(&rank).since(&before).by_group();
    let allocated = rank.device().memory().total_peak;
    Ok(BuiltRank { groups, start, step: log.take(), sent, allocated })
}

/// Micro-batches of a step on one data-parallel rank.
pub fn micro_batches(r: &Resolved) -> usize {
    (r.config.train.global_batch / (r.plan.micro_batch * r.config.parallel.dp).max(1)).max(1)
}

/// Builds all ranks of a recipe's layout.
pub fn build(r: &Resolved) -> Result<BuiltJob> {
    let grid = Grid::of(r.config.parallel.layout())?;
    let all = micro_batches(r);
    // Enough for a pipeline to fill, and for a first and a last one that differ.
    let few = all.min(grid.layout().pp.max(2));
    let short_step = Step::new(r, &grid, few)?;
    let full_step = Step::new(r, &grid, all)?;
    let (first_ranks, place_of) = places(r, &grid)?;

    let groups = GroupTable::new(&build_rank(&short_step, &grid, 0)?.groups, grid.world())?;
    groups.check(&grid)?;
    let table = Mutex::new(CallTable::default());
    let compact = |rank: usize, built: &BuiltRank| -> Result<(Program, usize)> {
        groups.check_same(rank, &built.groups)?;
        let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut program = table.program(&groups, &built.start)?;
        let start_calls = program.len();
        program.extend(table.program(&groups, &built.step)?);
        Ok((program, start_calls))
    };
    let short = in_parallel(&first_ranks, |rank| {
        let built = build_rank(&short_step, &grid, *rank)?;
        let (program, start_calls) = compact(*rank, &built)?;
        Ok((program, start_calls, built.sent, built.allocated))
    })?;

    // Ranks of one pipeline stage that make the same calls run the same program.
    let mut classes: HashMap<(usize, &Program), usize> = HashMap::new();
    let (mut class_of, mut members) = (Vec::new(), Vec::new());
    for (i, rank) in first_ranks.iter().enumerate() {
        let stage = grid.coordinates(*rank)?.pp;
        let class = *classes.entry((stage, &short[i].0)).or_insert_with(|| {
            members.push(i);
            members.len() - 1
        });
        class_of.push(class);
    }
    let full = in_parallel(&members, |i| {
        let rank = first_ranks[*i];
        if few == all {
            return Ok(short[*i].clone());
        }
        let built = build_rank(&full_step, &grid, rank)?;
        let (program, start_calls) = compact(rank, &built)?;
        Ok((program, start_calls, built.sent, built.allocated))
    })?;

    let program_of: Vec<usize> = place_of.iter().map(|place| class_of[*place]).collect();
    let (mut programs, mut shared) = (Vec::new(), Vec::new());
    for ((program, start_calls, sent, allocated), i) in full.into_iter().zip(&members) {
        let (rank, step_calls) = (first_ranks[*i], program.len() - start_calls);
        programs.push(BuiltProgram { rank, start_calls, step_calls, sent, allocated });
        shared.push(Arc::new(program));
    }
    let of_ranks = program_of.iter().map(|p| shared[*p].clone()).collect();
    let calls = table.into_inner().unwrap_or_else(PoisonError::into_inner);
    let job = SimulatedJob { groups, calls, programs: of_ranks };
    let built = first_ranks.len() + if few == all { 0 } else { members.len() };
    Ok(BuiltJob { job, program_of, programs, built })
}

/// The first rank at every place that makes calls of its own, and the place of every rank.
fn places(r: &Resolved, grid: &Grid) -> Result<(Vec<usize>, Vec<usize>)> {
    // Whole matrices have one owner among the data-parallel ranks, which is sent their gradients.
    let owners = r.param_groups().rules().iter().any(|g| matches!(g.rule, UpdateRule::Muon(_)));
    let (mut first, mut place_of, mut places) = (Vec::new(), Vec::new(), HashMap::new());
    for rank in 0..grid.world() {
        let c = grid.coordinates(rank)?;
        let dp = if owners { [c.dp_cp, c.edp] } else { [0; 2] };
        let place = *places.entry((c.pp, c.tp, c.cp, c.etp, c.ep, dp)).or_insert_with(|| {
            first.push(rank);
            first.len() - 1
        });
        place_of.push(place);
    }
    Ok((first, place_of))
}

/// Results of `work` on every item, in order, computed on all cores.
fn in_parallel<T: Sync, U: Send>(items: &[T], work: impl Fn(&T) -> Result<U> + Sync) -> Result<Vec<U>> {
    let next = AtomicUsize::new(0);
    let one = || {
        let mut done = Vec::new();
        while let Some((i, item)) = {
            let i = next.fetch_add(1, Relaxed);
            items.get(i).map(|item| (i, item))
        } {
            let result = work(item);
            let failed = result.is_err();
            done.push((i, result));
            if failed {
                next.store(items.len(), Relaxed);
            }
        }
        done
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(items.len().max(1));
    let mut done: Vec<(usize, Result<U>)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        let end = |worker: std::thread::ScopedJoinHandle<Vec<(usize, Result<U>)>>| {
            worker.join().unwrap_or_else(|_| {
                vec![(0, Err(Error::Invalid("a simulated rank panicked; this is a bug".into())))]
            })
        };
        workers.into_iter().flat_map(end).collect()
    });
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}
