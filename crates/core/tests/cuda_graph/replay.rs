//! Replayed steps of every kind of model and precision, and steps that are launched in between.

use super::{GPT2, MOE, OFFLOAD, card, recipe, train};

#[test]
fn replayed_steps_are_bit_equal_to_launched_ones() {
    let bf16: &[&str] = &["precision.dtype=bf16", "optimizer.state_dtype=bf16"];
    let cases: &[(&str, Vec<&str>)] = &[
        ("fp8, current", [bf16, &["precision.recipe=fp8-current"]].concat()),
        ("f16", vec!["precision.dtype=f16", "precision.loss_scale=[256, 7]"]),
        ("mxfp8", [bf16, &["precision.recipe=mxfp8"]].concat()),
        ("fp8 attention", [bf16, &["precision.fp8_attention=true"]].concat()),
        (
            "fp8 head",
            [bf16, &["precision.recipe=fp8-current", "precision.fp8_lm_head=true", "train.micro_batch=2"]]
                .concat(),
        ),
        ("fp8, delayed", [bf16, &["precision.recipe=fp8-delayed", "train.micro_batch=2"]].concat()),
        ("fp8, block", [bf16, &["precision.recipe=fp8-block"]].concat()),
        ("FP8 parameters", [bf16, &["precision.recipe=fp8-current", "precision.fp8_params=true"]].concat()),
        (
            "FP8 parameters, delayed scaling",
            [bf16, &["precision.recipe=fp8-delayed", "precision.fp8_params=true", "train.micro_batch=2"]]
                .concat(),
        ),
        (
            "fp8 moments",
            vec!["precision.dtype=bf16", "optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"],
        ),
        ("llama f32", vec![]),
        ("llama bf16", bf16.to_vec()),
        ("gpt2 f32", GPT2.to_vec()),
        ("gpt2 bf16", [GPT2, bf16].concat()),
        ("one micro-batch, sgd", vec!["train.micro_batch=8", "optimizer.kind=sgd", "optimizer.clip=0"]),
        ("moe, dropless, f32", MOE.to_vec()),
        ("moe, dropless, bf16", [MOE, bf16].concat()),
        ("moe, fp8, block", [MOE, bf16, &["precision.recipe=fp8-block"]].concat()),
        (
            "moe, padded",
            [MOE, bf16, &["moe.capacity=1.25", "moe.pad_to_capacity=true", "moe.z_loss=1e-3"]].concat(),
        ),
        ("dropout", [bf16, &["dropout.hidden=0.1", "train.micro_batch=2"]].concat()),
        ("MTP", [bf16, &["mtp.layers=2", "train.micro_batch=2"]].concat()),
        (
            "moe, MTP with dropout, jitter",
            [MOE, bf16, &["mtp.layers=1", "dropout.hidden=0.1", "moe.jitter=0.01"]].concat(),
        ),
        ("moe, forced balance", [MOE, bf16, &["moe.force_balance=0"]].concat()),
        ("recomputed, dropout", vec!["train.recompute=full", "dropout.hidden=0.2"]),
        ("recomputed", vec!["train.recompute=full", "model.window=24", "model.qk_norm=true"]),
        ("LoRA", [bf16, &["lora.rank=8"]].concat()),
        ("DoRA", [bf16, &["lora.rank=8", "lora.dora=true", "lora.fused=true"]].concat()),
        (
            "DoRA, FP8 base",
            [bf16, &["lora.rank=8", "lora.dora=true", "precision.recipe=fp8-current"]].concat(),
        ),
        ("offloaded layers", [bf16, OFFLOAD, &["offload.activations=2", "train.micro_batch=2"]].concat()),
        ("offloaded modules", [OFFLOAD, &["offload.activations=[\"core_attn\", \"fc1\"]"]].concat()),
        ("offloaded automatically", [bf16, OFFLOAD, &["offload.activations=auto"]].concat()),
        (
            "fp8, offloaded and recomputed",
            [
                bf16,
                OFFLOAD,
                &["precision.recipe=fp8-current", "offload.activations=3", "train.recompute=[\"norm\"]"],
            ]
            .concat(),
        ),
        (
            "moe, padded, offloaded",
            [MOE, bf16, OFFLOAD, &["moe.capacity=1.25", "moe.pad_to_capacity=true", "offload.activations=3"]]
                .concat(),
        ),
    ];
    let Some((rank, _alone)) = card() else {
        // Without a GPU, check that the recipes are valid.
        cases.iter().for_each(|(_, changes)| drop(recipe("on", changes)));
        return;
    };
    for (name, changes) in cases {
        let plain = train(&rank, "off", changes, false);
        assert_eq!((plain.replayed, plain.reports.len()), (0, 30), "{name}");
        let rates: Vec<f64> = plain.reports.iter().map(|r| r.lr).collect();
        assert!(rates.windows(2).all(|w| w[0] != w[1]), "{name}: the learning rate changes: {rates:?}");
        for ahead in [false, true] {
            let graph = train(&rank, "on", changes, ahead);
            // With offloading, a step is measured before one is captured.
            let offloads = changes.iter().any(|c| c.starts_with("offload"));
            let expected = if offloads { 10..=26 } else { 27..=27 };
            assert!(expected.contains(&graph.replayed), "{name}, ahead {ahead}: {}", graph.replayed);
            assert_eq!(graph.reports, plain.reports, "{name}, ahead {ahead}");
            assert!(graph.saved == plain.saved, "{name}, ahead {ahead}: weights or optimizer state differ");
        }
    }
}

