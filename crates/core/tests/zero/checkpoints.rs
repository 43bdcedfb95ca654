//! Checkpoints are the same under every ZeRO level, and any level resumes from any other.

use super::Case;
use ferrotron_core::checkpoint;
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::train::{LogicalValues, Observer, Run};
use std::path::{Path, PathBuf};

struct StopAfter(u64, u64);

impl Observer for StopAfter {
    fn event(&mut self, event: &Event) {
        if let Event::Step(s) = event {
            self.1 = s.step;
        }
    }
    fn stop(&self) -> bool {
        self.1 >= self.0
    }
}

fn train(case: &Case, dir: &Path, stop: u64) -> Vec<LogicalValues> {
    case.run(|rank, resolved| {
        let sources = source::open(&resolved)?;
        let mut run = Run::open(rank, resolved, dir, None)?;
        run.train(&*sources.train, None, &mut StopAfter(stop, 0))?;
        run.trainer.weights()
    })
    .swap_remove(0)
}

/// The newest checkpoint.
fn newest(dir: &Path) -> PathBuf {
    checkpoint::latest(&dir.join("checkpoints")).unwrap().unwrap()
}

#[test]
fn checkpoints_are_independent_of_zero() {
    let muon: &'static [&'static str] = &[
        "optimizer.kind=muon",
        "optimizer.muon={ adaptive = \"normuon\" }",
        "optimizer.groups=[{ params = \"norm\", frozen = true }]",
    ];
    for set in [&[][..], &["precision.dtype=bf16"], muon] {
        let case = |tp, dp, zero| Case { tp, cp: 1, pp: 1, dp, zero, overlap: true, set };
        let folders: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
        // Whatever the parts, the tensors are equal.
        for (zero, dir) in folders.iter().enumerate() {
            train(&case(2, 2, zero), dir.path(), 2);
        }
        let different = checkpoint::compare(&newest(folders[0].path()), &newest(folders[1].path())).unwrap();
        assert!(different.same(), "{different:?}");
        // Every ZeRO level reads what any other wrote.
        let dir = folders[0].path();
        let saved =
            case(2, 2, 1).run(|rank, r| Run::open(rank, r, dir, None)?.trainer.weights()).swap_remove(0);
        for (tp, dp, zero) in [(1, 1, 1), (1, 4, 2), (2, 2, 0), (4, 2, 1), (1, 4, 1), (2, 2, 3), (1, 4, 3)] {
            let read = case(tp, dp, zero)
                .run(|rank, r| Run::open(rank, r, dir, None)?.trainer.weights())
                .swap_remove(0);
            assert!(read == saved, "tp{tp} dp{dp} zero {zero}");
        }
        // Moments too: resumed under another ZeRO level, the run ends with the same bits.
        let whole = tempfile::tempdir().unwrap();
        let straight = train(&case(2, 2, 1), whole.path(), 100);
        assert!(train(&case(2, 2, 0), folders[1].path(), 100) == straight, "0 after 1");
        assert!(train(&case(2, 2, 1), folders[0].path(), 100) == straight, "1 after 0");
        // ZeRO-3 adds the gradients of micro-batches in the order of ZeRO-2.
        let [two, three] = [2, 3].map(|zero| {
            let folder = tempfile::tempdir().unwrap();
            train(&case(2, 2, zero), folder.path(), 2);
            (train(&case(2, 2, 5 - zero), folder.path(), 100), folder)
        });
        assert!(two.0 == three.0, "3 after 2, and 2 after 3");
        // HFSDP adds gradients in the order of HSDP.
        let hybrid = |outer: &'static str| {
            let groups = ["parallel.fsdp_group=2", outer];
            Case { set: Vec::leak([set, &groups].concat()), ..case(1, 4, 3) }
        };
        let [hsdp, hfsdp] =
            ["replicate", "optimizer"].map(|outer| format!("parallel.fsdp_outer={outer}").leak() as &str);
        let [after_hsdp, after_hfsdp] = [(hsdp, hfsdp), (hfsdp, hsdp)].map(|(one, two)| {
            let folder = tempfile::tempdir().unwrap();
            train(&hybrid(one), folder.path(), 2);
            let saved = newest(folder.path());
            (train(&hybrid(two), folder.path(), 100), saved, folder)
        });
        assert!(after_hsdp.0 == after_hfsdp.0, "HFSDP after HSDP, and HSDP after HFSDP");
        for pair in
            [[&after_hsdp.1, &after_hfsdp.1], [&newest(after_hsdp.2.path()), &newest(after_hfsdp.2.path())]]
        {
            let different = checkpoint::compare(pair[0], pair[1]).unwrap();
            assert!(different.same(), "{different:?}");
        }
        let different = checkpoint::compare(&newest(two.1.path()), &newest(three.1.path())).unwrap();
        assert!(different.same(), "{different:?}");
    }
}
