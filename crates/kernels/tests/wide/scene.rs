//! The kernels under test beside those of the CPU, large random tensors, and comparisons of their sampled rows.

use ferrotron_kernels::cpu::CpuKernels;
use ferrotron_kernels::cuda::CudaKernels;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_kernels::{Kernels, NormalFill};
use ferrotron_tensor::{
    Category, DType, Device, Element, Instrumentation, Stream, Tensor, Threads, bf16, f16, gpus,
};
use std::ops::Range;

/// Free memory that the largest family needs.
const MEMORY: usize = 64 << 30;
/// Elements that random values are drawn for at a time.
const SLAB: usize = 1 << 28;

/// Kernels with a stream to run them on.
pub struct Side {
    pub k: Box<dyn Kernels>,
    pub s: Stream,
}

pub struct Scene {
    /// What is tested.
    pub large: Side,
    /// What it is compared with.
    pub cpu: Side,
    /// Tensors have more elements than this.
    limit: usize,
}

fn cpu(threads: usize) -> Side {
    let device = Device::cpu(Threads::new(threads).unwrap());
    Side { k: Box::new(CpuKernels::detect()), s: device.stream("compute").unwrap() }
}

impl Scene {
    pub fn small() -> Scene {
        Scene { large: cpu(2), cpu: cpu(2), limit: 50_000 }
    }

    /// The first GPU; none where it is absent or too small, which is said aloud. `FERROTRON_TEST_DEVICE=cuda` requires one.
    pub fn gpu() -> Option<Scene> {
        if !gpus().is_ok_and(|all| !all.is_empty()) {
            assert!(std::env::var("FERROTRON_TEST_DEVICE").is_err(), "there is no GPU");
            eprintln!("SKIPPED: tensors of more than 2^31 elements need a GPU");
            return None;
        }
        let device = Device::cuda(0, Threads::new(8).unwrap(), Instrumentation::default()).unwrap();
        let (free, _) = device.gpu_memory().unwrap().unwrap();
        if free < MEMORY {
            eprintln!(
                "SKIPPED: tensors of more than 2^31 elements need 64 GiB of GPU memory, {free} bytes are free"
            );
            return None;
        }
        let k = Box::new(CudaKernels::load(&device).unwrap());
        let large = Side { k, s: device.stream("compute").unwrap() };
        Some(Scene { large, cpu: cpu(8), limit: 1 << 31 })
    }

    /// A size of the large tensors, or of the small ones.
    pub fn size(&self, large: usize, small: usize) -> usize {
        if self.limit == 1 << 31 { large } else { small }
    }

    /// Rows of `width` that hold more than `times` the limit.
    pub fn rows(&self, width: usize, times: usize) -> usize {
        (times * self.limit / width + 64).next_multiple_of(128)
    }

    /// `n` rows at the start, around every multiple of the limit, and at the end; starts are multiples of `align`.
    pub fn ranges(&self, rows: usize, width: usize, n: usize, align: usize) -> Vec<Range<usize>> {
        let boundaries =
            (1..=rows * width / self.limit).map(|i| (i * self.limit / width).saturating_sub(n / 2));
        let mut starts: Vec<usize> = [0].into_iter().chain(boundaries).chain([rows - n]).collect();
        starts.iter_mut().for_each(|at| *at = (*at).min(rows - n) / align * align);
        starts.dedup();
        starts.into_iter().map(|at| at..at + n).collect()
    }

    /// Four rows at each of those places.
    pub fn samples(&self, t: &Tensor) -> Vec<Range<usize>> {
        let rows = t.shape()[0];
        self.ranges(rows, t.numel() / rows, 4, 1)
    }

    /// Returns freed memory to the GPU.
    pub fn trim(&self) {
        self.large.s.synchronize().unwrap();
        self.large.s.device().trim().unwrap();
    }

    pub fn empty(&self, dtype: DType, shape: &[usize]) -> Tensor {
        Tensor::empty(&self.large.s, shape, dtype, Category::Workspace).unwrap()
    }

    /// Normal values, all rows different.
    pub fn random(&self, dtype: DType, [rows, width]: [usize; 2], seed: u64) -> Tensor {
        let out = self.empty(dtype, &[rows, width]);
        let each = (SLAB / width).clamp(1, rows.max(1));
        let drawn = self.empty(DType::F32, &[each, width]);
        for start in (0..rows).step_by(each) {
            let n = each.min(rows - start);
            let part = drawn.narrow(0, 0, n).unwrap();
            self.large.k.normal(&self.large.s, fill(seed, start, width), &part).unwrap();
            self.large.k.copy(&self.large.s, &part, &out.narrow(0, start, n).unwrap()).unwrap();
        }
        out
    }

    /// Zeros, but for the sampled rows.
    pub fn sparse(&self, dtype: DType, shape: [usize; 2], seed: u64) -> Tensor {
        let out = self.large.s.zeros(&shape, dtype, Category::Workspace).unwrap();
        for at in self.samples(&out) {
            let part = self.random(dtype, [at.len(), shape[1]], seed + at.start as u64);
            self.large.k.copy(&self.large.s, &part, &out.narrow(0, at.start, at.len()).unwrap()).unwrap();
        }
        out
    }

