//! Attention against an explicit f64 oracle, against golden vectors, and under hostile conditions.

mod golden;
mod hostile;
mod launch;
mod oracle;
mod sweep;
