//! FP8 transposes and quantization statistics.

use super::devices::TestDevice;
use super::quant_oracle::*;
use ferrotron_kernels::{Fp8Tensor, Quantize, ScaleSource, ScalingMode};
use ferrotron_tensor::{Category, DType, Tensor};

const INPUTS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const FORMATS: [DType; 2] = [DType::E4M3, DType::E5M2];

fn one(h: &TestDevice, x: f32) -> Tensor {
    h.s.upload(&[x], &[1], Category::Workspace).unwrap()
}

/// A transposed FP8 tensor holds the same codes and scale, and its padding is zero.
#[test]
fn transposed_tensors_hold_the_same_fp8_values() {
    const SIZES: [usize; 8] = [1, 15, 16, 17, 64, 65, 129, 200];
    everywhere(|h, k| {
        for (r, c) in SIZES.iter().flat_map(|r| SIZES.map(|c| (*r, c))).chain([(0, 5), (5, 0)]) {
            for format in FORMATS {
                let what = format!("{} {format} [{r}, {c}]", h.name);
                let from = poisoned(h, [r, c], format, ScalingMode::PerTensor);
                let to = poisoned(h, [c, r], format, ScalingMode::PerTensor);
                let width = c.next_multiple_of(16);
                // All codes, NaN included; padding of the input must not reach the output.
                let codes: Vec<u8> = (0..r * width).map(|i| (i * 37 + i / 256 + 1) as u8).collect();
                upload(h, &from, &codes);
                h.s.upload_into(&from.scale_inv, &[0.37f32]).unwrap();
                k.fp8_transpose(&h.s, &from, &to).unwrap();
                let (ours, pitch) = (raw(h, &to), r.next_multiple_of(16));
                assert_eq!(ours.len(), c * pitch, "{what}");
                for (at, found) in ours.iter().enumerate() {
                    let (i, j) = (at % pitch, at / pitch);
                    let want = if i < r { codes[i * width + j] } else { 0 };
                    assert_eq!(*found, want, "{what} [{j}, {i}]");
                }
                if r * c > 0 {
                    same(&what, &host(h, &to.scale_inv), &[0.37]);
                }
                let wrong = poisoned(h, [c, r + 1], format, ScalingMode::PerTensor);
                assert!(k.fp8_transpose(&h.s, &from, &wrong).is_err(), "{what}: another shape");
                let wrong = poisoned(h, [c, r], format, ScalingMode::Block1x128);
                assert!(k.fp8_transpose(&h.s, &from, &wrong).is_err(), "{what}: scales of blocks");
            }
        }
    });
}

fn upload(h: &TestDevice, b: &Fp8Tensor, codes: &[u8]) {
    h.s.upload_into(&b.data.as_bytes().unwrap().view(&[codes.len()]).unwrap(), codes).unwrap();
}

/// Statistics count values that saturate or underflow when quantized.
#[test]
fn statistics_count_underflow_and_saturation() {
    everywhere(|h, k| {
        for ([r, c], scaling, transposed) in [
            ([5, 7], ScalingMode::PerTensor, false),
            ([33, 130], ScalingMode::PerTensor, true),
            ([33, 130], ScalingMode::Block1x128, false),
            ([130, 33], ScalingMode::Block1x128, true),
            ([130, 257], ScalingMode::Block128x128, false),
            ([0, 4], ScalingMode::PerTensor, false),
        ] {
            for (format, dtype) in FORMATS.into_iter().flat_map(|f| INPUTS.map(|d| (f, d))) {
                let what =
                    format!("{} {format} {dtype} {scaling:?} [{r}, {c}] transposed {transposed}", h.name);
                let table = Table::new(format);
                let mut x = hostile("ordinary", dtype, 9, r * c);
                // Values far below and far above the others, and infinities.
                x.iter_mut().step_by(5).for_each(|x| *x = rounded(dtype, *x * 2f32.powi(-20)));
                x.iter_mut().skip(1).step_by(11).for_each(|x| *x = rounded(dtype, *x * 30000.0));
                x.iter_mut().skip(2).step_by(29).for_each(|x| *x = f32::INFINITY);
                let m = Matrix { r, c, x };
                let (tensor, given) = (place(h, dtype, &m, true), one(h, 3.0));
                let shape = if transposed { [c, r] } else { [r, c] };
                let q = poisoned(h, shape, format, scaling);
                let ignored = one(h, 0.0);
                let range = match scaling {
                    ScalingMode::PerTensor => ScaleSource::Given { scale: &given, amax: &ignored },
                    _ => ScaleSource::Blocks { pow2: true },
                };
                let (rows, cols) = if transposed { (None, Some(&q)) } else { (Some(&q), None) };
                k.quantize(&h.s, &Quantize { x: &tensor, range, rows, cols, sums: None }).unwrap();
                let found = k.quant_stats(&h.s, &tensor, &q, transposed).unwrap();
                let codes = raw(h, &q);
                let (width, scales) = (shape[1].next_multiple_of(16), host(h, &q.scale_inv));
                let (mut elements, mut saturated, mut vanished, mut amax) = (0, 0, 0, 0f32);
                let (mut error, mut size) = (0f64, 0f64);
                for (at, x) in m.x.iter().enumerate().filter(|(_, x)| x.is_finite()) {
                    let (i, j) = if transposed { (at % c, at / c) } else { (at / c, at % c) };
                    let columns = scaling.scales(shape[0], shape[1]);
                    let inverse = match scaling {
                        ScalingMode::PerTensor => scales[0],
                        ScalingMode::Block1x128 => scales[j / 128 * columns[1] + i],
                        ScalingMode::Block128x128 => scales[i / 128 * columns[1] + j / 128],
                    };
                    let value = table.value(codes[i * width + j]);
                    elements += 1;
                    amax = amax.max(x.abs());
                    saturated +=
                        u64::from(f64::from(x.abs()) / f64::from(inverse) > table.largest() * 1.00001);
                    vanished += u64::from(*x != 0.0 && value == 0.0);
                    let back = f64::from((value * f64::from(inverse)) as f32);
                    error += (back - f64::from(*x)).powi(2);
                    size += f64::from(*x).powi(2);
                }
                assert_eq!((found.elements, found.saturated), (elements, saturated), "{what}");
                assert_eq!((found.vanished, found.amax), (vanished, amax), "{what}");
                assert!((found.error - error).abs() <= 1e-9 * error, "{what}: {} or {error}", found.error);
                assert!((found.size - size).abs() <= 1e-9 * size, "{what}: {} or {size}", found.size);
                if elements > 0 {
                    assert!(vanished > 0, "{what}: the case has none");
                    assert!(
                        saturated > 0 || scaling != ScalingMode::PerTensor || format == DType::E5M2,
                        "{what}"
                    );
                }
            }
        }
    });
}
