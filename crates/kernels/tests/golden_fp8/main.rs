//! FP8, FP4 and MX formats against golden vectors (area `fp8`): casts, scales, delayed scaling, quantization, GEMMs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod compare;
mod formats;
mod gemm;
#[path = "../../../../tests/support/golden.rs"]
mod golden;
mod host;
mod quantize;

use golden::Area;

/// The area of every set that has this file; fails if no set has it.
fn areas(file: &str) -> Vec<Area> {
    let mut areas = Area::all("fp8");
    areas.retain(|area| {
        area.has(file) || {
            println!("{}/fp8: has no {file}", area.set);
            false
        }
    });
    assert!(!areas.is_empty(), "no set has fp8/{file}");
    areas
}

#[test]
fn golden_fp8_files() {
    let known = [
        "cast.safetensors",
        "scales.json",
        "delayed.json",
        "delayed.safetensors",
        "quantize.json",
        "quantize.safetensors",
        "gemm.safetensors",
    ];
    for area in Area::all("fp8") {
        area.known_files(|file| known.contains(&file));
        assert!(!area.present(&known).is_empty(), "{}/fp8 has no cases", area.set);
    }
}
