//! Memory accounting by category.

use crate::HostMemoryReport;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What a buffer is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// Weights in the compute dtype.
    Parameters,
    /// Gradient buffers.
    Gradients,
    /// Master weights and optimizer moments.
    Optimizer,
    /// Tensors saved for backward, and tensors passed between modules.
    Activations,
    /// Scratch memory of a single operation.
    Workspace,
    /// Buffers of collectives.
    Communication,
}

impl Category {
    /// All categories, in the order of tables.
    pub const ALL: [Category; 6] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Workspace,
        Category::Communication,
    ];

    /// The name in tables and events.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Workspace => "workspace",
            Category::Communication => "communication",
        }
    }
}

/// Live and peak bytes, by category and in total.
#[derive(Debug, Default)]
pub(crate) struct MemoryAccount {
    now: [AtomicUsize; 6],
    peak: [AtomicUsize; 6],
    total_now: AtomicUsize,
    total_peak: AtomicUsize,
}

impl MemoryAccount {
    pub(crate) fn take(&self, category: Category, bytes: usize) {
        let i = category as usize;
        self.peak[i].fetch_max(self.now[i].fetch_add(bytes, Relaxed) + bytes, Relaxed);
        self.total_peak.fetch_max(self.total_now.fetch_add(bytes, Relaxed) + bytes, Relaxed);
    }

    pub(crate) fn give(&self, category: Category, bytes: usize) {
        self.now[category as usize].fetch_sub(bytes, Relaxed);
        self.total_now.fetch_sub(bytes, Relaxed);
    }

    /// Peaks count from now on.
    pub(crate) fn restart_peaks(&self) {
        for (now, peak) in self.now.iter().zip(&self.peak) {
            peak.store(now.load(Relaxed), Relaxed);
        }
        self.total_peak.store(self.total_now.load(Relaxed), Relaxed);
    }

    pub(crate) fn report(&self) -> MemoryReport {
        MemoryReport {
            now: std::array::from_fn(|i| self.now[i].load(Relaxed)),
            peak: std::array::from_fn(|i| self.peak[i].load(Relaxed)),
            total_now: self.total_now.load(Relaxed),
            total_peak: self.total_peak.load(Relaxed),
            ..MemoryReport::default()
        }
    }
}

/// A snapshot of the memory account. Prints as a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Live bytes, in the order of [`Category::ALL`].
    pub now: [usize; 6],
    /// Peak bytes, in the same order. Categories peak at different times, so they need not add up to the total peak.
    pub peak: [usize; 6],
    /// Live bytes in total.
    pub total_now: usize,
    /// Peak bytes in total.
    pub total_peak: usize,
    /// Bytes that the pool holds from the device for tensors, live or free for reuse.
    pub reserved_now: usize,
    /// Peak of the reserved bytes.
    pub reserved_peak: usize,
    /// Host memory, which is not in the total.
    pub host: HostMemoryReport,
}

impl std::fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{:<14} {:>12} {:>12}", "memory", "now", "peak")?;
        for (i, c) in Category::ALL.iter().enumerate().filter(|(i, _)| self.peak[*i] > 0) {
            writeln!(
                f,
                "{:<14} {:>12} {:>12}",
                c.name(),
                format_bytes(self.now[i]),
                format_bytes(self.peak[i])
            )?;
        }
        let row = |name: &str, now, peak| {
            format!("{name:<14} {:>12} {:>12}", format_bytes(now), format_bytes(peak))
        };
        writeln!(f, "{}", row("total", self.total_now, self.total_peak))?;
        f.write_str(&row("reserved", self.reserved_now, self.reserved_peak))?;
        if self.host.peak > 0 {
            write!(f, "\n{}", row("host", self.host.now, self.host.peak))?;
        }
        Ok(())
    }
}

/// A byte count with a binary unit, such as `1.5 GiB`.
pub fn format_bytes(bytes: usize) -> String {
    let (mut x, mut unit) = (bytes as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if x < 1024.0 {
            break;
        }
        (x, unit) = (x / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{x:.1} {unit}") }
}
