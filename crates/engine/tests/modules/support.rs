//! Test values, f64 references and comparisons.

#[path = "../../../../tests/support/rng.rs"]
mod rng;

use ferrotron_engine::{
    Declarations, GradBuffer, LmHead, LmHeadConfig, ParamId, ParamKind, ParamSpec, Params, Rank, Saved,
    SavedTensor, StepContext, StepState, WeightGrad,
};
use ferrotron_tensor::fp8::{E4m3, E5m2};
use ferrotron_tensor::{Category, DType, Element, Tensor, bf16, f16};
use rng::SeededRng;

/// The dtypes modules compute in.
pub const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Values in (-1, 1) from a seed.
pub fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let mut rng = SeededRng(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5851_f42d_4c95_7f2d);
    (0..n).map(|_| rng.uniform()).collect()
}

/// Values rounded to the dtype.
pub fn rounded(dtype: DType, values: Vec<f64>) -> Vec<f64> {
    let round = |x: f64| match dtype {
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        _ => f64::from(x as f32),
    };
    values.into_iter().map(round).collect()
}

/// A rank with parameters of random values.
pub struct Setup {
    pub rank: Rank,
    pub params: Params,
    pub state: StepState,
    /// The parameters' values.
    pub weights: Vec<Vec<f64>>,
}

impl Setup {
    /// Allocates the declared parameters and fills them with values in (-`size`, `size`).
    pub fn new(d: Declarations, dtype: DType, seed: u64, size: f64) -> Setup {
        Setup::on(Rank::cpu(2, 1).unwrap(), d, dtype, seed, size)
    }

    /// The same on a given rank.
    pub fn on(rank: Rank, d: Declarations, dtype: DType, seed: u64, size: f64) -> Setup {
        Setup::of(rank, d.finish(), dtype, seed, size)
    }

    /// [`Setup::new`] where nothing but adapters is trained.
    pub fn frozen(d: Declarations, dtype: DType, seed: u64, size: f64) -> Setup {
        let mut specs = d.finish();
        specs.iter_mut().for_each(|s| s.group.frozen = s.kind() != ParamKind::Adapter);
        Setup::of(Rank::cpu(2, 1).unwrap(), specs, dtype, seed, size)
    }

    fn of(rank: Rank, specs: Vec<ParamSpec>, dtype: DType, seed: u64, size: f64) -> Setup {
        let params = Params::allocate(&rank, specs, dtype).unwrap();
        let draw = |i: usize, n| numbers(seed + i as u64, n).iter().map(|x| x * size).collect();
        let weights: Vec<Vec<f64>> =
            params.specs().iter().enumerate().map(|(i, s)| rounded(dtype, draw(i, s.numel()))).collect();
        for (t, w) in params.values().iter().zip(&weights) {
            write(&rank, t, w);
        }
        let state = StepState::new(&rank, &params, &[]).unwrap();
        Setup { rank, params, state, weights }
    }

    pub fn pass(&self) -> StepContext<'_> {
        StepContext::new(&self.rank, &self.params, &self.state)
    }

    pub fn buffer(&self) -> GradBuffer {
        GradBuffer::new(self.params.specs())
    }

    /// Values in the parameters' dtype, on the device and as f64.
    pub fn input(&self, seed: u64, shape: &[usize]) -> (Tensor, Vec<f64>) {
        let values = rounded(self.params.dtype(), numbers(seed, shape.iter().product()));
        (self.upload(&values, shape), values)
    }

    pub fn upload(&self, values: &[f64], shape: &[usize]) -> Tensor {
        let t = self.rank.activation(shape, self.params.dtype()).unwrap();
        write(&self.rank, &t, values);
        t
    }

    pub fn integers(&self, values: &[i32]) -> Tensor {
        self.rank.compute.upload(values, &[values.len()], Category::Activations).unwrap()
    }

    pub fn host(&self, t: &Tensor) -> Vec<f64> {
        host(&self.rank, t)
    }

    /// Runs the weight gradients into a new buffer and returns all of them.
    pub fn gradients(&self, work: WeightGrad) -> Vec<Vec<f64>> {
        let mut buffer = self.buffer();
        work.run(&self.rank, &mut buffer).unwrap();
        self.all(&mut buffer)
    }

    pub fn all(&self, buffer: &mut GradBuffer) -> Vec<Vec<f64>> {
        buffer.finish(&self.rank).unwrap().iter().map(|g| self.host(g)).collect()
    }

    /// Inputs of the reference: `x`, then every parameter.
    pub fn arrays(&self, x: &[f64]) -> Vec<Vec<f64>> {
        std::iter::once(x.to_vec()).chain(self.weights.iter().cloned()).collect()
    }

    /// Name of gradient `i` for messages; 0 is the input.
    pub fn name(&self, i: usize) -> String {
        match i {
            0 => "input".into(),
            _ => self.params.specs()[i - 1].parts.iter().map(|p| &*p.name).collect::<Vec<_>>().join("+"),
        }
    }

    /// Compares a module with its reference `f(arrays) = y`: output, input gradient and parameter gradients for the output
    /// gradient `dy`.
    pub fn compare(
        &self,
        what: &str,
        f: &dyn Fn(&[Vec<f64>]) -> Vec<f64>,
        x: &[f64],
        dy: &[f64],
        ours: (Vec<f64>, Vec<f64>, Vec<Vec<f64>>),
    ) {
        let dtype = self.params.dtype();
        let at = self.arrays(x);
        let (y, dx, grads) = ours;
        close(&format!("{what} {dtype} output"), dtype, &y, &f(&at));
        let theirs = differences(&|a: &[Vec<f64>]| dot(&f(a), dy), &at);
        for (i, (ours, theirs)) in std::iter::once(&dx).chain(&grads).zip(&theirs).enumerate() {
            if i > 0 && self.params.specs()[i - 1].group.frozen {
                assert!(ours.iter().all(|x| *x == 0.0), "{what}: {} is frozen", self.name(i));
                continue;
            }
            close(&format!("{what} {dtype} gradient of {}", self.name(i)), dtype, ours, theirs);
        }
        assert_eq!(grads.len() + 1, theirs.len(), "{what}");
    }
}

