//! Ranks on threads, test values, and random delays.

use crate::device::test_on_gpu;
use ferrotron_comm::{ReduceKernel, ReduceKernels, World};
use ferrotron_tensor::{
    Category, DType, Device, Element, Float, Instrumentation, Result, Stream, Tensor, Threads, bf16,
};
use std::sync::Arc;
use std::time::Duration;

pub const LONG: u64 = 60_000;

/// Runs `f` on `n` ranks that share a device with the race checker on; `timeout` in milliseconds. The device is the
/// CPU, or the first GPU with `FERROTRON_TEST_DEVICE=cuda`.
pub fn on_ranks<T: Send>(n: usize, timeout: u64, f: impl Fn(World, Stream) -> T + Sync) -> Vec<T> {
    on_devices(&vec![device(); n], timeout, host_kernels(), f)
}

/// The device under test.
pub fn device() -> Device {
    instrumented_device(Instrumentation { race_check: true, ..Instrumentation::default() })
}

/// The device under test with other instrumentation.
pub fn instrumented_device(instrumentation: Instrumentation) -> Device {
    let threads = Threads::new(1).unwrap();
    match test_on_gpu() {
        true => Device::cuda(0, threads, instrumentation).unwrap(),
        false => Device::cpu_instrumented(threads, instrumentation),
    }
}

/// [`on_ranks`] with one device per rank and given kernels. A rank that panics fails the test.
pub fn on_devices<T: Send>(
    devices: &[Device],
    timeout: u64,
    kernels: ReduceKernels,
    f: impl Fn(World, Stream) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let worlds = World::threads_with_kernels(devices.len(), Duration::from_millis(timeout), kernels);
        let start = |(world, device): (World, &Device)| {
            let (f, stream) = (&f, device.stream("compute").unwrap());
            scope.spawn(move || f(world, stream))
        };
        let handles: Vec<_> = worlds.into_iter().zip(devices).map(start).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// Host implementations of the GPU reduction kernels, which this crate does not have.
pub fn host_kernels() -> ReduceKernels {
    fn floats(s: &Stream, t: &Tensor) -> Result<Vec<f32>> {
        match t.dtype() {
            DType::BF16 => Ok(s.download::<bf16>(t)?.into_iter().map(Float::to_f32).collect()),
            _ => s.download::<f32>(t),
        }
    }
    fn kernel(f: fn(f32, f32) -> f32) -> Option<ReduceKernel> {
        Some(Arc::new(move |s: &Stream, acc: &Tensor, x: &Tensor| {
            let pairs = floats(s, acc)?.into_iter().zip(floats(s, x)?);
            let result: Vec<f32> = pairs.map(|(a, x)| f(a, x)).collect();
            match acc.dtype() {
                DType::BF16 => {
                    s.upload_into(acc, &result.into_iter().map(<bf16 as Float>::from_f32).collect::<Vec<_>>())
                }
                _ => s.upload_into(acc, &result),
            }
        }))
    }
    let max = |a: f32, x: f32| if x > a || x.is_nan() { x } else { a };
    ReduceKernels { add: kernel(|a, x| a + x), max: kernel(max) }
}

/// Mixes the bits of an integer.
pub fn hash(x: u64) -> u64 {
    let x = (x ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Sleeps up to two milliseconds, or not at all.
pub fn random_delay(seed: u64) {
    let h = hash(seed);
    if !h.is_multiple_of(3) {
        std::thread::sleep(Duration::from_micros(h % 2000));
    }
}

/// An element made from random bits, over a range where the order of summation affects the result.
pub trait Sample: Element {
    fn sample(h: u64) -> Self;
}

impl Sample for f32 {
    fn sample(h: u64) -> f32 {
        ((h % 2001) as f32 - 1000.0) * 0.37 * 10f32.powi((h / 4096 % 7) as i32 - 3)
    }
}

impl Sample for f64 {
    fn sample(h: u64) -> f64 {
        f64::from(f32::sample(h)) / 3.0
    }
}

impl Sample for bf16 {
    fn sample(h: u64) -> bf16 {
        <bf16 as Float>::from_f32(f32::sample(h))
    }
}

impl Sample for i32 {
    fn sample(h: u64) -> i32 {
        h as i32
    }
}

impl Sample for i64 {
    fn sample(h: u64) -> i64 {
        h as i64
    }
}

impl Sample for u8 {
    fn sample(h: u64) -> u8 {
        h as u8
    }
}

/// The `len` values of rank `rank`.
pub fn values<T: Sample>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::sample(hash((rank * 1_000_003 + i) as u64))).collect()
}

/// Values as a tensor.
pub fn tensor<T: Sample>(s: &Stream, values: &[T]) -> Tensor {
    s.upload(values, &[values.len()], Category::Communication).unwrap()
}

/// A tensor of values that differ from all expected results.
pub fn blank<T: Sample>(s: &Stream, len: usize) -> Tensor {
    tensor(s, &values::<T>(77, len))
}
