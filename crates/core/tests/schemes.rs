//! The generated matrix of data-parallel schemes: DDP, ZeRO-1, 2, 3, HSDP and HFSDP over tp × cp × pp/vp × ep, precision and
//! recomputation.
//!
//! Schemes that add gradients in one order give equal bits: DDP and ZeRO-1; ZeRO-2 and 3 unless a rank has several model chunks;
//! HSDP and HFSDP; with one micro-batch the first four. The others differ by the rounding of sums. ZeRO-1 is compared with one rank.
//!
//! By default a seeded sample runs. `FERROTRON_MATRIX=whole` runs all of it, `FERROTRON_MATRIX=N` a sample of N cases,
//! `FERROTRON_MATRIX_SEED` another sample, `FERROTRON_MATRIX_ONLY=TEXT` cases whose name contains a text, and
//! `FERROTRON_MATRIX_PART=K/N` part K of N. scripts/schemes.sh runs all parts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/matrix.rs"]
mod matrix_support;

use ferrotron_core::Result;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use matrix_support::selected;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

/// GQA, biases where FP8 allows them, an odd vocabulary, many small buckets.
const MODEL: &str = "
[model]
layers = 4
hidden = 32
heads = 4
kv_heads = 2
head_dim = 16
ffn = 64
vocab = 259
max_positions = 64
proj_bias = true
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 4
global_batch = 8
[optimizer]
lr = 1e-2
clip = 0.5
[precision]
dtype = \"bf16\"
[parallel]
comm_unit = 24000
[generate]
tokens = 0
";

const SCHEMES: [(&str, &[&str]); 6] = [
    ("ddp", &["parallel.zero=0"]),
    ("zero-1", &["parallel.zero=1"]),
    ("zero-2", &["parallel.zero=2"]),
    ("zero-3", &["parallel.zero=3"]),
    ("hsdp", &["parallel.zero=3"]),
    ("hfsdp", &["parallel.zero=3", "parallel.fsdp_outer=optimizer"]),
];
const ZERO_1: usize = 1;
const ZERO_2: usize = 2;
const ZERO_3: usize = 3;
const HSDP: usize = 4;
const HFSDP: usize = 5;

const PRECISIONS: [(&str, &[&str]); 6] = [
    ("f32", &["precision.dtype=f32"]),
    ("bf16", &[]),
    ("fp8-current", &["precision.recipe=fp8-current"]),
    ("fp8-current params", &["precision.recipe=fp8-current", "precision.fp8_params=true"]),
    ("fp8-delayed params", &["precision.recipe=fp8-delayed", "precision.fp8_params=true"]),
    ("fp8-block params", &["precision.recipe=fp8-block", "precision.fp8_params=true"]),
];

const RECOMPUTE: [&str; 3] = ["none", "full", "[\"norm\",\"mlp\"]"];

/// tp, cp, pp, vp, dp, and ep of an MoE model; a dense one has none.
type Layout = [usize; 6];

/// What all schemes of a row of the matrix share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Row {
    layout: Layout,
    precision: usize,
    recompute: usize,
    micro_batches: usize,
    tied: bool,
    overlap: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Case {
    row: Row,
    scheme: usize,
}

/// Two steps.
struct Made {
    /// Loss and gradient norm.
    steps: Vec<(f64, f64)>,
    /// Gradients of the first step, and weights after the last.
    first: Vec<LogicalValues>,
    weights: Vec<LogicalValues>,
}

impl Case {
    fn name(&self) -> String {
        let Row { layout: [tp, cp, pp, vp, dp, ep], micro_batches, tied, overlap, .. } = self.row;
        let model = if ep > 0 { format!("moe ep{ep}") } else { "dense".into() };
        let [precision, recompute] = [PRECISIONS[self.row.precision].0, RECOMPUTE[self.row.recompute]];
        format!(
            "{} {model} tp{tp} cp{cp} pp{pp} vp{vp} dp{dp} {precision} recompute={recompute} micro_batches={micro_batches} \
             tied={tied} overlap={overlap}",
            SCHEMES[self.scheme].0
        )
    }

