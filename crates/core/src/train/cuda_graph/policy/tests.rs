use super::*;
use ferrotron_kernels::IGNORE;

const SHAPE: StepShape = StepShape { micro_batches: 2, tokens: 32, seq: 16, sequences: None, splits: None };
const MS: Duration = Duration::from_millis(1);

fn policy(mode: CudaGraphMode) -> GraphPolicy {
    GraphPolicy::of(mode, false, None).unwrap()
}

/// Eager steps of a shape before a capture or replay.
fn eager_steps(p: &mut GraphPolicy, shape: StepShape, captured: Option<StepShape>) -> u32 {
    (0..20).find(|_| p.next(Some(shape), captured, true) != LaunchMode::Eager).unwrap_or(20)
}

#[test]
fn warm_up_then_capture_then_replay() {
    let mut p = policy(CudaGraphMode::On);
    assert!(p.is_open());
    assert_eq!(eager_steps(&mut p, SHAPE, None), WARMUP_STEPS);
    assert_eq!(p.next(Some(SHAPE), None, false), LaunchMode::Capture);
    assert_eq!(p.next(Some(SHAPE), Some(SHAPE), true), LaunchMode::Replay);
    assert!(!p.is_open());
}

#[test]
fn steps_of_other_shapes_run_eagerly() {
    let mut p = policy(CudaGraphMode::On);
    eager_steps(&mut p, SHAPE, None);
    // The graph is busy, or a step of no shape comes between: the graph stays valid.
    assert_eq!(p.next(Some(SHAPE), Some(SHAPE), false), LaunchMode::Eager);
    assert_eq!(p.next(None, Some(SHAPE), true), LaunchMode::Eager);
    assert_eq!(p.next(Some(SHAPE), Some(SHAPE), true), LaunchMode::Replay);
    // Another shape: warm-up starts anew, then another graph is captured.
    let more = StepShape { micro_batches: 4, ..SHAPE };
    let resized = StepShape { splits: Some(1), ..SHAPE };
    for shape in [more, StepShape { tokens: 64, ..SHAPE }, StepShape { seq: 32, ..SHAPE }, resized] {
        assert_eq!(eager_steps(&mut p, shape, Some(SHAPE)), WARMUP_STEPS);
    }
    // Steps of no shape alone never decide.
    let mut p = policy(CudaGraphMode::On);
    (0..9).for_each(|_| assert_eq!(p.next(None, None, false), LaunchMode::Eager));
    assert!(!p.is_open() && p.decision().value == CudaGraphMode::Off);
    // Steps whose shape changes every time are never captured.
    let mut p = policy(CudaGraphMode::On);
    for n in 1..20 {
        assert_eq!(p.next(Some(StepShape { micro_batches: n, ..SHAPE }), None, false), LaunchMode::Eager);
    }
    assert_eq!(eager_steps(&mut policy(CudaGraphMode::Off), SHAPE, Some(SHAPE)), 20);
}

/// A graph for many sequences replays steps with fewer; steps with more become a larger graph.
#[test]
fn graphs_of_packed_sequences_hold_fewer_sequences() {
    let packed = |n| StepShape { sequences: Some(n), ..SHAPE };
    let mut p = policy(CudaGraphMode::On);
    // Steps of different numbers of sequences warm up together, once the largest has come.
    assert_eq!(p.next(Some(packed(16)), None, false), LaunchMode::Eager);
    assert_eq!(p.next(Some(packed(32)), None, false), LaunchMode::Eager);
    for n in [16, 8] {
        assert_eq!(p.next(Some(packed(n)), None, false), LaunchMode::Eager);
    }
    assert_eq!(p.next(Some(packed(16)), None, false), LaunchMode::Capture);
    assert_eq!(p.shape(), Some(packed(32)));
    for n in [8, 32, 16] {
        assert_eq!(p.next(Some(packed(n)), p.shape(), true), LaunchMode::Replay);
    }
    // More sequences, with replays in between.
    let captured = p.shape();
    for _ in 0..WARMUP_STEPS {
        assert_eq!(p.next(Some(packed(64)), captured, true), LaunchMode::Eager);
        assert_eq!(p.next(Some(packed(32)), captured, true), LaunchMode::Replay);
    }
    assert_eq!(p.next(Some(packed(64)), captured, true), LaunchMode::Capture);
    assert_eq!(p.shape(), Some(packed(64)));
    // Rows are no packed sequences.
    assert!(!packed(64).holds(&SHAPE) && !SHAPE.holds(&packed(8)) && SHAPE.holds(&SHAPE));
    assert!(!packed(64).holds(&StepShape { tokens: 64, ..packed(8) }));
}

