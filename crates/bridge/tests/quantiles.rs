//! A model that was trained with quantile balancing is used with its quantiles, or not at all.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

use ferrotron_bridge::ModelSource;
use ferrotron_bridge::conversion::{ConvertOptions, convert};
use ferrotron_core::config::Recipe;
use ferrotron_core::data::{Row, source};
use ferrotron_core::events::Event;
use ferrotron_core::model::Sequence;
use ferrotron_core::train::{Observer, Run, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::DType;

struct Quiet;

impl Observer for Quiet {
    fn event(&mut self, _: &Event) {}
    fn stop(&self) -> bool {
        false
    }
}

#[test]
fn quantiles_are_loaded_and_not_dropped_by_a_conversion() {
    let mut recipe = Recipe::named("tiny").unwrap();
    let set = [
        "model.layers=2",
        "model.hidden=48",
        "model.heads=4",
        "model.ffn=48",
        "moe.experts=8",
        "moe.ffn=32",
        "moe.balance=quantile",
        "data.path=embedded",
        "data.seq_len=32",
        "train.global_batch=8",
        "train.micro_batch=8",
        "train.steps=40",
        "optimizer.lr=1e-2",
        "precision.dtype=f32",
        "generate.tokens=0",
    ];
    set.iter().for_each(|s| recipe.set(s).unwrap());
    let resolved = recipe.resolve(None).unwrap();
    let data = source::open(&resolved).unwrap().train;
    let dir = tempfile::tempdir().unwrap();
    let run_folder = dir.path().join("run");
    let mut run = Run::open(Rank::cpu(1, 1234).unwrap(), resolved, &run_folder, None).unwrap();
    run.train(&*data, None, &mut Quiet).unwrap();
    let trained = run.trainer.evaluate(&*data, 1).unwrap();
    let tables = run.trainer.expert_tables().unwrap();
    assert!(tables.iter().all(|t| t.values.iter().any(|x| x.abs() > 1e-3)), "{tables:?}");
    drop(run);

    let mut sequences = Vec::new();
    for n in 0..8 {
        let mut row = Row::default();
        data.row(n, &mut row).unwrap();
        sequences.push(Sequence { tokens: row.tokens, labels: row.labels });
    }
    let found = ModelSource::open(&run_folder).unwrap();
    let model = found.load(Rank::cpu(1, 1).unwrap(), DType::F32, 32).unwrap();
    let loss = || {
        let each = model.token_losses(&sequences).unwrap().concat();
        each.iter().map(|x| f64::from(*x)).sum::<f64>() / each.len() as f64
    };
    let used = loss();
    assert!((used - trained).abs() < 1e-5 * trained, "{used} instead of {trained}");
    let moe = model.step_state.moe().unwrap();
    model.rank.compute.zero(&moe.quantiles).unwrap();
    let without = loss();
    assert!((without - trained).abs() > 1e-4 * trained, "{without}: quantiles change nothing");

    // Another run takes them over; adapters, which are used with their base model's, must be trained with them.
    let start = |more: &[&str]| {
        let mut recipe = recipe.clone();
        more.iter().for_each(|s| recipe.set(s).unwrap());
        let trainer = Trainer::new(Rank::cpu(1, 1).unwrap(), &recipe.resolve(None).unwrap()).unwrap();
        found.weights.fill(&trainer).map(|()| trainer.expert_tables().unwrap())
    };
    for more in [&[][..], &["lora.rank=2"]] {
        let taken = start(more).unwrap();
        assert!(taken.iter().map(|t| &t.values).eq(tables.iter().map(|t| &t.values)), "{more:?}: {taken:?}");
    }
    assert!(start(&["moe.balance=none"]).unwrap().is_empty());
    let refused = start(&["moe.balance=none", "lora.rank=2"]).unwrap_err().to_string();
    assert!(refused.contains("set moe.balance = \"quantile\""), "{refused}");

    let options = ConvertOptions {
        dtype: None,
        like: None,
        merge: false,
        upcycle: None,
        overwrite: false,
        allow_non_finite: false,
        progress: &|_, _| {},
    };
    let refused = convert(&run_folder, &dir.path().join("hf"), &options).unwrap_err().to_string();
    assert!(refused.contains("quantiles") && refused.contains("moe.balance = \"quantile\""), "{refused}");
}
