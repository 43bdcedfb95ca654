//! Several ranks on one device, each with its own streams: bit-equal to ranks with a device each.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../tests/support/device.rs"]
mod device;

use device::test_on_gpu;
use ferrotron_core::config::{Recipe, Resolved};
use ferrotron_core::grid::RankLayout;
use ferrotron_core::parity::{Outcome, first_step};
use ferrotron_core::ranks::{DEFAULT_TIMEOUT, on_one_device, on_threads};
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;

fn recipe(layout: &RankLayout) -> Resolved {
    let mut recipe = Recipe::named("tiny").unwrap();
    let model = "[model]\nlayers = 2\nhidden = 32\nheads = 4\nkv_heads = 2\nffn = 48\nvocab = 259\nmax_positions = 64\n\
                 [data]\npath = \"embedded\"\nseq_len = 16\n[train]\nglobal_batch = 8\nmicro_batch = 1\n\
                 [precision]\ndtype = \"f32\"\n[generate]\ntokens = 0\n";
    recipe.add("model.toml", model).unwrap();
    recipe.set(&format!("parallel.tp={}", layout.tp)).unwrap();
    recipe.set(&format!("parallel.dp={}", layout.dp.unwrap_or(1))).unwrap();
    recipe.resolve(None).unwrap()
}

/// With `FERROTRON_TEST_DEVICE=cuda`, the first GPU.
fn device() -> Rank {
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    match test_on_gpu() {
        true => Rank::cuda(0, 1, 1234, watch).unwrap().0,
        false => Rank::cpu_instrumented(1, 1234, watch).unwrap(),
    }
}

#[test]
fn ranks_that_share_a_device_give_the_same_bits() {
    let bits = |o: &Outcome| -> Vec<(String, Vec<u32>)> {
        let all = o.tensors.iter().flat_map(|(_, list)| list);
        all.map(|t| (t.name.clone(), t.values.iter().map(|x| x.to_bits()).collect())).collect()
    };
    let shared = device();
    for (tp, dp) in [(2, 1), (1, 2), (2, 2), (4, 1)] {
        let layout = RankLayout { tp, dp: Some(dp), ..RankLayout::default() };
        let resolved = recipe(&layout);
        let one = |rank| first_step(rank, &resolved, None);
        let together = on_one_device(&layout, DEFAULT_TIMEOUT, &shared, one).unwrap();
        let ranks = layout.world().unwrap();
        assert_eq!(together.len(), ranks);
        // On a GPU, compare with the same GPU.
        if shared.device().gpu().is_none() {
            let apart = on_threads(&layout, || Ok(Rank::cpu(1, 1234)?), one).unwrap();
            assert_eq!(bits(&together[0]), bits(&apart[0]), "{layout}");
        }
        let again = on_one_device(&layout, DEFAULT_TIMEOUT, &shared, one).unwrap();
        for other in together[1..].iter().chain(&again) {
            assert_eq!(bits(other), bits(&together[0]), "{layout}");
        }
    }
}
