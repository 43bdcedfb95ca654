//! Every way of balancing keeps loads even over a few hundred steps of learning; none does not.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::train::Trainer;

const STEPS: u64 = 200;
/// Steps at the end that are looked at.
const LAST: u64 = 50;

/// The most loaded expert over the mean in the last steps of a run, of the worse of two layers.
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
        "train.micro_batch=8",
        "optimizer.lr=1e-2",
        "moe.log=[\"imbalance\",\"loads\"]",
    ];
    run.iter().chain(set).for_each(|s| recipe.set(s).unwrap());
    if let Ok(extra) = std::env::var("EXTRA") {
        extra.split(';').filter(|s| !s.is_empty()).for_each(|s| recipe.set(s).unwrap());
    }
    recipe.set(&format!("train.steps={STEPS}")).unwrap();
    let resolved = recipe.resolve(None).unwrap();
    let data = source::open(&resolved).unwrap().train;
    let mut trainer = Trainer::new(Rank::cpu(1, 1234).unwrap(), &resolved).unwrap();
    let mut loads = vec![vec![0i64; 8]; 2];
    let mut each = 0.0;
    for step in 0..STEPS {
        trainer.train_step(&*data).unwrap();
        let seen = trainer.take_loads().unwrap();
        if step < STEPS - LAST {
            continue;
        }
        each += seen["imbalance"].as_f64().unwrap() / LAST as f64;
        for (layer, sums) in loads.iter_mut().enumerate() {
            let load = seen[&format!("moe/load_layer_{layer}")].as_array().unwrap();
            sums.iter_mut().zip(load).for_each(|(sum, n)| *sum += n.as_i64().unwrap());
        }
    }
    let uneven = |l: &Vec<i64>| *l.iter().max().unwrap() as f64 * 8.0 / l.iter().sum::<i64>() as f64;
    let worst = loads.iter().map(uneven).fold(0.0, f64::max);
    println!("{set:?}: {worst:.3}, a mean of {each:.3} in each step");
    worst
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
