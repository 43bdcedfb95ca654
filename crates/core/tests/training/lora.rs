//! LoRA and DoRA: adapters train beside a frozen base model.

use super::support::*;
use ferrotron_core::Error;
use ferrotron_core::checkpoint;
use ferrotron_core::config::Resolved;
use ferrotron_core::train::{LogicalValues, Trainer};
use std::collections::HashMap;

const LORA: &[&str] = &["lora.rank=3", "lora.alpha=6"];

/// Four experts, two of them for each token, in both layers.
const MOE: &[&str] = &["moe.experts=4", "moe.topk=2", "moe.ffn=24", "moe.shared_ffn=16"];

fn is_adapter(name: &str) -> bool {
    name.contains(".lora_")
}

/// Values in (-1, 1) by index.
fn value(i: usize) -> f32 {
    ((i as f32 * 12.9898).sin() * 43758.547).fract()
}

/// Sets every adapter, B too, to values that differ.
fn fill_adapters(t: &Trainer) -> HashMap<String, Vec<f32>> {
    let weights = t.weights().unwrap();
    let adapters = weights.iter().enumerate().filter(|(_, w)| is_adapter(&w.name));
    let drawn: HashMap<String, Vec<f32>> = adapters
        .map(|(k, w)| (w.name.clone(), (0..w.values.len()).map(|i| 0.2 * value(1000 * k + i)).collect()))
        .collect();
    set_adapters(t, &drawn);
    drawn
}

fn set_adapters(t: &Trainer, values: &HashMap<String, Vec<f32>>) {
    let missing = |name: &str| Error::Invalid(format!("no {name}"));
    t.import_adapters(&|name| values.get(name).cloned().ok_or_else(|| missing(name))).unwrap();
}

#[test]
fn adapters_train_and_the_base_stays() {
    for more in [
        &[][..],
        &["precision.dtype=bf16"],
        &["lora.fused=true"],
        &["lora.b_lr_factor=4", "optimizer.lr=1e-2"],
        &["lora.dora=true"],
        &["lora.dora=true", "precision.dtype=bf16"],
    ] {
        let mut t = trainer(&recipe(&[LORA, &["train.steps=40", "optimizer.lr=3e-2"], more].concat()));
        let start = t.weights().unwrap();
        let losses: Vec<f64> = (0..40).map(|_| t.train_step(&RULE).unwrap().loss).collect();
        assert!(losses[39] < 0.88 * losses[0], "{more:?}: {losses:?}");
        for (a, b) in start.iter().zip(&t.weights().unwrap()) {
            assert_eq!(a.values != b.values, is_adapter(&a.name), "{more:?}: {}", a.name);
        }
    }
}

/// Training begins at the base model: the first loss is its own, to the bit.
#[test]
fn the_first_loss_is_that_of_the_base() {
    for more in [
        &[][..],
        &["precision.dtype=bf16"],
        MOE,
        &["precision.dtype=bf16", "precision.recipe=fp8-current", "model.hidden=128"],
        &[
            "precision.dtype=bf16",
            "precision.recipe=fp8-block",
            "model.hidden=128",
            "moe.experts=4",
            "moe.topk=2",
            "moe.ffn=128",
        ],
    ] {
        let first = |set: &[&str]| {
            let mut t = trainer(&recipe(&[more, &["optimizer.lr=3e-2"], set].concat()));
            let losses: Vec<f64> = (0..6).map(|_| t.train_step(&RULE).unwrap().loss).collect();
            assert!(losses[5] < losses[0], "{more:?} {set:?}: {losses:?}");
            losses[0]
        };
        let base = first(LORA);
        assert_eq!(first(&[LORA, &["lora.dora=true"]].concat()), base, "{more:?}");
    }
}

/// Gradients of adapters by central differences of the loss.
#[test]
fn gradients_of_adapters_are_those_of_the_loss() {
    // Every expert for every token: no difference selects others.
    let all = [MOE, &["moe.topk=4"]].concat();
    for (more, linears) in [(&[][..], 7), (&all[..], 4 + 4 * 3 + 3)] {
        check_gradients(&recipe(&[LORA, more].concat()), 2 * linears, |_| true);
        // Norms depend on A and B, and backward takes them as constants; m is free of that.
        let dora = recipe(&[LORA, more, &["lora.dora=true"]].concat());
        check_gradients(&dora, 3 * linears, |name| name.contains(".lora_m."));
    }
}

fn check_gradients(r: &Resolved, tensors: usize, checked: impl Fn(&str) -> bool) {
    let mut t = trainer(r);
    let mut values = fill_adapters(&t);
    t.train_step(&RULE).unwrap();
    let gradients: HashMap<String, Vec<f32>> =
        t.gradients().unwrap().into_iter().map(|g| (g.name, g.values)).collect();
    let names: Vec<String> = values.keys().cloned().collect();
    assert_eq!(names.len(), 2 * tensors, "A and B of the linears of two layers");
    assert!(gradients.iter().all(|(name, g)| is_adapter(name) != g.iter().all(|x| *x == 0.0)));
    for name in names.into_iter().filter(|name| checked(name)) {
        for i in [0, values[&name].len() - 1] {
            const H: f32 = 1e-2;
            let here = values[&name][i];
            let mut at = |x: f32| {
                values.get_mut(&name).unwrap()[i] = x;
                set_adapters(&t, &values);
                t.evaluate(&RULE, 2).unwrap()
            };
            // Central differences without their error of second order.
            let [down, up, down2, up2] = [-H, H, -2.0 * H, 2.0 * H].map(|h| at(here + h));
            at(here);
            let wanted = (8.0 * (up - down) - (up2 - down2)) / (12.0 * f64::from(H));
            let got = f64::from(gradients[&name][i]);
            assert!((wanted - got).abs() < 2e-3 * wanted.abs() + 2e-5, "{name}[{i}]: {got}, not {wanted}");
        }
    }
}

