//! ZeRO changes only memory: losses, gradients, weights and checkpoints equal plain DDP, bit for bit where the order of
//! additions is the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::Result;
use ferrotron_core::checkpoint;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::cost::MemoryEstimate;
use ferrotron_core::data::source;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Observer, Run, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, Instrumentation};

/// GQA, biases, an odd vocabulary, active gradient clipping, and many small buckets.
const MODEL: &str = "
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 259
max_positions = 64
qkv_bias = true
proj_bias = true
[data]
path = \"embedded\"
seq_len = 16
[train]
steps = 4
global_batch = 8
micro_batch = 1
[optimizer]
lr = 1e-2
clip = 0.5
[precision]
dtype = \"f32\"
[generate]
tokens = 0
[checkpoint]
keep = 0
";

#[derive(Clone, Copy, Debug)]
struct Case {
    tp: usize,
    cp: usize,
    pp: usize,
    dp: usize,
    zero: usize,
    overlap: bool,
    set: &'static [&'static str],
}

impl Case {
    fn layout(&self) -> RankLayout {
        self.recipe().config.parallel.layout()
    }

    fn recipe(&self) -> Resolved {
        let mut recipe = Recipe::named("tiny").unwrap();
        recipe.add("model.toml", MODEL).unwrap();
        recipe.set("parallel.comm_unit=24000").unwrap();
        self.set.iter().for_each(|s| recipe.set(s).unwrap());
        let axes = [("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("dp", self.dp)];
        let sizes = axes.into_iter().chain([("zero", self.zero)]);
        sizes.for_each(|(k, v)| recipe.set(&format!("parallel.{k}={v}")).unwrap());
        recipe.resolve(None).unwrap()
    }

    /// The results of `work` on every rank, with the race checker on.
    fn run<T: Send>(&self, work: impl Fn(Rank, Resolved) -> Result<T> + Sync) -> Vec<T> {
        let resolved = self.recipe();
        let make = || {
            let rank = Rank::cpu_instrumented(
                1,
                1234,
                Instrumentation { race_check: true, ..Instrumentation::default() },
            )?;
            Ok(Rank { overlap: self.overlap, ..rank })
        };
        on_threads(&self.layout(), make, |rank| work(rank, resolved.clone()))
            .unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }
}

/// Results of a few steps.
#[derive(Clone, Debug, PartialEq)]
struct Made {
    losses: Vec<(f64, f64)>,
    eval: f64,
    first: Vec<LogicalValues>,
    gradients: Vec<LogicalValues>,
    weights: Vec<LogicalValues>,
}

fn made(case: &Case) -> Made {
    let mut all = case.run(|rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut trainer = Trainer::new(rank, &resolved)?;
        let (mut losses, mut first) = (Vec::new(), None);
        for _ in 0..3 {
            let report = trainer.train_step(&*sources.train)?;
            losses.push((report.loss, report.grad_norm));
            first = Some(first.map_or_else(|| trainer.gradients(), Ok)?);
        }
        let first = first.unwrap_or_default();
        let eval = trainer.evaluate(&*sources.train, 4)?;
        let gradients = trainer.gradients()?;
        let zeros = gradients.iter().flat_map(|g| &g.values).filter(|x| **x == 0.0).count();
        assert_eq!(trainer.count_zero_grads()?, zeros as u64, "{case:?}: zeros are counted once");
        // An untied embedding has no gradient for tokens that do not occur.
        assert!(zeros > 32 || !case.set.contains(&"model.tied=false"), "{case:?}: {zeros} zeros");
        Ok(Made { losses, eval, first, gradients, weights: trainer.weights()? })
    });
    let first = all.swap_remove(0);
    all.iter().for_each(|other| assert!(*other == first, "{case:?}: ranks differ"));
    first
}

fn equal(what: &str, a: &Made, b: &Made) {
    assert_eq!((&a.losses, a.eval), (&b.losses, b.eval), "{what}");
    for (kind, a, b) in [("gradient", &a.gradients, &b.gradients), ("weight", &a.weights, &b.weights)] {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            let bits = |v: &LogicalValues| v.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(a.name == b.name && bits(a) == bits(b), "{what}: {kind} {} differs", a.name);
        }
    }
}

