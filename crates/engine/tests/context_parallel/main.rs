//! Context parallelism: which rank holds which tokens, and attention over all of them against an f64 reference and
//! against one rank.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod module;
mod ranks;
mod tokens;
mod variants;

#[path = "../../../../tests/support/device.rs"]
mod device;

#[path = "../../../../tests/support/golden.rs"]
mod golden;

#[path = "../../../kernels/tests/attention/oracle.rs"]
#[allow(dead_code)]
mod oracle;

#[path = "../modules/support.rs"]
#[allow(dead_code)]
mod support;
