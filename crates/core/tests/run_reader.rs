//! The reader of all views: a log that grows, is torn, replaced or damaged, steps that are done again, many events.

// The lints see a test only where `#[test]` stands; everything here is one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::events::*;
use serde_json::json;
use std::io::Write;
use std::path::Path;

/// A step with every field, some of them not finite.
fn step(n: u64) -> Event {
    let x = n as f64;
    let mut s = Step {
        step: n,
        loss: if n % 97 == 5 { f64::NAN } else { 5.0 / (1.0 + x / 3.0) },
        tokens: n * 4096,
        epoch: Some(x / 300.0),
        lr: 1e-3 / x,
        grad_norm: if n % 89 == 7 { f64::INFINITY } else { 0.1 + 1e-9 * x },
        batch: 16,
        seconds: 0.25,
        tokens_per_s: 16384.0 + x,
        tflops: 1.5,
        memory: 1 << 33,
        reserved: (1 << 33) + n,
        memory_peaks: [("activations".to_string(), 7 * n), ("parameters".to_string(), 12)].into(),
        sent: [("tp".to_string(), [("all-gather".to_string(), 4096)].into())].into(),
        ..Step::default()
    };
    s.losses = [("mtp_1 loss".to_string(), 4.0), ("mtp_2 loss".to_string(), f64::NAN)].into();
    s.more.insert("imbalance".into(), json!(1.0 + 1.0 / x));
    s.more.insert("energy_j".into(), json!(null));
    s.more.insert("text".into(), json!("a \"quoted\" {text}"));
    if n.is_multiple_of(3) {
        s.more.insert("moe/load_layer_1".into(), json!([n, 2, 0, 5]));
        s.more.insert("moe/load_layer_0".into(), json!([]));
    }
    Event::Step(s)
}

fn lines(events: impl IntoIterator<Item = Event>) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, event) in events.into_iter().enumerate() {
        out.extend(serde_json::to_vec(&Line { event, time: 1e9 + i as f64 / 8.0 }).unwrap());
        out.push(b'\n');
    }
    out
}

fn history(text: &[u8]) -> RunHistory {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(FILE_NAME), text).unwrap();
    RunReader::open(dir.path()).unwrap().history
}

/// Columns that are equal in their bits, in any order.
fn assert_same(a: &RunHistory, b: &RunHistory) {
    assert_eq!((&a.steps.step, &a.steps.time), (&b.steps.step, &b.steps.time));
    let names = |h: &RunHistory| {
        let mut names: Vec<String> = h.steps.names().map(Into::into).collect();
        names.sort();
        names
    };
    assert_eq!(names(a), names(b));
    for name in names(a) {
        let bits = |h: &RunHistory| h.steps.column(&name).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(a) == bits(b), "{name}");
    }
    assert_eq!((&a.evals, &a.loads, &a.end, a.events), (&b.evals, &b.loads, &b.end, b.events));
    assert_eq!((&a.notes, &a.checkpoints, a.unreadable), (&b.notes, &b.checkpoints, b.unreadable));
}

#[test]
fn scanned_lines_equal_parsed_events() {
    let text = lines((1..=400).map(step));
    let fast = history(&text);
    // With a space in front the scanner leaves a line to the JSON parser.
    let spaced: Vec<u8> = text.split_inclusive(|b| *b == b'\n').flat_map(|l| [b" ", l].concat()).collect();
    assert_same(&fast, &history(&spaced));
    // And both to what every event says.
    let parsed = parse(Path::new("log"), &text).unwrap();
    assert_eq!(parsed.len(), fast.steps.len());
    for (i, line) in parsed.iter().enumerate() {
        let Event::Step(s) = &line.event else { panic!() };
        let is = |name: &str, x: f64| assert_eq!(fast.steps.column(name)[i].to_bits(), x.to_bits(), "{name}");
        assert_eq!(fast.steps.step[i], s.step);
        is("loss", s.loss);
        is("tokens", s.tokens as f64);
        is("lr", s.lr);
        is("grad_norm", s.grad_norm);
        is("memory_peaks/activations", s.memory_peaks["activations"] as f64);
        is("losses/mtp_2 loss", f64::NAN);
        is("imbalance", s.more["imbalance"].as_f64().unwrap());
        is("energy_j", f64::NAN);
    }
    assert_eq!(fast.steps.column("text"), [0.0; 0]);
    assert_eq!(fast.steps.column("sent"), [0.0; 0]);
    assert_eq!(fast.loads[1].step, 6);
    assert_eq!(fast.loads[1].layers, [(0, vec![]), (1, vec![6.0, 2.0, 0.0, 5.0])]);
}