fn near(what: &str, a: &Made, b: &Made, room: f64) {
    for ((x, _), (y, _)) in a.losses.iter().zip(&b.losses) {
        assert!((x / y - 1.0).abs() < 1e-6, "{what}: loss {x} instead of {y}");
    }
    // First step only: Adam turns rounding noise around 0 into full steps, so later steps differ by more than sums do.
    for (a, b) in a.first.iter().zip(&b.first) {
        let most = b.values.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
        for (x, y) in a.values.iter().zip(&b.values) {
            let apart = f64::from((x - y).abs());
            assert!(apart <= room * most + 1e-7, "{what}: {} {x} instead of {y}", a.name);
        }
    }
}

const LAYOUTS: [(usize, usize); 7] = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2)];

/// Four micro-batches, dp = 2: ZeRO-1 and overlap are bit-equal to DDP; ZeRO-2 adds gradients in another order.
#[test]
fn zero_is_bit_equal_to_ddp() {
    for set in [
        &["model.tied=true"][..],
        &["model.tied=false", "optimizer.state_dtype=bf16", "precision.dtype=bf16"],
    ] {
        for (tp, dp) in LAYOUTS {
            let case = |zero, overlap| Case { tp, cp: 1, pp: 1, dp, zero, overlap, set };
            let plain = made(&case(0, false));
            for zero in [0, 1] {
                equal(
                    &format!("tp{tp} dp{dp} zero {zero} overlap {set:?}"),
                    &made(&case(zero, true)),
                    &plain,
                );
            }
            equal(&format!("tp{tp} dp{dp} zero 1 {set:?}"), &made(&case(1, false)), &plain);
            let divided = made(&case(2, true));
            equal(&format!("tp{tp} dp{dp} zero 2 {set:?}"), &made(&case(2, false)), &divided);
            for overlap in [false, true] {
                let what = format!("tp{tp} dp{dp} zero 3 overlap {overlap} {set:?}");
                equal(&what, &made(&case(3, overlap)), &divided);
            }
            if !set.contains(&"precision.dtype=bf16") {
                near(&format!("tp{tp} dp{dp} zero 2 {set:?}"), &divided, &plain, 1e-5);
            }
        }
    }
}

/// Packed moments are scaled per block of the logical tensor, so they are bit-equal under any sharding. 16-bit master
/// remainders round weights differently, alike on all ranks.
#[test]
fn packed_moments_are_bit_equal_under_zero() {
    const SIZES: [&str; 4] =
        ["model.hidden=64", "model.ffn=64", "model.qkv_bias=false", "precision.dtype=bf16"];
    for kept in [
        ["optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"],
        ["optimizer.state_dtype=f16", "optimizer.clip=1"],
    ] {
        let set: &'static [&'static str] = Vec::leak([&SIZES[..], &kept].concat());
        for (tp, dp) in [(1, 2), (1, 3), (2, 1), (2, 2)] {
            let batch: &'static [&'static str] = Vec::leak([set, &["train.global_batch=12"]].concat());
            let case = |zero| Case { tp, cp: 1, pp: 1, dp, zero, overlap: true, set: batch };
            let what = format!("tp{tp} dp{dp} {kept:?}");
            let plain = made(&case(0));
            equal(&what, &made(&case(1)), &plain);
            equal(&what, &made(&case(3)), &made(&case(2)));
        }
    }
}

/// Layers whose matrices differ in cost, so that ranks own unequal numbers of them; f32 products.
const MUON: [&str; 3] =
    ["optimizer.kind=muon", "optimizer.muon={ products = \"f32\" }", "train.global_batch=12"];

