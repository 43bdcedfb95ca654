//! Faults of one of four ranks in the middle of a run: killed, stopped, another shape, a skipped collective. It is
//! named within the timeout, every rank exits with an error, and the run resumes from the newest checkpoint to the same
//! bits.

use super::support::{files, run};
use super::{Scene, mpi, signal, text};
use ferrotron_comm::ReduceOp;
use ferrotron_core::config::Recipe;
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::Launch;
use ferrotron_core::train::{Observer, Run};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, DType};
use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

/// `--timeout` of the ranks.
const TIMEOUT: u64 = 3;
/// Seconds after the timeout for error messages and for `mpirun` to end all ranks.
const END: f64 = 15.0;
/// The faulty rank.
const BAD: usize = 2;
/// Its last good step.
const GOOD: u64 = 7;

impl Scene {
    fn mpirun(&self) -> mpi::Job {
        self.mpirun_with(&[])
    }

    /// With options of `mpirun`.
    fn mpirun_with(&self, options: &[&str]) -> mpi::Job {
        let timeout = TIMEOUT.to_string();
        let out = self.out();
        let args = ["train", text(&self.recipe), "--out", text(&out), "--timeout", &timeout];
        mpi::ferrotron(4, options, &[&args[..], &["--set", "parallel.tp=2"]].concat())
    }

    /// It ended badly, in time; going on from there ends as an undisturbed run does.
    fn ended(&self, o: &mpi::Outcome) {
        assert!(o.code != Some(0), "{}", o.text);
        assert!(o.seconds < 30.0 + TIMEOUT as f64 + END, "it took {:.1} s:\n{}", o.seconds, o.text);
        assert!(!o.text.contains("panicked"), "{}", o.text);
        let stood = files(&self.out().join("checkpoints"));
        assert!(!stood.is_empty());
        let after = self.mpirun().wait(Duration::from_secs(120)).succeeded();
        assert!(after.err[0].contains("resuming"), "{}", after.text);
        let whole = self.dir.path().join("whole");
        let args = ["train", text(&self.recipe), "--out", text(&whole), "--set", "parallel.tp=2"];
        let e = run(&[&args[..], &["--ranks", "4", "--device", "cpu"]].concat());
        assert_eq!(e.code, Some(0), "{}", e.err);
        self.equals(&whole);
    }
}

#[test]
fn a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint() {
    if !mpi::installed("a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint") {
        return;
    }
    let scene = Scene::new();
    let job = scene.mpirun();
    scene.wait_for_steps(GOOD as usize);
    let begin = Instant::now();
    signal("-KILL", job.process(BAD));
    let o = job.wait(Duration::from_secs(90));
    assert!(begin.elapsed().as_secs_f64() < TIMEOUT as f64 + END, "{}", o.text);
    // Open MPI itself sees it, says so and ends the others.
    assert!(o.text.lines().any(|l| l.contains("rank 2") && l.contains("signal 9")), "{}", o.text);
    scene.ended(&o);
}

/// Where the launcher does not end the others at once, each of them names the dead rank and ends within the timeout.
#[test]
fn a_killed_rank_is_named_by_those_that_are_given_the_time() {
    if !mpi::installed("a_killed_rank_is_named_by_those_that_are_given_the_time") {
        return;
    }
    let scene = Scene::new();
    let job = scene.mpirun_with(&["--enable-recovery"]);
    scene.wait_for_steps(GOOD as usize);
    let begin = Instant::now();
    signal("-KILL", job.process(BAD));
    let o = job.wait(Duration::from_secs(90));
    assert!(begin.elapsed().as_secs_f64() < TIMEOUT as f64 + END, "{}", o.text);
    for rank in [0, 1, 3] {
        assert!(o.says(rank, &[&format!("error: rank {rank}: "), "rank 2"]), "rank {rank}:\n{}", o.text);
    }
}

#[test]
fn a_rank_that_stands_still_is_named_by_every_other() {
    if !mpi::installed("a_rank_that_stands_still_is_named_by_every_other") {
        return;
    }
    let scene = Scene::new();
    let job = scene.mpirun();
    scene.wait_for_steps(GOOD as usize);
    let begin = Instant::now();
    signal("-STOP", job.process(BAD));
    let o = job.wait(Duration::from_secs(90));
    let took = begin.elapsed().as_secs_f64();
    assert!(took > TIMEOUT as f64 - 0.5 && took < TIMEOUT as f64 + END, "{took:.1} s:\n{}", o.text);
    // Those that wait for it name it; those that wait for these hear of it, or name them and what they wait for.
    assert!((0..4).any(|r| o.says(r, &["ferrotron: stalled", "rank 2 ("])), "{}", o.text);
    for rank in [0, 1, 3] {
        assert!(o.says(rank, &[&format!("rank {rank}"), "rank 2"]), "rank {rank}:\n{}", o.text);
    }
    scene.ended(&o);
}

