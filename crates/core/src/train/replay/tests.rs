use super::*;
use ferrotron_kernels::IGNORE;

const FORM: Form = Form { micro_batches: 2, tokens: 32, seq: 16 };
const MS: Duration = Duration::from_millis(1);

fn policy(wish: Wish) -> Policy {
    Policy::of(wish, None).unwrap()
}

/// Steps of a form until something other than launches comes.
fn launches(p: &mut Policy, form: Form, made: Option<Form>) -> u32 {
    (0..20).find(|_| p.next(Some(form), made, true) != Next::Launches).unwrap_or(20)
}

#[test]
fn captures_come_after_the_first_steps_and_replays_after_captures() {
    let mut p = policy(Wish::On);
    assert!(p.is_open());
    assert_eq!(launches(&mut p, FORM, None), FIRST);
    assert_eq!(p.next(Some(FORM), None, false), Next::Capture);
    assert_eq!(p.next(Some(FORM), Some(FORM), true), Next::Replay);
    assert!(!p.is_open());
}

#[test]
fn other_steps_are_given_launch_by_launch() {
    let mut p = policy(Wish::On);
    launches(&mut p, FORM, None);
    // Something else is in its memory; a packed step comes between: the graph stays good.
    assert_eq!(p.next(Some(FORM), Some(FORM), false), Next::Launches);
    assert_eq!(p.next(None, Some(FORM), true), Next::Launches);
    assert_eq!(p.next(Some(FORM), Some(FORM), true), Next::Replay);
    // More micro-batches: the first steps anew, then another graph.
    let more = Form { micro_batches: 4, ..FORM };
    for form in [more, Form { tokens: 64, ..FORM }, Form { seq: 32, ..FORM }] {
        assert_eq!(launches(&mut p, form, Some(FORM)), FIRST);
    }
    // Packed steps alone: nothing to wait for.
    let mut p = policy(Wish::On);
    (0..9).for_each(|_| assert_eq!(p.next(None, None, false), Next::Launches));
    assert!(!p.is_open() && p.choice().value == Wish::Off);
    // Steps that change every time are never captured.
    let mut p = policy(Wish::On);
    for n in 1..20 {
        assert_eq!(p.next(Some(Form { micro_batches: n, ..FORM }), None, false), Next::Launches);
    }
    assert_eq!(launches(&mut policy(Wish::Off), FORM, Some(FORM)), 20);
}

#[test]
fn auto_decides_by_the_hosts_part_of_a_step() {
    for (host, pays) in [(3, true), (1, false)] {
        let mut p = policy(Wish::Auto);
        assert_eq!(launches(&mut p, FORM, None), 20, "nothing measured, nothing captured");
        assert!(p.is_open() && p.choice().value == Wish::Auto);
        p.took(Form { seq: 8, ..FORM }, 9 * MS, 10 * MS);
        assert!(p.is_open(), "a step of another form says nothing");
        p.took(FORM, 30 * MS, 30 * MS);
        p.took(FORM, host * MS, 10 * MS);
        assert!(!p.is_open());
        let next = p.next(Some(FORM), None, false);
        assert_eq!(next, if pays { Next::Capture } else { Next::Launches });
        let choice = p.choice();
        assert_eq!(choice.value, if pays { Wish::On } else { Wish::Off });
        assert!(choice.reason.contains(&format!("{host}0 %")), "{}", choice.reason);
    }
}

#[test]
fn where_it_cannot_work_on_is_refused_and_auto_is_off() {
    let why = Policy::of(Wish::On, Some("the moon is full")).err().unwrap().to_string();
    assert!(why.contains("train.graph") && why.contains("the moon is full"), "{why}");
    let mut p = Policy::of(Wish::Auto, Some("the moon is full")).unwrap();
    assert_eq!(launches(&mut p, FORM, None), 20);
    assert!(!p.is_open());
    let off = GraphChoice { value: Wish::Off, reason: "the moon is full".into() };
    assert_eq!(p.choice(), off);
    // A capture that fails.
    let failure = || Error::Invalid("a choice by time\nand more".into());
    assert!(policy(Wish::On).failed(failure()).is_err());
    let mut p = policy(Wish::Auto);
    p.failed(failure()).unwrap();
    assert_eq!(p.choice(), GraphChoice { value: Wish::Off, reason: "a choice by time".into() });
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
    assert_eq!(Form::of(&[batch(2), batch(2)], 16), Some(FORM));
    assert_eq!(FORM.layout().tokens(), 32);
    assert_eq!(Form::of(&[], 16), None);
    assert_eq!(Form::of(&[batch(2), batch(1)], 16), None);
    let packed = Batch { cu_seqlens: Some(vec![0, 16, 32]), ..batch(2) };
    assert_eq!(Form::of(&[batch(2), packed], 16), None);
}