/// Owners update whole matrices, everything else is cut into equal shards: the bits of plain DDP, where every rank does what
/// one rank does, whoever owns what. With one matrix most ranks own none, and with none Muon has nothing to do.
#[test]
fn layer_wise_muon_is_bit_equal_to_ddp() {
    const ONE: &str = "optimizer.groups=[{ params = \"layers.0.attn.out.weight\", optimizer = \"muon\" }]";
    const NONE: &str = "optimizer.groups=[{ params = [\"matrix\"], optimizer = \"lion\" }]";
    let sets: [&[&str]; 5] = [
        &MUON,
        &[
            "optimizer.muon={ adaptive = \"adamuon\", rest = \"lion\" }",
            MUON[0],
            MUON[2],
            "precision.dtype=bf16",
        ],
        &["optimizer.muon={ adaptive = \"normuon\" }", MUON[0], MUON[2]],
        &[ONE, MUON[2]],
        &[NONE, MUON[0], MUON[2]],
    ];
    for set in sets {
        let set: &'static [&'static str] = Vec::leak(set.to_vec());
        for (tp, dp) in [(1, 2), (1, 3), (1, 4), (2, 2)] {
            let case = |zero, overlap| Case { tp, cp: 1, pp: 1, dp, zero, overlap, set };
            let what = format!("tp{tp} dp{dp} {set:?}");
            let plain = made(&case(0, false));
            assert!(plain.losses[2].0 < plain.losses[0].0, "{what}: {:?}", plain.losses);
            equal(&what, &made(&case(1, true)), &plain);
            let divided = made(&case(2, true));
            equal(&what, &made(&case(2, false)), &divided);
            equal(&format!("zero 3 {what}"), &made(&case(3, true)), &divided);
        }
    }
}

/// Groups of every rule side by side, with a state dtype of their own.
#[test]
fn groups_are_bit_equal_under_zero() {
    let set: &'static [&'static str] = &[
        "optimizer.groups=[{ params = \"norm\", optimizer = \"sgd\", lr_factor = 0.5 }, { params = \"embedding\", optimizer = \"lion\", lr_factor = 0.1, state_dtype = \"bf16\" }, { params = [\"*.attn.q.*\", \"*.attn.k.*\", \"*.attn.v.*\"], betas = [0.8, 0.9] }, { params = \"layers.1.mlp.*\", optimizer = \"muon\", weight_decay_factor = 0.0 }]",
        "model.qkv_bias=false",
    ];
    for (tp, pp, dp) in [(1, 1, 2), (2, 1, 2), (1, 2, 2)] {
        let case = |zero| Case { tp, cp: 1, pp, dp, zero, overlap: true, set };
        let plain = made(&case(0));
        equal(&format!("tp{tp} pp{pp} dp{dp}"), &made(&case(1)), &plain);
        equal(&format!("zero 3 tp{tp} pp{pp} dp{dp}"), &made(&case(3)), &made(&case(2)));
    }
}

/// Duplicated and distributed orthogonalization do not depend on tensor parallelism, up to the rounding of gradients.
#[test]
fn muon_is_invariant_under_tensor_parallelism() {
    let case = |tp, set| Case { tp, cp: 1, pp: 1, dp: 1, zero: 0, overlap: false, set };
    let one = made(&case(1, &MUON));
    let distributed: &'static [&'static str] =
        &[MUON[0], "optimizer.muon={ products = \"f32\", tp_mode = \"distributed\" }", MUON[2]];
    let blockwise: &'static [&'static str] =
        &[MUON[0], "optimizer.muon={ products = \"f32\", tp_mode = \"blockwise\" }", MUON[2]];
    let apart = |other: &Made| {
        let mut most = 0f32;
        for (a, b) in one.weights.iter().zip(&other.weights) {
            assert_eq!(a.name, b.name);
            most = a.values.iter().zip(&b.values).fold(most, |m, (x, y)| m.max((x - y).abs()));
        }
        most
    };
    for tp in [2, 4] {
        for set in [&MUON[..], distributed] {
            let most = apart(&made(&case(tp, Vec::leak(set.to_vec()))));
            assert!(most < 1e-4, "tp{tp} {set:?}: weights are {most} apart");
        }
        assert!(apart(&made(&case(tp, blockwise))) > 1e-3, "tp{tp}: shards alone give another update");
    }
}

