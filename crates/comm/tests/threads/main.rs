//! The thread backend: results of every operation, and errors of every misuse.
#![allow(clippy::unwrap_used, clippy::panic)]

mod failures;
mod in_flight;
mod operations;
mod payloads;
mod race_checker;
mod send_recv;
mod support;
mod trace;
mod volumes;

#[path = "../../../../tests/support/device.rs"]
mod device;
