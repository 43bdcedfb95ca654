//! A dry run of the largest recipe, in a process of its own: its time and memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use ferrotron_core::config::Recipe;
use ferrotron_core::dry_run::dry_run;
use ferrotron_core::plan::Machine;

/// A minute of two cores.
const LIMIT: f64 = 120.0;

/// Processor time of this process, in seconds: what other processes do does not count.
#[cfg(target_os = "linux")]
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after = stat.rsplit(')').next().unwrap();
    let ticks: u64 = after.split_whitespace().skip(11).take(2).map(|t| t.parse::<u64>().unwrap()).sum();
    ticks as f64 / 100.0
}

/// Peak memory of this process, in bytes.
#[cfg(target_os = "linux")]
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

#[test]
#[cfg(target_os = "linux")]
fn llama_405b_on_1024_ranks_is_checked_in_minutes() {
    let mut recipe = Recipe::named("llama-405b").unwrap();
    recipe.set("data.path=embedded").unwrap();
    let r = recipe.resolve(None).unwrap();
    let machine = Machine::parse("1024xH100").unwrap();
    let report = dry_run(&r, &machine.hardware).unwrap();
    println!("{report:?}\n{:.1} CPU seconds, {} MiB", cpu_seconds(), peak_bytes() >> 20);
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!((report.ranks, report.micro_batches), (1024, 768));
    assert!(report.step_calls > 100_000_000);
    assert!(cpu_seconds() < LIMIT, "{} CPU seconds", cpu_seconds());
    assert!(peak_bytes() < 8 << 30, "{} bytes", peak_bytes());
}