/// A layout that splits a block is refused by an error that names the tensor.
#[test]
fn split_blocks_are_refused() {
    let case =
        Case { tp: 2, cp: 1, pp: 1, dp: 1, zero: 0, overlap: true, set: &["optimizer.state_dtype=fp8"] };
    let refused = case.run(|rank, resolved| match Trainer::new(rank, &resolved) {
        Err(e) => Ok(e.to_string()),
        Ok(_) => Ok("accepted".into()),
    });
    for text in refused {
        assert!(text.contains("layers.0") && text.contains("parallel.tp") && text.contains("32"), "{text}");
    }
}

/// The dp×cp group with context parallelism, and a tied embedding on both ends of a pipeline.
#[test]
fn zero_is_bit_equal_with_other_parallelism() {
    for set in [&["model.tied=true"][..], &["model.tied=false"]] {
        for (tp, cp, pp, dp) in [(1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 2, 4)] {
            let case = |zero, overlap| Case { tp, cp, pp, dp, zero, overlap, set };
            let what = format!("tp{tp} cp{cp} pp{pp} dp{dp} {set:?}");
            let plain = made(&case(0, false));
            equal(&what, &made(&case(1, true)), &plain);
            let divided = made(&case(2, true));
            equal(&what, &made(&case(2, false)), &divided);
            equal(&format!("zero 3 {what}"), &made(&case(3, true)), &divided);
            near(&what, &divided, &plain, 1e-5);
        }
    }
}

/// With one micro-batch the order of additions is the same.
#[test]
fn zero_2_and_3_with_one_micro_batch_is_bit_equal() {
    for (tp, dp) in [(1, 4), (2, 2)] {
        let set: &[&str] = if dp == 4 { &["train.micro_batch=2"] } else { &["train.micro_batch=4"] };
        let case = |zero| Case { tp, cp: 1, pp: 1, dp, zero, overlap: true, set };
        let plain = made(&case(0));
        for zero in [2, 3] {
            equal(&format!("tp{tp} dp{dp} zero {zero}"), &made(&case(zero)), &plain);
        }
    }
}

/// SGD and another bucket size: bucket boundaries do not matter.
#[test]
fn bucket_size_is_bit_neutral() {
    let case = |zero, set| Case { tp: 2, cp: 1, pp: 1, dp: 2, zero, overlap: true, set };
    for zero in [0, 1, 2, 3] {
        let one = made(&case(zero, &["optimizer.kind=\"sgd\"", "parallel.comm_unit=8000000000"]));
        for set in [&["optimizer.kind=\"sgd\"", "parallel.comm_unit=8"][..], &["optimizer.kind=\"sgd\""]] {
            equal(&format!("zero {zero} {set:?}"), &made(&case(zero, set)), &one);
        }
    }
}

#[test]
fn memory_is_sharded() {
    let bytes = |zero: usize, dp: usize, category: Category| -> Vec<f64> {
        let case = Case { tp: 1, cp: 1, pp: 1, dp, zero, overlap: true, set: &["precision.dtype=bf16"] };
        case.run(|rank, resolved| {
            let sources = source::open(&resolved)?;
            let mut trainer = Trainer::new(rank.clone(), &resolved)?;
            trainer.train_step(&*sources.train)?;
            Ok(rank.device().memory().now[category as usize] as f64)
        })
    };
    let one = bytes(1, 1, Category::Optimizer)[0];
    for dp in [2, 4] {
        for (zero, optimizer, gradients) in [(0, 1, 1), (1, dp, 1), (2, dp, dp)] {
            for (category, whole, parts) in
                [(Category::Optimizer, one, optimizer), (Category::Gradients, one / 3.0, gradients)]
            {
                for mine in bytes(zero, dp, category) {
                    let share = mine * parts as f64 / whole;
                    let what = format!("zero {zero} dp {dp} {category:?}");
                    assert!((0.9..1.1).contains(&share), "{what}: {share} of an even share");
                }
            }
        }
    }
}

