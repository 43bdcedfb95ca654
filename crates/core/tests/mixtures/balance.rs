//! Every way of balancing keeps loads even over a few hundred steps of learning; none does not.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::train::Trainer;

const STEPS: u64 = 200;
/// Steps at the end that are looked at.
const LAST: u64 = 50;

/// The most loaded expert over the mean, of the worse of two layers, a mean over the last steps of a run.
fn imbalance(set: &[&str]) -> f64 {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    let run = [
        "model.layers=2",
        "model.hidden=48",
        "moe.dense=[]",
        "moe.ffn=32",
        "data.seq_len=32",
        "train.global_batch=16",
        "train.micro_batch=16",
        "optimizer.lr=1e-2",
        "moe.log=imbalance",
    ];
    run.iter().chain(set).for_each(|s| recipe.set(s).unwrap());
    recipe.set(&format!("train.steps={STEPS}")).unwrap();
    let resolved = recipe.resolve(None).unwrap();
    let data = source::open(&resolved).unwrap().train;
    let mut trainer = Trainer::new(Rank::cpu(1, 1234).unwrap(), &resolved).unwrap();
    let mut sum = 0.0;
    for step in 0..STEPS {
        trainer.train_step(&*data).unwrap();
        let seen = trainer.take_loads().unwrap()["imbalance"].as_f64().unwrap();
        sum += if step >= STEPS - LAST { seen } else { 0.0 };
    }
    let mean = sum / LAST as f64;
    println!("{set:?}: {mean:.3}");
    mean
}

#[test]
fn aux() {
    assert!(imbalance(&["moe.balance=aux"]) < 1.6);
}

#[test]
fn seq_aux() {
    assert!(imbalance(&["moe.balance=seq_aux"]) < 1.6);
}

#[test]
fn global_aux() {
    assert!(imbalance(&["moe.balance=global_aux"]) < 1.6);
}

#[test]
fn expert_bias() {
    let set = ["moe.score=sigmoid", "moe.expert_bias=true", "moe.bias_rate=1e-2"];
    assert!(imbalance(&set) < 1.6);
}

#[test]
fn sinkhorn() {
    assert!(imbalance(&["moe.balance=sinkhorn"]) < 1.6);
}

#[test]
fn quantile() {
    assert!(imbalance(&["moe.balance=quantile"]) < 1.6);
}

#[test]
fn without_balancing_loads_are_clearly_less_even() {
    assert!(imbalance(&[]) > 2.0);
    assert!(imbalance(&["moe.score=sigmoid"]) > 2.0);
}
