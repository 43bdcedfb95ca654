//! The event log: round trip, interruption and resume, tolerance of a torn last line.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::events::*;
use std::io::Write;

fn step(step: u64) -> Event {
    Event::Step(Step {
        step,
        loss: 5.0 / step as f64,
        tokens: step * 4096,
        lr: 1e-3,
        grad_norm: 0.5,
        ..Step::default()
    })
}

fn start() -> Event {
    Event::RunStart(RunStart { recipe: "tiny".into(), steps: 6, ..RunStart::default() })
}

fn end(step: u64, ending: Ending) -> Event {
    Event::RunEnd(RunEnd { step, ending, seconds: 1.5, tokens_per_s: 10.0, reason: None })
}

fn checkpoint(step: u64) -> Event {
    Event::Checkpoint(Checkpoint {
        step,
        path: format!("checkpoints/{step}"),
        bytes: 10,
        seconds: 0.1,
        best: false,
    })
}

fn write(log: &mut EventLog, events: &[Event]) {
    events.iter().for_each(|e| log.write(e).unwrap());
}

fn events(path: &std::path::Path) -> Vec<Event> {
    read(path).unwrap().into_iter().map(|l| l.event).collect()
}

#[test]
fn events_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    let all = vec![
        start(),
        step(1),
        Event::Eval(Eval { step: 1, loss: 2.25, tokens: 64, ..Eval::default() }),
        Event::Precision(Precision {
            step: 1,
            operands: vec![
                Operand { module: "layers.0.mlp.down".into(), role: "input".into(), ..Operand::default() },
                Operand { scale: Some([0.5, 64.0]), error: 0.03, ..Operand::default() },
            ],
        }),
        checkpoint(1),
        Event::Sample(Sample { step: 1, prompt: "a\n\"b".into(), text: "é\u{1F600}".into() }),
        end(1, Ending::Finished),
    ];
    let mut log = EventLog::create(&path).unwrap();
    write(&mut log, &all);
    log.sync().unwrap();
    assert_eq!(events(&path), all);
    assert_eq!(events(dir.path()), all, "the run folder names its log");
    assert!(read(&path).unwrap().iter().all(|l| l.time > 1.7e9));

    let text = std::fs::read_to_string(&path).unwrap();
    let line: serde_json::Value = serde_json::from_str(text.lines().nth(1).unwrap()).unwrap();
    assert_eq!(line["kind"], "step");
    for key in ["step", "loss", "tokens", "lr", "grad_norm", "tokens_per_s", "tflops", "memory", "reserved"] {
        assert!(line[key].is_number(), "{key}: {line}");
    }
}

#[test]
fn a_loss_that_is_not_a_number_survives() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    let bad = Event::Step(Step { step: 1, loss: f64::NAN, grad_norm: f64::INFINITY, ..Step::default() });
    EventLog::create(&path).unwrap().write(&bad).unwrap();
    let [Event::Step(back)] = &events(&path)[..] else { panic!() };
    assert!(back.loss.is_nan() && back.grad_norm.is_nan());
}

#[test]
fn an_interrupted_and_resumed_run_reads_like_one() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one.jsonl"), dir.path().join("two.jsonl"));
    let whole = [
        start(),
        step(1),
        step(2),
        checkpoint(2),
        step(3),
        step(4),
        checkpoint(4),
        step(5),
        end(5, Ending::Finished),
    ];
    write(&mut EventLog::create(&one).unwrap(), &whole);

    // Killed while writing step 4 after the checkpoint at 2; then stopped by a signal at 4; then finished.
    write(&mut EventLog::create(&two).unwrap(), &whole[..5]);
    std::fs::OpenOptions::new()
        .append(true)
        .open(&two)
        .unwrap()
        .write_all(b"{\"kind\":\"step\",\"st")
        .unwrap();
    assert_eq!(events(&two), whole[..5], "a torn line is left out");
    let mut log = EventLog::resume(&two, 2).unwrap();
    assert_eq!(events(&two), whole[..4]);
    write(&mut log, &[step(3), step(4), checkpoint(4), end(4, Ending::Interrupted)]);
    let mut log = EventLog::resume(&two, 4).unwrap();
    write(&mut log, &whole[7..]);
    assert_eq!(events(&two), events(&one));

    // Resuming where the log ends changes no byte of it, whichever way it ended.
    let before = std::fs::read(&two).unwrap();
    let cut = before.len() - 1;
    drop(EventLog::resume(&two, 1000).unwrap());
    assert_eq!(events(&two), whole[..8], "the end is no longer the end");
    std::fs::write(&two, &before[..cut]).unwrap();
    drop(EventLog::resume(&two, 1000).unwrap());
    assert_eq!(events(&two), whole[..8]);

    drop(EventLog::resume(&two, 0).unwrap());
    assert_eq!(events(&two), []);
    drop(EventLog::resume(&dir.path().join("new.jsonl"), 3).unwrap());
}

#[test]
fn every_way_of_tearing_the_last_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    write(&mut EventLog::create(&path).unwrap(), &[start(), step(1), step(2)]);
    let text = std::fs::read(&path).unwrap();
    let ends: Vec<usize> = (1..=text.len()).filter(|i| text[i - 1] == b'\n').collect();
    for cut in 0..=text.len() {
        // A line counts once its last character is there, with or without the newline.
        let whole = ends.iter().filter(|e| cut + 1 >= **e).count();
        let read = parse(&path, &text[..cut]).unwrap();
        assert_eq!(read.len(), whole, "cut at {cut}");
        std::fs::write(&path, &text[..cut]).unwrap();
        let mut log = EventLog::resume(&path, 1).unwrap();
        log.write(&step(2)).unwrap();
        assert_eq!(events(&path).last(), Some(&step(2)), "cut at {cut}");
    }
}

#[test]
fn damage_in_the_middle_names_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    write(&mut EventLog::create(&path).unwrap(), &[start(), step(1), step(2)]);
    let mut text = std::fs::read(&path).unwrap();
    let second = text.iter().position(|b| *b == b'\n').unwrap() + 1;
    text[second] = 0xff;
    std::fs::write(&path, &text).unwrap();
    let e = read(&path).unwrap_err().to_string();
    assert!(e.contains("events.jsonl: line 2 is not an event"), "{e}");
    assert!(!e.contains('\n'));
    // Resuming drops the unreadable line and keeps the rest.
    drop(EventLog::resume(&path, 5).unwrap());
    assert_eq!(events(&path), [start(), step(2)]);
}
