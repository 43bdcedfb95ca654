//! The page in a browser: ten runs, live, hostile texts, both themes, a phone, a million events.

use super::browser::{self, Browser};
use super::run_log::RunLog;
use super::server::Server;
use ferrotron_core::events::*;
use serde_json::json;
use std::io::Write;
use std::time::Duration;

const HOSTILE: &str = "<img src=x onerror=window.hacked=1>";
const READY: &str = "!!(document.body && document.body.dataset.ready)";

/// Ten runs, one of them hostile and one of them still running.
fn runs(dir: &std::path::Path) -> RunLog {
    for i in 0..8 {
        let mut run = RunLog::create(dir, &format!("finished-{i}"), 40);
        run.steps(30 + i);
        run.end(Ending::Finished, None);
    }
    let mut hostile = RunLog::create(dir, HOSTILE, 40);
    hostile.steps(20);
    hostile.event(Event::Sample(Sample {
        step: 20,
        prompt: HOSTILE.into(),
        text: "</script><script>hacked=1".into(),
    }));
    hostile.event(Event::SaveFailed(SaveFailed { step: 20, reason: HOSTILE.into() }));
    hostile.event(Event::Checkpoint(Checkpoint { step: 20, path: HOSTILE.into(), ..Checkpoint::default() }));
    hostile.end(Ending::Failed, Some(HOSTILE));
    let mut live = RunLog::create(dir, "live", 100);
    live.steps(10);
    live.event(Event::Restart(Restart {
        step: 8,
        generation: 2,
        reason: "rank 1 died".into(),
        ..Restart::default()
    }));
    live
}

#[test]
fn ten_runs_live_hostile_dark_light_and_on_a_phone() {
    let Some(program) = browser::program("the page in a browser") else { return };
    let (dir, profile) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut live = runs(dir.path());
    let server = Server::start(dir.path(), &[]);
    let mut b = Browser::start(program, profile.path());
    b.open(&server.url, 1600, 1400, "dark");
    b.wait(READY);
    assert_eq!(b.eval("document.querySelectorAll('#runs tbody tr').length"), json!(10));
    assert_eq!(b.eval("document.querySelector('#runs tr.focus .name').textContent"), json!("live"));
    let states = b.eval("[...document.querySelectorAll('.state')].map((s) => s.textContent).sort().join()");
    assert_eq!(states, json!(format!("failed,{}running", "finished,".repeat(8))));
    // All ten are in the chart of the loss; panels without data are not shown.
    assert_eq!(b.eval("card('loss').chart.series.filter((s) => !s.faint).length"), json!(10));
    for (id, hidden) in [
        ("loss", false),
        ("throughput", false),
        ("memory", false),
        ("loads", false),
        ("energy", false),
        ("fp8", true),
        ("ranks", true),
    ] {
        assert_eq!(b.eval(&format!("document.getElementById('card-{id}').hidden")), json!(hidden), "{id}");
    }
    b.wait("document.querySelector('#card-loads .plot').dataset.points > 0");
    assert_eq!(b.eval("card('loss').chart.marks.length > 0"), json!(true));
    assert!(
        b.eval("document.getElementById('absent').textContent")
            .as_str()
            .unwrap()
            .contains("precision.stats_every")
    );

    // An event is on the page within two seconds; the best of three, the machine may be busy.
    let mut best = Duration::MAX;
    for n in 11..=13 {
        live.steps(1);
        best = best.min(b.wait(&format!("document.body.dataset.step === '{n}'")));
        std::thread::sleep(Duration::from_millis(500));
    }
    eprintln!("an event is on the page after {best:?}");
    assert!(best < Duration::from_secs(2), "{best:?}");

    // Hostile texts are texts.
    b.eval("[...document.querySelectorAll('#runs tbody tr')].find((r) => r.textContent.includes('<img')).click()");
    assert_eq!(b.eval("document.querySelector('#runs tr.focus .name').textContent"), json!(HOSTILE));
    let notes = b.eval("document.getElementById('notes').textContent");
    assert!(notes.as_str().unwrap().contains("</script><script>hacked=1"), "{notes}");
    assert!(b.eval("document.getElementById('files').textContent").as_str().unwrap().contains(HOSTILE));
    assert_eq!(
        b.eval("String(window.hacked) + document.querySelectorAll('img').length"),
        json!("undefined1")
    );
    assert_eq!(b.eval("document.scripts.length"), json!(2));

    // Themes: that of the system, and the switch.
    let background = "getComputedStyle(document.body).backgroundColor";
    let dark = b.eval(background);
    b.call(
        "Emulation.setEmulatedMedia",
        json!({ "features": [{ "name": "prefers-color-scheme", "value": "light" }] }),
    );
    b.wait("document.documentElement.dataset.theme === 'light'");
    assert_ne!(b.eval(background), dark);
    b.eval("byId('theme').click(), byId('theme').click()");
    assert_eq!(b.eval("document.documentElement.dataset.theme"), json!("dark"));
    assert!(b.screenshot() > 30_000);

    // A phone: nothing is wider than the screen.
    b.open(&server.url, 390, 844, "light");
    b.wait(READY);
    assert_eq!(b.eval("document.documentElement.scrollWidth <= innerWidth"), json!(true));
    assert!(b.screenshot() > 10_000);
    // Other axes and a zoom ask for other curves.
    b.eval("document.querySelector('[data-axis=tokens]').click()");
    b.wait("view.data.runs[1].series.loss.x.at(-1) > 100000");
    b.eval("shared.setZoom([40000, 80000])");
    b.wait("view.data.runs[1].series.loss.x.length < 15");
    assert_eq!(b.eval("byId('zoom').hidden"), json!(false));
    assert_eq!(b.complaints, [""; 0]);
}

#[test]
fn a_million_events_are_decimated() {
    let Some(program) = browser::program("a million events in a browser") else { return };
    let (dir, profile) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut out = std::io::BufWriter::new(std::fs::File::create(dir.path().join(FILE_NAME)).unwrap());
    for step in 1..=1_000_000u64 {
        // One spike, which must not be lost.
        let loss = if step == 765_432 { 77.0 } else { 2.0 + 5.0 / step as f64 };
        writeln!(
            out,
            "{{\"kind\":\"step\",\"step\":{step},\"loss\":{loss},\"tokens\":{},\"lr\":0.001,\"grad_norm\":1.5,\"time\":{step}.5}}",
            step * 4096
        )
        .unwrap();
    }
    out.into_inner().unwrap();
    let server = Server::start(dir.path(), &[]);
    let mut b = Browser::start(program, profile.path());
    b.open(&server.url, 1600, 1000, "light");
    b.wait(READY);
    let ready = b.eval("Number(document.body.dataset.ready)").as_f64().unwrap();
    eprintln!("curves are painted {ready} ms after the page was opened");
    // Curves are drawn from what has been read; nothing waits for the whole log.
    assert!(ready < 2000.0, "{ready} ms");
    b.wait("document.body.dataset.step === '1000000'");
    let points =
        b.eval("Number(document.querySelector('#card-loss .plot').dataset.points)").as_f64().unwrap();
    assert!(points > 300.0 && points < 5000.0, "{points}");
    assert_eq!(b.eval("Math.max(...view.data.runs[0].series.loss.y)"), json!(77));
    assert_eq!(b.complaints, [""; 0]);
}
