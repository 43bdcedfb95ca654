//! MoE metrics in the log: equal under every layout, counted once, of training steps alone.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::train::{StepMetrics, Trainer};

const ALL: [&str; 5] = [
    "moe.log=all",
    "moe.balance=[\"aux\",\"seq_aux\"]",
    "moe.z_loss=0.01",
    "moe.capacity=1.0",
    "train.micro_batch=4",
];

const GLOBAL: [&str; 3] = ["moe.log=all", "moe.balance=global_aux", "train.micro_batch=16"];

/// Metrics of three steps on every rank, with an evaluation in between.
fn said(at: &RankLayout, set: &[&str]) -> Vec<Vec<StepMetrics>> {
    let (resolved, at) = recipe(at, &keys(set));
    run(&at, |rank| {
        let data = source::open(&resolved)?.train;
        let mut trainer = Trainer::new(rank, &resolved)?;
        let mut step = || {
            trainer.train_step(&*data)?;
            let said = trainer.take_moe_metrics()?;
            trainer.evaluate(&*data, 2)?;
            assert_eq!(trainer.take_moe_metrics()?.len(), 0, "an evaluation counts nothing");
            Ok(said)
        };
        (0..3).map(|_| step()).collect()
    })
    .unwrap()
}

/// The first metric out of tolerance.
fn apart(ours: &StepMetrics, wanted: &StepMetrics) -> Option<String> {
    if ours.keys().ne(wanted.keys()) {
        return Some(format!("{:?} instead of {:?}", ours.keys(), wanted.keys()));
    }
    ours.iter().zip(wanted).find_map(|((name, a), (_, b))| {
        // Counts are exact; losses are sums in another order.
        let near = match (a.as_f64(), b.as_f64()) {
            (Some(x), Some(y)) if name.contains("loss") => (x / y - 1.0).abs() < 1e-5,
            _ => a == b,
        };
        (!near).then(|| format!("{name}: {a} instead of {b}"))
    })
}

#[test]
fn metrics_of_every_layout_match_one_rank() {
    let layouts =
        ["tp=2", "cp=2", "pp=2", "pp=4", "ep=2", "ep=4", "tp=2,etp=1,ep=2", "pp=2,vp=2", "pp=2,ep=2,etp=2"];
    let wanted = &said(&one(), &ALL)[0];
    let whole = &said(&one(), &GLOBAL)[0];
    for text in layouts {
        // The global aux loss covers all ranks' tokens: one micro-batch, whatever the layout.
        let dp = Grid::of(recipe(&layout(text), &[]).1).unwrap().dp();
        let micro = format!("train.micro_batch={}", 16 / dp);
        let global = [GLOBAL[0], GLOBAL[1], &micro];
        for (set, wanted) in [(&ALL[..], wanted), (&global, whole)] {
            for (rank, ours) in said(&layout(text), set).iter().enumerate() {
                // Later steps may route differently at near ties, but log the same keys.
                assert_eq!(apart(&ours[0], &wanted[0]), None, "{text}, rank {rank}");
                assert!(ours.iter().zip(wanted).all(|(o, w)| o.keys().eq(w.keys())), "{text}, rank {rank}");
            }
        }
    }
}

fn sum(list: &serde_json::Value) -> i64 {
    list.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).sum()
}

#[test]
fn metrics_count_each_routed_token_once() {
    let ours = &said(&one(), &ALL)[0];
    for step in ours {
        for layer in 1..4 {
            // 16 sequences of 16 tokens, top-2.
            let kept = sum(&step[&format!("moe/load_layer_{layer}")]);
            let dropped = step[&format!("moe/dropped_layer_{layer}")].as_i64().unwrap();
            assert_eq!(kept + dropped, 16 * 16 * 2, "layer {layer}");
        }
        assert!(!step.contains_key("moe/load_layer_0"), "the first layer is none");
        for name in ["load_balancing_loss", "seq_load_balancing_loss", "z_loss"] {
            let x = step[name].as_f64().unwrap();
            // Aux losses are 1 under even load; the z-loss of small logits is near ln(8)².
            let room = if name == "z_loss" { 4.0..4.7 } else { 0.95..1.6 };
            assert!(room.contains(&x), "{name} is {x}");
        }
    }
    // With capacity factor 1 some tokens are dropped, and all drops are logged.
    assert!(ours.iter().any(|s| s["dropped"].as_i64().unwrap() > 0));
    let plain = &said(&one(), &["moe.log=all"])[0][0];
    assert_eq!(plain["dropped"], 0);
    assert!(!plain.keys().any(|k| k.contains("loss")), "no loss is configured: {plain:?}");
    let default = &said(&one(), &["moe.balance=aux"])[0][0];
    let names: Vec<&str> = default.keys().map(String::as_str).collect();
    assert_eq!(names, ["dead_experts", "imbalance", "load_balancing_loss", "min_load"]);
}

#[test]
fn recomputed_layers_count_once() {
    let wanted = said(&one(), &ALL);
    for again in ["full", "[\"mlp\"]", "[\"norm\",\"activation\"]"] {
        let key = format!("train.recompute={again}");
        let mut set = ALL.to_vec();
        set.push(&key);
        assert_eq!(said(&one(), &set), wanted, "{again}");
    }
}

