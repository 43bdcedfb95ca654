//! What tests on a GPU share: the GPU, random operands, uploads and downloads.

use super::CudaKernels;
use ferrotron_tensor::{Category, DType, Device, Instrumentation, Stream, Tensor, Threads, bf16, gpus};
use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Tests on the GPU run beside each other, but for those that occupy its multiprocessors and measure whether a kernel still ends.
static GPU: RwLock<()> = RwLock::new(());

/// A test's share of the GPU, until its thread ends.
enum Share {
    Beside { _held: RwLockReadGuard<'static, ()> },
    Alone { _held: RwLockWriteGuard<'static, ()> },
}

thread_local! {
    static SHARE: RefCell<Option<Share>> = const { RefCell::new(None) };
}

/// The GPU, where there is one; `FERROTRON_TEST_DEVICE=cuda` requires it.
pub fn gpu() -> Option<(CudaKernels, Stream)> {
    // That of an earlier test on the same thread ends first.
    SHARE.set(None);
    SHARE.set(Some(Share::Beside { _held: GPU.read().unwrap_or_else(PoisonError::into_inner) }));
    open_gpu()
}

/// The GPU without any other test on it.
pub fn gpu_alone() -> Option<(CudaKernels, Stream)> {
    SHARE.set(None);
    SHARE.set(Some(Share::Alone { _held: GPU.write().unwrap_or_else(PoisonError::into_inner) }));
    open_gpu()
}

fn open_gpu() -> Option<(CudaKernels, Stream)> {
    if gpus().is_ok_and(|all| !all.is_empty()) {
        let device = Device::cuda(0, Threads::new(2).unwrap(), Instrumentation::default()).unwrap();
        return Some((CudaKernels::load(&device).unwrap(), device.stream("compute").unwrap()));
    }
    assert!(std::env::var("FERROTRON_TEST_DEVICE").is_err(), "there is no GPU");
    skipped("no GPU");
    None
}

/// Says aloud that the current test is skipped, and why.
pub fn skipped(why: &str) {
    eprintln!("SKIPPED: {}: {why}", std::thread::current().name().unwrap_or("test"));
}

/// Random numbers of 24 bits.
pub fn random_bits(seed: u64) -> impl FnMut() -> u64 {
    let mut x = seed | 1;
    move || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x >> 40
    }
}

/// Uniform values in [-1, 1).
pub fn uniform(seed: u64) -> impl FnMut() -> f32 {
    let mut bits = random_bits(seed);
    move || bits() as f32 / (1 << 23) as f32 - 1.0
}

/// A bf16 tensor.
pub fn upload(s: &Stream, v: &[f32], shape: &[usize]) -> Tensor {
    let v: Vec<bf16> = v.iter().map(|x| bf16::from_f32(*x)).collect();
    s.upload(&v, shape, Category::Workspace).unwrap()
}

/// A tensor of NaN.
pub fn poisoned(s: &Stream, dtype: DType, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    match dtype {
        DType::BF16 => s.upload(&vec![bf16::NAN; n], shape, Category::Workspace).unwrap(),
        _ => s.upload(&vec![f32::NAN; n], shape, Category::Workspace).unwrap(),
    }
}

/// The values of a bf16 or f32 tensor.
pub fn host(s: &Stream, t: &Tensor) -> Vec<f32> {
    match t.dtype() {
        DType::BF16 => s.download::<bf16>(t).unwrap().iter().map(|x| x.to_f32()).collect(),
        _ => s.download::<f32>(t).unwrap(),
    }
}
