//! The loss in chunks of tokens, label smoothing, and what steps log besides the loss.

use crate::support::{RULE, losses, recipe, run, trainer};
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::events::Event;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Trainer};
use ferrotron_tensor::Category;

/// Loss and gradients of the first step, on the first rank.
fn first_step(r: &Resolved) -> (f64, Vec<LogicalValues>) {
    let layout: RankLayout = r.config.parallel.layout();
    let mut all = on_threads(
        &layout,
        || Ok(crate::support::rank(1, r)),
        |rank| {
            let mut t = Trainer::new(rank, r)?;
            let loss = t.train_step(&RULE)?.loss;
            Ok((loss, t.gradients()?))
        },
    )
    .unwrap();
    all.swap_remove(0)
}

/// Largest difference of two sets of gradients, relative to the largest gradient.
fn distance(a: &[LogicalValues], b: &[LogicalValues]) -> f32 {
    let pairs = || a.iter().zip(b).flat_map(|(a, b)| a.values.iter().zip(&b.values));
    let largest = pairs().map(|(x, _)| x.abs()).fold(0.0, f32::max);
    pairs().map(|(x, y)| (x - y).abs()).fold(0.0, f32::max) / largest
}

#[test]
fn a_loss_in_chunks_is_the_loss_of_all_logits() {
    for more in [
        &[][..],
        &["model.tied=true"],
        &["train.label_smoothing=0.1"],
        &["mtp.layers=1", "train.recompute=full"],
        &["parallel.tp=2"],
        &["parallel.tp=2", "model.tied=true", "train.label_smoothing=0.2"],
    ] {
        let step = |chunk: &str| first_step(&recipe(&[more, &[chunk]].concat()));
        let (loss, grads) = step("train.loss_chunk=0");
        // 32 tokens in a micro-batch: chunks that divide them, that do not, and one that holds them all.
        for chunk in ["train.loss_chunk=8", "train.loss_chunk=7", "train.loss_chunk=64"] {
            let (chunked, chunked_grads) = step(chunk);
            // The loss of a token depends on its own logits only: the same bits. The weight gradient is summed chunk by
            // chunk, so its rounding differs.
            assert_eq!(chunked.to_bits(), loss.to_bits(), "{more:?} {chunk}");
            let apart = distance(&grads, &chunked_grads);
            assert!(apart < 2e-6, "{more:?} {chunk}: gradients differ by {apart}");
            assert!(chunk.ends_with("64") == (apart == 0.0), "{more:?} {chunk}: the loss is not chunked");
        }
    }
}

#[test]
fn chunks_lower_the_peak_of_activations() {
    let peak = |chunk: &str| {
        let r = recipe(&["model.vocab=4096", "model.layers=1", chunk]);
        let mut t = trainer(&r);
        t.train_step(&RULE).unwrap();
        let category = Category::ALL.iter().position(|c| *c == Category::Activations).unwrap();
        t.rank.device().memory().peak[category]
    };
    let (all, chunked) = (peak("train.loss_chunk=0"), peak("train.loss_chunk=4"));
    // 32 tokens of 4096 f32 logits are 512 KiB, of which a chunk is an eighth.
    assert!(all - chunked > 400 << 10, "{all} bytes at once, {chunked} in chunks");
}

#[test]
fn label_smoothing_reaches_the_loss() {
    let loss = |set: &str| first_step(&recipe(&["model.init_std=0.3", set])).0;
    let (plain, smoothed) = (loss("train.label_smoothing=0"), loss("train.label_smoothing=0.25"));
    assert!(plain.is_finite() && smoothed.is_finite() && plain != smoothed, "{plain} {smoothed}");
    // Half the way to the uniform target moves the loss by twice as much as a quarter.
    let half = loss("train.label_smoothing=0.5");
    assert!(((half - plain) - 2.0 * (smoothed - plain)).abs() < 1e-5, "{plain} {smoothed} {half}");
}

#[test]
fn a_chunk_is_derived_for_long_sequences_only() {
    let resolve = |set: &[&str]| {
        let mut r = Recipe::open("llama-8b").unwrap();
        ["data.path=embedded", "train.micro_batch=1"].iter().for_each(|s| r.set(s).unwrap());
        set.iter().for_each(|s| r.set(s).unwrap());
        r.resolve(None)
    };
    let chunk = |set: &[&str]| resolve(set).unwrap().config.train.loss_chunk;
    let long = ["data.seq_len=131072", "model.max_positions=131072"];
    assert_eq!(chunk(&[]), None);
    // 131072 · 128256 · 2 bytes are 31 GiB; 4096 of these tokens have 1 GiB of logits.
    assert_eq!(chunk(&long), Some(4096));
    assert_eq!(chunk(&[&long[..], &["parallel.tp=8"]].concat()), None);
    assert_eq!(chunk(&[&long[..], &["train.loss_chunk=0"]].concat()), Some(0));
    let head = ["precision.recipe=fp8-current", "precision.fp8_lm_head=true"];
    assert_eq!(chunk(&[&long[..], &head].concat()), None);
    let refused = resolve(&[&head[..], &["train.loss_chunk=512"]].concat()).unwrap_err().to_string();
    assert!(refused.contains("train.loss_chunk: an FP8 LM head"), "{refused}");
    let refused = resolve(&["train.label_smoothing=1.0"]).unwrap_err().to_string();
    assert!(refused.contains("train.label_smoothing"), "{refused}");
}

#[test]
fn zero_gradients_are_counted_where_the_recipe_asks() {
    let steps = |set: &[&str]| {
        let r = recipe(&[&["model.vocab=24", "model.tied=false", "train.steps=2"], set].concat());
        let dir = tempfile::tempdir().unwrap();
        let (_, events) = run(dir.path(), &r, 1, &RULE, None, None);
        let counts = events.iter().filter_map(|e| match e {
            Event::Step(s) => Some(s.num_zeros),
            _ => None,
        });
        (counts.collect::<Vec<_>>(), losses(&events), serde_json::to_string(&events[0]).unwrap())
    };
    let (counts, with, line) = steps(&["train.log_num_zeros=true"]);
    // The data has 16 of 24 tokens: the other eight rows of the embedding, 32 wide, get no gradient.
    assert!(counts.iter().all(|n| n.is_some_and(|n| (8 * 32..9 * 32).contains(&n))), "{counts:?}");
    assert!(line.contains("\"num_zeros\":"), "{line}");
    let (counts, without, line) = steps(&[]);
    assert!(counts.iter().all(Option::is_none) && !line.contains("num_zeros"), "{line}");
    assert_eq!(with, without);
}

#[test]
fn moe_metrics_of_mtp_layers_stand_beside_the_decoders() {
    let r = recipe(&[
        "moe.experts=4",
        "moe.ffn=16",
        "mtp.layers=2",
        "moe.log=[\"loads\", \"dropped\", \"per_layer\"]",
    ]);
    let mut t = trainer(&r);
    t.train_step(&RULE).unwrap();
    let metrics = t.take_moe_metrics().unwrap();
    // Two decoder layers, then two MTP layers. Every one routes its 4·16 tokens to two experts.
    for layer in 0..4 {
        let load = &metrics[&format!("moe/load_layer_{layer}")];
        let tokens: i64 = load.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).sum();
        assert_eq!(tokens, 2 * 4 * 16, "layer {layer}: {load}");
    }
    assert!(!metrics.contains_key("moe/load_layer_4"));
}
