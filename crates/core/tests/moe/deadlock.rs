//! Ranks without tokens still join every collective: no deadlock, and results match one rank.

use super::*;
use ferrotron_core::data::{Batch, Batches, Row, source};
use ferrotron_core::train::{StepReport, Trainer};

type Made = (Vec<StepReport>, Vec<LogicalValues>);

/// Routers that send every token to the first two experts.
fn to_the_first_two(trainer: &Trainer) -> ferrotron_core::Result<()> {
    let mut weights = trainer.weights()?;
    for w in weights.iter_mut().filter(|w| w.name.ends_with("router.bias")) {
        w.values[..2].copy_from_slice(&[31.0, 30.0]);
    }
    let of = |name: &str| weights.iter().find(|w| w.name == name).unwrap().values.clone();
    trainer.import(&|name| Ok(of(name)))
}

/// A few steps, and the last step's gradients on every rank.
fn steps(
    at: &str,
    set: &[&str],
    count: usize,
    data: &(impl Fn(Box<dyn Batches>) -> Box<dyn Batches> + Sync),
    prepare: &(impl Fn(&Trainer) -> ferrotron_core::Result<()> + Sync),
) -> Vec<Made> {
    let at = if at == "one" { one() } else { layout(at) };
    let (resolved, at) = recipe(&at, &keys(set));
    run(&at, |rank| {
        let data = data(source::open(&resolved)?.train);
        let mut trainer = Trainer::new(rank, &resolved)?;
        prepare(&trainer)?;
        let reports =
            (0..count).map(|_| trainer.train_step(&*data)).collect::<ferrotron_core::Result<_>>()?;
        Ok((reports, trainer.gradients()?))
    })
    .unwrap()
}

fn near(ours: &[Made], wanted: &Made, what: &str) {
    for (rank, (reports, gradients)) in ours.iter().enumerate() {
        for (o, w) in reports.iter().zip(&wanted.0) {
            assert!((o.loss / w.loss - 1.0).abs() < 1e-5, "{what}, rank {rank}: {o:?} instead of {w:?}");
            assert!(
                (o.grad_norm / w.grad_norm - 1.0).abs() < 1e-4,
                "{what}, rank {rank}: {o:?} instead of {w:?}"
            );
        }
        assert_eq!(reports.len(), wanted.0.len());
        if reports.len() == 1 {
            assert_eq!(difference(gradients, &wanted.1, false), None, "{what}, rank {rank}");
        }
    }
}

#[test]
fn experts_without_tokens_get_zero_gradients_and_no_deadlock() {
    let set = |how: &'static str| ["moe.router_bias=true", how];
    let same = |data| data;
    let wanted = steps("one", &set("moe.dispatcher=all_to_all"), 1, &same, &to_the_first_two).remove(0);
    for how in ["moe.dispatcher=all_to_all", "moe.dispatcher=all_gather"] {
        for at in ["ep=4", "ep=2,etp=2", "ep=8"] {
            let ours = steps(at, &set(how), 1, &same, &to_the_first_two);
            near(&ours, &wanted, &format!("{at} {how}"));
            let mut used = 0;
            for g in ours[0].1.iter().filter(|g| g.name.contains(".experts.")) {
                let expert: usize = g.name.split('.').nth(4).unwrap().parse().unwrap();
                let zero = g.values.iter().all(|x| *x == 0.0);
                assert_eq!(zero, expert >= 2, "{at} {how}: {}", g.name);
                used += usize::from(!zero);
            }
            // gate, up and down of two experts in three layers.
            assert_eq!(used, 18);
        }
    }
}

#[test]
fn a_stage_without_moe_layers_does_not_deadlock() {
    let same = |data| data;
    let set = ["moe.dense_layers=[0,1]", "parallel.zero=1", "optimizer.clip=0.5", "moe.balance=aux"];
    let wanted = steps("one", &set, 3, &same, &|_| Ok(())).remove(0);
    assert!(wanted.0.iter().all(|r| r.grad_norm > 0.5), "nothing was clipped: {:?}", wanted.0);
    for at in ["pp=2,ep=2", "pp=4,ep=2"] {
        near(&steps(at, &set, 3, &same, &|_| Ok(())), &wanted, at);
    }
}

/// Samples, some of which are all padding.
struct Padded {
    inner: Box<dyn Batches>,
    is_padding: fn(u64) -> bool,
}

impl Batches for Padded {
    fn seq(&self) -> usize {
        self.inner.seq()
    }
    fn samples(&self) -> u64 {
        self.inner.samples()
    }
    fn resets(&self) -> bool {
        self.inner.resets()
    }
    fn row(&self, n: u64, row: &mut Row) -> ferrotron_core::Result<()> {
        self.inner.row(n, row)
    }
    fn batch(&self, first: u64, count: usize) -> ferrotron_core::Result<Batch> {
        let batch = self.inner.batch(first, count)?;
        Ok(if (self.is_padding)(first / count as u64) { batch.as_padding() } else { batch })
    }
}

#[test]
fn micro_batches_without_tokens_match_one_rank() {
    type Chosen = fn(u64) -> bool;
    let cases: [(&str, Chosen); 3] = [
        ("one of all", |i| i == 3),
        ("all of the second rank", |i| i % 2 == 1),
        ("the last half", |i| i >= 8),
    ];
    for (what, is_padding) in cases {
        let padded = move |inner| Box::new(Padded { inner, is_padding }) as Box<dyn Batches>;
        // Drop by position: equal tokens at the start of a row have equal probabilities up to rounding, which differs between
        // layouts.
        let capacity = ["moe.capacity=1.0", "moe.drop_policy=first"];
        for set in [&["moe.balance=[\"aux\",\"seq_aux\"]", "moe.z_loss=0.01"][..], &capacity] {
            let wanted = steps("one", set, 1, &padded, &|_| Ok(())).remove(0);
            for at in ["ep=2", "tp=2,etp=1,ep=2"] {
                near(&steps(at, set, 1, &padded, &|_| Ok(())), &wanted, &format!("{what}, {at}, {set:?}"));
            }
        }
    }
}

#[test]
fn evaluations_of_any_number_of_batches() {
    let evaluate = |at: &RankLayout| {
        let (resolved, at) = recipe(at, &[]);
        run(&at, |rank| {
            let data = source::open(&resolved)?.train;
            let trainer = Trainer::new(rank, &resolved)?;
            (1..=6).map(|n| trainer.evaluate(&*data, n)).collect::<ferrotron_core::Result<Vec<f64>>>()
        })
        .unwrap()
    };
    let wanted = evaluate(&one()).remove(0);
    for at in ["ep=4", "ep=2,pp=2"] {
        for ours in evaluate(&layout(at)) {
            for (n, (o, w)) in ours.iter().zip(&wanted).enumerate() {
                assert!((o / w - 1.0).abs() < 1e-6, "{at}, {} batches: {o} instead of {w}", n + 1);
            }
        }
    }
}
