//! The text that a finished run samples: every rank that a forward pass takes is there.

use super::support::{recipe, run};
use super::{of_kind, train};

#[test]
fn a_run_with_expert_parallelism_samples_text_and_ends_well() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 2, "[moe]\nexperts = 4\n[parallel]\nep = 2\n[generate]\ntokens = 4\n");
    for dispatcher in ["all_to_all", "all_gather"] {
        let out = dir.path().join(dispatcher);
        let key = format!("moe.dispatcher={dispatcher}");
        let e = run(&train(&recipe, &out, &["--ranks", "2", "--timeout", "20", "--set", &key]));
        assert_eq!(e.code, Some(0), "{dispatcher}: {}", e.err);
        assert_eq!(of_kind(&out, "sample").len(), 1, "{dispatcher}");
        let ends = of_kind(&out, "run_end");
        assert!(ends.len() == 1 && ends[0]["ending"] == "finished", "{dispatcher}: {ends:?}");
    }
}
