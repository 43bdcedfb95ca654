//! The model that a run trains is the model that its weights are used as.

use super::*;
use ferrotron_core::model::{Model, PipelineLayout, Sequence};
use ferrotron_core::train::{Run, Trainer};
use ferrotron_tensor::DType;

/// Loss of a run's own evaluation after some steps, and of its weights in a model for inference.
fn losses(set: &[&str]) -> [f64; 2] {
    let base = ["optimizer.lr=1e-2", "moe.dense_layers=[]", "moe.shared_ffn=8"];
    let (resolved, at) = recipe(&one(), &keys(&[&base[..], set].concat()));
    let data = Numbers::of(&resolved);
    let both = run(&at, |rank| {
        let mut trainer = Trainer::new(rank, &resolved)?;
        for _ in 0..20 {
            trainer.train_step(&data)?;
        }
        let trained = trainer.evaluate(&data, 4)?;
        let tensors = trainer.weights()?;
        let source = |name: &str| {
            let found = tensors.iter().find(|t| t.name == name).unwrap();
            Ok(found.values.iter().flat_map(|x| x.to_le_bytes()).collect())
        };
        let (rank, layout) = (Rank::cpu(1, 1)?, PipelineLayout::default());
        let model = Model::load(rank, &resolved.model, 16, DType::F32, &layout, &source)?;
        let mut sequences = Vec::new();
        for n in 0..4 {
            let mut row = Row::default();
            data.row(n, &mut row)?;
            sequences.push(Sequence { tokens: row.tokens, labels: row.labels });
        }
        let each = model.token_losses(&sequences)?.concat();
        Ok([trained, each.iter().map(|x| f64::from(*x)).sum::<f64>() / each.len() as f64])
    });
    both.unwrap()[0]
}

#[test]
fn a_model_trained_with_sinkhorn_is_used_as_it_was_trained() {
    for set in
        [&["moe.topk=1"][..], &["moe.topk=1", "moe.pre_softmax=true"], &["moe.topk=2"], &["moe.topk=4"]]
    {
        let [trained, used] = losses(&[&["moe.balance=sinkhorn"], set].concat());
        assert!((trained - used).abs() < 1e-6 * trained, "{set:?}: {used} instead of {trained}");
    }
}

/// Runs that were saved with an architecture that Sinkhorn does not follow go on as if it had always said what is trained.
#[test]
fn older_runs_with_sinkhorn_go_on() {
    let (resolved, at) = recipe(&one(), &keys(&["moe.balance=sinkhorn"]));
    let mut old = resolved.clone();
    old.model.moe.as_mut().unwrap().pre_softmax = false;
    let dir = tempfile::tempdir().unwrap();
    let data = Numbers::of(&resolved);
    /// Stops after the first step.
    struct Stop(bool);
    impl ferrotron_core::train::Observer for Stop {
        fn event(&mut self, event: &ferrotron_core::events::Event) {
            self.0 |= matches!(event, ferrotron_core::events::Event::Step(_));
        }
        fn stop(&self) -> bool {
            self.0
        }
    }
    let first = run(&at, |rank| {
        let mut run = Run::open(rank, old.clone(), dir.path(), None)?;
        run.train(&data, None, &mut Stop(false))?;
        Ok(run.trainer.step())
    })
    .unwrap();
    let then = run(&at, |rank| Ok(Run::open(rank, resolved.clone(), dir.path(), None)?.trainer.step()));
    assert_eq!(then.unwrap(), first);
    assert!(first[0] > 0);
}
