//! Ranks as threads: what every operation gives, and what every mistake is called.
#![allow(clippy::unwrap_used, clippy::panic)]

mod failures;
mod messages;
mod operations;
mod order;
mod support;
mod trace;
mod volumes;