/// HSDP: every instance of the shards has the same bits, and the steps of one rank up to the order of additions.
#[test]
fn hsdp_matches_ddp() {
    for set in [
        &["parallel.fsdp_group=2", "model.tied=true"][..],
        &["parallel.fsdp_group=2", "model.tied=false", "optimizer.kind=muon"],
        &["parallel.fsdp_group=1"],
        &["parallel.fsdp_group=4"],
    ] {
        for (tp, cp, pp, dp) in [(1, 1, 1, 4), (2, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 4)] {
            let case = |zero, set| Case { tp, cp, pp, dp, zero, overlap: true, set };
            let (hybrid, what) = (made(&case(3, set)), format!("tp{tp} cp{cp} pp{pp} dp{dp} {set:?}"));
            near(&what, &hybrid, &made(&case(2, &set[1..])), 1e-5);
            let away: &'static [&'static str] = Vec::leak([set, &["parallel.comm_unit=1GB"]].concat());
            equal(&what, &made(&Case { overlap: false, ..case(3, away) }), &hybrid);
        }
    }
}

/// HFSDP: groups that update a piece of a shard each have the bits of groups that update all of it.
#[test]
fn hfsdp_is_bit_equal_to_hsdp() {
    const OUTER: &str = "parallel.fsdp_outer=optimizer";
    for set in [
        &["parallel.fsdp_group=2", "model.tied=true"][..],
        &["parallel.fsdp_group=2", "model.tied=false", "optimizer.kind=muon"],
        &["parallel.fsdp_group=2", "precision.dtype=bf16", "optimizer.master_dtype=remainder"],
        &[
            "parallel.fsdp_group=2",
            "precision.dtype=bf16",
            "model.ffn=64",
            "precision.recipe=fp8-current",
            "precision.fp8_params=true",
        ],
        &[
            "parallel.fsdp_group=2",
            "precision.dtype=bf16",
            "model.ffn=64",
            "precision.recipe=fp8-delayed",
            "precision.fp8_params=true",
        ],
        &[
            "parallel.fsdp_group=2",
            "precision.dtype=bf16",
            "model.ffn=64",
            "precision.recipe=fp8-block",
            "precision.fp8_params=true",
        ],
        &["parallel.fsdp_group=1", "optimizer.state_dtype=bf16"],
        &["parallel.fsdp_group=4"],
    ] {
        let outer: &'static [&'static str] = Vec::leak([set, &[OUTER]].concat());
        for (tp, cp, pp, dp) in [(1, 1, 1, 4), (2, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 4)] {
            let case = |set, overlap| Case { tp, cp, pp, dp, zero: 3, overlap, set };
            let plain = made(&case(set, true));
            for overlap in [true, false] {
                let what = format!("tp{tp} cp{cp} pp{pp} dp{dp} overlap {overlap} {outer:?}");
                equal(&what, &made(&case(outer, overlap)), &plain);
            }
        }
    }
}