    fn recipe(&self) -> Resolved {
        let [tp, cp, pp, vp, dp, ep] = self.row.layout;
        let mut recipe = Recipe::named("tiny").unwrap();
        recipe.add("model.toml", MODEL).unwrap();
        let mut set: Vec<String> = PRECISIONS[self.row.precision].1.iter().map(|s| s.to_string()).collect();
        set.extend(SCHEMES[self.scheme].1.iter().map(|s| s.to_string()));
        for (key, size) in [("tp", tp), ("cp", cp), ("pp", pp), ("vp", vp), ("dp", dp)] {
            set.push(format!("parallel.{key}={size}"));
        }
        set.push(format!("train.micro_batch={}", 8 / dp / self.row.micro_batches));
        set.push(format!("train.recompute={}", RECOMPUTE[self.row.recompute]));
        set.push(format!("model.tied={}", self.row.tied));
        if ep > 0 {
            let moe =
                ["moe.experts=4", "moe.topk=2", "moe.ffn=128", "moe.dense_layers=[0]", "parallel.etp=1"];
            set.extend(moe.map(String::from));
            set.push(format!("parallel.ep={ep}"));
            // Rounding must not decide which experts a token goes to.
            if self.row.is_16_bit() {
                set.push("moe.force_balance=0".into());
            }
            // 128 x 128 blocks need more rows than these experts have.
            if PRECISIONS[self.row.precision].0.starts_with("fp8-block") {
                set.push("precision.skip=experts".into());
            }
        }
        if self.scheme >= HSDP {
            set.push(format!("parallel.fsdp_group={}", self.row.fsdp_group()));
        }
        set.iter().for_each(|s| recipe.set(s).unwrap_or_else(|e| panic!("{s}: {e}")));
        recipe.resolve(None).unwrap_or_else(|e| panic!("{}: {e}", self.name()))
    }

    fn make(&self) -> Result<Made> {
        let resolved = self.recipe();
        let watch = Instrumentation { race_check: self.row.overlap, ..Instrumentation::default() };
        let make = || {
            let rank = Rank::cpu_instrumented(1, 1234, watch)?;
            Ok(Rank { overlap: self.row.overlap, ..rank })
        };
        let work = |rank| {
            let sources = source::open(&resolved)?;
            let mut trainer = Trainer::new(rank, &resolved)?;
            let one = trainer.train_step(&*sources.train)?;
            let first = trainer.gradients()?;
            let two = trainer.train_step(&*sources.train)?;
            let steps = [one, two].iter().map(|r| (r.loss, r.grad_norm)).collect();
            Ok(Made { steps, first, weights: trainer.weights()? })
        };
        let all = on_threads(&resolved.config.parallel.layout(), make, work)?;
        let mut all = all.into_iter();
        let first = all.next().ok_or_else(|| ferrotron_core::Error::Invalid("no rank".into()))?;
        match all.all(|other| equal(&other, &first).is_none()) {
            true => Ok(first),
            false => Err(ferrotron_core::Error::Invalid("ranks differ".into())),
        }
    }
}

impl Row {
    /// Two groups, of experts too.
    fn fsdp_group(&self) -> usize {
        let [_, cp, _, _, dp, _] = self.layout;
        dp * cp / 2
    }

    fn is_16_bit(&self) -> bool {
        self.precision > 0
    }

    fn is_fp8(&self) -> bool {
        self.precision > 1
    }
}

/// The first difference in bits.
fn equal(a: &Made, b: &Made) -> Option<String> {
    if a.steps != b.steps {
        return Some(format!("loss and norm {:?} instead of {:?}", a.steps, b.steps));
    }
    for (kind, a, b) in [("gradient", &a.first, &b.first), ("weight", &a.weights, &b.weights)] {
        for (x, y) in a.iter().zip(b) {
            let bits = |v: &LogicalValues| v.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            if x.name != y.name || bits(x) != bits(y) {
                return Some(format!("{kind} {} has other bits", x.name));
            }
        }
    }
    None
}

/// The first difference beyond the rounding of the first step: `room` of a tensor's norm.
fn near(a: &Made, b: &Made, (loss, room): (f64, f64)) -> Option<String> {
    let ((x, _), (y, _)) = (a.steps[0], b.steps[0]);
    if (x / y - 1.0).abs() > loss || x.is_nan() {
        return Some(format!("loss {x} instead of {y}"));
    }
    for (a, b) in a.first.iter().zip(&b.first) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
        let apart = norm(&mut a.values.iter().zip(&b.values).map(|(x, y)| f64::from(x - y)));
        let size = norm(&mut b.values.iter().map(|y| f64::from(*y)));
        if a.name != b.name || apart.is_nan() || apart > room * size + 1e-6 {
            return Some(format!("gradient {}: {apart:.2e} of {size:.2e} apart", a.name));
        }
    }
    None
}

/// Every case, in a fixed order: the schemes of a row together.
fn whole() -> Vec<Case> {
    let mut layouts: Vec<Layout> = Vec::new();
    for dp in [2usize, 4] {
        for (tp, cp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
            for (pp, vp) in [(1, 1), (2, 1), (2, 2)] {
                for ep in [0, 1, 2, 4] {
                    let experts = ep == 0 || (tp * cp * dp).is_multiple_of(ep) && ep < tp * cp * dp;
                    if tp * cp * pp * dp <= 8 && experts && (ep == 0 || vp == 1) {
                        layouts.push([tp, cp, pp, vp, dp, ep]);
                    }
                }
            }
        }
    }
    let mut out = Vec::new();
    for (l, layout) in layouts.into_iter().enumerate() {
        for precision in 0..PRECISIONS.len() {
            for recompute in 0..RECOMPUTE.len() {
                // The rest is spread over all other options.
                let n = l + precision + recompute;
                let (micro_batches, tied, overlap) = (1 + n % 2, n / 2 % 2 == 0, !n.is_multiple_of(3));
                let row = Row { layout, precision, recompute, micro_batches, tied, overlap };
                out.extend((0..SCHEMES.len()).map(|scheme| Case { row, scheme }));
            }
        }
    }
    out
}

