//! Workspace of Muon's step in the memory estimate.

use ferrotron_core::bench::{train, workload};
use ferrotron_core::cost::MemoryEstimate;
use ferrotron_engine::Rank;
use std::time::Instant;

/// Few tokens and wide matrices: the peak is in Muon's step, of which every byte is counted.
#[test]
fn muon_updates_are_counted() {
    const WIDE: [&str; 9] = [
        "optimizer.kind=muon",
        "model.layers=2",
        "model.hidden=512",
        "model.ffn=1024",
        "model.vocab=256",
        "data.seq_len=8",
        "train.micro_batch=1",
        "train.global_batch=1",
        "generate.tokens=0",
    ];
    for set in [
        &[][..],
        &["optimizer.muon={ products = \"f32\" }"],
        &["optimizer.muon={ split_qkv = false }"],
        &["optimizer.muon={ adaptive = \"normuon\" }"],
        &["moe.experts=4", "moe.topk=2", "moe.ffn=256"],
    ] {
        let mut recipe = workload("tiny").unwrap();
        WIDE.iter().chain(set).for_each(|s| recipe.set(s).unwrap());
        let r = recipe.resolve(None).unwrap();
        let estimate = MemoryEstimate::of(&r).unwrap().largest().unwrap();
        assert!(estimate.update > estimate.activations + estimate.workspace, "{set:?}: {estimate:?}");
        let bench = train(Rank::cpu(1, 0).unwrap(), &r, 0, 1, None, Instant::now()).unwrap();
        let [measured, expected] = [bench.memory.total_peak, estimate.total()].map(|x| x as f64);
        assert!((measured / expected - 1.0).abs() < 0.02, "{set:?}: {measured} instead of {expected}");
    }
}