/// `W + alpha / rank · B·A` of every linear, with DoRA its rows scaled to the lengths m.
fn merged(weights: &[LogicalValues], scale: f32) -> HashMap<String, Vec<f32>> {
    let by_name: HashMap<&str, &LogicalValues> = weights.iter().map(|w| (w.name.as_str(), w)).collect();
    let merge = |w: &LogicalValues| {
        let module = w.name.trim_end_matches(".weight");
        let factors = ["lora_a", "lora_b"].map(|f| by_name.get(format!("{module}.{f}.weight").as_str()));
        let [Some(a), Some(b)] = factors else { return w.values.clone() };
        let (input, rank) = (a.shape[1], a.shape[0]);
        let update = |at: usize| {
            let (row, column) = (at / input, at % input);
            (0..rank).map(|r| b.values[row * rank + r] * a.values[r * input + column]).sum::<f32>()
        };
        let mut merged: Vec<f32> =
            w.values.iter().enumerate().map(|(at, x)| x + scale * update(at)).collect();
        if let Some(m) = by_name.get(format!("{module}.lora_m.weight").as_str()) {
            for (row, m) in merged.chunks_mut(input).zip(&m.values) {
                let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                row.iter_mut().for_each(|x| *x *= m / norm);
            }
        }
        merged
    };
    weights.iter().filter(|w| !is_adapter(&w.name)).map(|w| (w.name.clone(), merge(w))).collect()
}

#[test]
fn merged_weights_give_the_same_loss() {
    for more in [&[][..], MOE] {
        check_merged(more, LORA);
        check_merged(more, &[LORA, &["lora.dora=true"]].concat());
    }
}

fn check_merged(more: &[&str], lora: &[&str]) {
    let adapted = trainer(&recipe(&[lora, more].concat()));
    fill_adapters(&adapted);
    let merged = merged(&adapted.weights().unwrap(), 2.0);
    let plain = trainer(&recipe(more));
    let without = plain.evaluate(&RULE, 4).unwrap();
    plain.import(&|name| Ok(merged[name].clone())).unwrap();
    let [a, b] = [&adapted, &plain].map(|t| t.evaluate(&RULE, 4).unwrap());
    assert!((a / b - 1.0).abs() < 1e-6, "{a} and {b}");
    assert!((a / without - 1.0).abs() > 1e-3, "the adapters change nothing");
}

/// A resumed run ends with the bits of an undisturbed one; its checkpoints hold adapters alone.
#[test]
fn runs_of_adapters_resume_to_the_same_bits() {
    for more in [
        &[][..],
        &["precision.dtype=bf16"],
        &["precision.dtype=bf16", "precision.recipe=fp8-current"],
        &["lora.dora=true"],
        &["lora.dora=true", "precision.dtype=bf16", "precision.recipe=fp8-current"],
    ] {
        let r = recipe(&[LORA, more].concat());
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        run(dirs[0].path(), &r, 1, &RULE, None, None);
        run(dirs[1].path(), &r, 2, &RULE, None, Some(3));
        run(dirs[1].path(), &r, 1, &RULE, None, None);
        let [a, b] = [0, 1].map(|i| newest(dirs[i].path()));
        assert!(a == b, "{more:?}");
        let path = checkpoint::latest(&dirs[0].path().join("checkpoints")).unwrap().unwrap();
        let loaded = checkpoint::load(&path).unwrap();
        assert!(loaded.get("model/layers.0.attn.q.lora_a.weight").is_some());
        assert!(loaded.get("adam.m/layers.1.mlp.down.lora_b.weight").is_some());
        let m = loaded.get("model/layers.0.attn.q.lora_m.weight");
        assert_eq!(m.is_some(), more.contains(&"lora.dora=true"));
        assert!(loaded.get("model/layers.0.attn.q.weight").is_none());
        assert!(loaded.get("model/embed.tokens").is_none());
    }
}

/// A base that stays in FP8 gives the bits of one that is in bf16 and quantized in every pass.
#[test]
fn a_base_in_fp8_gives_the_bits_of_a_quantized_one() {
    for recipe_of in ["precision.recipe=fp8-current", "precision.recipe=fp8-block"] {
        for more in [&[][..], &["moe.experts=4", "moe.topk=2", "moe.ffn=128"]] {
            let losses = |resident: &str| -> Vec<f64> {
                let own =
                    ["precision.dtype=bf16", recipe_of, resident, "model.hidden=128", "optimizer.lr=3e-2"];
                let r = recipe(&[LORA, &own, more].concat());
                let mut t = trainer(&r);
                (0..4).map(|_| t.train_step(&RULE).unwrap().loss).collect()
            };
            let (resident, quantized) =
                (losses("precision.fp8_params=true"), losses("precision.fp8_params=false"));
            assert_eq!(resident, quantized, "{recipe_of} {more:?}");
            assert!(resident[3] < resident[0], "{resident:?}");
        }
    }
}