pub fn write(rank: &Rank, t: &Tensor, values: &[f64]) {
    match t.dtype() {
        DType::F32 => rank.compute.upload_into(t, &values.iter().map(|x| *x as f32).collect::<Vec<_>>()),
        DType::BF16 => {
            rank.compute.upload_into(t, &values.iter().map(|x| bf16::from_f32(*x as f32)).collect::<Vec<_>>())
        }
        DType::F16 => {
            rank.compute.upload_into(t, &values.iter().map(|x| f16::from_f32(*x as f32)).collect::<Vec<_>>())
        }
        other => panic!("{other}"),
    }
    .unwrap();
}

pub fn host(rank: &Rank, t: &Tensor) -> Vec<f64> {
    match t.dtype() {
        DType::F32 => rank.compute.download::<f32>(t).unwrap().into_iter().map(f64::from).collect(),
        DType::F16 => rank.compute.download::<f16>(t).unwrap().into_iter().map(|x| x.to_f64()).collect(),
        DType::BF16 => rank.compute.download::<bf16>(t).unwrap().into_iter().map(|x| x.to_f64()).collect(),
        other => panic!("{other}"),
    }
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `∂f/∂a` for every element of every array by central differences, accurate to about ten digits in f64.
pub fn differences(f: &dyn Fn(&[Vec<f64>]) -> f64, at: &[Vec<f64>]) -> Vec<Vec<f64>> {
    const H: f64 = 1e-5;
    let mut a = at.to_vec();
    let mut out = Vec::with_capacity(at.len());
    for i in 0..at.len() {
        let mut row = Vec::with_capacity(at[i].len());
        for j in 0..at[i].len() {
            a[i][j] = at[i][j] + H;
            let up = f(&a);
            a[i][j] = at[i][j] - H;
            let down = f(&a);
            a[i][j] = at[i][j];
            row.push((up - down) / (2.0 * H));
        }
        out.push(row);
    }
    out
}

/// Asserts a relative l2 distance within the dtype's rounding error.
pub fn close(what: &str, dtype: DType, ours: &[f64], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    assert!(ours.iter().all(|x| x.is_finite()), "{what}: a value is no number");
    let apart: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| a - b).collect();
    let size = dot(theirs, theirs).sqrt();
    let relative = dot(&apart, &apart).sqrt() / size.max(1e-3);
    // A module rounds a few intermediate results, by up to 2^-8 each in bf16. How often a value lies close to the middle of two
    // others depends on the order of sums, which differs between CPUs with and without a matrix unit.
    let most = match dtype {
        DType::F32 => 3e-6,
        DType::F16 => 2e-3,
        _ => 2e-2,
    };
    assert!(relative <= most, "{what}: {relative:.2e} apart, more than {most:.1e}");
}

/// A copy in new memory.
fn copied<T: Element>(rank: &Rank, t: &Tensor) -> Tensor {
    let values = rank.compute.download::<T>(t).unwrap();
    rank.compute.upload(&values, t.shape(), Category::Activations).unwrap()
}

/// Moves all saved activations to other memory, as an offload engine does, and overwrites the old contents where nothing
/// else references them. Returns the number of tensors.
pub fn move_saved(rank: &Rank, params: &Params, saved: &mut dyn Saved) -> usize {
    let weights: Vec<u64> = params.values().iter().map(Tensor::allocation_id).collect();
    let mut count = 0;
    saved.tensors(&mut |s: &mut SavedTensor| {
        assert!(!weights.contains(&s.allocation_id()), "a parameter is saved: {:?}", **s);
        let copy = match s.dtype() {
            DType::F32 => copied::<f32>(rank, s),
            DType::BF16 => copied::<bf16>(rank, s),
            DType::F16 => copied::<f16>(rank, s),
            DType::I32 => copied::<i32>(rank, s),
            DType::E4M3 => copied::<E4m3>(rank, s),
            DType::E5M2 => copied::<E5m2>(rank, s),
            DType::U8 => copied::<u8>(rank, s),
            other => panic!("{other}"),
        };
        s.replace(copy);
        count += 1;
    });
    count
}

/// The id of the `i`-th declared parameter.
pub fn id(i: usize) -> ParamId {
    ParamId(i)
}

/// An LM head of `[vocab, hidden]`, with a weight of its own or that of an embedding.
pub fn head_of(
    d: &mut Declarations,
    [vocab, hidden]: [usize; 2],
    softcap: Option<f32>,
    tied: Option<ParamId>,
) -> LmHead {
    let config = LmHeadConfig { vocab, hidden, softcap, std: 0.1 };
    match tied {
        Some(table) => LmHead::tied(d, table, &config),
        None => LmHead::declare(d, "head.weight", &config).unwrap(),
    }
}