/// Weights, gradients and optimizer state at their peaks are what the estimate says; weights gathered ahead and gradients
/// being reduced stay within parallel.comm_unit and one unit.
#[test]
fn sharded_memory_is_as_estimated() {
    for set in [
        &["model.tied=true"][..],
        &["model.tied=false", "precision.dtype=bf16"],
        &["model.layers=6", "model.tied=false", "parallel.comm_unit=150KB"],
        &[
            "model.layers=4",
            "precision.dtype=bf16",
            "precision.recipe=fp8-current",
            "precision.fp8_params=true",
        ],
        &["model.layers=4", "precision.dtype=bf16", "parallel.fsdp_group=1", "parallel.comm_unit=30KB"],
        &["model.tied=false", "parallel.fsdp_group=1", "parallel.fsdp_outer=optimizer"],
    ] {
        let hybrid = set.iter().position(|s| s.starts_with("parallel.fsdp_group"));
        let own: &'static [&'static str] = if set.len() == 3 && hybrid.is_none() {
            set
        } else {
            Vec::leak([set, &["parallel.comm_unit=30KB"]].concat())
        };
        for dp in [1, 2, 4, 8] {
            // Two groups.
            let group: &'static str = String::leak(format!("parallel.fsdp_group={}", (dp / 2).max(1)));
            let mut own = own.to_vec();
            if let Some(at) = hybrid {
                own[at] = group;
            }
            let own: &'static [&'static str] = Vec::leak(own);
            let case = Case { tp: 1, cp: 1, pp: 1, dp, zero: 3, overlap: true, set: own };
            let resolved = case.recipe();
            let estimate = MemoryEstimate::of(&resolved).unwrap().largest().unwrap();
            let categories = [Category::Parameters, Category::Gradients, Category::Optimizer];
            let expected = [estimate.parameters, estimate.gradients, estimate.optimizer];
            for peak in case.run(|rank, resolved| {
                let sources = source::open(&resolved)?;
                let mut trainer = Trainer::new(rank.clone(), &resolved)?;
                (0..2).try_for_each(|_| trainer.train_step(&*sources.train).map(drop))?;
                Ok(categories.map(|c| rank.device().memory().peak[c as usize]))
            }) {
                let [sum, whole] = [peak, expected].map(|x| x.iter().sum::<usize>() as f64);
                let what = format!("dp{dp} {own:?}: {peak:?} instead of {expected:?}");
                assert!((sum / whole - 1.0).abs() < 0.02, "{what}");
            }
        }
    }
}

/// With shards in host memory the device has slots and what is in flight, and the host the shards.
#[test]
fn shards_in_host_memory_are_as_estimated() {
    /// Tables of rotary embeddings, which the estimate leaves out.
    const ROPE: usize = 4096;
    const WEIGHTS: &str = "offload.weights=true";
    const GRADIENTS: &str = "offload.gradients=true";
    for set in [
        &["model.tied=true", "precision.dtype=bf16", WEIGHTS][..],
        &["model.tied=true", GRADIENTS],
        &["model.layers=6", "model.tied=false", "precision.dtype=bf16", WEIGHTS, GRADIENTS],
        &["model.layers=6", "model.tied=false", "parallel.comm_unit=150KB", WEIGHTS, GRADIENTS],
        &["model.layers=4", "parallel.overlap=false", "parallel.comm_unit=30KB", WEIGHTS, GRADIENTS],
        &[
            "model.layers=4",
            "precision.dtype=bf16",
            "precision.recipe=fp8-current",
            "precision.fp8_params=true",
            WEIGHTS,
            GRADIENTS,
        ],
    ] {
        for dp in [1, 2, 4] {
            let overlap = !set.contains(&"parallel.overlap=false");
            let case = Case { tp: 1, cp: 1, pp: 1, dp, zero: 3, overlap, set: Vec::leak(set.to_vec()) };
            let estimate = MemoryEstimate::of(&case.recipe()).unwrap().largest().unwrap();
            let expected = [estimate.parameters, estimate.gradients, estimate.host];
            for found in case.run(|rank, resolved| {
                let sources = source::open(&resolved)?;
                let mut trainer = Trainer::new(rank.clone(), &resolved)?;
                (0..2).try_for_each(|_| trainer.train_step(&*sources.train).map(drop))?;
                let memory = rank.device().memory();
                let peak = [Category::Parameters, Category::Gradients].map(|c| memory.peak[c as usize]);
                Ok([peak[0] - ROPE, peak[1], memory.host.now])
            }) {
                let near = |(a, b): (&usize, &usize)| (*a as f64 - *b as f64).abs() <= 0.02 * *b as f64;
                let what = format!("dp{dp} {set:?}: {found:?} instead of {expected:?}");
                assert!(found.iter().zip(&expected).all(near), "{what}");
            }
        }
    }
}

struct StopAfter(u64, u64);

impl Observer for StopAfter {
    fn event(&mut self, event: &ferrotron_core::events::Event) {
        if let ferrotron_core::events::Event::Step(s) = event {
            self.1 = s.step;
        }
    }
    fn stop(&self) -> bool {
        self.1 >= self.0
    }
}

