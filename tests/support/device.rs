//! The device that `FERROTRON_TEST_DEVICE` asks for. Test files include this module by `#[path]`.
#![allow(dead_code)] // each test uses its part

/// Whether tests run on a GPU: `FERROTRON_TEST_DEVICE=cuda`.
pub fn test_on_gpu() -> bool {
    std::env::var("FERROTRON_TEST_DEVICE").is_ok_and(|device| device == "cuda")
}

/// Says aloud that the current test is skipped, and why.
pub fn skipped(why: &str) {
    eprintln!("SKIPPED: {}: {why}", std::thread::current().name().unwrap_or("test"));
}
