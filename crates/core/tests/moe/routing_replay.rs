//! Routing record and replay under any layout; routing files that do not fit are refused.

use super::*;
use ferrotron_core::data::source;
use ferrotron_core::train::{StepReport, Trainer};
use std::collections::BTreeMap;
use std::path::Path;

/// Two steps.
fn steps(at: &str, set: &[String]) -> ferrotron_core::Result<Vec<Vec<StepReport>>> {
    let at = if at == "one" { one() } else { layout(at) };
    let (resolved, at) = recipe(&at, set);
    run(&at, |rank| {
        let data = source::open(&resolved)?.train;
        let mut trainer = Trainer::new(rank, &resolved)?;
        (0..2).map(|_| trainer.train_step(&*data)).collect()
    })
}

fn key(name: &str, folder: &Path) -> String {
    format!("moe.{name}={}", folder.display())
}

/// Top-k experts of each token by step and MoE layer, merged over files.
fn choices(folder: &Path) -> BTreeMap<(String, String), BTreeMap<i32, Vec<i32>>> {
    let ints = |bytes: Vec<u8>| -> Vec<i32> {
        bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
    };
    let mut all: BTreeMap<_, BTreeMap<i32, Vec<i32>>> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let step = path.file_name().unwrap().to_string_lossy()[..13].to_string();
        let file = ferrotron_core::tensorfile::TensorFile::open(&path).unwrap();
        for t in file.tensors().iter().filter(|t| !t.name.ends_with(".tokens")) {
            let tokens = ints(file.read(&format!("{}.tokens", t.name)).unwrap());
            let of = all.entry((step.clone(), t.name.clone())).or_default();
            for (token, chosen) in tokens.iter().zip(ints(file.read(&t.name).unwrap()).chunks(t.shape[1])) {
                assert_eq!(of.insert(*token, chosen.to_vec()), None, "token {token} twice");
            }
        }
    }
    all
}

#[test]
fn recorded_routing_is_replayed_under_any_layout() {
    let folder = tempfile::tempdir().unwrap();
    let [noisy, again, alone] = ["noisy", "again", "alone"].map(|n| folder.path().join(n));
    // Routing that the router would not choose without its jitter.
    steps("one", &[key("record", &noisy), "moe.jitter=0.9".into()]).unwrap();
    let recorded = choices(&noisy);
    // Two steps, three MoE layers, 16 sequences of 16 tokens.
    assert_eq!(recorded.len(), 6);
    assert!(recorded.values().all(|c| c.len() == 256));
    let wanted = steps("one", &[key("replay", &noisy), key("record", &again)]).unwrap().remove(0);
    assert_eq!(choices(&again), recorded);
    let own = steps("one", &[key("record", &alone)]).unwrap().remove(0);
    assert_ne!(choices(&alone), recorded);
    assert_ne!(own[0].loss, wanted[0].loss);
    for at in ["ep=4", "tp=2,ep=2,etp=2", "pp=2,cp=2,ep=2", "dp=2"] {
        for more in ["train.recompute=none", "train.recompute=full"] {
            let here = folder.path().join(at);
            let set = [key("replay", &noisy), key("record", &here), more.into()];
            for ours in steps(at, &set).unwrap() {
                for (o, w) in ours.iter().zip(&wanted) {
                    assert!((o.loss / w.loss - 1.0).abs() < 1e-5, "{at}, {more}: {o:?} and {w:?}");
                }
            }
            assert_eq!(choices(&here), recorded, "{at}, {more}");
            // Also from files of several ranks.
            let back = steps("one", &[key("replay", &here)]).unwrap().remove(0);
            assert_eq!(back, wanted, "{at}, {more}");
        }
    }
}

#[test]
fn routing_that_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let good = folder.path().join("good");
    steps("dp=2", &[key("record", &good)]).unwrap();
    let refused = |what: &str, change: &dyn Fn(&Path), set: &[String]| {
        let bad = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&good).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, bad.path().join(path.file_name().unwrap())).unwrap();
        }
        change(bad.path());
        let mut all = vec![key("replay", bad.path())];
        all.extend_from_slice(set);
        let error = steps("one", &all).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    };
    let file = |folder: &Path, rank: usize| folder.join(format!("step-00000001.rank-00{rank}.safetensors"));
    refused("has no routing", &|f| std::fs::remove_file(file(f, 1)).unwrap(), &[]);
    refused("appears twice", &|f| assert!(std::fs::copy(file(f, 1), file(f, 2)).is_ok()), &[]);
    refused(
        "holds no routing of step 1",
        &|f| (0..2).for_each(|r| std::fs::remove_file(file(f, r)).unwrap()),
        &[],
    );
    refused("is not a folder", &|f| std::fs::remove_dir_all(f).unwrap(), &[]);
    refused("is routed to expert", &|_| (), &["moe.experts=4".into()]);
    refused("tokens have 3 experts", &|_| (), &["moe.topk=3".into()]);
    // A file that is read first, with tensors of no rows and any width.
    let layer = choices(&good).into_keys().next().unwrap().1;
    for k in [0u64, 65, 1 << 40, (1 << 63) + 1] {
        let header = format!(
            r#"{{"{layer}":{{"dtype":"I32","shape":[0,{k}],"data_offsets":[0,0]}},"{layer}.tokens":{{"dtype":"I32","shape":[0],"data_offsets":[0,0]}}}}"#
        );
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        let add = |f: &Path| std::fs::write(f.join("step-00000001.a.safetensors"), &bytes).unwrap();
        refused(&format!("top-k is {k} of"), &add, &[]);
    }
}
