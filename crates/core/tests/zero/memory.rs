//! Memory is divided by the ranks that share it, and is what the estimate says.

use super::Case;
use ferrotron_core::cost::MemoryEstimate;
use ferrotron_core::data::source;
use ferrotron_core::train::Trainer;
use ferrotron_tensor::Category;

#[test]
fn memory_is_sharded() {
    let bytes = |zero: usize, dp: usize, category: Category| -> Vec<f64> {
        let case = Case { tp: 1, cp: 1, pp: 1, dp, zero, overlap: true, set: &["precision.dtype=bf16"] };
        case.run(|rank, resolved| {
            let sources = source::open(&resolved)?;
            let mut trainer = Trainer::new(rank.clone(), &resolved)?;
            trainer.train_step(&*sources.train)?;
            Ok(rank.device().memory().now[category as usize] as f64)
        })
    };
    let one = bytes(1, 1, Category::Optimizer)[0];
    for dp in [2, 4] {
        for (zero, optimizer, gradients) in [(0, 1, 1), (1, dp, 1), (2, dp, dp)] {
            for (category, whole, parts) in
                [(Category::Optimizer, one, optimizer), (Category::Gradients, one / 3.0, gradients)]
            {
                for mine in bytes(zero, dp, category) {
                    let share = mine * parts as f64 / whole;
                    let what = format!("zero {zero} dp {dp} {category:?}");
                    assert!((0.9..1.1).contains(&share), "{what}: {share} of an even share");
                }
            }
        }
    }
}

/// Weights, gradients and optimizer state at their peaks are what the estimate says; weights gathered ahead and gradients
/// being reduced stay within parallel.comm_unit and one unit.
#[test]
fn sharded_memory_is_as_estimated() {
    for set in [
        &["model.tied=true"][..],
        &["model.tied=false", "precision.dtype=bf16"],
        &["model.layers=6", "model.tied=false", "parallel.comm_unit=150KB"],
        &[
            "model.layers=4",
            "precision.dtype=bf16",
            "precision.recipe=fp8-current",
            "precision.fp8_params=true",
        ],
        &["model.layers=4", "precision.dtype=bf16", "parallel.fsdp_group=1", "parallel.comm_unit=30KB"],
        &["model.tied=false", "parallel.fsdp_group=1", "parallel.fsdp_outer=optimizer"],
    ] {
        let hybrid = set.iter().position(|s| s.starts_with("parallel.fsdp_group"));
        let own: &'static [&'static str] = if set.len() == 3 && hybrid.is_none() {
            set
        } else {
            Vec::leak([set, &["parallel.comm_unit=30KB"]].concat())
        };
        for dp in [1, 2, 4, 8] {
            // Two groups.
            let group: &'static str = String::leak(format!("parallel.fsdp_group={}", (dp / 2).max(1)));
            let mut own = own.to_vec();
            if let Some(at) = hybrid {
                own[at] = group;
            }
            let own: &'static [&'static str] = Vec::leak(own);
            let case = Case { tp: 1, cp: 1, pp: 1, dp, zero: 3, overlap: true, set: own };
            let resolved = case.recipe();
            let estimate = MemoryEstimate::of(&resolved).unwrap().largest().unwrap();
            let categories = [Category::Parameters, Category::Gradients, Category::Optimizer];
            let expected = [estimate.parameters, estimate.gradients, estimate.optimizer];
            for peak in case.run(|rank, resolved| {
                let sources = source::open(&resolved)?;
                let mut trainer = Trainer::new(rank.clone(), &resolved)?;
                (0..2).try_for_each(|_| trainer.train_step(&*sources.train).map(drop))?;
                Ok(categories.map(|c| rank.device().memory().peak[c as usize]))
            }) {
                let [sum, whole] = [peak, expected].map(|x| x.iter().sum::<usize>() as f64);
                let what = format!("dp{dp} {own:?}: {peak:?} instead of {expected:?}");
                assert!((sum / whole - 1.0).abs() < 0.02, "{what}");
            }
        }
    }
}

/// With shards in host memory the device has slots and what is in flight, and the host the shards.
#[test]
fn shards_in_host_memory_are_as_estimated() {
    /// Tables of rotary embeddings, which the estimate leaves out.
    const ROPE: usize = 4096;
    const WEIGHTS: &str = "offload.weights=true";
    const GRADIENTS: &str = "offload.gradients=true";
    for set in [
        &["model.tied=true", "precision.dtype=bf16", WEIGHTS][..],
        &["model.tied=true", GRADIENTS],
        &["model.layers=6", "model.tied=false", "precision.dtype=bf16", WEIGHTS, GRADIENTS],
        &["model.layers=6", "model.tied=false", "parallel.comm_unit=150KB", WEIGHTS, GRADIENTS],
        &["model.layers=4", "parallel.overlap=false", "parallel.comm_unit=30KB", WEIGHTS, GRADIENTS],
        &[
            "model.layers=4",
            "precision.dtype=bf16",
            "precision.recipe=fp8-current",
            "precision.fp8_params=true",
            WEIGHTS,
            GRADIENTS,
        ],
    ] {
        for dp in [1, 2, 4] {
            let overlap = !set.contains(&"parallel.overlap=false");
            let case = Case { tp: 1, cp: 1, pp: 1, dp, zero: 3, overlap, set: Vec::leak(set.to_vec()) };
            let estimate = MemoryEstimate::of(&case.recipe()).unwrap().largest().unwrap();
            let expected = [estimate.parameters, estimate.gradients, estimate.host];
            for found in case.run(|rank, resolved| {
                let sources = source::open(&resolved)?;
                let mut trainer = Trainer::new(rank.clone(), &resolved)?;
                (0..2).try_for_each(|_| trainer.train_step(&*sources.train).map(drop))?;
                let memory = rank.device().memory();
                let peak = [Category::Parameters, Category::Gradients].map(|c| memory.peak[c as usize]);
                Ok([peak[0] - ROPE, peak[1], memory.host.now])
            }) {
                let near = |(a, b): (&usize, &usize)| (*a as f64 - *b as f64).abs() <= 0.02 * *b as f64;
                let what = format!("dp{dp} {set:?}: {found:?} instead of {expected:?}");
                assert!(found.iter().zip(&expected).all(near), "{what}");
            }
        }
    }
}
