//! Traces: what is recorded, that nothing is without one, and overlap against counting every nanosecond.
#![allow(clippy::unwrap_used)]

use ferrotron_tensor::trace::{Activity, ActivityKind, Trace};
use ferrotron_tensor::*;
use std::collections::BTreeMap;
use std::time::Duration;

fn device(trace: bool) -> Device {
    Device::cpu_instrumented(
        Threads::new(1).unwrap(),
        Instrumentation { trace, ..Instrumentation::default() },
    )
}

fn work(s: &Stream, op: &'static str, ms: u64) {
    let run = |_: &Launch| {
        std::thread::sleep(Duration::from_millis(ms));
        Ok(())
    };
    s.launch(op, &[], run).unwrap();
}

/// Counts how often it is formatted.
struct CountsFormatting<'a>(&'a std::cell::Cell<u32>);

impl std::fmt::Display for CountsFormatting<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.set(self.0.get() + 1);
        f.write_str("tp: 'loud'")
    }
}

#[test]
fn launches_and_spans_are_recorded_with_stream_and_rank() {
    let d = device(true);
    let (compute, comm) = (d.stream("compute").unwrap(), d.stream("communication").unwrap().with_rank(3));
    work(&compute, "before", 1);
    d.start_trace().unwrap();
    work(&compute, "gemm", 2);
    {
        let _step = compute.span(ActivityKind::Region, "step", format_args!("")).unwrap();
        work(&compute, "norm", 1);
        {
            let _all =
                compute.span(ActivityKind::Collective, "all-reduce", format_args!("{}: 'x'", "tp")).unwrap();
            work(&compute, "copy", 1);
            work(&comm, "copy", 1);
        }
        work(&compute, "gemm", 1);
    }
    d.pause_trace();
    work(&compute, "unseen", 1);
    drop(compute.span(ActivityKind::Region, "unseen", format_args!("")).unwrap());
    d.start_trace().unwrap();
    work(&comm, "later", 1);
    let t = d.take_trace().unwrap();
    work(&compute, "after", 1);
    assert!(d.take_trace().unwrap().is_empty());

    let kinds: Vec<_> =
        t.activities.iter().map(|a| (a.name.as_str(), a.kind, a.in_collective, a.rank, a.stream)).collect();
    use ActivityKind::*;
    let expected = [
        ("gemm", Kernel, false, 0, 0),
        ("norm", Kernel, false, 0, 0),
        ("copy", Kernel, true, 0, 0),
        ("copy", Kernel, false, 3, 1),
        ("all-reduce", Collective, false, 0, 0),
        ("gemm", Kernel, false, 0, 0),
        ("step", Region, false, 0, 0),
        ("later", Kernel, false, 3, 1),
    ];
    assert_eq!(kinds, expected);
    let find = |name: &str| t.activities.iter().find(|a| a.name == name).unwrap();
    assert_eq!(find("all-reduce").detail, "tp: 'x'");
    assert_eq!(find("later").stream_name, "communication");
    // Nested as opened, in order, and at least as long as the sleeps.
    let (step, all) = (find("step"), find("all-reduce"));
    assert!(step.start <= all.start && all.end <= step.end);
    assert!(step.start <= find("norm").start && find("norm").end <= all.start);
    assert!(all.start <= find("copy").start && find("copy").end <= all.end);
    assert!(find("gemm").end - find("gemm").start >= 2_000_000);
    assert!(all.end - all.start >= 2_000_000 && all.end <= find("later").start);

    let by: BTreeMap<_, _> =
        t.by_kernel().into_iter().map(|k| (k.name, (k.calls, (k.seconds * 1e9).round() as u64))).collect();
    assert_eq!(by.keys().collect::<Vec<_>>(), ["gemm", "norm"]);
    let sum = |name| -> u64 {
        let of = |a: &&Activity| a.name == name && a.kind == Kernel && !a.in_collective;
        t.activities.iter().filter(of).map(|a| a.end - a.start).sum()
    };
    assert_eq!(by["gemm"], (2, sum("gemm")));
    assert_eq!(by["norm"], (1, sum("norm")));
    let collectives = t.by_collective();
    assert_eq!((collectives.len(), collectives[0].name.as_str()), (1, "all-reduce tp: 'x'"));
}

