//! MTP runs: interrupted and resumed, with MoE, and refusals.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Observer, Run, Trainer};
use ferrotron_engine::Rank;
use std::path::Path;
use std::sync::Mutex;

struct StopAfter<'a>(u64, u64, &'a Mutex<Vec<Event>>);

impl Observer for StopAfter<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step(s) = event {
            self.1 = s.step;
        }
        self.2.lock().unwrap().push(event.clone());
    }
    fn stop(&self) -> bool {
        self.1 >= self.0
    }
}

/// Trains in a folder until step `stop`; returns all weights and the steps' losses by name.
fn train(
    layout: &RankLayout,
    set: &[&str],
    dir: &Path,
    stop: u64,
) -> (Vec<LogicalValues>, Vec<Vec<(String, f64)>>) {
    let resolved = recipe(layout, set);
    let heard = Mutex::new(Vec::new());
    let work = |rank| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved.clone(), dir, None)?;
        run.train(&*sources.train, sources.eval.as_deref(), &mut StopAfter(stop, 0, &heard))?;
        run.trainer.weights()
    };
    let weights = on_threads(layout, || Ok(Rank::cpu(1, 1234)?), work).unwrap().swap_remove(0);
    let steps = heard.into_inner().unwrap().into_iter().filter_map(|e| match e {
        Event::Step(s) => Some(s.losses.into_iter().chain([("loss".to_string(), s.loss)]).collect()),
        _ => None,
    });
    (weights, steps.collect())
}

#[test]
fn a_resumed_run_ends_with_the_same_bits() {
    for (text, set) in [("tp=1", &["mtp.shared_layer=true"][..]), ("pp=2,dp=2", &["dropout.hidden=0.1"])] {
        let layout = layout(text);
        let [whole, parts] = [(), ()].map(|()| tempfile::tempdir().unwrap());
        let (wanted, losses) = train(&layout, set, whole.path(), 100);
        let (_, mut heard) = train(&layout, set, parts.path(), 3);
        let (ours, rest) = train(&layout, set, parts.path(), 100);
        heard.extend(rest);
        assert!(ours == wanted, "{text}: other weights");
        assert_eq!(heard, losses, "{text}");
        assert_eq!(losses.len(), 6);
        assert!(ours.iter().any(|v| v.name == "mtp.0.layer.mlp.up.weight"));
        assert_eq!(ours.iter().any(|v| v.name == "mtp.1.eh.weight"), text != "tp=1");
    }
}

/// The log has a falling loss per depth; tokens per expert of the MTP layer move its expert bias.
#[test]
fn mtp_trains_with_moe() {
    let set = [
        "moe.experts=4",
        "moe.ffn=24",
        "moe.dense_layers=[0]",
        "moe.score_function=sigmoid",
        "moe.expert_bias=true",
        "moe.balance=aux",
        "mtp.layers=1",
        "optimizer.lr=1e-2",
        "train.steps=12",
    ];
    let wanted = train(&one(), &set, tempfile::tempdir().unwrap().path(), 100);
    let dir = tempfile::tempdir().unwrap();
    let (weights, losses) = train(&layout("ep=2,dp=2"), &set, dir.path(), 100);
    assert!(weights.iter().any(|v| v.name.starts_with("mtp.0.layer.moe.experts.")));
    let text = std::fs::read_to_string(dir.path().join("events.jsonl")).unwrap();
    assert!(text.contains("\"mtp_1 loss\":"), "{text}");
    let of = |list: &[(String, f64)]| list.iter().find(|(n, _)| n == "mtp_1 loss").unwrap().1;
    let (first, last) = (of(&losses[0]), of(losses.last().unwrap()));
    assert!(last < first - 0.2, "{first} to {last}");
    assert!((of(&losses[0]) / of(&wanted.1[0]) - 1.0).abs() < 1e-6);
    // Saved and loaded again: weights and expert biases.
    let resolved = recipe(&one(), &set);
    let run = Run::open(Rank::cpu(1, 1234).unwrap(), resolved, dir.path(), None).unwrap();
    assert!(run.trainer.weights().unwrap() == weights);
    let tables = run.trainer.expert_tables().unwrap();
    let bias = tables.iter().find(|t| t.name == "mtp.0.layer.moe.expert_bias").unwrap();
    assert!(bias.values.iter().any(|b| *b != 0.0), "{bias:?}");
}

