//! Test devices, test values, and comparisons.

#[path = "../../../../tests/support/device.rs"]
mod device;

#[path = "../../../../tests/support/rng.rs"]
mod rng;

use device::test_on_gpu;
use ferrotron_kernels::Kernels;
use ferrotron_kernels::cpu::{CpuKernels, Isa};
use ferrotron_kernels::cuda::CudaKernels;
use ferrotron_tensor::{
    Category, DType, Device, Instrumentation, Result, Stream, Tensor, Threads, bf16, f16, gpus,
};
use rng::SeededRng;

/// The types every kernel must take.
pub const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Types that MoE kernels support: their auxiliary losses carry no loss scale, so f16 is excluded.
pub const MOE_DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// A device with its kernels.
pub struct TestDevice {
    pub name: String,
    pub k: Box<dyn Kernels>,
    pub s: Stream,
}

/// Every device of this machine: each instruction-set level of the CPU, and a GPU where there is one.
/// `FERROTRON_TEST_DEVICE=cuda` asks for the GPU alone and fails without it.
pub fn devices() -> Vec<TestDevice> {
    let gpu_only = test_on_gpu();
    // A device per test: errors that kernels report asynchronously belong to the device they ran on.
    let threads = || Threads::new(2).unwrap();
    let gpu = match gpus() {
        Ok(all) if !all.is_empty() => {
            let watch = Instrumentation {
                race_check: std::env::var_os("FERROTRON_TEST_CHECK").is_some(),
                ..Instrumentation::default()
            };
            let device = Device::cuda(0, threads(), watch).unwrap();
            let k = Box::new(CudaKernels::load(&device).unwrap());
            Some(TestDevice { name: "CUDA".into(), k, s: device.stream("compute").unwrap() })
        }
        found if gpu_only => panic!("FERROTRON_TEST_DEVICE=cuda, but: {found:?}"),
        _ => None,
    };
    if gpu_only {
        return gpu.into_iter().collect();
    }
    let cpu = |isa: Isa| TestDevice {
        name: format!("CPU {}", isa.name()),
        k: Box::new(CpuKernels::with(isa)),
        s: Device::cpu(threads()).stream("compute").unwrap(),
    };
    Isa::all().into_iter().map(cpu).chain(gpu).collect()
}

/// Runs a test on every device and type.
pub fn everywhere(test: impl Fn(&TestDevice, DType)) {
    for device in devices() {
        for dtype in DTYPES {
            test(&device, dtype);
        }
    }
}

/// [`everywhere`] with the types of MoE kernels.
pub fn for_moe_dtypes(test: impl Fn(&TestDevice, DType)) {
    for device in devices() {
        for dtype in MOE_DTYPES {
            test(&device, dtype);
        }
    }
}

/// A view inside a larger buffer of NaN: reads outside it poison results, and writes outside it are detected.
pub struct Framed {
    whole: Tensor,
    pub view: Tensor,
}

