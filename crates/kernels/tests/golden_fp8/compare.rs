//! What counts as equal to a golden vector.

use ferrotron_tensor::DType;
use ferrotron_tensor::fp8::{E4m3, E5m2};

pub fn format_of(name: &str) -> DType {
    match name {
        "e4m3" => DType::E4M3,
        "e5m2" => DType::E5M2,
        other => panic!("the format has no number format {other}"),
    }
}

fn nan(format: DType, code: u8) -> bool {
    if format == DType::E4M3 { E4m3(code).decode().is_nan() } else { E5m2(code).decode().is_nan() }
}

pub fn same_codes(what: &str, format: DType, ours: &[u8], wanted: &[u8]) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        assert!(o == w || (nan(format, *o) && nan(format, *w)), "{what}[{i}]: {o:#x} instead of {w:#x}");
    }
}

/// Equal bits, or within `ulps`; NaN is NaN.
pub fn same(what: &str, ours: &[f32], wanted: &[f32], ulps: u32) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        let near = o.to_bits().abs_diff(w.to_bits()) <= ulps || (o.is_nan() && w.is_nan());
        assert!(near, "{what}[{i}]: {o:e} instead of {w:e}");
    }
}