/// The load-balancing loss of a layer is the mean over its uses: near 1 with initial weights, whether MTP depths share the
/// layer or not.
#[test]
fn a_shared_layer_has_one_load_balancing_loss() {
    for balance in ["aux", "seq_aux", "global_aux"] {
        let set =
            ["moe.experts=4", "moe.ffn=16", "moe.log=[\"losses\",\"per_layer\"]", "mtp.shared_layer=true"];
        let resolved = recipe(&one(), &[&set[..], &[&format!("moe.balance={balance}")]].concat());
        let data = source::open(&resolved).unwrap().train;
        let mut trainer = Trainer::new(Rank::cpu(1, 1234).unwrap(), &resolved).unwrap();
        trainer.train_step(&*data).unwrap();
        let metrics = trainer.take_moe_metrics().unwrap();
        let losses = metrics.iter().filter(|(name, _)| name.contains("load_balancing_loss_layer_"));
        let losses: Vec<f64> = losses.map(|(_, loss)| loss.as_f64().unwrap()).collect();
        assert!(losses.len() == 4 && losses.iter().all(|x| (0.9..1.3).contains(x)), "{balance}: {losses:?}");
    }
}

#[test]
fn parameter_count_includes_mtp() {
    for set in [
        &["mtp.layers=2"][..],
        &["mtp.shared_layer=true", "model.norm=layernorm"],
        &["moe.experts=4", "moe.shared_ffn=8", "model.tied=true"],
        &[
            "model.mla={ kv_lora_rank = 8, nope_dim = 8, rope_dim = 4, v_dim = 8 }",
            "model.qkv_bias=false",
            "model.kv_heads=4",
        ],
    ] {
        let m = recipe(&one(), set).model;
        let parts = ferrotron_core::model::logical_parts(&m).unwrap();
        let count: usize = parts.iter().map(|p| p.shape.iter().product::<usize>()).sum();
        assert_eq!(count, m.parameters(), "{set:?}");
        let without = ferrotron_core::model::ModelConfig { mtp: None, ..m.clone() };
        assert!(m.flops_per_token(16.0).unwrap().total() > without.flops_per_token(16.0).unwrap().total());
    }
}

#[test]
fn what_cannot_work_is_refused_in_one_sentence() {
    let refused = |text: &str, set: &[&str], word: &str| {
        let e = build(&layout(text), set).resolve(None).unwrap_err().to_string();
        assert!(e.contains(word) && !e.contains('\n'), "{e}");
    };
    refused("pp=2", &["parallel.stages=Ettm|mtL"], "t");
    refused("pp=2", &["parallel.stages=Ett|tL"], "write 2 m before L");
    refused("pp=4", &["parallel.stages=Et|tt|mm|L"], "write mL");
    refused("pp=2", &["parallel.stages=Ett|tmL", "mtp.layers=0", "mtp.loss_weight=0.1"], "leave m out");
    refused("tp=1", &["mtp.layers=0"], "mtp.layers");
    refused("tp=1", &["mtp.loss_weight=0"], "above 0");
    refused("tp=1", &["mtp.layers=16"], "16");
    let same = recipe(&layout("pp=2"), &["parallel.stages=Ett|tmmL"]);
    assert_eq!(same.model.mtp_depth(), 2);
    // The stored configuration resolves to the same values.
    let again = {
        let mut r = Recipe::default();
        r.add("config.toml", &same.config.to_toml()).unwrap();
        r.resolve(None).unwrap()
    };
    assert_eq!((again.config, again.model), (same.config, same.model));
}
