//! What `train.cuda_graph` decides, and the memory of a graph.

use super::{Changing, card, recipe, steps, train};
use ferrotron_core::config::CudaGraphMode;
use ferrotron_core::train::Trainer;
use ferrotron_engine::Rank;
use ferrotron_tensor::Instrumentation;

#[test]
fn auto_decides_and_says_why() {
    let r = recipe("auto", &[]);
    let Some((rank, _alone)) = card() else {
        let t = Trainer::new(Rank::cpu(1, 1).unwrap(), &r).unwrap();
        assert_eq!(t.cuda_graph_decision().value, CudaGraphMode::Off);
        assert!(!t.cuda_graph_undecided());
        let refused = Trainer::new(Rank::cpu(1, 1).unwrap(), &recipe("on", &[])).err().unwrap().to_string();
        assert!(refused.contains("train.cuda_graph") && refused.contains("CPU") && !refused.contains('\n'));
        return;
    };
    for ahead in [false, true] {
        let mut t = Trainer::new(rank.clone(), &r).unwrap();
        assert_eq!(t.cuda_graph_decision().value, CudaGraphMode::Auto);
        steps(&mut t, 8, ahead);
        let choice = t.cuda_graph_decision();
        println!("ahead {ahead}: {:?}, {} replayed", choice, t.steps_replayed());
        assert!(choice.value != CudaGraphMode::Auto && choice.reason.contains('%'), "{choice:?}");
        assert_eq!(t.steps_replayed() > 0, choice.value == CudaGraphMode::On);
    }
    // Instrumented steps are launched.
    let (watched, _) =
        Rank::cuda(0, 1, 1234, Instrumentation { race_check: true, ..Instrumentation::default() }).unwrap();
    let mut t = Trainer::new(watched.clone(), &r).unwrap();
    steps(&mut t, 6, true);
    assert_eq!((t.steps_replayed(), t.cuda_graph_decision().value), (0, CudaGraphMode::Off));
    assert!(Trainer::new(watched, &recipe("on", &[])).is_err());
}

#[test]
fn memory_is_constant_and_equal_to_launched_steps() {
    // Large enough that an evaluation borrows a graph's memory.
    let sizes = ["model.hidden=256", "model.ffn=512", "train.micro_batch=16", "train.global_batch=32"];
    let changes = [&sizes[..], &["optimizer.lr=1e-3"]].concat();
    let Some((warm, _alone)) = card() else { return drop(recipe("on", &changes)) };
    let free = |r: &Rank| r.device().gpu_memory().unwrap().unwrap().0;
    // Lazy driver allocations are not counted.
    train(&warm, "on", &changes, true);
    let used = ["off", "on"].map(|graph| {
        let (rank, _) = Rank::cuda(0, 1, 1234, Instrumentation::default()).unwrap();
        let before = free(&rank);
        let mut t = Trainer::new(rank.clone(), &recipe(graph, &changes)).unwrap();
        steps(&mut t, 15, true);
        t.evaluate(&Changing, 3).unwrap();
        steps(&mut t, 15, true);
        let (now, left) = (rank.device().memory(), free(&rank));
        for _ in 0..9 {
            steps(&mut t, 30, true);
            t.evaluate(&Changing, 3).unwrap();
        }
        assert_eq!(rank.device().memory(), now, "{graph}");
        assert_eq!(free(&rank), left, "{graph}");
        assert_eq!(t.steps_replayed(), if graph == "on" { 297 } else { 0 });
        println!(
            "{graph}: {} live, {} at most, {} of the card",
            now.total_now,
            now.total_peak,
            before - left
        );
        (now.total_now, now.total_peak, before - left)
    });
    // A graph owns its inputs and outputs, plus what the driver needs.
    let inputs = 2 * 4 * 4 * 1024 + 1024;
    let [off, on] = used;
    assert!(on.0 <= off.0 + inputs && on.1 <= off.1 + inputs, "{used:?}");
    assert!(on.2 <= off.2 + (8 << 20), "{used:?}");
}
