//! `moe.pad_to_capacity`: exchanges have static, equal sizes without a host sync on counts; results equal those without
//! padding.

use super::*;
use ferrotron_comm::{OpKind, Volume};
use ferrotron_core::data::source;
use ferrotron_core::train::{StepReport, Trainer};

/// A step, its gradients, and the bytes each rank sent in expert exchanges.
fn step(at: &str, set: &[&str]) -> Vec<(StepReport, Vec<LogicalValues>, Volume)> {
    let (resolved, at) = recipe(&layout(at), &keys(set));
    run(&at, |rank| {
        let data = source::open(&resolved)?.train;
        let mut trainer = Trainer::new(rank.clone(), &resolved)?;
        let before = rank.etp_ep_group.volume();
        let report = trainer.train_step(&*data)?;
        let sent = rank.etp_ep_group.volume().since(&before);
        Ok((report, trainer.gradients()?, sent))
    })
    .unwrap()
}

#[test]
fn padding_makes_exchanges_static_and_keeps_results() {
    for at in ["ep=4", "ep=2,etp=2", "tp=2,ep=4,etp=1,dp=2", "pp=2,ep=2,dp=2"] {
        for factor in ["0.5", "1.25"] {
            let capacity = format!("moe.capacity={factor}");
            let set = ["moe.capacity_per_rank=true", capacity.as_str()];
            let plain = step(at, &[set[0], set[1], "moe.pad_to_capacity=false"]);
            let even = step(at, &[set[0], set[1], "moe.pad_to_capacity=true"]);
            for (rank, (p, e)) in plain.iter().zip(&even).enumerate() {
                let what = format!("{at}, capacity {factor}, rank {rank}");
                assert!((e.0.loss / p.0.loss - 1.0).abs() < 1e-5, "{what}: {:?} and {:?}", e.0, p.0);
                assert_eq!(difference(&e.1, &p.1, false), None, "{what}");
                // Counts would be exchanged by separate calls.
                assert!(p.2.calls(OpKind::AllToAll) > e.2.calls(OpKind::AllToAll), "{what}: {:?}", e.2);
            }
            // Stages differ in their number of MoE layers.
            let bytes = |v: &Volume| v.bytes(OpKind::AllToAll);
            let stages = if at.contains("pp=2") { 2 } else { 1 };
            for stage in even.chunks(even.len() / stages) {
                assert!(stage.iter().all(|e| bytes(&e.2) == bytes(&stage[0].2)), "{at}, capacity {factor}");
            }
        }
    }
}