#[test]
fn hand_written_forms_are_read_and_damage_is_counted() {
    let h = history(
        b"{\"kind\":\"step\", \"step\" : 1 , \"loss\":2.5e0,\"tokens\":1,\"lr\":0,\"grad_norm\":null,\"x\":{\"y\":[1,{\"z\":\"\"}]}, \"t\":true}\n\
          {\"kind\":\"step\",\"step\":2,\"loss\":1,\"tokens\":1,\"lr\":0,\"grad_norm\":1,\"\\u0061b\":3}\n\
          \n{\"kind\":\"step\",\"step\":3,\"loss\":\n\xff\n{\"kind\":\"of later versions\",\"step\":4}\n\
          {\"kind\":\"step\",\"step\":3,\"loss\":7,\"tokens\":1,\"lr\":0,\"grad_norm\":1} x\n\
          {\"kind\":\"step\",\"step\":4,\"loss\":0.5,\"tokens\":1,\"lr\":0,\"grad_norm\":1}\n",
    );
    assert_eq!(h.steps.step, [1, 2, 4]);
    assert_eq!(h.steps.column("loss"), [2.5, 1.0, 0.5]);
    assert_eq!(h.steps.column("ab")[1], 3.0);
    assert_eq!(h.unreadable, 4);
}

#[test]
fn a_growing_log_reads_like_a_whole_one_wherever_it_is_cut() {
    let events = [
        Event::RunStart(RunStart { recipe: "tiny".into(), schema: SCHEMA, ..RunStart::default() }),
        step(1),
        step(2),
        step(3),
        Event::Eval(Eval { step: 3, loss: 2.0, tokens: 5, ..Eval::default() }),
        Event::Checkpoint(Checkpoint { step: 3, path: "checkpoints/step-3".into(), ..Checkpoint::default() }),
        step(4),
        Event::RunEnd(RunEnd { step: 4, ending: Ending::Failed, ..RunEnd::default() }),
    ];
    let text = lines(events);
    let whole = history(&text);
    assert_eq!(whole.state(2e9), RunState::Ended(Ending::Failed));
    for size in [1, 7, 64, 1000] {
        let dir = tempfile::tempdir().unwrap();
        let mut reader = RunReader::new(dir.path());
        assert_eq!(reader.poll().unwrap(), Read::Same, "there is no log yet");
        let mut file = std::fs::File::create(dir.path().join(FILE_NAME)).unwrap();
        for piece in text.chunks(size) {
            file.write_all(piece).unwrap();
            let found = reader.poll().unwrap();
            assert_eq!(found == Read::More, piece.contains(&b'\n'), "{found:?}");
        }
        assert_eq!(reader.poll().unwrap(), Read::Same);
        assert_same(&reader.history, &whole);
        assert_eq!(reader.history.start, whole.start);
    }
}

#[test]
fn steps_done_again_replace_the_earlier_ones() {
    let slow = |n| {
        let Event::Step(s) = step(n) else { panic!() };
        Event::Step(Step { seconds: 9.0, ..s })
    };
    let eval = |step| Event::Eval(Eval { step, loss: 1.0, tokens: 1, ..Eval::default() });
    let text =
        lines([step(1), step(2), eval(2), step(3), eval(3), slow(2), slow(3), eval(3), step(4), slow(4)]);
    let h = history(&text);
    assert_eq!(h.steps.step, [1, 2, 3, 4]);
    assert_eq!(h.steps.column("seconds"), [0.25, 9.0, 9.0, 9.0]);
    assert_eq!(h.evals.iter().map(|e| e.step).collect::<Vec<_>>(), [3]);
    assert_eq!(h.events, 10);
}

#[test]
fn a_run_that_goes_on_for_longer_has_the_steps_of_its_resume() {
    let start = RunStart { steps: 4, ..RunStart::default() };
    let change = Change { key: "train.steps".into(), old: "4".into(), new: "10".into() };
    let resume = Resume { step: 4, changes: vec![change], ..Resume::default() };
    let events = [Event::RunStart(start), step(4), Event::Resume(resume), step(5)];
    assert_eq!(history(&lines(events)).start.unwrap().steps, 10);
}