#[test]
fn unknown_log_words_are_refused() {
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", MODEL).unwrap();
    recipe.set("moe.log=[\"losses\",\"lodes\"]").unwrap();
    let e = recipe.resolve(None).err().unwrap().to_string();
    assert!(e.contains("moe.log") && e.contains("lodes") && e.contains("per_layer"), "{e}");
}

#[test]
fn the_log_of_a_run_has_tokens_per_expert_and_energy() {
    use ferrotron_core::events::{self, Event};
    use ferrotron_core::train::{Observer, Run};
    struct Deaf;
    impl Observer for Deaf {
        fn event(&mut self, _: &Event) {}
        fn stop(&self) -> bool {
            false
        }
    }
    let set = ["moe.balance=aux", "train.energy=true", "train.steps=4", "train.log_every=2", "eval.every=2"];
    // The first two layers are dense: the first stage has no MoE metrics.
    let (resolved, at) =
        recipe(&layout("pp=2,ep=2"), &keys(&[&set[..], &["moe.dense_layers=[0,1]"]].concat()));
    let dir = tempfile::tempdir().unwrap();
    run(&at, |rank| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved.clone(), dir.path(), None)?;
        run.train(&*sources.train, sources.eval.as_deref(), &mut Deaf)
    })
    .unwrap();
    let lines = events::read(dir.path()).unwrap();
    let text = std::fs::read_to_string(dir.path().join(events::FILE_NAME)).unwrap();
    let steps: Vec<_> = lines
        .iter()
        .filter_map(|l| match &l.event {
            Event::Step(s) => Some(s),
            _ => None,
        })
        .collect();
    assert_eq!(steps.iter().map(|s| s.step).collect::<Vec<_>>(), [2, 4]);
    for step in steps {
        assert!(step.more["imbalance"].as_f64().unwrap() >= 1.0);
        assert!((0.9..2.0).contains(&step.more["load_balancing_loss"].as_f64().unwrap()));
        // Without a GPU there is no energy counter: null, not an error.
        for name in ["energy_j", "energy_j_per_token", "power_w"] {
            assert!(step.more[name].is_null(), "{name}");
        }
        assert!(
            !step.more.contains_key("kind")
                && !step.more.contains_key("loss")
                && !step.more.contains_key("time")
        );
    }
    assert!(text.contains("\"energy_j\":null") && text.contains("\"imbalance\":"), "{text}");
}

/// Packed documents of these lengths, and padding up to `seq`.
struct Documents {
    seq: usize,
    lengths: &'static [usize],
}

impl Batches for Documents {
    fn seq(&self) -> usize {
        self.seq
    }
    fn samples(&self) -> u64 {
        1 << 20
    }
    fn resets(&self) -> bool {
        true
    }
    fn row(&self, n: u64, row: &mut Row) -> ferrotron_core::Result<()> {
        for len in self.lengths {
            row.starts.push(row.tokens.len());
            let first = n as usize * 7919 + row.tokens.len();
            let token = |i: usize| (((first + i) * 2_654_435_761) >> 7) as i32 & 255;
            let tokens: Vec<i32> = (0..*len).map(token).collect();
            row.labels.extend(tokens.iter().skip(1).chain(&[3]));
            row.tokens.extend(tokens);
            row.positions.extend(0..*len as i32);
        }
        row.padding = self.seq - row.tokens.len();
        if row.padding > 0 {
            row.starts.push(row.tokens.len());
            row.positions.extend(0..row.padding as i32);
            row.tokens.resize(self.seq, 0);
            row.labels.resize(self.seq, ferrotron_kernels::IGNORE);
        }
        Ok(())
    }
}

/// The loss per sequence is 1 where routing is even, as it nearly is at the start, whatever the lengths of packed documents; and
/// padding at the end of rows changes neither it nor a gradient.
#[test]
fn seq_aux_loss_of_packed_documents_is_1_for_even_routing() {
    let step = |seq: usize, lengths: &'static [usize]| {
        let (resolved, at) = recipe(
            &one(),
            &keys(&[
                "moe.balance=[\"aux\",\"seq_aux\"]",
                "moe.log=all",
                "train.micro_batch=4",
                "data.reset_at_documents=true",
                &format!("data.seq_len={seq}"),
            ]),
        );
        let data = Documents { seq, lengths };
        let mut all = run(&at, |rank| {
            let mut trainer = Trainer::new(rank, &resolved)?;
            trainer.train_step(&data)?;
            Ok((trainer.take_moe_metrics()?, trainer.gradients()?))
        })
        .unwrap();
        let (metrics, gradients) = all.remove(0);
        (metrics["seq_load_balancing_loss"].as_f64().unwrap(), gradients)
    };
    let (uneven, _) = step(60, &[50, 1, 1, 1, 2, 1, 4]);
    assert!((0.95..1.25).contains(&uneven), "uneven documents: {uneven}");
    for lengths in [&[21][..], &[13, 3, 5]] {
        let ((padded, ours), (exact, wanted)) = (step(32, lengths), step(21, lengths));
        assert!((padded / exact - 1.0).abs() < 1e-5, "{lengths:?}: {padded} with padding, {exact} without");
        assert_eq!(difference(&ours, &wanted, false), None, "{lengths:?}");
    }
}