const FAULT: &str = "FERROTRON_TEST_FAULT";

/// Runs the worker below with a fault; every rank's error must contain all of `words` within the timeout.
fn fault(name: &str, words: &[&str]) {
    if !mpi::installed(name) {
        return;
    }
    let scene = Scene::new();
    let out = scene.out();
    let env =
        [(FAULT, name), ("FERROTRON_TEST_RECIPE", text(&scene.recipe)), ("FERROTRON_TEST_OUT", text(&out))];
    let program = std::env::current_exe().unwrap().into_os_string();
    let args = ["--ignored", "--exact", "faults::worker", "--nocapture", "--test-threads=1"];
    let o = mpi::start(4, &[], &program, &args, &env).wait(Duration::from_secs(90));
    for rank in 0..4 {
        let me = format!("rank {rank} ends: ");
        assert!(o.says(rank, &[&[&*me, "rank 2"], words].concat()), "rank {rank}:\n{}", o.text);
    }
    scene.ended(&o);
}

#[test]
fn another_shape_is_named_on_every_rank() {
    fault("another shape", &["all-reduce", "'requests'", "[6]", "[7]"]);
}

#[test]
fn a_skipped_collective_is_named_on_every_rank() {
    fault("skipped", &["'requests'"]);
}

/// One rank of a run whose rank 2 fails after a step. Only this test can inject faults; the binary cannot.
#[test]
#[ignore = "started by mpirun"]
fn worker() {
    let Ok(fault) = std::env::var(FAULT) else { return };
    let [recipe, out] = ["FERROTRON_TEST_RECIPE", "FERROTRON_TEST_OUT"].map(|v| std::env::var(v).unwrap());
    let mut recipe = Recipe::open(&recipe).unwrap();
    for set in ["parallel.tp=2", "parallel.dp=2"] {
        recipe.set(set).unwrap();
    }
    let resolved = recipe.resolve(None).unwrap();
    let launch = Launch::default();
    let job = launch.job().unwrap().unwrap();
    let layout = RankLayout { tp: 2, dp: Some(2), ..RankLayout::default() };
    let make = || Ok(Rank::cpu(1, resolved.config.train.seed)?);
    let done = launch.run(&job, &layout, Duration::from_secs(TIMEOUT), make, |rank| {
        let bad = rank.world.rank() == BAD;
        let mut run = Run::open(rank.clone(), resolved.clone(), Path::new(&out), None)?;
        let sources = source::open(&resolved)?;
        let fault = bad.then_some((rank, fault.as_str()));
        run.train(&*sources.train, None, &mut Faulty { fault, steps: Cell::new(0) })
    });
    let error = done.expect_err("rank 2 fails");
    eprintln!("rank {} ends: {error}", job.rank);
    drop(launch);
    std::process::exit(1);
}

/// Called once a step, just before the ranks agree on whether to stop.
struct Faulty<'a> {
    fault: Option<(Rank, &'a str)>,
    steps: Cell<u64>,
}

impl Observer for Faulty<'_> {
    fn event(&mut self, _: &Event) {}
    fn stop(&self) -> bool {
        self.steps.set(self.steps.get() + 1);
        let Some((rank, fault)) = self.fault.as_ref().filter(|_| self.steps.get() == GOOD) else {
            return false;
        };
        let s = &rank.compute;
        // What follows fails, too: the job is over.
        let _ = match *fault {
            "another shape" => {
                let wrong = s.zeros(&[7], DType::F64, Category::Communication).unwrap();
                rank.control.all_reduce(s, &wrong, ReduceOp::Sum, "requests")
            }
            // Goes on with the next step instead.
            _ => {
                let tokens = s.zeros(&[1], DType::F64, Category::Communication).unwrap();
                rank.dp.all_reduce(s, &tokens, ReduceOp::Sum, "tokens of the step")
            }
        };
        false
    }
}