fn train(case: &Case, dir: &std::path::Path, stop: u64) -> Vec<LogicalValues> {
    case.run(|rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved, dir, None)?;
        run.train(&*sources.train, None, &mut StopAfter(stop, 0))?;
        run.trainer.weights()
    })
    .swap_remove(0)
}

/// The newest checkpoint.
fn newest(dir: &std::path::Path) -> std::path::PathBuf {
    checkpoint::latest(&dir.join("checkpoints")).unwrap().unwrap()
}

#[test]
fn checkpoints_are_independent_of_zero() {
    let muon: &'static [&'static str] = &[
        "optimizer.kind=muon",
        "optimizer.muon={ adaptive = \"normuon\" }",
        "optimizer.groups=[{ params = \"norm\", frozen = true }]",
    ];
    for set in [&[][..], &["precision.dtype=bf16"], muon] {
        let case = |tp, dp, zero| Case { tp, cp: 1, pp: 1, dp, zero, overlap: true, set };
        let homes: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
        // Whatever the parts, the tensors are equal.
        for (zero, dir) in homes.iter().enumerate() {
            train(&case(2, 2, zero), dir.path(), 2);
        }
        let different = checkpoint::compare(&newest(homes[0].path()), &newest(homes[1].path())).unwrap();
        assert!(different.same(), "{different:?}");
        // Every ZeRO level reads what any other wrote.
        let dir = homes[0].path();
        let saved =
            case(2, 2, 1).run(|rank, r| Run::open(rank, r, dir, None)?.trainer.weights()).swap_remove(0);
        for (tp, dp, zero) in [(1, 1, 1), (1, 4, 2), (2, 2, 0), (4, 2, 1), (1, 4, 1), (2, 2, 3), (1, 4, 3)] {
            let read = case(tp, dp, zero)
                .run(|rank, r| Run::open(rank, r, dir, None)?.trainer.weights())
                .swap_remove(0);
            assert!(read == saved, "tp{tp} dp{dp} zero {zero}");
        }
        // Moments too: resumed under another ZeRO level, the run ends with the same bits.
        let whole = tempfile::tempdir().unwrap();
        let straight = train(&case(2, 2, 1), whole.path(), 100);
        assert!(train(&case(2, 2, 0), homes[1].path(), 100) == straight, "0 after 1");
        assert!(train(&case(2, 2, 1), homes[0].path(), 100) == straight, "1 after 0");
        // ZeRO-3 adds the gradients of micro-batches in the order of ZeRO-2.
        let [two, three] = [2, 3].map(|zero| {
            let home = tempfile::tempdir().unwrap();
            train(&case(2, 2, zero), home.path(), 2);
            (train(&case(2, 2, 5 - zero), home.path(), 100), home)
        });
        assert!(two.0 == three.0, "3 after 2, and 2 after 3");
        // HFSDP adds gradients in the order of HSDP.
        let hybrid = |outer: &'static str| {
            let groups = ["parallel.fsdp_group=2", outer];
            Case { set: Vec::leak([set, &groups].concat()), ..case(1, 4, 3) }
        };
        let [hsdp, hfsdp] =
            ["replicate", "optimizer"].map(|outer| format!("parallel.fsdp_outer={outer}").leak() as &str);
        let [after_hsdp, after_hfsdp] = [(hsdp, hfsdp), (hfsdp, hsdp)].map(|(one, two)| {
            let home = tempfile::tempdir().unwrap();
            train(&hybrid(one), home.path(), 2);
            let saved = newest(home.path());
            (train(&hybrid(two), home.path(), 100), saved, home)
        });
        assert!(after_hsdp.0 == after_hfsdp.0, "HFSDP after HSDP, and HSDP after HFSDP");
        for pair in
            [[&after_hsdp.1, &after_hfsdp.1], [&newest(after_hsdp.2.path()), &newest(after_hfsdp.2.path())]]
        {
            let different = checkpoint::compare(pair[0], pair[1]).unwrap();
            assert!(different.same(), "{different:?}");
        }
        let different = checkpoint::compare(&newest(two.1.path()), &newest(three.1.path())).unwrap();
        assert!(different.same(), "{different:?}");
    }
}
