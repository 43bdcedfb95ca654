//! Pipeline schedules as plain data: every schedule is verified, and every fault is found.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // clippy takes helpers of tests for production

mod faults;
mod oracle;
mod placement;
mod schedules;
