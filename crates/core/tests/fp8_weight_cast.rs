//! Weight amax and FP8 casts fused into the optimizer step: bit-equal to separate passes over the weights, with fewer
//! launches. With `FERROTRON_TEST_DEVICE=cuda` on one rank of the first GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/support/device.rs"]
mod device;

use device::{skipped, test_on_gpu};
use ferrotron_core::Result;
use ferrotron_core::bench;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::data::source;
use ferrotron_core::grid::RankLayout;
use ferrotron_core::ranks::on_threads;
use ferrotron_core::train::{LogicalValues, Trainer};
use ferrotron_engine::Rank;
use ferrotron_tensor::{Instrumentation, bf16};
use std::time::Instant;

const LAYERS: usize = 2;

fn recipe(layout: &RankLayout, set: &[&str]) -> Resolved {
    let model = format!(
        "[model]\nlayers = {LAYERS}\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 160\nvocab = 288\nmax_positions = 64\n\
         qkv_bias = true\n[data]\npath = \"embedded\"\nseq_len = 16\n[train]\nsteps = 20\nglobal_batch = 8\n\
         micro_batch = 2\n[optimizer]\nlr = 1e-2\nclip = 0.5\n[precision]\ndtype = \"bf16\"\nrecipe = \"fp8-current\"\n\
         [generate]\ntokens = 0\n[parallel]\ncomm_unit = 160000\n"
    );
    let mut recipe = Recipe::named("tiny").unwrap();
    recipe.add("model.toml", &model).unwrap();
    let sizes = [("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp), ("dp", layout.dp.unwrap_or(1))];
    for (key, n) in sizes {
        recipe.set(&format!("parallel.{key}={n}")).unwrap();
    }
    set.iter().for_each(|s| recipe.set(s).unwrap());
    recipe.resolve(None).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

fn on_ranks<T: Send>(
    layout: &str,
    set: &[&str],
    work: impl Fn(Trainer, Resolved) -> Result<T> + Sync,
) -> Vec<T> {
    let layout: RankLayout = layout.parse().unwrap();
    let layout = RankLayout { dp: layout.dp.or(Some(1)), ..layout };
    let resolved = recipe(&layout, set);
    let make = || match test_on_gpu() {
        true => Ok(Rank::cuda(0, 1, 1234, Instrumentation::default())?.0),
        false => Ok(Rank::cpu_instrumented(
            1,
            1234,
            Instrumentation { race_check: true, ..Instrumentation::default() },
        )?),
    };
    on_threads(&layout, make, |rank| work(Trainer::new(rank, &resolved)?, resolved.clone()))
        .unwrap_or_else(|e| panic!("{layout} {set:?}: {e}"))
}

/// Losses, norms and evaluations of a few steps, and masters. With `forget`, forward recomputes every weight's amax.
fn made(layout: &str, set: &[&str], forget: bool) -> (Vec<[u64; 3]>, Vec<LogicalValues>) {
    on_ranks(layout, set, |mut t, resolved| {
        let sources = source::open(&resolved)?;
        let again = |t: &Trainer| {
            t.model.step_state.quant().filter(|_| forget).into_iter().for_each(|e| e.weights_changed())
        };
        let mut all = Vec::new();
        for step in 0..6 {
            again(&t);
            let r = t.train_step(&*sources.train)?;
            again(&t);
            let eval = if step % 2 == 1 { t.evaluate(&*sources.train, 2)? } else { 0.0 };
            all.push([r.loss, r.grad_norm, eval].map(f64::to_bits));
        }
        Ok((all, t.weights()?))
    })
    .swap_remove(0)
}

fn equal(layout: &str, set: &[&str]) {
    if test_on_gpu() && layout != "tp=1" {
        return skipped(&format!("{layout} on one GPU"));
    }
    let (left, found) = (made(layout, set, false), made(layout, set, true));
    assert_eq!(left.0, found.0, "{layout} {set:?}");
    assert!(left.1 == found.1, "{layout} {set:?}: masters differ");
}

#[test]
fn amax_of_the_optimizer_step_matches_forward() {
    for set in [
        &[][..],
        &["train.micro_batch=8"],
        &["optimizer.master_dtype=remainder"],
        &["optimizer.state_dtype=bf16"],
        &["optimizer.state_dtype=fp8", "optimizer.master_dtype=remainder"],
        &["optimizer.kind=sgd", "optimizer.lr=0.3"],
        &["precision.fp8_lm_head=true", "model.tied=true"],
        &["precision.skip=[\"mlp.down:output\", \"attn.out\"]", "precision.pow2_scales=true"],
        &["train.recompute=full"],
    ] {
        equal("tp=1", set);
    }
}

#[test]
fn ranks_agree_on_the_optimizers_amax() {
    for layout in ["dp=2", "tp=2", "tp=2,dp=2", "pp=2,dp=2", "cp=2,dp=2"] {
        for zero in ["parallel.zero=0", "parallel.zero=1", "parallel.zero=2"] {
            equal(layout, &[zero]);
        }
    }
    equal("dp=4", &["parallel.zero=1", "precision.fp8_lm_head=true", "parallel.overlap=false"]);
    equal(
        "tp=2,dp=2",
        &["parallel.zero=1", "optimizer.master_dtype=remainder", "optimizer.state_dtype=bf16"],
    );
}

/// A skipped step changes no weight and no cached amax.
#[test]
fn skipped_steps_keep_amax() {
    let go = |set: &[&str], forget: bool| {
        on_ranks("tp=1", set, |mut t, resolved| {
            let sources = source::open(&resolved)?;
            let again = |t: &Trainer| {
                t.model.step_state.quant().filter(|_| forget).into_iter().for_each(|e| e.weights_changed())
            };
            t.train_step(&*sources.train)?;
            // A NaN weight written behind the cache's back.
            let norm =
                t.model.params.specs().iter().position(|s| s.parts[0].name == "final_norm.weight").unwrap();
            let (value, stream) = (t.model.params.values()[norm].clone(), t.rank.compute.clone());
            let good = stream.download::<bf16>(&value)?;
            stream.upload_into(&value, &vec![bf16::NAN; good.len()])?;
            let before = t.weights()?;
            for _ in 0..2 {
                again(&t);
                let r = t.train_step(&*sources.train)?;
                assert!(!r.grad_norm.is_finite(), "{r:?}");
            }
            let same = |(a, b): (&LogicalValues, &LogicalValues)| a == b || a.name == "final_norm.weight";
            assert!(t.weights()?.iter().zip(&before).all(same));
            stream.upload_into(&value, &good)?;
            let mut all = Vec::new();
            for _ in 0..2 {
                again(&t);
                let r = t.train_step(&*sources.train)?;
                all.push([r.loss, r.grad_norm].map(f64::to_bits));
            }
            Ok((all, t.weights()?))
        })
        .swap_remove(0)
    };
    for more in [&[][..], &["optimizer.master_dtype=remainder"], &["optimizer.state_dtype=fp8"]] {
        let set = [&["optimizer.skip_nonfinite=true"], more].concat();
        let (left, found) = (go(&set, false), go(&set, true));
        assert!(left == found, "{set:?}");
    }
}

/// Launches of a kernel in two steps.
fn launches(set: &[&str]) -> impl Fn(&str) -> usize {
    let r = recipe(&"tp=1".parse().unwrap(), set);
    let watch = Instrumentation { kernel_times: true, ..Instrumentation::default() };
    let rank = match test_on_gpu() {
        true => Rank::cuda(0, 1, 1234, watch).unwrap().0,
        false => Rank::cpu_instrumented(1, 1234, watch).unwrap(),
    };
    let profile = bench::train(rank, &r, 1, 1, None, Instant::now()).unwrap().profile;
    move |name: &str| profile.iter().filter(|(k, _)| **k == name).map(|(_, (calls, _))| *calls as usize).sum()
}

#[test]
fn no_extra_pass_reads_weights() {
    const MAPS: usize = 4 * LAYERS;
    const SGD: &str = "optimizer.kind=sgd";
    let calls = |set: &[&str], name: &str| launches(set)(name);
    assert_eq!(calls(&[SGD], "amax") - calls(&[], "amax"), MAPS);
    const BYTES: [&str; 2] = ["precision.fp8_params=true", "precision.recipe=fp8-current"];
    assert_eq!(calls(&[&BYTES[..], &[SGD]].concat(), "amax") - calls(&BYTES, "amax"), MAPS);
    const DELAYED: [&str; 2] = ["precision.fp8_params=true", "precision.recipe=fp8-delayed"];
    for name in ["quantize", "copy"] {
        let (with, without) = (calls(&[&DELAYED[..], &[SGD]].concat(), name), calls(&DELAYED, name));
        assert_eq!(with - without, MAPS, "{name}");
    }
}