#[test]
fn nothing_is_recorded_unless_a_trace_is_active() {
    let d = device(false);
    let s = d.stream("compute").unwrap();
    let formatted = std::cell::Cell::new(0);
    d.start_trace().unwrap();
    drop(
        s.span(ActivityKind::Collective, "all-reduce", format_args!("{}", CountsFormatting(&formatted)))
            .unwrap(),
    );
    work(&s, "gemm", 0);
    assert!(d.take_trace().unwrap().is_empty() && !d.is_traced());
    assert_eq!(formatted.get(), 0);

    let d = device(true);
    let s = d.stream("compute").unwrap();
    drop(
        s.span(ActivityKind::Collective, "all-reduce", format_args!("{}", CountsFormatting(&formatted)))
            .unwrap(),
    );
    assert_eq!(formatted.get(), 0, "not started yet");
    d.start_trace().unwrap();
    drop(
        s.span(ActivityKind::Collective, "all-reduce", format_args!("{}", CountsFormatting(&formatted)))
            .unwrap(),
    );
    assert_eq!((formatted.get(), d.take_trace().unwrap().activities.len()), (1, 1));
}

/// Live memory is sampled where it differs from the launch before.
#[test]
fn memory_is_sampled_at_launches() {
    let d = device(true);
    let s = d.stream("compute").unwrap().with_rank(2);
    let weights = s.zeros(&[1024], DType::F32, Category::Parameters).unwrap();
    d.start_trace().unwrap();
    work(&s, "one", 1);
    work(&s, "two", 1);
    let saved = s.zeros(&[256], DType::F32, Category::Activations).unwrap();
    work(&s, "three", 1);
    drop(saved);
    work(&s, "four", 1);
    let t = d.take_trace().unwrap();
    let at = |i: usize| (t.memory[i].rank, t.memory[i].bytes);
    let expected = [4096, 0, 0, 0, 0, 0];
    assert_eq!(at(0), (2, expected));
    assert_eq!(at(1), (2, [4096, 0, 0, 1024, 0, 0]));
    assert_eq!((at(2), t.memory.len()), ((2, expected), 3));
    let begins = |name: &str| t.activities.iter().find(|a| a.name == name).unwrap().start;
    assert_eq!([t.memory[0].at, t.memory[2].at], ["one", "four"].map(begins));
    assert!(t.launches.is_empty(), "a launch on the CPU is the kernel itself");
    // Of another device, that began to trace later.
    let later = Trace { start_unix_ns: t.start_unix_ns + 5, ..t.clone() };
    let all = Trace::merge([later, t.clone()]);
    assert_eq!(
        (all.memory.len(), all.memory[0].at, all.memory[3].at),
        (6, t.memory[0].at + 5, t.memory[0].at)
    );
    drop(weights);
}

#[test]
fn profile_and_trace_agree() {
    let instrumentation = Instrumentation { kernel_times: true, trace: true, ..Instrumentation::default() };
    let d = Device::cpu_instrumented(Threads::new(1).unwrap(), instrumentation);
    let s = d.stream("compute").unwrap();
    d.start_trace().unwrap();
    (0..5).for_each(|_| work(&s, "gemm", 1));
    let traced = &d.take_trace().unwrap().by_kernel()[0];
    let (calls, time) = d.take_profile().unwrap()["gemm"];
    assert_eq!((traced.calls, calls), (5, 5));
    assert!((traced.seconds - time.as_secs_f64()).abs() < 1e-7);
}

struct Lcg(u64);

