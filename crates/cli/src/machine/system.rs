//! CPU, memory and disk.

use serde::Serialize;
use std::fs::read_to_string;
use std::process::{Command, Stdio};

/// The processor.
#[derive(Debug, Serialize)]
pub struct Cpu {
    /// Its name.
    pub model: Option<String>,
    /// Hardware threads this process may use.
    pub usable: usize,
    /// Hardware threads in the machine.
    pub total: Option<usize>,
}

impl Cpu {
    /// Reads /proc/cpuinfo.
    pub fn look() -> Cpu {
        let text = read_to_string("/proc/cpuinfo").unwrap_or_default();
        let total = text.lines().filter(|l| l.starts_with("processor")).count();
        Cpu {
            model: field(&text, &["model name", "Model", "cpu model"]),
            usable: std::thread::available_parallelism().map_or(1, |n| n.get()),
            total: (total > 0).then_some(total),
        }
    }
}

/// The first `name : value` line of `/proc/cpuinfo` with one of these names.
fn field(text: &str, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| {
        let line = text.lines().find(|l| l.split(':').next().is_some_and(|k| k.trim() == *name))?;
        let value = line.split_once(':')?.1.split_whitespace().collect::<Vec<_>>().join(" ");
        (!value.is_empty()).then_some(value)
    })
}

/// Memory available to this process, in bytes.
#[derive(Debug, Serialize)]
pub struct Memory {
    /// Total memory.
    pub total: Option<u64>,
    /// Memory that is free now.
    pub available: Option<u64>,
}

impl Memory {
    /// Reads /proc/meminfo; a lower cgroup limit takes precedence.
    pub fn look() -> Memory {
        let text = read_to_string("/proc/meminfo").unwrap_or_default();
        let of = |name: &str| meminfo(&text, name);
        let number = |path: &str| read_to_string(path).ok().and_then(|t| t.trim().parse::<u64>().ok());
        let limit = number("/sys/fs/cgroup/memory.max");
        let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
        let lower = |x: Option<u64>, limit: Option<u64>| match (x, limit) {
            (Some(x), Some(limit)) => Some(x.min(limit)),
            (x, limit) => x.or(limit),
        };
        Memory {
            total: lower(of("MemTotal"), limit),
            available: lower(of("MemAvailable"), limit.map(|l| l.saturating_sub(used))),
        }
    }
}

fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.split(':').next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The disk of the current folder, in bytes.
#[derive(Debug, Serialize)]
pub struct Disk {
    /// Size of the file system.
    pub total: u64,
    /// Free space available to this user.
    pub free: u64,
}

impl Disk {
    /// Runs `df`; none where there is no such command.
    pub fn look() -> Option<Disk> {
        let out = Command::new("df").args(["-Pk", "."]).stderr(Stdio::null()).output().ok()?;
        df(&String::from_utf8_lossy(&out.stdout))
    }
}

/// Parses POSIX `df` output: device, 1024-byte blocks, used, available, capacity, mount point. The device may contain
/// spaces, so columns are counted from the capacity.
fn df(text: &str) -> Option<Disk> {
    let words: Vec<&str> = text.lines().nth(1)?.split_whitespace().collect();
    let share = words.iter().position(|w| w.ends_with('%'))?;
    let at = |back: usize| words.get(share.checked_sub(back)?)?.parse::<u64>().ok()?.checked_mul(1024);
    Some(Disk { total: at(3)?, free: at(1)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_system() {
        let info = "processor\t: 0\nmodel\t\t: 207\nmodel name\t: Intel(R)  Xeon(R) Processor\n";
        assert_eq!(field(info, &["model name"]).as_deref(), Some("Intel(R) Xeon(R) Processor"));
        assert_eq!(field(info, &["Hardware"]), None);
        assert_eq!(field("", &["model name"]), None);
        assert_eq!(meminfo("MemTotal:  24 kB\nMemAvailable:\n", "MemTotal"), Some(24 * 1024));
        assert_eq!(meminfo("MemTotal:  24 kB\nMemAvailable:\n", "MemAvailable"), None);
    }

    #[test]
    fn df_output() {
        let d = df("Filesystem 1024-blocks Used Available Capacity Mounted on\n//a b/c 100 30 70 30% /a b\n")
            .unwrap();
        assert_eq!((d.total, d.free), (100 * 1024, 70 * 1024));
        for bad in ["", "x\n", "x\n1%\n", "x\na b c d 1% /\n"] {
            assert!(df(bad).is_none(), "{bad:?}");
        }
    }
}
