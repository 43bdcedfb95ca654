//! `--profile`: the report of real runs in a browser: its numbers add up, it loads nothing, texts stay texts, it fits a phone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // all of it is test

#[path = "watch/browser.rs"]
mod browser;
mod common;

use browser::Browser;
use common::*;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Child;

/// A process that ends with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

const READY: &str = "!!(document.body && document.body.dataset.ready)";
/// A name of a recipe that must not become part of the page.
const HOSTILE: &str = "<img src=x onerror=window.hacked=1>";

/// The data of a report.
fn data(report: &Path) -> Value {
    let text = std::fs::read_to_string(report).unwrap();
    let (_, rest) = text.split_once("id=\"data\"").unwrap();
    let (_, rest) = rest.split_once('>').unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

fn number(v: &Value) -> f64 {
    v.as_f64().unwrap_or_else(|| panic!("{v}"))
}

/// What must hold of any report.
fn check(report: &Path, ranks: u64, steps: u64, more: &[&str]) -> Value {
    let all = data(report);
    let p = &all["profile"];
    assert_eq!((&p["ranks"], &p["steps"]), (&json!(ranks), &json!(steps)));
    for r in p["breakdown"].as_array().unwrap() {
        let parts: f64 = ["compute", "exposed_communication", "exposed_copies", "idle"]
            .iter()
            .map(|k| number(&r[k]))
            .sum();
        assert!((parts - number(&r["total"])).abs() < 1e-9 && number(&r["compute"]) > 0.0, "{r}");
    }
    let families = p["families"].as_array().unwrap();
    let has = |name: &str| families.iter().any(|f| f["name"] == name && number(&f["floor_s"]) > 0.0);
    for name in ["GEMMs", "attention", "optimizer"].iter().chain(more) {
        assert!(has(name), "{name}: {families:?}");
    }
    for f in families {
        let kernels: f64 = f["kernels"].as_array().unwrap().iter().map(|k| number(&k["seconds"])).sum();
        assert!((kernels / number(&f["measured_s"]) - 1.0).abs() < 1e-9, "{f}");
    }
    let memory = &p["memory"];
    let totals: Vec<f64> = memory["bytes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|b| b.as_array().unwrap().iter().map(number).sum())
        .collect();
    let most = totals.iter().copied().fold(0.0, f64::max);
    assert!(totals.len() > 20 && most > 0.0 && most <= number(&memory["total_peak"]), "{most}: {memory}");
    assert!(totals.iter().any(|t| *t < most), "memory rises and falls");
    assert!(p["advice"].as_array().unwrap().len() <= 5);
    for a in p["advice"].as_array().unwrap() {
        assert!(
            number(&a["gain_s"]) < number(&p["step_s"]) && !a["settings"][0].as_str().unwrap().is_empty(),
            "{a}"
        );
    }
    all
}

#[test]
fn two_ranks_in_a_browser() {
    let (dir, recipe) = folder();
    let hostile = dir.path().join(format!("{HOSTILE}.toml"));
    std::fs::rename(&recipe, &hostile).unwrap();
    let out = dir.path().join("run");
    let args = ["train", path(&hostile), "--out", path(&out), "--device", "cpu", "--steps", "6"];
    let more = ["--ranks", "2", "--threads", "1", "--set", "parallel.overlap=false", "--profile"];
    let moe = ["--set", "moe.experts=4", "--set", "moe.topk=2"];
    let text = ok(&[&args[..], &more, &moe].concat());
    let (report, trace) = (out.join("profile.html"), out.join("profile.trace.json"));
    assert!(text.contains("profile: ") && text.contains("profile.html") && trace.is_file(), "{text}");
    // Measuring the roofline takes a gigabyte; these steps do not.
    let memory = text.lines().find(|l| l.contains("peak memory")).unwrap();
    assert!(!memory.contains("GiB"), "{memory}");
    let all = check(&report, 2, 3, &["grouped GEMMs", "token permutation"]);
    assert_eq!(all["subject"]["untraced_steps"], 2);
    let groups = all["profile"]["communication"].as_array().unwrap();
    assert!(groups.iter().any(|g| g["group"] == "dp_cp" && number(&g["exposed"]) > 0.0), "{groups:?}");
    // Nothing is loaded from elsewhere, and the policy would not let it be.
    let page = std::fs::read_to_string(&report).unwrap();
    assert!(
        !page.contains("src=\"")
            && !page.contains("<link")
            && !page.contains("https://")
            && !page.contains(HOSTILE)
    );
    assert!(page.contains("default-src 'none'"));

    let Some(program) = browser::program("the report in a browser") else { return };
    let profile = tempfile::tempdir().unwrap();
    let mut b = Browser::start(program, profile.path());
    let url = format!("file://{}", report.display());
    b.open(&url, 1400, 1900, "dark");
    b.wait(READY);
    assert!(b.eval("document.title").as_str().unwrap().contains("<img src=x"));
    assert_eq!(b.eval("window.hacked === undefined && document.images.length === 0"), json!(true));
    let count =
        |b: &mut Browser, what: &str| number(&b.eval(&format!("document.querySelectorAll('{what}').length")));
    assert_eq!(count(&mut b, "#breakdown .rank-bar"), 2.0);
    assert_eq!(count(&mut b, "#communication tbody tr"), groups.len() as f64);
    assert_eq!(count(&mut b, ".family"), all["profile"]["families"].as_array().unwrap().len() as f64);
    assert_eq!(count(&mut b, "#advice li"), all["profile"]["advice"].as_array().unwrap().len().max(1) as f64);
    assert!(number(&b.eval("Number(byId('timeline').dataset.entries)")) > 100.0);
    assert!(number(&b.eval("Number(byId('memory').dataset.points)")) > 20.0);
    // Something of every kind is drawn.
    let painted = "(() => { const c = byId('timeline').querySelector('canvas'); const d = c.getContext('2d').getImageData(0, 0, \
                   c.width, c.height).data; const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | \
                   d[i + 2]); return [0x3b82f6, 0xe11d74, 0x94a0b3].every((x) => s.has(x)); })()";
    assert_eq!(b.eval(painted), json!(true));
    // The last step is in view; all of them take more time, a part of it less.
    let span = |b: &mut Browser| number(&b.eval("Number(byId('timeline').dataset.span)"));
    let step = span(&mut b);
    b.eval("[...document.querySelectorAll('#zooms button')].find((x) => x.textContent === 'all').click()");
    let whole = span(&mut b);
    assert!(whole > 2.0 * step, "{whole} and {step}");
    for (kind, x) in [("mousePressed", 500), ("mouseMoved", 600), ("mouseReleased", 600)] {
        let y = b.eval("byId('timeline').getBoundingClientRect().top + 40");
        let event = json!({ "type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1 });
        b.call("Input.dispatchMouseEvent", event);
    }
    assert!(span(&mut b) < whole / 5.0);
    assert!(b.screenshot() > 20_000);
    let dark = b.eval("getComputedStyle(document.body).backgroundColor");

    b.open(&url, 390, 800, "light");
    b.wait(READY);
    assert_ne!(b.eval("getComputedStyle(document.body).backgroundColor"), dark);
    assert_eq!(b.eval("document.documentElement.scrollWidth <= innerWidth"), json!(true));
    assert_eq!(b.complaints, [""; 0]);
}

#[test]
fn a_benchmark_writes_a_report_beside_its_trace() {
    let (dir, recipe) = folder();
    let (report, trace) = (dir.path().join("r.html"), dir.path().join("r.trace.json"));
    let option = format!("--profile={}", report.display());
    let args =
        ["bench", "train", "--work", path(&recipe), "--steps", "2", "--warmup", "1", "--device", "cpu"];
    let v = json(&[&args[..], &["--trace-steps", "2", &option]].concat());
    assert_eq!(v["trace"]["profile"]["file"], json!(report));
    assert!(trace.is_file() && v["kernel_ms"].is_object());
    let all = check(&report, 1, 2, &["activation"]);
    assert_eq!(v["trace"]["profile"]["advice"], all["profile"]["advice"]);
    assert_eq!(all["profile"]["communication"], json!([]));
    let named = dir.path().join("named.json");
    let text = ok(&[&args[..], &["--trace", path(&named), &option]].concat());
    assert!(text.contains("of roofline") && named.is_file(), "{text}");
}

#[test]
fn a_report_that_cannot_be_written_is_found_first() {
    let (dir, recipe) = folder();
    let out = dir.path().join("run");
    let option = format!("--profile={}", dir.path().join("no/report.html").display());
    let error = fails(&["train", path(&recipe), "--out", path(&out), &option], 1);
    assert!(error.contains("report.html: cannot write the profile"), "{error}");
    assert!(!out.exists());
}
