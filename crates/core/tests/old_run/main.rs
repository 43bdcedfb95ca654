//! A run of an earlier version, with that version's keys and checkpoint, resumes to the same bits.
//!
//! `interrupted/` is a run folder that stopped at step 3 of 6. It was written before keys were renamed and uses every
//! renamed key but `moe.force`: FP8 parameters, LM head and attention under delayed scaling, MoE, MTP and bf16 moments.
//! `step-00000006.manifest.json` is the manifest of the checkpoint that the earlier version wrote after resuming; it
//! holds the CRC-32C of every tensor file and the whole training state, in that version's format. The two checksums are those of
//! today's order of sums in f32 GEMMs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::checkpoint;
use ferrotron_core::config::{QuantRecipe, Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::events::Event;
use ferrotron_core::train::{CHECKPOINTS, CONFIG, Observer, Run};
use ferrotron_engine::Rank;
use ferrotron_kernels::cpu::Isa;
use std::path::{Path, PathBuf};

struct Silent;

impl Observer for Silent {
    fn event(&mut self, _: &Event) {}
    fn stop(&self) -> bool {
        false
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/old_run").join(name)
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => _ = std::fs::copy(entry.path(), to).unwrap(),
        }
    }
}

fn resume(r: &Resolved, dir: &Path) {
    let rank = Rank::cpu(1, r.config.train.seed).unwrap();
    let sources = source::open(r).unwrap();
    let mut run = Run::open(rank, r.clone(), dir, None).unwrap();
    assert_eq!(run.trainer.step(), 3, "the checkpoint of the earlier version was not read");
    assert!(run.train(&*sources.train, None, &mut Silent).unwrap().finished);
}

#[test]
fn a_run_of_an_earlier_version_resumes_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture("interrupted"), dir.path());
    let resolved = Recipe::read(&dir.path().join(CONFIG)).unwrap().resolve(None).unwrap();
    resume(&resolved, dir.path());
    // The folder now holds today's keys and reads back to the same configuration.
    let stored = std::fs::read_to_string(dir.path().join(CONFIG)).unwrap();
    let mut today = Recipe::default();
    today.add("config.toml", &stored).unwrap();
    assert_eq!(today.config, resolved.config);

    let checkpoint = checkpoint::latest(&dir.path().join(CHECKPOINTS)).unwrap().unwrap();
    assert_eq!(checkpoint::verify(&checkpoint).unwrap().step, 6);
    let [mut ours, mut theirs] = [checkpoint.join("manifest.json"), fixture("step-00000006.manifest.json")]
        .map(|path| {
            serde_json::from_str::<serde_json::Value>(&std::fs::read_to_string(path).unwrap()).unwrap()
        });
    // Today's checkpoints record the run's configuration and data and what delayed scales map amax to as well, and list
    // tensors with their parts; nothing else differs.
    let state = ours["state"].as_object_mut().unwrap();
    assert_eq!(state.remove("run").unwrap()["config"]["train.steps"], "6");
    assert_eq!(state.remove("scaled_to").unwrap(), serde_json::json!([448.0, 57344.0]));
    for manifest in [&mut ours, &mut theirs] {
        manifest.as_object_mut().unwrap().remove("checksum");
        manifest.as_object_mut().unwrap().remove("version");
    }
    for tensor in ours["tensors"].as_object_mut().unwrap().values_mut() {
        *tensor = tensor["parts"][0]["file"].take();
    }
    // Sums of bf16 products are ordered differently without a matrix unit; the fixture was written on a CPU with one.
    if Isa::detect() == Isa::Amx {
        assert_eq!(ours, theirs, "the resumed run has other bits than the earlier version's");
    } else {
        assert_eq!((&ours["state"], &ours["tensors"]), (&theirs["state"], &theirs["tensors"]));
    }
}

#[test]
fn stored_keys_are_translated_and_written_keys_refused() {
    let path = fixture("interrupted").join(CONFIG);
    let c = Recipe::read_stored(&path).unwrap().config;
    let p = &c.precision;
    assert_eq!((p.recipe, p.amax_history, p.pow2_scales), (QuantRecipe::Fp8Delayed, 4, Some(true)));
    assert!(p.fp8_params && p.fp8_lm_head && p.fp8_attention);
    assert_eq!(p.skip.0, ["mlp.down:weight_grad"]);
    assert_eq!((c.mtp.loss_weight, c.mtp.shared_layer), (0.3, true));
    assert_eq!((c.moe.layer_freq, c.moe.dense_layers), (Some(1), Some(vec![0])));
    assert_eq!((c.moe.route_scale, c.moe.pad_to_capacity), (Some(1.5), true));
    // The same text as a user's own recipe: an error at the first old key, with the new spelling.
    let text = std::fs::read_to_string(&path).unwrap();
    let e = Recipe::default().add("mine.toml", &text).unwrap_err().to_string();
    assert!(
        e.starts_with("mine.toml:28: moe.every: unknown key; moe.every is now moe.layer_freq = 1"),
        "{e}"
    );
    for (old, new) in [
        ("precision.scaling=current", "precision.scaling is now precision.recipe = \"fp8-current\""),
        ("precision.weights=fp8", "precision.weights is now precision.fp8_params = true"),
        ("precision.also=[\"head\"]", "precision.also is now precision.fp8_lm_head = true"),
        ("optimizer.moments=fp8", "optimizer.moments is now optimizer.state_dtype = \"fp8\""),
        ("train.graph=on", "train.graph is now train.cuda_graph = \"on\""),
        ("moe.force=0.0", "moe.force is now moe.force_balance = 0.0"),
    ] {
        let e = Recipe::default().set(old).unwrap_err().to_string();
        assert!(e.contains(new), "{old}: {e}");
    }
}
