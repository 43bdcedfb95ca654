//! Every pretraining recipe: its whole layout is valid and can be costed, and a shallow version of it trains.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

use ferrotron_core::config::{RECIPES, Recipe, Resolved};
use ferrotron_core::cost::CostSummary;
use ferrotron_core::data::source;
use ferrotron_core::train::Trainer;
use ferrotron_engine::Rank;

/// Parameters of a shallow model that a CPU trains in a second or two.
const SMALL: usize = 150_000_000;

fn pretraining() -> impl Iterator<Item = &'static str> {
    RECIPES.iter().map(|r| r.name).filter(|name| !["finetune-hf", "sft", "lora"].contains(name))
}

fn resolved(name: &str, set: &[&str]) -> Resolved {
    let mut recipe = Recipe::named(name).unwrap();
    recipe.set("data.path=embedded").unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap_or_else(|e| panic!("{name}: {s}: {e}")));
    recipe.resolve(None).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Memory, communication and the pipeline's schedule of every stage, as `train --dry-run` prints them.
#[test]
fn every_layout_is_valid() {
    for name in pretraining() {
        let r = resolved(name, &[]);
        let cost = CostSummary::of(&r).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(cost.stages.len(), r.config.parallel.pp, "{name}");
        let p = &r.config.parallel;
        println!("{name}: {} ranks, largest {} bytes", cost.ranks, cost.largest().unwrap().memory.total());
        assert_eq!(r.config.train.global_batch % (r.plan.micro_batch * p.dp), 0, "{name}");
    }
}

/// Two steps of the recipe with two layers, a small vocabulary and short sequences, on one rank.
#[test]
fn shallow_versions_train() {
    let mut trained = Vec::new();
    for name in pretraining() {
        let one = ["tp", "cp", "pp", "vp", "ep", "etp", "dp"].map(|k| format!("parallel.{k}=1"));
        let mut set: Vec<&str> = one.iter().map(String::as_str).collect();
        set.extend(["model.layers=2", "model.vocab=512", "model.max_positions=32", "data.seq_len=32"]);
        set.extend(["train.steps=2", "train.global_batch=2", "train.micro_batch=1", "parallel.zero=1"]);
        set.extend(["precision.dtype=bf16", "precision.recipe=none", "generate.tokens=0"]);
        set.extend(["precision.fp8_params=false", "precision.fp8_lm_head=false"]);
        set.extend(["offload.activations=off", "offload.optimizer=0"]);
        let r = resolved(name, &set);
        if r.model.parameters() > SMALL {
            continue;
        }
        let sources = source::open(&r).unwrap();
        let mut trainer = Trainer::new(Rank::cpu(2, 0).unwrap(), &r).unwrap();
        for _ in 0..2 {
            let step = trainer.train_step(&*sources.train).unwrap();
            assert!(step.loss.is_finite() && step.loss < 20.0, "{name}: {}", step.loss);
        }
        trained.push(name);
    }
    println!("trained {trained:?}");
    assert!(trained.len() >= 4, "{trained:?}");
}
