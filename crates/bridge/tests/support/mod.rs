//! Helpers that several tests share.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

#[path = "../../../../tests/support/golden.rs"]
pub mod golden;

#[path = "../../../../tests/support/rng.rs"]
mod rng;

pub use rng::SeededRng;

/// The golden models of all sets: (folder, model type).
pub fn cases() -> Vec<(PathBuf, String)> {
    golden::HfModel::all().into_iter().map(|m| (m.dir, m.model_type)).collect()
}

/// The folders of all golden models.
pub fn covered() -> Vec<PathBuf> {
    cases().into_iter().map(|(dir, _)| dir).collect()
}

impl SeededRng {
    /// One corruption to a file: flipped, cut, repeated, removed or overwritten bytes, or another number.
    pub fn corrupt(&mut self, good: &[u8]) -> Vec<u8> {
        let mut bad = good.to_vec();
        let at = self.below(good.len());
        match self.below(7) {
            0 | 1 => bad[at] ^= 1 << self.below(8),
            2 => bad.truncate(at),
            3 => {
                let n = 1 + self.below(40);
                let piece: Vec<u8> = good[at..].iter().take(n).copied().collect();
                bad.splice(at..at, piece);
            }
            4 => {
                let end = (at + 1 + self.below(24)).min(bad.len());
                bad.drain(at..end);
            }
            5 => bad[at] = self.next() as u8,
            _ => {
                // Another value where a value was.
                const VALUES: &[&str] = &[
                    "0",
                    "-1",
                    "1e308",
                    "1e-308",
                    "18446744073709551615",
                    "4294967296",
                    "null",
                    "true",
                    "[]",
                    "{}",
                    "\"\"",
                    "0.5",
                    "-0.0",
                    "9223372036854775807",
                    "3",
                    "[[[[[[[[]]]]]]]]",
                    "65536",
                    "1",
                ];
                let start = good[at..].iter().position(|&b| b == b':' || b == b',').map(|i| at + i + 1);
                if let Some(start) = start {
                    let stop = good[start..].iter().position(|b| b",]}\n".contains(b)).unwrap_or(0) + start;
                    let value = VALUES[self.below(VALUES.len())];
                    bad.splice(start..stop, value.bytes());
                }
            }
        }
        bad
    }
}

/// Copies a folder's files.
pub fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}