impl Lcg {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

fn random(lcg: &mut Lcg) -> Trace {
    let streams = ["compute", "communication", "staging", "other"];
    let mut activities = Vec::new();
    for _ in 0..lcg.below(25) {
        let stream = lcg.below(4) as usize;
        let start = lcg.below(150);
        activities.push(Activity {
            name: ["gemm", "a \"b\"", "c\\d\n\u{1}é"][lcg.below(3) as usize].into(),
            detail: String::new(),
            kind: [
                ActivityKind::Kernel,
                ActivityKind::Kernel,
                ActivityKind::Collective,
                ActivityKind::Region,
            ][lcg.below(4) as usize],
            in_collective: lcg.below(4) == 0,
            rank: lcg.below(3) as usize,
            stream: stream as u32,
            stream_name: streams[stream].into(),
            start,
            end: start + lcg.below(60),
        });
    }
    Trace { start_unix_ns: lcg.below(50), activities, ..Trace::default() }
}

#[test]
fn overlap_equals_a_count_of_nanoseconds() {
    let mut lcg = Lcg(5);
    let mut covered = 0;
    for _ in 0..300 {
        let t = random(&mut lcg);
        let has = |rank: Option<usize>, at: u64, which: &dyn Fn(&Activity) -> bool| {
            let on = |a: &&Activity| rank.is_none_or(|r| r == a.rank) && a.start <= at && at < a.end;
            t.activities.iter().filter(on).any(which)
        };
        // By definition, not through the functions under test.
        let is_side_stream = |a: &Activity| ["communication", "staging"].contains(&a.stream_name.as_str());
        let compute = |a: &Activity| a.kind == ActivityKind::Kernel && !a.in_collective && !is_side_stream(a);
        let comm = |a: &Activity| {
            a.kind == ActivityKind::Collective
                || (a.kind == ActivityKind::Kernel && a.stream_name == "communication")
        };
        let moves = |a: &Activity| {
            a.kind == ActivityKind::Kernel && (a.in_collective || a.stream_name == "communication")
        };
        let count = |which: &dyn Fn(&Activity) -> bool| {
            let mut n = [0u32; 3];
            for rank in 0..3 {
                for at in (0..220).filter(|at| has(Some(rank), *at, which)) {
                    n[0] += 1;
                    n[1] += u32::from(has(Some(rank), at, &compute));
                    n[2] += u32::from(has(None, at, &compute));
                }
            }
            n
        };
        let o = t.overlap();
        for (cover, expected) in [(o.collectives, count(&comm)), (o.transfers, count(&moves))] {
            let ns = [cover.total, cover.same_rank, cover.any_rank].map(|s| (s * 1e9).round() as u32);
            assert_eq!(ns, expected);
            covered += expected[1];
        }
    }
    assert!(covered > 1000, "the random traces overlap too little: {covered}");
}

#[test]
fn fractions_of_a_known_trace() {
    let a = |kind, rank, stream: &str, start, end| Activity {
        name: "x".into(),
        detail: String::new(),
        kind,
        in_collective: false,
        rank,
        stream: 0,
        stream_name: stream.into(),
        start,
        end,
    };
    let t = Trace {
        activities: vec![
            a(ActivityKind::Collective, 0, "communication", 0, 100),
            a(ActivityKind::Kernel, 0, "compute", 50, 80),
            a(ActivityKind::Kernel, 1, "compute", 70, 200),
        ],
        ..Trace::default()
    };
    let spans = t.overlap().collectives;
    assert_eq!([spans.total, spans.same_rank, spans.any_rank], [100e-9, 30e-9, 50e-9]);
    assert_eq!([spans.same_rank_fraction(), spans.any_rank_fraction()], [0.3, 0.5]);
    assert_eq!(Trace::default().overlap().collectives.same_rank_fraction(), 1.0);
}

#[test]
fn chrome_json_parses_and_holds_every_entry() {
    let mut lcg = Lcg(8);
    for _ in 0..50 {
        let t = random(&mut lcg);
        let json: serde_json::Value = serde_json::from_str(&t.chrome_json()).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let mut shown: Vec<_> = events
            .iter()
            .filter(|e| e["ph"] == "X")
            .map(|e| {
                let ns = |key: &str| (e[key].as_f64().unwrap() * 1e3).round() as u64;
                let number = |key: &str| e[key].as_u64().unwrap();
                (number("pid"), number("tid"), ns("ts"), ns("dur"), e["name"].as_str().unwrap().to_string())
            })
            .collect();
        let mut expected: Vec<_> = t
            .activities
            .iter()
            .map(|a| (a.rank as u64, u64::from(a.stream), a.start, a.end - a.start, a.name.clone()))
            .collect();
        shown.sort();
        expected.sort();
        assert_eq!(shown, expected);
        let rows: std::collections::BTreeSet<_> =
            t.activities.iter().map(|a| (a.rank, a.stream_name.clone(), a.stream)).collect();
        let named = events.iter().filter(|e| e["name"] == "thread_name").count();
        assert_eq!(named, rows.len());
        for (rank, name, stream) in rows {
            let row = events.iter().find(|e| {
                e["name"] == "thread_name" && e["pid"].as_u64() == Some(rank as u64) && e["tid"] == stream
            });
            assert_eq!(row.unwrap()["args"]["name"], format!("{name} (stream {stream})"));
        }
        // Traces are sent between ranks as JSON.
        assert_eq!(serde_json::from_slice::<Trace>(&serde_json::to_vec(&t).unwrap()).unwrap(), t);
    }
}

#[test]
fn merged_traces_share_one_clock() {
    let mut lcg = Lcg(2);
    for _ in 0..50 {
        let all = [random(&mut lcg), random(&mut lcg), random(&mut lcg)];
        let absolute = |t: &Trace| -> Vec<(u64, u64, String)> {
            t.activities
                .iter()
                .map(|a| (t.start_unix_ns + a.start, t.start_unix_ns + a.end, a.name.clone()))
                .collect()
        };
        let expected: Vec<_> = all.iter().flat_map(absolute).collect();
        let merged = Trace::merge(all);
        assert_eq!(absolute(&merged), expected);
        let (first, last) = (expected.iter().map(|w| w.0).min(), expected.iter().map(|w| w.1).max());
        let seconds = first.zip(last).map_or(0.0, |(f, l)| (l - f) as f64 / 1e9);
        assert_eq!(merged.seconds(), seconds);
    }
}
