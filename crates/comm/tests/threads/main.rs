//! Ranks as threads: what every operation gives, and what every mistake is called.
#![allow(clippy::unwrap_used, clippy::panic)]

mod failures;
mod in_flight;
mod operations;
mod race_checker;
mod send_recv;
mod support;
mod trace;
mod volumes;
