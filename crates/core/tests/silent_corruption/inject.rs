//! Entries of `fault.inject`.

use ferrotron_core::fault::inject::{FaultKind, FlipTarget, Injection, Injector};

#[test]
fn entries_are_parsed_and_wrong_ones_explained() {
    let flip = Injection::parse("flip:target=gradient,rank=2,step=7,bit=30,tensor=mlp,element=5").unwrap();
    assert_eq!((flip.kind, flip.rank, flip.step), (FaultKind::Flip(FlipTarget::Gradient), 2, 7));
    assert_eq!((flip.bit, flip.tensor.as_str(), flip.element, flip.times), (Some(30), "mlp", 5, 1));
    let slow = Injection::parse("slow:rank=1,step=3,percent=50").unwrap();
    assert_eq!((slow.percent, slow.times), (50.0, u64::MAX));
    for (entry, says) in [
        ("explode:step=1", "one of kill, stop"),
        ("kill", "needs step"),
        ("kill:step=x", "step=x"),
        ("kill:step", "not key=value"),
        ("kill:step=1,bit=3", "no key \"bit\""),
        ("flip:step=1", "needs target="),
        ("flip:step=1,target=tokens", "weight, gradient"),
        ("slow:step=1,percent=-3", "at least 0"),
    ] {
        let e = Injection::parse(entry).unwrap_err();
        assert!(e.contains(says), "{entry}: {e}");
    }
}

#[test]
fn an_entry_acts_once_on_its_rank_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let list = ["nan:rank=1,step=4".to_string(), "nan:rank=1,step=4,times=2".to_string()];
    let new = |rank| {
        let mut injector = Injector::new(&list, rank, None).unwrap();
        injector.remember_in(folder.path(), false);
        injector
    };
    assert!(new(0).is_empty());
    let injector = new(1);
    assert!(injector.take(3, |_| true).unwrap().is_none(), "too early");
    assert!(injector.take(4, |e| e.kind == FaultKind::Kill).unwrap().is_none(), "another kind");
    let taken = |injector: &Injector| injector.take(5, |_| true).unwrap().map(|e| e.times);
    assert_eq!([taken(&injector), taken(&injector)], [Some(1), Some(2)]);
    let restarted = new(1);
    assert_eq!([taken(&restarted), taken(&restarted)], [Some(2), None]);
    let mut fresh = new(1);
    fresh.remember_in(folder.path(), true);
    assert_eq!(taken(&fresh), Some(1));
}
