//! The planner: its cost model beside published throughput, and its searches.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

use ferrotron_core::config::Recipe;
use ferrotron_core::plan::published::{Comparison, compare_all, read_rows};
use ferrotron_core::plan::{Constraints, GemmDtype, Machine, SearchResult, Workload, search};

const ROWS: &str = include_str!("../../../tests/data/published-rows.csv");

fn errors(all: &[Comparison], half: &str) -> Vec<f64> {
    let of = all.iter().filter(|c| c.row.text("half") == half);
    let mut out: Vec<f64> = of.map(|c| c.error().unwrap().abs()).collect();
    out.sort_by(f64::total_cmp);
    out
}

/// Rows that no constant was fitted on: half of them within 10 %, nine of ten within 35 % (25 % is the goal).
#[test]
fn published_rows_are_predicted() {
    let all = compare_all(&read_rows(ROWS).unwrap()).unwrap();
    let test = errors(&all, "test");
    let at = |q: f64| test[((test.len() - 1) as f64 * q).round() as usize];
    println!("{} rows, median {:.3}, 90th percentile {:.3}", test.len(), at(0.5), at(0.9));
    assert!(test.len() >= 40, "{}", test.len());
    assert!(at(0.5) <= 0.10, "median {}", at(0.5));
    assert!(at(0.9) <= 0.25, "90th percentile {}", at(0.9));
}

fn workload(preset: &str, set: &[&str], gpus: usize) -> Workload {
    let mut recipe = Recipe::named("llama-8b").unwrap();
    recipe.set(&format!("model.preset={preset}")).unwrap();
    recipe.set("data.path=embedded").unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap());
    Workload { recipe: recipe.resolve(None).unwrap(), gpus, gradient_bytes: 4.0, overlap_param_gather: true }
}

fn plans(w: &Workload, machine: &str, layout: &str, count: usize) -> SearchResult {
    let mut limits = Constraints::free(vec![GemmDtype::Bf16]);
    limits.fix(layout).unwrap();
    search(w, &Machine::parse(machine).unwrap(), &limits, count).unwrap()
}

/// What the search returns is no slower than any layout that is asked for by name.
#[test]
fn the_best_plan_is_no_slower_than_any_other() {
    let w = workload("llama-70b", &["train.global_batch=256"], 64);
    let found = plans(&w, "64xH100", "", 3);
    let best = &found.plans[0];
    assert!(
        found.considered > 1000 && best.memory.total() < Machine::parse("H100").unwrap().hardware.memory()
    );
    assert!(found.plans.windows(2).all(|p| p[0].time.total <= p[1].time.total));
    for layout in ["tp=4,pp=8,vp=5,micro_batch=1", "tp=8,pp=4", "tp=4,pp=4,cp=2,vp=5", "tp=8,zero=3"] {
        let fixed = plans(&w, "64xH100", layout, 1);
        let fixed = fixed.plans.first().unwrap_or_else(|| panic!("{layout} does not fit"));
        assert!(fixed.time.total >= best.time.total * 0.999, "{layout}: {:?}", fixed.time);
    }
}

/// The exact time of a plan with a pipeline is above the work of its busiest rank, and its parts add up.
#[test]
fn the_parts_of_a_step_add_up() {
    let w = workload("llama-70b", &["train.global_batch=256"], 64);
    let p = &plans(&w, "64xH100", "tp=4,pp=8,vp=5,micro_batch=1", 1).plans[0];
    let t = &p.time;
    let sum = t.passes.total() + t.bubble + t.dp + t.optimizer + t.offload;
    assert!((sum / t.total - 1.0).abs() < 1e-9, "{t:?}");
    // 7 stages before the last: bubble of (P − 1)/(v·M) of the work, 7/(5·128).
    let bubble = t.bubble / t.passes.total();
    assert!((0.005..0.08).contains(&bubble), "{bubble}");
}

#[test]
fn large_searches_are_fast() {
    let started = std::time::Instant::now();
    let dense = workload("llama-70b", &["train.global_batch=2048"], 1024);
    assert!(!plans(&dense, "1024xH100", "", 5).plans.is_empty());
    let seconds = started.elapsed().as_secs_f64();
    println!("llama-70b on 1024 GPUs: {seconds:.2} s");
    // Five seconds alone; tests share the machine.
    assert!(seconds < 30.0, "{seconds}");
}

/// A model that no layout fits has no plan, and says how much it would need.
#[test]
fn a_model_that_does_not_fit_has_no_plan() {
    let w = workload("llama-405b", &["train.global_batch=8"], 8);
    let found = plans(&w, "8xH100", "", 1);
    let least = found.least_memory.unwrap();
    assert!(found.plans.is_empty() && least > 8e10, "{least}");
}
