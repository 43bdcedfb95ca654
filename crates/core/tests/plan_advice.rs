//! What the planner says of a recipe that does not fit, and plans as keys of a recipe.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::cost::MemoryEstimate;
use ferrotron_core::plan::{Machine, advice, search, workload_of};

fn recipe(name: &str, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named(name).unwrap();
    recipe.set("data.path=embedded").unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap()
}

/// The keys of an advice, without the quotes of a shell.
fn settings(advice: &str) -> Vec<String> {
    let after = advice.split_once("the fastest plan that fits is ").unwrap().1;
    let keys = after.split_once(" (about").unwrap().0;
    keys.split("--set ").filter(|k| !k.is_empty()).map(|k| k.trim().trim_matches('\'').to_string()).collect()
}

/// Following the advice makes the recipe fit.
#[test]
fn the_advice_is_a_plan_that_fits() {
    let machine = Machine::parse("8xH100").unwrap();
    let set = ["parallel.dp=8", "parallel.zero=0", "train.micro_batch=8", "train.global_batch=64"];
    let r = recipe("llama-8b", &set);
    let needed = |r: &Resolved| MemoryEstimate::of(r).unwrap().largest().unwrap().total();
    assert!(needed(&r) > machine.hardware.memory());
    let text = advice(&r, &machine).unwrap();
    let keys = settings(&text);
    assert!(!keys.is_empty(), "{text}");
    let changed: Vec<&str> = set.into_iter().chain(keys.iter().map(String::as_str)).collect();
    let better = recipe("llama-8b", &changed);
    assert!(needed(&better) <= machine.hardware.usable_memory(), "{text}");
    assert_eq!(better.config.parallel.layout().world().unwrap(), 8, "{text}");
    // Nothing is named that the recipe has already.
    assert!(keys.iter().all(|k| !set.contains(&k.as_str())), "{text}");
}

/// A step that runs out of memory although the estimate says that it fits is given a plan that needs less.
#[test]
fn the_advice_needs_less_than_what_did_not_fit() {
    let machine = Machine::parse("1xH200").unwrap();
    let r = recipe("llama-1b", &["parallel.dp=1", "train.micro_batch=4", "train.global_batch=64"]);
    let needed = MemoryEstimate::of(&r).unwrap().largest().unwrap().total();
    assert!(needed < machine.hardware.usable_memory());
    let keys = settings(&advice(&r, &machine).unwrap());
    let set = ["parallel.dp=1", "train.global_batch=64"];
    let changed: Vec<&str> = set.into_iter().chain(keys.iter().map(String::as_str)).collect();
    let better = MemoryEstimate::of(&recipe("llama-1b", &changed)).unwrap().largest().unwrap().total();
    assert!(better < needed / 100 * 91, "{better} of {needed}: {keys:?}");
}

#[test]
fn a_model_that_no_plan_fits_needs_more_gpus() {
    let r = recipe(
        "llama-405b",
        &["parallel.tp=8", "parallel.cp=1", "parallel.pp=1", "parallel.vp=1", "parallel.dp=1"],
    );
    let text = advice(&r, &Machine::parse("8xH100").unwrap()).unwrap();
    assert!(text.contains("no plan fits on 8 H100; ") && text.ends_with(" H100 would do"), "{text}");
    assert!(text.contains("--set offload.weights=true"), "{text}");
}

/// A plan's keys replace the layout of any recipe.
#[test]
fn settings_are_the_plan() {
    let machine = Machine::parse("16xH100").unwrap();
    let r = recipe("mixtral-8x7b", &[]);
    let (workload, limits) = workload_of(&r, machine.gpus);
    let found = search(&workload, &machine, &limits, 2).unwrap();
    for plan in &found.plans {
        let keys = plan.settings(machine.gpus);
        let set: Vec<&str> = keys.iter().map(String::as_str).collect();
        let r = recipe("mixtral-8x7b", &set);
        assert_eq!(r.config.parallel.layout().world().unwrap(), 16, "{keys:?}");
        assert_eq!(MemoryEstimate::of(&r).unwrap().largest().unwrap(), plan.memory, "{keys:?}");
    }
}