impl TestDevice {
    pub fn tensor(&self, dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
        let up = |r| -> Tensor { Result::unwrap(r) };
        match dtype {
            DType::F32 => {
                let v: Vec<f32> = values.iter().map(|x| *x as f32).collect();
                up(self.s.upload(&v, shape, Category::Workspace))
            }
            DType::BF16 => {
                let v: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x as f32)).collect();
                up(self.s.upload(&v, shape, Category::Workspace))
            }
            DType::F16 => {
                let v: Vec<f16> = values.iter().map(|x| f16::from_f32(*x as f32)).collect();
                up(self.s.upload(&v, shape, Category::Workspace))
            }
            DType::I32 => {
                let v: Vec<i32> = values.iter().map(|x| *x as i32).collect();
                up(self.s.upload(&v, shape, Category::Workspace))
            }
            other => up(self.s.zeros(shape, other, Category::Workspace)),
        }
    }

    /// Filled with a value that every kernel must overwrite.
    pub fn poisoned(&self, dtype: DType, shape: &[usize]) -> Tensor {
        self.tensor(dtype, shape, &vec![f64::NAN; shape.iter().product()])
    }

    pub fn ids(&self, values: &[i32]) -> Tensor {
        self.s.upload(values, &[values.len()], Category::Workspace).unwrap()
    }

    pub fn framed(&self, dtype: DType, shape: &[usize], values: &[f64]) -> Framed {
        let outer: Vec<usize> = shape.iter().enumerate().map(|(a, n)| n + 2 + a % 2).collect();
        let mut all = vec![f64::NAN; outer.iter().product()];
        for (i, v) in values.iter().enumerate() {
            let (mut rest, mut at, mut step) = (i, 0, 1);
            for a in (0..shape.len()).rev() {
                at += (rest % shape[a] + 1) * step;
                rest /= shape[a];
                step *= outer[a];
            }
            all[at] = *v;
        }
        let whole = self.tensor(dtype, &outer, &all);
        let view = (0..shape.len()).fold(whole.clone(), |t, a| t.narrow(a, 1, shape[a]).unwrap());
        Framed { whole, view }
    }

    /// As a view inside a larger buffer, or contiguous and aligned.
    pub fn placed(&self, framed: bool, dtype: DType, shape: &[usize], values: &[f64]) -> Framed {
        if framed {
            return self.framed(dtype, shape, values);
        }
        let whole = self.tensor(dtype, shape, values);
        Framed { view: whole.clone(), whole }
    }

    pub fn host(&self, t: &Tensor) -> Vec<f64> {
        match t.dtype() {
            DType::F32 => self.s.download::<f32>(t).unwrap().into_iter().map(f64::from).collect(),
            DType::BF16 => self.s.download::<bf16>(t).unwrap().into_iter().map(|x| x.to_f64()).collect(),
            DType::F16 => self.s.download::<f16>(t).unwrap().into_iter().map(|x| x.to_f64()).collect(),
            DType::I32 => self.s.download::<i32>(t).unwrap().into_iter().map(f64::from).collect(),
            other => panic!("{other}"),
        }
    }

    /// Values of the view, after checking that nothing around it was written.
    pub fn inside(&self, f: &Framed) -> Vec<f64> {
        let inside = self.host(&f.view);
        let numbers = self.host(&f.whole).iter().filter(|x| !x.is_nan()).count();
        assert_eq!(numbers, inside.iter().filter(|x| !x.is_nan()).count(), "written outside the view");
        inside
    }
}

/// Random values in (-1, 1), rounded to the dtype.
pub fn numbers(dtype: DType, seed: u64, n: usize) -> Vec<f64> {
    let mut rng = SeededRng(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x1234_5678_9abc_def1);
    (0..n).map(|_| rounded(dtype, rng.uniform())).collect()
}

pub fn rounded(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        _ => f64::from(x as f32),
    }
}

/// Half an ulp of 1.
pub fn eps(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    }
}

/// Allows one rounding to the dtype of the result, plus `slack` for f32 arithmetic before it.
pub fn close(what: &str, dtype: DType, ours: &[f64], wanted: &[f64], slack: f64) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (o, w)) in ours.iter().zip(wanted).enumerate() {
        let room = 1.01 * eps(dtype) * (w.abs() + slack) + slack;
        assert!((o - w).abs() <= room, "{what} [{i}]: {o} instead of {w}, allowed {room:.1e}");
    }
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Errors that a GPU kernel finds are reported when the host synchronizes.
pub fn refused(h: &TestDevice, what: &str, result: Result<()>) {
    match result.and_then(|()| h.s.synchronize()) {
        Ok(()) => panic!("{}: {what} was accepted", h.name),
        Err(e) => assert!(e.to_string().len() > 15 && !e.to_string().contains('\n'), "{what}: {e}"),
    }
}