    /// The same values on both sides.
    pub fn both<T: Element>(&self, values: &[T], shape: &[usize]) -> [Tensor; 2] {
        [&self.large, &self.cpu].map(|side| side.s.upload(values, shape, Category::Workspace).unwrap())
    }

    /// A contiguous part of a tensor, on the CPU.
    pub fn fetch(&self, part: &Tensor) -> Tensor {
        self.cpu_tensor(&self.bytes(part), part.dtype(), part.shape())
    }

    /// The sampled rows of a tensor, on the CPU.
    pub fn gather(&self, t: &Tensor, at: &[Range<usize>]) -> Tensor {
        let rows = |r: &Range<usize>| self.bytes(&t.narrow(0, r.start, r.len()).unwrap());
        let mut shape = t.shape().to_vec();
        shape[0] = at.iter().map(Range::len).sum();
        self.cpu_tensor(&at.iter().flat_map(rows).collect::<Vec<u8>>(), t.dtype(), &shape)
    }

    pub fn bytes(&self, part: &Tensor) -> Vec<u8> {
        self.large.s.download::<u8>(&part.as_bytes().unwrap()).unwrap()
    }

    fn cpu_tensor(&self, bytes: &[u8], dtype: DType, shape: &[usize]) -> Tensor {
        let flat = self.cpu.s.upload(bytes, &[bytes.len()], Category::Workspace).unwrap();
        flat.with_dtype(dtype).unwrap().view(shape).unwrap()
    }

    pub fn cpu_empty(&self, dtype: DType, shape: &[usize]) -> Tensor {
        Tensor::empty(&self.cpu.s, shape, dtype, Category::Workspace).unwrap()
    }

    /// The sampled rows hold the same bits as the CPU's.
    pub fn same(&self, what: &str, t: &Tensor, at: &[Range<usize>], wanted: &Tensor) {
        let ours = self.gather(t, at);
        let [ours, wanted] =
            [&ours, wanted].map(|t| self.cpu.s.download::<u8>(&t.as_bytes().unwrap()).unwrap());
        let first = ours.iter().zip(&wanted).position(|(a, b)| a != b);
        assert!(
            ours.len() == wanted.len() && first.is_none(),
            "{what}: byte {first:?} of rows {at:?} differs"
        );
    }

    /// The sampled rows differ from the CPU's by two roundings and `slack` at most.
    pub fn near(&self, what: &str, t: &Tensor, at: &[Range<usize>], wanted: &Tensor, slack: f64) {
        let eps = if t.dtype() == DType::F32 { 2f64.powi(-22) } else { 2.02 * 2f64.powi(-8) };
        let (ours, wanted) = (self.values(&self.gather(t, at)), self.values(wanted));
        assert_eq!(ours.len(), wanted.len(), "{what}");
        for (i, (o, w)) in ours.iter().zip(&wanted).enumerate() {
            let room = eps * w.abs() + slack;
            assert!((o - w).abs() <= room, "{what}: element {i} of rows {at:?} is {o} instead of {w}");
        }
    }

    /// Every sampled row differs from the CPU's by a hundredth of its norm at most.
    pub fn alike(&self, what: &str, t: &Tensor, at: &[Range<usize>], wanted: &Tensor) {
        let (ours, wanted) = (self.values(&self.gather(t, at)), self.values(wanted));
        assert_eq!(ours.len(), wanted.len(), "{what}");
        let width = ours.len() / at.iter().map(Range::len).sum::<usize>();
        for (row, (o, w)) in ours.chunks(width).zip(wanted.chunks(width)).enumerate() {
            assert_close(&format!("{what}: row {row} of {at:?}"), o, w);
        }
    }

    /// Values of a tensor on the CPU.
    pub fn values(&self, t: &Tensor) -> Vec<f64> {
        let s = &self.cpu.s;
        match t.dtype() {
            DType::F64 => s.download::<f64>(t).unwrap(),
            DType::F32 => s.download::<f32>(t).unwrap().into_iter().map(f64::from).collect(),
            DType::BF16 => s.download::<bf16>(t).unwrap().into_iter().map(|x| x.to_f64()).collect(),
            DType::F16 => s.download::<f16>(t).unwrap().into_iter().map(|x| x.to_f64()).collect(),
            other => panic!("{other}"),
        }
    }

    /// The one value of a tensor under test.
    pub fn number(&self, t: &Tensor) -> f64 {
        self.values(&self.fetch(t))[0]
    }
}

/// The values of rows from `start` on.
pub fn fill(seed: u64, start: usize, width: usize) -> NormalFill {
    let stream = RandomStream::named(seed, "wide");
    NormalFill { stream, first: (start * width) as u64, stride: width as u64, std: 1.0 }
}

/// `‖ours − wanted‖ ≤ ‖wanted‖/100`: another row would differ by more than its norm.
pub fn assert_close(what: &str, ours: &[f64], wanted: &[f64]) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let (error, size) =
        (norm(&mut ours.iter().zip(wanted).map(|(o, w)| o - w)), norm(&mut wanted.iter().copied()));
    assert!(error <= 0.01 * size + 1e-12, "{what}: off by {error:.3e} where the norm is {size:.3e}");
}
