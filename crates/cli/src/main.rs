//! The `ferrotron` binary.
fn main() {}