#[test]
fn a_resumed_or_replaced_log_is_read_anew() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = EventLog::create(dir.path().join(FILE_NAME).as_path()).unwrap();
    (1..=6).for_each(|n| log.write(&step(n)).unwrap());
    let mut reader = RunReader::open(dir.path()).unwrap();
    assert_eq!(reader.history.steps.len(), 6);
    let mut log = EventLog::resume(dir.path(), 4).unwrap();
    log.write(&Event::Resume(Resume { step: 4, ..Resume::default() })).unwrap();
    log.write(&step(5)).unwrap();
    assert_eq!(reader.poll().unwrap(), Read::Anew);
    assert_eq!(reader.history.steps.step, [1, 2, 3, 4, 5]);
    assert!(matches!(reader.history.notes[0].event, Event::Resume(_)));
    // Cut inside a line that was not read yet: what a failed write takes back.
    let path = dir.path().join(FILE_NAME);
    let whole = std::fs::read(&path).unwrap();
    std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"kind\":\"st").unwrap();
    assert_eq!(reader.poll().unwrap(), Read::Same);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(whole.len() as u64).unwrap();
    assert_eq!(reader.poll().unwrap(), Read::Same);
    log.write(&step(6)).unwrap();
    assert_eq!(reader.poll().unwrap(), Read::More);
    assert_eq!(reader.history.steps.step, [1, 2, 3, 4, 5, 6]);
    assert_eq!(reader.history.unreadable, 0);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(reader.poll().unwrap(), Read::Anew);
    assert_eq!(reader.history, RunHistory::default());
    assert!(RunReader::open(dir.path()).is_err(), "a run without a log is no run");
}

#[test]
fn many_events_are_parsed_by_several_threads_alike() {
    let mut events: Vec<Event> = (1..=9000).map(step).collect();
    events.insert(5000, Event::Eval(Eval { step: 5000, loss: 1.0, tokens: 1, ..Eval::default() }));
    let text = lines(events);
    assert!(text.len() > 4 << 20);
    let all = history(&text);
    // In pieces below the size from which threads are used.
    let dir = tempfile::tempdir().unwrap();
    let mut reader = RunReader::new(dir.path());
    let mut file = std::fs::File::create(dir.path().join(FILE_NAME)).unwrap();
    for piece in text.chunks(500_000) {
        file.write_all(piece).unwrap();
        reader.poll().unwrap();
    }
    assert_same(&reader.history, &all);
    assert_eq!(all.steps.len(), 9000);
    assert!(all.loads.len() <= 512 && all.loads.len() > 200, "{}", all.loads.len());
}

#[test]
fn a_long_log_is_read_block_by_block() {
    let dir = tempfile::tempdir().unwrap();
    let text = lines((1..=40_000).map(step));
    std::fs::write(dir.path().join(FILE_NAME), &text).unwrap();
    let mut reader = RunReader::new(dir.path());
    let (mut blocks, mut steps) = (0, 0);
    loop {
        let (read, more) = reader.poll_block().unwrap();
        assert!(read == Read::More && reader.history.steps.len() > steps);
        (blocks, steps) = (blocks + 1, reader.history.steps.len());
        if !more {
            break;
        }
    }
    assert!(blocks > 2 && steps == 40_000, "{blocks} blocks of {} bytes, {steps} steps", text.len());
    assert_eq!(reader.poll_block().unwrap(), (Read::Same, false));
    assert_same(&reader.history, &history(&text));
}

#[test]
fn runs_are_found_in_a_folder_of_runs() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["b", "a", "empty"] {
        std::fs::create_dir(dir.path().join(name)).unwrap();
    }
    for name in ["a", "b"] {
        std::fs::write(dir.path().join(name).join(FILE_NAME), lines([step(1)])).unwrap();
    }
    assert_eq!(runs_in(dir.path()), [dir.path().join("a"), dir.path().join("b")]);
    assert_eq!(runs_in(&dir.path().join("a")), [dir.path().join("a")]);
    assert_eq!(runs_in(&dir.path().join("no such")), [""; 0].map(std::path::PathBuf::from));
    assert_eq!(RunReader::new(&dir.path().join("a").join(FILE_NAME)).name(), "a");
}
