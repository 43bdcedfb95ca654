//! Packed moments, Muon and parameter groups under ZeRO.

use super::{Case, Made, equal, made};
use ferrotron_core::train::Trainer;

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
