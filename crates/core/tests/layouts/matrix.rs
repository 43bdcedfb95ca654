//! The generated matrix: every legal layout, schedule and ZeRO level, four models, two dtypes, recomputation.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::parity::{Outcome, TensorKind};
use ferrotron_core::train::Trainer;
use ferrotron_tensor::Instrumentation;
use std::collections::HashMap;
use std::time::Instant;

/// The recipe that all layouts of a matrix row share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    tied: bool,
    packed: bool,
    bf16: bool,
}

#[derive(Clone, Debug)]
struct Case {
    variant: Variant,
    layout: RankLayout,
    zero: usize,
    zero_bubble: bool,
    overlap: bool,
    /// What backward recomputes.
    recompute: &'static str,
}

impl Case {
    fn recipe(&self) -> Resolved {
        let Variant { tied, packed, bf16 } = self.variant;
        let order = if self.zero_bubble { "zero-bubble" } else { "1f1b" };
        let dtype = if bf16 { "bf16" } else { "f32" };
        let set = [
            format!("model.tied={tied}"),
            format!("data.reset_at_documents={packed}"),
            format!("precision.dtype={dtype}"),
            format!("parallel.zero={}", self.zero),
            format!("parallel.schedule={order}"),
            format!("parallel.overlap={}", self.overlap),
            format!("train.recompute={}", self.recompute),
        ];
        recipe(&self.layout, &set.each_ref().map(String::as_str))
    }

    fn name(&self) -> String {
        let Variant { tied, packed, bf16 } = self.variant;
        let words = [
            (tied, "tied"),
            (packed, "packed"),
            (bf16, "bf16"),
            (self.zero_bubble, "zero-bubble"),
            (!self.overlap, "without overlap"),
        ];
        let words: Vec<&str> = words.into_iter().filter(|w| w.0).map(|w| w.1).collect();
        format!("{} zero={} recompute={} {}", self.layout, self.zero, self.recompute, words.join(" "))
    }

    /// Loss and gradients of the first step, then an evaluation of three micro-batches: over two or four data-parallel
    /// ranks the last round is uneven.
    fn outcome(&self) -> ferrotron_core::Result<(Outcome, f64)> {
        let resolved = self.recipe();
        let ranks = self.layout.world()?;
        // Overlapped runs use the race checker: an access that no event orders is an error.
        let watch = Instrumentation { race_check: self.overlap, ..Instrumentation::default() };
        let work = |rank| {
            let rank = Rank { overlap: self.overlap, ..rank };
            let sources = source::open(&resolved)?;
            let mut trainer = Trainer::new(rank, &resolved)?;
            let before = trainer.evaluate(&*sources.train, 3)?;
            let report = trainer.train_step(&*sources.train)?;
            let gradients = vec![(TensorKind::Gradient, trainer.gradients()?)];
            Ok((Outcome { loss: Some(report.loss), lr: report.lr, tensors: gradients }, before))
        };
        let all = if test_on_gpu() {
            on_one_device(&self.layout, DEFAULT_TIMEOUT, &Rank::cuda(0, 1, 1234, watch)?.0, work)?
        } else {
            on_threads(&self.layout, || Ok(Rank::cpu_instrumented(1, 1234, watch)?), work)?
        };
        assert_eq!(all.len(), ranks);
        let first = all.into_iter().next();
        first.ok_or_else(|| ferrotron_core::Error::Invalid("no rank".into()))
    }

    /// The first difference from one rank, if any.
    fn check(&self, (wanted, evaluated): &(Outcome, f64)) -> Option<String> {
        let (ours, evaluation) = match self.outcome() {
            Ok(made) => made,
            Err(e) => return Some(e.to_string()),
        };
        let (a, b) = (ours.loss.unwrap(), wanted.loss.unwrap());
        let room = if self.variant.bf16 { 2e-3 } else { 1e-6 };
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < room;
        if !near(a, b) {
            return Some(format!("loss {a} instead of {b}"));
        }
        if !near(evaluation, *evaluated) {
            return Some(format!("evaluation {evaluation} instead of {evaluated}"));
        }
        difference(&ours.tensors[0].1, &wanted.tensors[0].1, self.variant.bf16)
    }
}

/// Every case, in a fixed order.
fn whole() -> Vec<Case> {
    let sizes = [1, 2, 4];
    let yes_no = [false, true];
    let mut out = Vec::new();
    let each = |out: &mut Vec<Case>, variant: Variant, [tp, cp, pp, dp]: [usize; 4]| {
        for vp in if pp > 1 { &[1, 2][..] } else { &[1] } {
            for zero_bubble in if pp > 1 { &yes_no[..] } else { &[false] } {
                for zero in if cp * dp > 1 { &[0, 1, 2, 3][..] } else { &[0] } {
                    let layout = RankLayout { tp, cp, pp, vp: *vp, dp: Some(dp), ..RankLayout::default() };
                    // Half of the cases run without overlap, spread over all other options.
                    let overlap = (out.len() / 2 + out.len()).is_multiple_of(2);
                    let recompute =
                        ["none", "full", "[\"attention\",\"mlp\"]", "[\"norm\"]"][out.len() / 3 % 4];
                    let zero_bubble = *zero_bubble;
                    out.push(Case { variant, layout, zero: *zero, zero_bubble, overlap, recompute });
                }
            }
        }
    };
    for (tied, packed, bf16) in (0..8).map(|i| (i & 1 == 1, i & 2 == 2, i & 4 == 4)) {
        for i in 0..81 {
            let [tp, cp, pp, dp] = [i % 3, i / 3 % 3, i / 9 % 3, i / 27].map(|k| sizes[k]);
            if tp * cp * pp * dp <= 16 {
                each(&mut out, Variant { tied, packed, bf16 }, [tp, cp, pp, dp]);
            }
        }
    }
    out
}

#[test]
fn loss_and_gradients_of_the_matrix_match_one_rank() {
    let all = whole();
    let total = all.len();
    let mut cases = selected(all, 160, 20261115, Case::name);
    // Cheap cases first, so that errors show early.
    cases.sort_by_key(|c| c.layout.world().unwrap());
    let begin = Instant::now();
    let (mut references, mut wrong) = (HashMap::new(), Vec::new());
    for (i, case) in cases.iter().enumerate() {
        let reference = references.entry(case.variant).or_insert_with(|| {
            let one = Case { layout: one(), zero: 0, zero_bubble: false, recompute: "none", ..case.clone() };
            one.outcome().unwrap()
        });
        if let Some(what) = case.check(reference) {
            println!("{}: {what}", case.name());
            wrong.push(format!("{}: {what}", case.name()));
        }
        if (i + 1) % 100 == 0 {
            println!("{} of {} cases, {:.0} s", i + 1, cases.len(), begin.elapsed().as_secs_f64());
        }
    }
    println!("{} of {total} cases in {:.0} s", cases.len(), begin.elapsed().as_secs_f64());
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
