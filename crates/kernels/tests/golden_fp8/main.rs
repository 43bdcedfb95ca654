//! Golden vectors of the 8-bit formats: every tensor and row of `fp8` in the folder FERROTRON_GOLDEN names.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod files;
mod formats;
mod host;
mod products;
mod quantize;
