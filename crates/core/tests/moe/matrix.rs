//! The generated matrix: every legal layout of up to 16 ranks, over balancing methods, capacities and dispatchers.

use super::*;
use ferrotron_core::ranks::{DEFAULT_TIMEOUT, on_one_device};
use ferrotron_core::train::Trainer;
use ferrotron_tensor::Instrumentation;
use std::collections::HashMap;
use std::time::Instant;

/// The recipe keys that all layouts of a matrix row share.
const VARIANTS: [(&str, &[&str]); 8] = [
    ("plain", &[]),
    ("aux", &["moe.balance=[\"aux\",\"seq_aux\"]", "moe.z_loss=0.01"]),
    ("global", &["moe.balance=[\"global_aux\"]", "moe.jitter=0.1"]),
    (
        "bias",
        &["moe.score_function=sigmoid", "moe.expert_bias=true", "moe.route_scale=2.5", "moe.groups=[4,2]"],
    ),
    ("capacity", &["moe.capacity=0.75", "moe.balance=[\"aux\"]", "moe.bias=true", "moe.router_bias=true"]),
    (
        "first",
        &["moe.capacity=1.0", "moe.drop_policy=first", "moe.latent=24", "data.reset_at_documents=true"],
    ),
    // Rows of several sequences, not in token order.
    ("rows", &["moe.capacity=1.0", "moe.drop_policy=first", "train.micro_batch=2", "train.global_batch=32"]),
    ("bf16", &["precision.dtype=bf16", "moe.force_balance=0"]),
];

#[derive(Clone, Debug)]
struct Case {
    variant: usize,
    layout: RankLayout,
    zero: usize,
    all_gather: bool,
    overlap: bool,
    paired: bool,
}

/// Results of a run: loss, evaluation, gradients, and expert biases after the step.
struct Made {
    loss: f64,
    evaluation: f64,
    gradients: Vec<LogicalValues>,
    tables: Vec<LogicalValues>,
}

impl Case {
    fn name(&self) -> String {
        let how = if self.all_gather { "all_gather" } else { "all_to_all" };
        format!(
            "{} {} zero={} {how} overlap={} paired={}",
            self.layout, VARIANTS[self.variant].0, self.zero, self.overlap, self.paired
        )
    }

    fn is_bf16(&self) -> bool {
        VARIANTS[self.variant].0 == "bf16"
    }

    fn make(&self) -> ferrotron_core::Result<Made> {
        let mut set: Vec<String> = VARIANTS[self.variant].1.iter().map(|s| s.to_string()).collect();
        set.push(format!("parallel.zero={}", self.zero));
        set.push(format!("moe.dispatcher={}", if self.all_gather { "all_gather" } else { "all_to_all" }));
        if self.paired {
            set.push("parallel.schedule=paired".into());
        }
        if VARIANTS[self.variant].0 == "global" {
            // One micro-batch per step: the aux loss is computed per micro-batch, which must not depend on the layout.
            set.push(format!("train.micro_batch={}", 16 / Grid::of(self.layout.clone())?.dp()));
        }
        let (resolved, layout) = recipe(&self.layout, &set);
        let watch = Instrumentation { race_check: self.overlap, ..Instrumentation::default() };
        let work = |rank| {
            let rank = Rank { overlap: self.overlap, ..rank };
            let data = Numbers::of(&resolved);
            let mut trainer = Trainer::new(rank, &resolved)?;
            // Uneven over two or more data-parallel ranks.
            let evaluation = trainer.evaluate(&data, 3)?;
            let report = trainer.train_step(&data)?;
            let gradients = trainer.gradients()?;
            let tables = trainer.expert_tables()?;
            Ok(Made { loss: report.loss, evaluation, gradients, tables })
        };
        let all = if test_on_gpu() {
            on_one_device(&layout, DEFAULT_TIMEOUT, &Rank::cuda(0, 1, 1234, watch)?.0, work)?
        } else {
            on_threads_with(
                &layout,
                std::time::Duration::from_secs(30),
                Default::default(),
                || Ok(Rank::cpu_instrumented(1, 1234, watch)?),
                work,
            )?
        };
        assert_eq!(all.len(), self.layout.world()?);
        let first = all.into_iter().next();
        first.ok_or_else(|| ferrotron_core::Error::Invalid("no rank".into()))
    }

    /// The first difference from one rank, if any.
    fn check(&self, wanted: &Made) -> Option<String> {
        let ours = match self.make() {
            Ok(made) => made,
            Err(e) => return Some(e.to_string()),
        };
        let room = if self.is_bf16() { 2e-3 } else { 1e-6 };
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < room;
        if !near(ours.loss, wanted.loss) {
            return Some(format!("loss {} instead of {}", ours.loss, wanted.loss));
        }
        // With other micro-batches the aux loss covers other sequences.
        if VARIANTS[self.variant].0 != "global" && !near(ours.evaluation, wanted.evaluation) {
            return Some(format!("evaluation {} instead of {}", ours.evaluation, wanted.evaluation));
        }
        if ours.tables != wanted.tables {
            return Some(format!("tables {:?} instead of {:?}", ours.tables, wanted.tables));
        }
        difference(&ours.gradients, &wanted.gradients, self.is_bf16())
    }
}

/// Every case, in a fixed order.
fn whole() -> Vec<Case> {
    let sizes = [1, 2, 4];
    let mut out: Vec<Case> = Vec::new();
    for variant in 0..VARIANTS.len() {
        for i in 0..3usize.pow(5) {
            let [tp, cp, pp, ep, etp] = [1, 3, 9, 27, 81].map(|by| sizes[i / by % 3]);
            for dp in [1, 2] {
                let layout =
                    RankLayout { tp, cp, pp, ep, etp: Some(etp), dp: Some(dp), ..RankLayout::default() };
                if layout.world().is_ok_and(|n| n <= 16) && Grid::of(layout.clone()).is_ok() {
                    let n = out.len();
                    let (zero, all_gather, overlap) =
                        (n % 4, (n / 4).is_multiple_of(3), (n / 4 + n).is_multiple_of(2));
                    let paired = ep * etp > 1 && !all_gather && (n / 2).is_multiple_of(2);
                    out.push(Case { variant, layout, zero, all_gather, overlap, paired });
                }
            }
        }
    }
    out
}

#[test]
fn loss_and_gradients_of_the_matrix_match_one_rank() {
    let all = whole();
    let total = all.len();
    let mut cases = selected(all, 80, 20261115, Case::name);
    // Cheap cases first, so that errors show early.
    cases.sort_by_key(|c| c.layout.world().unwrap());
    let begin = Instant::now();
    let (mut references, mut wrong) = (HashMap::new(), Vec::new());
    for case in &cases {
        let reference = references.entry(case.variant).or_insert_with(|| {
            Case { layout: one(), zero: 0, all_gather: false, paired: false, ..case.clone() }.make().unwrap()
        });
        if let Some(what) = case.check(reference) {
            println!("{}: {what}", case.name());
            wrong.push(format!("{}: {what}", case.name()));
        }
    }
    println!("{} of {total} cases in {:.0} s", cases.len(), begin.elapsed().as_secs_f64());
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
