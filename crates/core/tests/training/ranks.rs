//! A run of several ranks resumes from a checkpoint, or fails on all ranks.

use crate::support::{RULE, Stopper, recipe};
use ferrotron_core::checkpoint;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::Run;
use ferrotron_engine::Rank;

#[test]
fn damage_ends_a_resumed_run_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let r = recipe(&["train.steps=1", "schedule.warmup=0", "parallel.tp=2", "parallel.dp=2"]);
    let layout = RankLayout { tp: 2, dp: Some(2), ..RankLayout::default() };
    let make = || Ok(Rank::cpu(1, r.config.train.seed)?);
    let open = |rank| Run::open(rank, r.clone(), dir.path(), None);
    on_threads(&layout, make, |rank| open(rank)?.train(&RULE, None, &mut Stopper::default())).unwrap();
    let step = on_threads(&layout, make, |rank| Ok(open(rank)?.trainer.step())).unwrap();
    assert_eq!(step, [1; 4]);

    let path = checkpoint::latest(&dir.path().join("checkpoints")).unwrap().unwrap();
    let file = path.join("optimizer-rank-00003.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let said = on_threads(&layout, make, |rank| Ok(open(rank).err().map(|e| e.to_string()))).unwrap();
    assert_eq!(said.len(), 4);
    for e in said {
        assert!(
            e.as_ref().is_some_and(|e| e.contains("optimizer-rank-00003.safetensors: is damaged in tensor")),
            "{e:?}"
        );
    }
}