#[test]
fn auto_decides_by_the_launch_share() {
    for (host, pays) in [(3, true), (1, false)] {
        let mut p = policy(CudaGraphMode::Auto);
        assert_eq!(eager_steps(&mut p, SHAPE, None), 20, "nothing measured, nothing captured");
        assert!(p.is_open() && p.decision().value == CudaGraphMode::Auto);
        p.record_times(StepShape { seq: 8, ..SHAPE }, 9 * MS, 10 * MS);
        assert!(p.is_open(), "a step of another shape says nothing");
        p.record_times(SHAPE, 30 * MS, 30 * MS);
        p.record_times(SHAPE, host * MS, 10 * MS);
        assert!(!p.is_open());
        let next = p.next(Some(SHAPE), None, false);
        assert_eq!(next, if pays { LaunchMode::Capture } else { LaunchMode::Eager });
        let decision = p.decision();
        assert_eq!(decision.value, if pays { CudaGraphMode::On } else { CudaGraphMode::Off });
        assert!(decision.reason.contains(&format!("{host}0 %")), "{}", decision.reason);
    }
}

#[test]
fn auto_replays_long_launches_of_one_rank() {
    for (alone, host, pays) in [(true, 3, true), (true, 2, false), (false, 8, false)] {
        let mut p = GraphPolicy::of(CudaGraphMode::Auto, alone, None).unwrap();
        eager_steps(&mut p, SHAPE, None);
        p.record_times(SHAPE, host * MS, 200 * MS);
        let next = p.next(Some(SHAPE), None, false);
        assert_eq!(next, if pays { LaunchMode::Capture } else { LaunchMode::Eager }, "{alone} {host}");
        let decision = p.decision();
        assert_eq!(decision.value, if pays { CudaGraphMode::On } else { CudaGraphMode::Off });
        assert!(decision.reason.contains(if pays { "3.0 ms" } else { "%" }), "{}", decision.reason);
    }
}

#[test]
fn on_is_refused_and_auto_is_off_where_capture_is_impossible() {
    let why = GraphPolicy::of(CudaGraphMode::On, true, Some("no capture here")).err().unwrap().to_string();
    assert!(why.contains("train.cuda_graph") && why.contains("no capture here"), "{why}");
    let mut p = GraphPolicy::of(CudaGraphMode::Auto, true, Some("no capture here")).unwrap();
    assert_eq!(eager_steps(&mut p, SHAPE, None), 20);
    assert!(!p.is_open());
    let off = CudaGraphDecision { value: CudaGraphMode::Off, reason: "no capture here".into() };
    assert_eq!(p.decision(), off);
    // A capture that fails.
    let failure = || Error::Invalid("a GEMM was autotuned\nand more".into());
    assert!(policy(CudaGraphMode::On).capture_failed(failure()).is_err());
    let mut p = policy(CudaGraphMode::Auto);
    p.capture_failed(failure()).unwrap();
    assert_eq!(
        p.decision(),
        CudaGraphDecision { value: CudaGraphMode::Off, reason: "a GEMM was autotuned".into() }
    );
    assert_eq!(eager_steps(&mut p, SHAPE, None), 20);
}

#[test]
fn shapes_distinguish_steps_with_different_launches() {
    let batch = |rows: i32| Batch {
        tokens: vec![1; rows as usize * 16],
        labels: vec![IGNORE; rows as usize * 16],
        positions: (0..rows * 16).map(|i| i % 16).collect(),
        cu_seqlens: None,
        padding: None,
        varies: false,
    };
    let of = |batches: &[Batch], sequences| StepShape::of(batches, (16, sequences), None);
    assert_eq!(of(&[batch(2), batch(2)], 0), Some(SHAPE));
    assert_eq!(SHAPE.layout().tokens(), 32);
    assert_eq!(of(&[], 0), None);
    assert_eq!(of(&[batch(2), batch(1)], 0), None);
    let padding = Some(vec![true; 32]);
    assert_eq!(of(&[batch(2), Batch { padding: padding.clone(), ..batch(2) }], 0), None);
    // Packed sequences, of which there may be fewer, and rows that end in padding.
    let packed = |offsets: &[i32]| Batch { cu_seqlens: Some(offsets.to_vec()), ..batch(2) };
    let shape = StepShape { sequences: Some(4), ..SHAPE };
    assert_eq!(of(&[packed(&[0, 16, 32]), packed(&[0, 3, 9, 16, 32])], 4), Some(shape));
    assert_eq!(of(&[Batch { padding, ..packed(&[0, 16, 32]) }, packed(&[0, 32])], 4), Some(shape));
    assert_eq!(of(&[packed(&[0, 16, 32]), packed(&[0, 3, 9, 12, 16, 32])], 4), None);
    assert_eq!(of(&[batch(2), packed(&[0, 16, 32])], 4), None);
    assert_eq!(of(&[packed(&[0, 16, 32]), batch(2)], 4), None);
    assert_eq!(of(&[Batch { varies: true, ..packed(&[0, 16, 32]) }], 4), None);
    assert!(shape.layout().check(32).is_ok() && shape.layout().lengths().len() == 4);
}