/// Steps with operand statistics and calibration steps are launched, not replayed; the graph stays valid.
#[test]
fn statistics_and_calibration_steps_are_not_replayed() {
    let current = ["precision.dtype=bf16", "precision.recipe=fp8-current"];
    let delayed = ["precision.dtype=bf16", "precision.recipe=fp8-delayed"];
    let cases = [
        ([current[0], current[1], "precision.stats_every=10"], current.to_vec(), 24),
        ([delayed[0], delayed[1], "precision.stats_every=10"], delayed.to_vec(), 24),
        (
            [delayed[0], delayed[1], "precision.calibrate=5"],
            [&delayed[..], &["precision.calibrate=5"]].concat(),
            22,
        ),
    ];
    let Some((rank, _alone)) = card() else {
        return cases.iter().for_each(|(changes, ..)| drop(recipe("on", changes)));
    };
    for (changes, plain, replayed) in cases {
        let plain = train(&rank, "off", &plain, false);
        for ahead in [false, true] {
            let graph = train(&rank, "on", &changes, ahead);
            assert_eq!(graph.replayed, replayed, "{changes:?}, ahead {ahead}");
            assert_eq!(graph.reports, plain.reports, "{changes:?}, ahead {ahead}");
            assert!(graph.saved == plain.saved, "{changes:?}, ahead {ahead}: weights differ");
        }
    }
}

#[test]
fn another_number_of_micro_batches_is_another_graph() {
    // 2, 4, 6 and 8 sequences per step.
    let changes = ["train.ramp=[2, 2, 80]", "train.micro_batch=2"];
    recipe("on", &changes);
    let Some((rank, _alone)) = card() else { return };
    let plain = train(&rank, "off", &changes, true);
    let graph = train(&rank, "on", &changes, true);
    assert_eq!(graph.reports, plain.reports);
    assert!(graph.saved == plain.saved);
    let sizes: std::collections::BTreeSet<u64> = plain.reports.iter().map(|r| r.samples).collect();
    assert!(sizes.len() > 2, "{sizes:?}");
    assert!(graph.replayed > 0 && graph.replayed < 30 - 3 * sizes.len() as u64 + 3, "{}", graph.replayed);
}
