//! Dropout, communication overlap and generation.

use super::attention::{LATENT, STREAM};
use super::*;
use ferrotron_core::model::generate::{Prompt, Sampling, generate};
use ferrotron_core::parity::first_step;
use ferrotron_core::train::Trainer;
use ferrotron_engine::StepContext;
use ferrotron_tensor::Instrumentation;

/// Dropout masks depend on the token's index in the step, not on rank or micro-batch size.
#[test]
fn dropout_is_that_of_one_rank_for_any_micro_batch() {
    let one = one();
    let sizes = ["train.micro_batch=1", "train.micro_batch=2"];
    let set = |size| ["dropout.hidden=0.1", size];
    let wanted = run(&one, |rank| first_step(rank, &recipe(&one, &set(sizes[0])), None)).unwrap();
    let without = run(&one, |rank| first_step(rank, &recipe(&one, &[]), None)).unwrap();
    assert!((wanted.loss.unwrap() - without.loss.unwrap()).abs() > 1e-4, "nothing was dropped");
    let layouts = ["tp=1", "dp=2", "tp=2", "tp=4,dp=2", "tp=2,pp=2,dp=2", "pp=2,vp=2"];
    for layout in layouts.map(layout) {
        for size in sizes {
            let resolved = recipe(&layout, &set(size));
            let ours = run(&layout, |rank| first_step(rank, &resolved, None)).unwrap();
            let (a, b) = (ours.loss.unwrap(), wanted.loss.unwrap());
            assert!((a / b - 1.0).abs() < 1e-6, "{layout} {size}: loss {a} instead of {b}");
            let wrong = difference(&ours.tensors[0].1, &wanted.tensors[0].1, false);
            assert_eq!(wrong, None, "{layout} {size}");
        }
    }
}

/// Overlapped communication is bit-equal, and the race checker finds no unordered access.
#[test]
fn overlap_is_bit_equal_and_race_free() {
    for (tp, set) in [
        (2, &["precision.dtype=bf16", "dropout.hidden=0.1"][..]),
        (4, &["train.recompute=full", "model.tied=true"]),
        (2, &["train.recompute=[\"norm\", \"activation\"]", "data.reset_at_documents=true"]),
    ] {
        let layout = RankLayout { tp, dp: Some(2), ..RankLayout::default() };
        let resolved = recipe(&layout, set);
        let step = |overlap| {
            let make = || {
                Ok(Rank::cpu_instrumented(
                    1,
                    1234,
                    Instrumentation { race_check: true, ..Instrumentation::default() },
                )?)
            };
            let work = |rank| first_step(Rank { overlap, ..rank }, &resolved, None);
            on_threads(&layout, make, work).unwrap().swap_remove(0)
        };
        let (with, without) = (step(true), step(false));
        assert_eq!(with.loss, without.loss, "{layout} {set:?}");
        for (o, w) in with.tensors.iter().zip(&without.tensors) {
            assert_eq!(o.1, w.1, "{layout} {set:?} {}", o.0.name());
        }
    }
}

/// Prompt lengths that do not divide by the rank count, replicated key/value heads, vocabulary-parallel logits.
#[test]
fn generation_matches_one_rank() {
    let text = |layout: &RankLayout, set: &[&str]| {
        let resolved = recipe(layout, set);
        let all = on_threads(
            layout,
            || {
                Ok(Rank::cpu_instrumented(
                    1,
                    1234,
                    Instrumentation { race_check: true, ..Instrumentation::default() },
                )?)
            },
            |rank| {
                let trainer = Trainer::new(rank, &resolved)?;
                let pass = StepContext::new(&trainer.rank, &trainer.model.params, &trainer.model.step_state);
                let cold = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 3 };
                let warm = Sampling { temperature: 1.0, ..cold };
                let first = trainer.rank.world.rank() == 0;
                let mut texts = Vec::new();
                for (prompt, sampling) in [(&[7][..], cold), (&[1, 2, 3, 4, 250], cold), (&[9, 8, 7], warm)] {
                    texts.push(generate(
                        &trainer.model.decoder,
                        &pass,
                        Prompt { tokens: prompt, max_new: 9, stop: &[] },
                        sampling,
                        &mut |_| true,
                    )?);
                }
                // One rank's stop ends generation on all ranks.
                let mut heard = 0;
                let mut enough = |_| {
                    heard += 1;
                    !first || heard < 3
                };
                let cut = generate(
                    &trainer.model.decoder,
                    &pass,
                    Prompt { tokens: &[7], max_new: 9, stop: &[] },
                    cold,
                    &mut enough,
                )?;
                assert_eq!(cut, texts[0][..3]);
                Ok(texts)
            },
        )
        .unwrap();
        assert!(all.windows(2).all(|w| w[0] == w[1]), "{layout}: ranks draw different text");
        all
    };
    for set in [
        &["model.init_std=0.3"][..],
        &["model.init_std=0.3", "model.tied=false", "model.qk_norm=true"],
        &["model.init_std=0.3", "model.attn_sink=true", "model.window=6"],
        &["model.init_std=0.3", "model.kv_heads=4", LATENT],
        &["model.init_std=0.3", "model.kv_heads=4", "model.attn_sink=true", STREAM],
    ] {
        let one = one();
        let wanted = text(&one, set);
        assert!(wanted[0][1].windows(2).any(|w| w[0] != w[1]), "one token for ever: {wanted:?}");
        for tp in [2, 4] {
            let layout = RankLayout { tp, ..one.clone() };
            assert_eq!(text(&layout, set)[0], wanted[0], "{layout}");
        }
    }
}
