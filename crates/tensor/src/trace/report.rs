//! Trace output: kernel tables, and timelines for Chrome and Perfetto.

use super::{Activity, ActivityKind, Trace};
use std::collections::BTreeMap;
use std::fmt;

/// Number of calls and time of one kernel or collective, over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Name of the kernel, or of a collective with its group and label.
    pub name: String,
    /// Number of calls.
    pub calls: u64,
    /// Total seconds.
    pub seconds: f64,
}

impl Trace {
    /// Time by kernel, longest first, without the kernels of communication.
    pub fn by_kernel(&self) -> Vec<KernelTime> {
        self.by(|a| a.is_compute().then(|| a.name.clone()))
    }

    /// Time by collective, group and label, longest first.
    pub fn by_collective(&self) -> Vec<KernelTime> {
        self.by(|a| (a.kind == ActivityKind::Collective).then(|| format!("{} {}", a.name, a.detail)))
    }

    fn by(&self, name: impl Fn(&Activity) -> Option<String>) -> Vec<KernelTime> {
        let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for a in &self.activities {
            if let Some(name) = name(a) {
                let (calls, ns) = sums.entry(name).or_default();
                (*calls, *ns) = (*calls + 1, *ns + (a.end - a.start));
            }
        }
        let mut out: Vec<KernelTime> = sums
            .into_iter()
            .map(|(name, (calls, ns))| KernelTime { name, calls, seconds: ns as f64 / 1e9 })
            .collect();
        out.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        out
    }

    /// The trace as Chrome trace JSON, for chrome://tracing and Perfetto: ranks are processes, streams are threads,
    /// times are microseconds.
    pub fn chrome_json(&self) -> String {
        let mut events = Vec::with_capacity(self.activities.len() + 16);
        let mut streams: BTreeMap<(usize, u32), &str> = BTreeMap::new();
        for a in &self.activities {
            streams.entry((a.rank, a.stream)).or_insert(&a.stream_name);
        }
        for rank in self.ranks() {
            events.push(about("process_name", rank, 0, &format!("rank {rank}")));
        }
        for ((rank, stream), name) in streams {
            events.push(about("thread_name", rank, stream, &format!("{name} (stream {stream})")));
        }
        let mut order: Vec<&Activity> = self.activities.iter().collect();
        // Enclosing spans come before the entries they contain.
        order.sort_by_key(|a| {
            (a.rank, a.stream, a.start, std::cmp::Reverse(a.end), a.kind == ActivityKind::Kernel)
        });
        events.extend(order.into_iter().map(event));
        format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
    }
}

/// A string quoted for JSON.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"")?;
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                c if c < ' ' => write!(f, "\\u{:04x}", u32::from(c))?,
                c => write!(f, "{c}")?,
            }
        }
        f.write_str("\"")
    }
}

fn about(what: &str, rank: usize, stream: u32, name: &str) -> String {
    let name = Quoted(name);
    format!(
        "{{\"ph\":\"M\",\"name\":\"{what}\",\"pid\":{rank},\"tid\":{stream},\"args\":{{\"name\":{name}}}}}"
    )
}

fn event(a: &Activity) -> String {
    let category = match a.kind {
        ActivityKind::Kernel if a.in_collective => "transfer",
        ActivityKind::Kernel => "kernel",
        ActivityKind::Collective => "collective",
        ActivityKind::Region => "region",
    };
    let name = match a.detail.as_str() {
        "" => a.name.clone(),
        detail => format!("{} {detail}", a.name),
    };
    // Microseconds with three decimals, without going through a float.
    let us = |ns: u64| format!("{}.{:03}", ns / 1000, ns % 1000);
    format!(
        "{{\"ph\":\"X\",\"name\":{},\"cat\":\"{category}\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{}}}",
        Quoted(&name),
        a.rank,
        a.stream,
        us(a.start),
        us(a.end - a.start)
    )
}
