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
