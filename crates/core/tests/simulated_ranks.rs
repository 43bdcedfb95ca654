//! Simulated ranks make the calls that a real job makes, and what does not match in them is found and named.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_comm::{CallLog, Detail, OpKind, RecordedCall, World};
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::dry_run::{Call, CallTable, GroupTable, SimulatedJob, build};
use ferrotron_core::grid::Grid;
use ferrotron_core::ranks::join;
use ferrotron_core::train::Trainer;
use ferrotron_engine::Rank;
use std::sync::Arc;
use std::time::Duration;

/// Chunks of overlapped GEMMs are whole tiles, as on a GPU: 128 rows on each of two tensor- and two context-parallel ranks.
const SEQ: usize = 256;

fn recipe(set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    let model = format!(
        "[model]\nlayers = 4\nhidden = 32\nheads = 4\nkv_heads = 2\nffn = 48\nvocab = 259\nmax_positions = {SEQ}\n\
         tied = true\n[data]\npath = \"embedded\"\nseq_len = {SEQ}\n[train]\nglobal_batch = 16\nmicro_batch = 2\n\
         [precision]\ndtype = \"f32\"\n[generate]\ntokens = 0\n[parallel]\nzero = 0\n"
    );
    recipe.add("model.toml", &model).unwrap();
    set.iter().flat_map(|s| s.split(' ')).for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

/// Calls of every rank of a real job of threads: initial weights and one step.
fn real_calls(r: &Resolved) -> Vec<Vec<RecordedCall>> {
    let grid = &Grid::of(r.config.parallel.layout()).unwrap();
    let work = |(world, log): (World, CallLog)| {
        let rank = join(Rank::cpu(1, 1234).unwrap(), &world, grid).unwrap();
        let mut trainer = Trainer::new(rank, r).unwrap();
        trainer.train_step(&*source::open(r).unwrap().train).unwrap();
        log.take()
    };
    let worlds = World::recorded_threads(grid.world(), Duration::from_secs(120));
    std::thread::scope(|scope| {
        let threads: Vec<_> = worlds.into_iter().map(|w| scope.spawn(move || work(w))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// A program as text, call by call.
fn listing(table: &CallTable, groups: &GroupTable, rank: usize, program: &[u32]) -> Vec<String> {
    let detail = |number: u32| match table.call(number) {
        Call::Collective { shape, .. } => format!("{:?}", table.shape(*shape).detail),
        Call::Messages(_) => String::new(),
    };
    program.iter().map(|n| format!("{} {}", table.describe(groups, rank, *n), detail(*n))).collect()
}

/// Builds the ranks, compares each with its real twin, and runs them against each other.
fn check_calls(set: &[&str]) -> SimulatedJob {
    let r = recipe(set);
    let built = build(&r).unwrap();
    let (groups, mut table) = (&built.job.groups, built.job.calls.clone());
    for (rank, log) in real_calls(&r).iter().enumerate() {
        let real = table.program(groups, log).unwrap();
        let simulated = &built.job.programs[rank];
        if real != **simulated {
            let [a, b] = [&real, &**simulated].map(|p| listing(&table, groups, rank, p));
            let at = a.iter().zip(&b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
            panic!(
                "{set:?} rank {rank}, call {at} of {} and {}:\n  real      {:?}\n  simulated {:?}",
                a.len(),
                b.len(),
                a.get(at),
                b.get(at)
            );
        }
    }
    let calls: usize = built.job.programs.iter().map(|p| p.len()).sum();
    assert_eq!(built.job.run().unwrap(), calls as u64, "{set:?}");
    assert_eq!(calls > 0, built.job.programs.len() > 1);
    built.job
}

#[test]
fn dense_layouts_make_the_calls_of_a_real_job() {
    for layout in [
        "parallel.dp=1",
        "parallel.tp=2",
        "parallel.cp=2",
        "parallel.dp=2",
        "parallel.pp=4",
        "parallel.pp=2 parallel.vp=2",
        "parallel.tp=2 parallel.cp=2 parallel.pp=2",
        "parallel.tp=2 parallel.pp=2 parallel.dp=2 parallel.schedule=zero-bubble",
        "parallel.tp=2 parallel.dp=2 train.recompute=full precision.dtype=bf16",
        "parallel.tp=2 parallel.overlap=false",
        "parallel.tp=4 model.window=8 model.tied=false",
        "parallel.cp=2 model.window=8",
        "parallel.pp=2 mtp.layers=1",
    ] {
        check_calls(&[layout]);
    }
}

#[test]
fn sharded_layouts_make_the_calls_of_a_real_job() {
    for zero in 1..=3 {
        let zero = format!("parallel.zero={zero}");
        for layout in
            ["parallel.dp=4", "parallel.tp=2 parallel.pp=2 parallel.dp=2", "parallel.cp=2 parallel.dp=2"]
        {
            check_calls(&[&zero, layout]);
        }
    }
    check_calls(&["parallel.zero=3 parallel.dp=4 parallel.fsdp_group=2"]);
    check_calls(&["parallel.zero=3 parallel.dp=4 parallel.fsdp_group=2 parallel.fsdp_outer=optimizer"]);
    check_calls(&["parallel.zero=1 parallel.dp=4 optimizer.kind=muon"]);
    check_calls(&["parallel.tp=2 parallel.dp=2 parallel.zero=1 optimizer.kind=muon"]);
}

#[test]
fn moe_layouts_make_the_calls_of_a_real_job() {
    // Every token goes to every expert, so that parts of all-to-alls are known.
    const MOE: &str = "moe.experts=4 moe.topk=4 moe.ffn=16";
    for layout in [
        "parallel.ep=2 parallel.dp=2",
        "parallel.ep=4 parallel.dp=4 parallel.zero=1",
        "parallel.tp=2 parallel.ep=2 parallel.etp=1",
        "parallel.tp=2 parallel.etp=2 parallel.ep=2 parallel.dp=2",
        "parallel.pp=2 parallel.ep=2 parallel.dp=2 parallel.schedule=paired",
        "parallel.pp=2 parallel.ep=2 parallel.dp=4 parallel.zero=3",
        "parallel.ep=2 parallel.dp=2 moe.dispatcher=all_gather",
        "parallel.ep=2 parallel.dp=2 moe.shared_ffn=24",
    ] {
        check_calls(&[MOE, layout]);
    }
}

#[test]
fn fp8_and_adapters_make_the_calls_of_a_real_job() {
    const SIZES: &str = "precision.dtype=bf16 model.hidden=64 model.head_dim=16 model.ffn=128";
    for scaling in ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8"] {
        let scaling = format!("precision.recipe={scaling}");
        check_calls(&[SIZES, &scaling, "parallel.tp=2 parallel.dp=2 parallel.zero=1"]);
    }
    check_calls(&[
        SIZES,
        "precision.recipe=fp8-current precision.fp8_params=true parallel.dp=2 parallel.zero=3",
    ]);
    check_calls(&["parallel.tp=2 parallel.dp=2 offload.activations=2 offload.optimizer=1"]);
}

/// Tokens that do not divide by the experts: parts differ between ranks, and still match.
#[test]
fn uneven_parts_of_an_all_to_all_match() {
    let set = "moe.experts=8 moe.topk=3 moe.ffn=16 parallel.ep=4 parallel.dp=4 data.seq_len=250 train.micro_batch=1";
    let job = build(&recipe(&[set])).unwrap().job;
    job.run().unwrap();
    let uneven = |call: &Call| match call {
        Call::Collective { shape, .. } => match &job.calls.shape(*shape).detail {
            Detail::Pairs { sent, .. } => sent.iter().any(|n| *n != sent[0]),
            _ => false,
        },
        Call::Messages(_) => false,
    };
    assert!(job.calls.calls().iter().any(uneven));
}

/// A job of 16 ranks with every kind of parallelism of dense models.
fn job() -> SimulatedJob {
    let job = build(&recipe(&["parallel.tp=2 parallel.cp=2 parallel.pp=2 parallel.dp=2"])).unwrap().job;
    job.run().unwrap();
    job
}

/// The error of a job in which `rank` does something else.
fn broken(rank: usize, change: impl Fn(&mut CallTable, &mut Vec<u32>)) -> String {
    let mut job = job();
    let mut program = (*job.programs[rank]).clone();
    change(&mut job.calls, &mut program);
    assert_ne!(program, *job.programs[rank]);
    job.programs[rank] = Arc::new(program);
    job.run().unwrap_err()
}

/// The place of the `n`-th call that is one of `is`.
fn place(table: &CallTable, program: &[u32], n: usize, is: impl Fn(&Call) -> bool) -> usize {
    (0..program.len()).filter(|i| is(table.call(program[*i]))).nth(n).unwrap()
}

fn is_collective(table: &CallTable, kind: OpKind) -> impl Fn(&Call) -> bool + '_ {
    move |call| matches!(call, Call::Collective { shape, .. } if table.shape(*shape).kind == kind)
}

#[test]
fn a_skipped_collective_is_named() {
    let e = broken(5, |table, program| {
        let at = place(table, program, 3, is_collective(table, OpKind::AllReduce));
        program.remove(at);
    });
    assert!(e.contains("rank 5") && e.contains("all-reduce"), "{e}");
    // The last call of all: the others wait for a rank that is done.
    let e = broken(5, |_, program| _ = program.pop());
    assert!(e.contains("deadlock") && e.contains("rank 5, which has made all its"), "{e}");
}

#[test]
fn a_collective_on_another_group_is_named() {
    let e = broken(3, |table, program| {
        let at = place(table, program, 2, is_collective(table, OpKind::AllReduce));
        let Call::Collective { group, shape } = *table.call(program[at]) else { panic!() };
        program[at] = table.add(Call::Collective { group: if group == 1 { 2 } else { 1 }, shape });
    });
    assert!(e.contains("rank 3"), "{e}");
}

#[test]
fn a_swapped_receive_is_named() {
    let is_pipeline = |call: &Call| matches!(call, Call::Messages(ends) if ends.len() == 1 && !ends[0].sends);
    // Received after everything else.
    let e = broken(8, |table, program| {
        let at = place(table, program, 0, is_pipeline);
        let call = program.remove(at);
        program.push(call);
    });
    assert!(e.contains("deadlock") && e.contains("rank 8"), "{e}");
    // Sent instead of received.
    let e = broken(8, |table, program| {
        let at = place(table, program, 0, |call| matches!(call, Call::Messages(_)));
        let Call::Messages(mut ends) = table.call(program[at]).clone() else { panic!() };
        ends[0].sends = !ends[0].sends;
        program[at] = table.add(Call::Messages(ends));
    });
    assert!(e.contains("deadlock") && e.contains("rank 8"), "{e}");
}

#[test]
fn a_message_of_another_size_is_named() {
    let e = broken(8, |table, program| {
        let at = place(table, program, 0, |call| matches!(call, Call::Messages(_)));
        let Call::Messages(mut ends) = table.call(program[at]).clone() else { panic!() };
        let mut shape = table.shape(ends[0].shape).clone();
        shape.shape[0] += 1;
        ends[0].shape = table.add_shape(shape);
        program[at] = table.add(Call::Messages(ends));
    });
    assert!(e.contains("two ends of a message differ") && e.contains("rank 8"), "{e}");
}

#[test]
fn wrong_groups_are_named() {
    let grid = Grid::of(recipe(&["parallel.tp=2 parallel.dp=2"]).config.parallel.layout()).unwrap();
    let created = |rank: usize| {
        let (world, log) = World::simulated(rank, grid.world());
        join(Rank::meta(1).unwrap(), &world, &grid).unwrap();
        log.groups()
    };
    let right = created(0);
    let table = GroupTable::new(&right, 4).unwrap();
    table.check(&grid).unwrap();
    table.check_same(3, &created(3)).unwrap();
    let tp = right.iter().position(|g| g.name == "tp").unwrap();
    let mut other = right.clone();
    other[tp].ranks.reverse();
    let e = table.check_same(3, &other).unwrap_err().to_string();
    assert!(e.contains("of rank 3 is tp [1, 0], and tp [0, 1] on rank 0"), "{e}");
    other[tp].ranks = vec![0, 2];
    let e = GroupTable::new(&other, 4).unwrap_err().to_string();
    assert!(e.contains("rank 2 is in two tp groups"), "{e}");
    other[tp].ranks = vec![0];
    let e = GroupTable::new(&other, 4).unwrap().check(&grid).unwrap_err().to_string();
    assert!(e.contains("rank 1 is in no tp group"), "{e}");
}