/// Results of cases, each computed once; only those of the last row are kept.
#[derive(Default)]
struct Results {
    row: Option<Row>,
    made: HashMap<usize, std::result::Result<Rc<Made>, String>>,
    /// One rank, by what the layout does not change.
    single: HashMap<Row, Rc<Made>>,
}

impl Results {
    fn of(&mut self, row: Row, scheme: usize) -> std::result::Result<Rc<Made>, String> {
        if self.row != Some(row) {
            (self.row, self.made) = (Some(row), HashMap::new());
        }
        let make = || Case { row, scheme }.make().map(Rc::new).map_err(|e| e.to_string());
        self.made.entry(scheme).or_insert_with(make).clone()
    }

    /// One rank with micro-batches as large.
    fn one_rank(&mut self, row: Row) -> Rc<Made> {
        let [_, _, _, _, dp, ep] = row.layout;
        let layout = [1, 1, 1, 1, 1, ep.min(1)];
        let micro_batches = dp * row.micro_batches;
        let one = Row { layout, micro_batches, recompute: 0, overlap: false, ..row };
        let make = || Rc::new(Case { row: one, scheme: 0 }.make().unwrap());
        self.single.entry(one).or_insert_with(make).clone()
    }

    /// The first difference of a case from what it must equal, if any.
    fn check(&mut self, Case { row, scheme }: Case) -> std::result::Result<Option<String>, String> {
        let ours = self.of(row, scheme)?;
        // Sums of gradients round differently.
        let rounding = (1e-9, 1e-5);
        Ok(match scheme {
            ZERO_1 => {
                let usual = if row.is_16_bit() { (2e-3, 1e-2) } else { (1e-6, 1e-5) };
                // FP8 rounds other sums to other values: losses only.
                let usual = if row.is_fp8() { (5e-3, f64::MAX) } else { usual };
                near(&ours, &self.one_rank(row), usual)
            }
            ZERO_2 if row.micro_batches > 1 => near(&ours, &*self.of(row, ZERO_1)?, rounding),
            // A bucket of ZeRO-2 may have parameters of two chunks, and is reduced when both have passed.
            ZERO_3 if row.layout[3] > 1 && row.micro_batches > 1 => {
                near(&ours, &*self.of(row, ZERO_2)?, rounding)
            }
            ZERO_3 => equal(&ours, &*self.of(row, ZERO_2)?),
            HSDP => near(&ours, &*self.of(row, ZERO_2)?, rounding),
            HFSDP => equal(&ours, &*self.of(row, HSDP)?),
            _ => equal(&ours, &*self.of(row, ZERO_1)?),
        })
    }
}

/// `FERROTRON_MATRIX_PART=K/N`, by default the only part.
fn part() -> (usize, usize) {
    let Ok(text) = std::env::var("FERROTRON_MATRIX_PART") else { return (1, 1) };
    let part = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    let (k, n) = part.expect("FERROTRON_MATRIX_PART is K/N");
    assert!((1..=n).contains(&k), "there is no part {k} of {n}");
    (k, n)
}

#[test]
fn schemes_of_the_matrix_match() {
    let all = whole();
    assert!(all.len() >= 1500, "{}", all.len());
    let mut cases = selected(all.clone(), 60, 20261116, Case::name);
    // Rows together, so that what schemes are compared with is computed once.
    let order = |c: &Case| all.iter().position(|x| x == c);
    cases.sort_by_cached_key(order);
    let (k, n) = part();
    let each = cases.len().div_ceil(n).next_multiple_of(SCHEMES.len());
    let cases: Vec<Case> = cases.into_iter().skip((k - 1) * each).take(each).collect();
    let (begin, mut results, mut wrong) = (Instant::now(), Results::default(), Vec::new());
    for (i, case) in cases.iter().enumerate() {
        let what = results.check(*case).unwrap_or_else(Some);
        if let Some(what) = what {
            println!("FAILED {}: {what}", case.name());
            wrong.push(format!("{}: {what}", case.name()));
        }
        if (i + 1) % 60 == 0 {
            println!("{} of {} cases, {:.0} s", i + 1, cases.len(), begin.elapsed().as_secs_f64());
        }
    }
    println!("part {k} of {n}: {} cases, {} failures", cases.len(), wrong.len());
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
