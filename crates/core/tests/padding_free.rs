//! `data.packing = "padding_free"`: samples of different lengths, concatenated without padding, have the losses and gradients
//! of samples in rows of their own, under every layout.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/support/device.rs"]
mod device;

use device::test_on_gpu;
use ferrotron_core::Result;
use ferrotron_core::config::{Packing, Recipe, Resolved, Truncation};
use ferrotron_core::data::{Batches, Documents, IGNORE, Packed, Row, RowOptions};
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::{on_one_device, on_threads_with};
use ferrotron_core::train::{LogicalValues, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;
use std::ops::Range;

const SEQ: usize = 48;
const VOCAB: u32 = 61;
const BATCH: u64 = 16;

const RECIPE: &str = "
[model]
layers = 4
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 61
max_positions = 48
[data]
path = \"never opened\"
seq_len = 48
[train]
steps = 10
global_batch = 16
[optimizer]
lr = 1e-3
[precision]
dtype = \"f32\"
[generate]
tokens = 0
";

const MOE: &[&str] = &["moe.experts=8", "moe.topk=2", "moe.ffn=16", "moe.shared_ffn=24"];

fn recipe(set: &[&str]) -> Resolved {
    let mut recipe = Recipe::default();
    recipe.add("test", RECIPE).unwrap();
    set.iter().for_each(|s| recipe.set(s).unwrap_or_else(|e| panic!("{s}: {e}")));
    recipe.resolve(None).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

fn layout(text: &str) -> RankLayout {
    let layout: RankLayout = text.parse().unwrap();
    RankLayout { dp: layout.dp.or(Some(1)), ..layout }
}

/// Conversations of 3 to 60 tokens, the last third of each with a loss.
struct Chats;

fn length(document: usize) -> usize {
    3 + document * 37 % 58
}

impl Documents for Chats {
    fn count(&self) -> usize {
        48
    }
    fn length(&self, document: usize) -> Result<usize> {
        Ok(length(document))
    }
    fn read(&self, document: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<()> {
        out.extend(
            range.map(|i| ((document * 131 + i * (7 + document % 5) + i * i) % VOCAB as usize) as i64),
        );
        Ok(())
    }
    fn has_mask(&self) -> bool {
        true
    }
    fn loss(&self, document: usize, range: Range<usize>, out: &mut Vec<bool>) -> Result<()> {
        out.extend(range.map(|i| i * 3 >= length(document) * 2));
        Ok(())
    }
    fn name(&self) -> String {
        "chats".into()
    }
}

fn rows(packing: Packing) -> Packed {
    let options =
        RowOptions { seq: SEQ, vocab: VOCAB, seed: Some(7), truncation: Truncation::KeepEnd, packing };
    Packed::with(Box::new(Chats), options).unwrap().unwrap()
}

/// Samples from `first` on, of which only `only` keeps its labels.
struct OneOf<'a> {
    data: &'a dyn Batches,
    first: u64,
    only: u64,
}

impl Batches for OneOf<'_> {
    fn seq(&self) -> usize {
        self.data.seq()
    }
    fn samples(&self) -> u64 {
        self.data.samples()
    }
    fn resets(&self) -> bool {
        self.data.resets()
    }
    fn length(&self, n: u64) -> Result<Option<usize>> {
        self.data.length(self.first + n)
    }
    fn row(&self, n: u64, row: &mut Row) -> Result<()> {
        self.data.row(self.first + n, row)?;
        if self.first + n != self.only {
            row.labels.fill(IGNORE);
        }
        Ok(())
    }
}

/// Micro-batches end with their last sample and differ in length, and no two samples of the data have equal contents.
#[test]
fn micro_batches_hold_their_samples_and_nothing_else() {
    let (free, padded) = (rows(Packing::PaddingFree), rows(Packing::None));
    assert_eq!(free.samples(), padded.samples());
    let mut lengths = Vec::new();
    for n in (0..free.samples()).step_by(4) {
        let (ours, theirs) = (free.batch(n, 4).unwrap(), padded.batch(n, 4).unwrap());
        let is_token = |i: &usize| theirs.padding.as_ref().is_none_or(|p| !p[*i]);
        let kept = |x: &[i32]| (0..x.len()).filter(is_token).map(|i| x[i]).collect::<Vec<_>>();
        assert_eq!(ours.tokens, kept(&theirs.tokens));
        assert_eq!(ours.labels, kept(&theirs.labels));
        assert_eq!(ours.positions, kept(&theirs.positions));
        assert!(ours.padding.is_none() && ours.varies && !theirs.varies);
        let offsets = ours.cu_seqlens.unwrap();
        let each: Vec<usize> = offsets.windows(2).map(|w| (w[1] - w[0]) as usize).collect();
        let wanted: Vec<usize> = (n..n + 4).map(|n| free.length(n).unwrap().unwrap()).collect();
        assert_eq!(each, wanted);
        assert_eq!(ours.tokens.len() as u64, free.tokens(n, 4).unwrap());
        lengths.push(ours.tokens.len());
    }
    lengths.sort_unstable();
    lengths.dedup();
    assert!(lengths.len() > 8, "lengths hardly vary: {lengths:?}");
    assert!((0..free.samples()).any(|n| free.length(n).unwrap() == Some(SEQ)), "no conversation was cut");
    assert_eq!(free.tokens(0, free.samples()).unwrap(), free.used());
}

#[test]
fn each_sample_has_the_loss_of_a_row_of_its_own() {
    for more in [&[][..], MOE] {
        let make = |micro| {
            let r = recipe(&[&[micro, "data.packing=padding_free"], more].concat());
            Trainer::new(Rank::cpu(1, 1234).unwrap(), &r).unwrap()
        };
        let (four, one) = (make("train.micro_batch=4"), make("train.micro_batch=1"));
        let (free, padded) = (rows(Packing::PaddingFree), rows(Packing::None));
        let mut worst = 0.0f64;
        for only in 0..free.samples() {
            let first = only / 4 * 4;
            let ours = four.evaluate(&OneOf { data: &free, first, only }, 1).unwrap();
            let alone = one.evaluate(&OneOf { data: &padded, first: only, only }, 1).unwrap();
            worst = worst.max((ours - alone).abs());
        }
        println!("{} samples: losses differ by at most {worst:.1e}", free.samples());
        assert!(worst < 1e-5, "{more:?}: {worst}");
    }
}

struct Step {
    loss: f64,
    evaluation: f64,
    tokens: u64,
    gradients: Vec<LogicalValues>,
}

/// The first step under a layout, with the race checker on.
fn step(text: &str, packing: Packing, set: &[&str]) -> Step {
    let layout = layout(text);
    let mut set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    set.push(format!("data.packing={}", packing.name()));
    let (etp, dp) = (layout.etp(), layout.dp.unwrap_or(1));
    let sizes = [
        ("tp", layout.tp),
        ("cp", layout.cp),
        ("pp", layout.pp),
        ("vp", layout.vp),
        ("ep", layout.ep),
        ("etp", etp),
        ("dp", dp),
    ];
    set.extend(sizes.map(|(key, n)| format!("parallel.{key}={n}")));
    let r = recipe(&set.iter().map(String::as_str).collect::<Vec<_>>());
    let layout = r.config.parallel.layout();
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let work = |rank| {
        let data = rows(packing);
        let mut trainer = Trainer::new(rank, &r)?;
        let evaluation = trainer.evaluate(&data, 3)?;
        let report = trainer.train_step(&data)?;
        let gradients = trainer.gradients()?;
        Ok(Step { loss: report.loss, evaluation, tokens: report.tokens, gradients })
    };
    let timeout = std::time::Duration::from_secs(60);
    // With `FERROTRON_TEST_DEVICE=cuda` all ranks share the first GPU.
    let all = match test_on_gpu() {
        true => on_one_device(&layout, timeout, &Rank::cuda(0, 1, 1234, watch).unwrap().0, work),
        false => {
            let make = || Ok(Rank::cpu_instrumented(1, 1234, watch)?);
            on_threads_with(&layout, timeout, Default::default(), make, work)
        }
    };
    all.unwrap_or_else(|e| panic!("{text} {set:?}: {e}")).swap_remove(0)
}

/// Loss within 1e-6 and gradients within 1e-5 of the largest of each tensor.
fn assert_near(ours: &Step, wanted: &Step, what: &str) {
    assert!((ours.loss / wanted.loss - 1.0).abs() < 1e-6, "{what}: loss {} for {}", ours.loss, wanted.loss);
    assert_eq!(ours.gradients.len(), wanted.gradients.len());
    for (o, w) in ours.gradients.iter().zip(&wanted.gradients) {
        let largest = w.values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let apart = o.values.iter().zip(&w.values).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(
            o.name == w.name && apart <= 1e-5 * largest + 1e-7,
            "{what}: {} {apart:e} of {largest:e}",
            o.name
        );
    }
}

/// One step on padding-free micro-batches of four under each layout, against one sample per row on one rank.
fn compare(layouts: &[&str], set: &[&str]) {
    let wanted = step("tp=1", Packing::None, &[&["train.micro_batch=1"], set].concat());
    let tokens = rows(Packing::PaddingFree).tokens(0, BATCH).unwrap();
    assert_eq!(wanted.tokens, BATCH * SEQ as u64);
    assert!(tokens * 3 < wanted.tokens * 2, "{tokens} of {}", wanted.tokens);
    let set = [&["train.micro_batch=4"], set].concat();
    let one = step("tp=1", Packing::PaddingFree, &set);
    for text in layouts {
        let ours = step(text, Packing::PaddingFree, &set);
        let what = format!("{text} {set:?}");
        assert_near(&ours, &wanted, &what);
        assert_eq!(ours.tokens, tokens, "{what}: padding is counted");
        assert!((ours.evaluation / one.evaluation - 1.0).abs() < 1e-6, "{what}: evaluation");
    }
}

#[test]
fn losses_and_gradients_are_those_of_one_sample_per_row() {
    compare(&["tp=1", "tp=2", "pp=2", "cp=2", "dp=2", "pp=2,vp=2", "tp=2,cp=2,pp=2,dp=2", "cp=4,dp=4"], &[]);
}

#[test]
fn sharding_and_recomputation_change_nothing() {
    for zero in ["parallel.zero=1", "parallel.zero=2", "parallel.zero=3"] {
        compare(&["dp=4"], &[zero]);
    }
    compare(&["tp=2,dp=2", "pp=2"], &["train.recompute=full"]);
    compare(&["tp=2,cp=2"], &["train.recompute=[\"norm\", \"activation\"]", "train.loss_chunk=24"]);
    compare(&["tp=1", "pp=2"], &["parallel.schedule=zero-bubble", "train.mlp_chunk=16"]);
    compare(&["tp=1", "dp=2"], &["offload.activations=2", "offload.min_bytes=1"]);
}

/// Without load-balancing losses, which are means over micro-batches and so differ with them.
#[test]
fn experts_take_tokens_of_ranks_with_different_lengths() {
    for more in [&["moe.balance=none"][..], &["moe.balance=none", "moe.dispatcher=all_gather"]] {
        let set = [MOE, more].concat();
        compare(
            &["tp=1", "ep=2,dp=2", "ep=4,dp=4", "tp=2,etp=1,ep=4,dp=2", "cp=2,ep=2", "pp=2,ep=2,dp=2"],
            &set,
        );
    }
}

/// What depends on a token's place in the step, and on means over micro-batches, is that of one rank.
#[test]
fn dropout_and_load_balancing_are_those_of_one_rank() {
    let moe = |more: &[&'static str]| [MOE, more].concat();
    for set in [
        vec!["dropout.hidden=0.1"],
        moe(&["moe.balance=aux"]),
        moe(&["moe.balance=seq_aux", "moe.z_loss=0.01", "moe.jitter=0.1"]),
        moe(&["moe.balance=none", "moe.capacity=1.2"]),
    ] {
        let set = [&["train.micro_batch=4"], &set[..]].concat();
        let wanted = step("tp=1", Packing::PaddingFree, &set);
        for text in ["tp=2", "cp=2", "pp=2", "dp=2", "tp=2,dp=4"] {
            let ours = step(text, Packing::PaddingFree, &set);
            assert_near(&ours, &wanted, &format!("{text} {set:?}"));
        }
    }
}

#[test]
fn what_cannot_vary_in_length_is_refused() {
    let refusal = |set: &[&str]| {
        let mut recipe = Recipe::default();
        recipe.add("test", RECIPE).unwrap();
        recipe.set("data.packing=padding_free").unwrap();
        set.iter().for_each(|s| recipe.set(s).unwrap());
        recipe.resolve(None).unwrap_err().to_string()
    };
    let moe = |more: &[&'static str]| refusal(&[MOE, more].concat());
    assert!(moe(&["moe.balance=quantile"]).contains("micro-batches of equal length"));
    assert!(moe(&["moe.capacity=1.5", "moe.pad_to_capacity=true"]).contains("differ in length"));
    assert!(refusal(&["train.cuda_graph=on"]).contains("differ in their number of tokens"));
    assert!(refusal(&["data.path=embedded", "model.vocab=256"]).contains("data.packing"));
    assert!(refusal(&["train.tokens=1000"]).contains("train.epochs"));
}
