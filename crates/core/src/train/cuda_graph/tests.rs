use super::*;
use ferrotron_kernels::IGNORE;

const FORM: StepShape = StepShape { micro_batches: 2, tokens: 32, seq: 16 };
const MS: Duration = Duration::from_millis(1);

fn policy(mode: CudaGraphMode) -> GraphPolicy {
    GraphPolicy::of(mode, None).unwrap()
}

/// Steps of a form until something other than launches comes.
fn launches(p: &mut GraphPolicy, form: StepShape, made: Option<StepShape>) -> u32 {
    (0..20).find(|_| p.next(Some(form), made, true) != LaunchMode::Eager).unwrap_or(20)
}

#[test]
fn captures_come_after_the_first_steps_and_replays_after_captures() {
    let mut p = policy(CudaGraphMode::On);
    assert!(p.is_open());
    assert_eq!(launches(&mut p, FORM, None), WARMUP_STEPS);
    assert_eq!(p.next(Some(FORM), None, false), LaunchMode::Capture);
    assert_eq!(p.next(Some(FORM), Some(FORM), true), LaunchMode::Replay);
    assert!(!p.is_open());
}

#[test]
fn other_steps_are_given_launch_by_launch() {
    let mut p = policy(CudaGraphMode::On);
    launches(&mut p, FORM, None);
    // Something else is in its memory; a packed step comes between: the graph stays good.
    assert_eq!(p.next(Some(FORM), Some(FORM), false), LaunchMode::Eager);
    assert_eq!(p.next(None, Some(FORM), true), LaunchMode::Eager);
    assert_eq!(p.next(Some(FORM), Some(FORM), true), LaunchMode::Replay);
    // More micro-batches: the first steps anew, then another graph.
    let more = StepShape { micro_batches: 4, ..FORM };
    for form in [more, StepShape { tokens: 64, ..FORM }, StepShape { seq: 32, ..FORM }] {
        assert_eq!(launches(&mut p, form, Some(FORM)), WARMUP_STEPS);
    }
    // Packed steps alone: nothing to wait for.
    let mut p = policy(CudaGraphMode::On);
    (0..9).for_each(|_| assert_eq!(p.next(None, None, false), LaunchMode::Eager));
    assert!(!p.is_open() && p.choice().value == CudaGraphMode::Off);
    // Steps that change every time are never captured.
    let mut p = policy(CudaGraphMode::On);
    for n in 1..20 {
        assert_eq!(p.next(Some(StepShape { micro_batches: n, ..FORM }), None, false), LaunchMode::Eager);
    }
    assert_eq!(launches(&mut policy(CudaGraphMode::Off), FORM, Some(FORM)), 20);
}

#[test]
fn auto_decides_by_the_hosts_part_of_a_step() {
    for (host, pays) in [(3, true), (1, false)] {
        let mut p = policy(CudaGraphMode::Auto);
        assert_eq!(launches(&mut p, FORM, None), 20, "nothing measured, nothing captured");
        assert!(p.is_open() && p.choice().value == CudaGraphMode::Auto);
        p.record_times(StepShape { seq: 8, ..FORM }, 9 * MS, 10 * MS);
        assert!(p.is_open(), "a step of another form says nothing");
        p.record_times(FORM, 30 * MS, 30 * MS);
        p.record_times(FORM, host * MS, 10 * MS);
        assert!(!p.is_open());
        let next = p.next(Some(FORM), None, false);
        assert_eq!(next, if pays { LaunchMode::Capture } else { LaunchMode::Eager });
        let choice = p.choice();
        assert_eq!(choice.value, if pays { CudaGraphMode::On } else { CudaGraphMode::Off });
        assert!(choice.reason.contains(&format!("{host}0 %")), "{}", choice.reason);
    }
}

#[test]
fn where_it_cannot_work_on_is_refused_and_auto_is_off() {
    let why = GraphPolicy::of(CudaGraphMode::On, Some("the moon is full")).err().unwrap().to_string();
    assert!(why.contains("train.cuda_graph") && why.contains("the moon is full"), "{why}");
    let mut p = GraphPolicy::of(CudaGraphMode::Auto, Some("the moon is full")).unwrap();
    assert_eq!(launches(&mut p, FORM, None), 20);
    assert!(!p.is_open());
    let off = CudaGraphDecision { value: CudaGraphMode::Off, reason: "the moon is full".into() };
    assert_eq!(p.choice(), off);
    // A capture that fails.
    let failure = || Error::Invalid("a choice by time\nand more".into());
    assert!(policy(CudaGraphMode::On).failed(failure()).is_err());
    let mut p = policy(CudaGraphMode::Auto);
    p.failed(failure()).unwrap();
    assert_eq!(
        p.choice(),
        CudaGraphDecision { value: CudaGraphMode::Off, reason: "a choice by time".into() }
    );
    assert_eq!(launches(&mut p, FORM, None), 20);
}

#[test]
fn forms_tell_steps_apart_that_launch_other_kernels() {
    let batch = |rows: i32| Batch {
        tokens: vec![1; rows as usize * 16],
        labels: vec![IGNORE; rows as usize * 16],
        positions: (0..rows * 16).map(|i| i % 16).collect(),
        cu_seqlens: None,
        padding: None,
    };
    assert_eq!(StepShape::of(&[batch(2), batch(2)], 16), Some(FORM));
    assert_eq!(FORM.layout().tokens(), 32);
    assert_eq!(StepShape::of(&[], 16), None);
    assert_eq!(StepShape::of(&[batch(2), batch(1)], 16), None);
    let packed = Batch { cu_seqlens: Some(vec![0, 16, 32]), ..batch(2) };
    assert_eq!(StepShape::of(&[batch(2), packed], 16), None);
}
