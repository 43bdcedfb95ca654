//! How long seeded tests run.

/// `n` rounds of a seeded test; FERROTRON_SOAK=k makes it k times as many.
pub fn rounds(n: usize) -> usize {
    n * std::env::var("FERROTRON_SOAK").ok().and_then(|k| k.parse().ok()).unwrap_or(1)
}
