//! Gradients of weights: the buffer they gather in, and the work that puts them there.

use crate::{ParamId, ParamSpec, Rank};
use ferrotron_kernels::Gemm;
use ferrotron_tensor::{Category, DType, Error, Result, Tensor};

/// f32 gradients of all parameters in one piece of memory, in reverse order of declaration (about the order in
/// which backward finishes them). Memory is taken when the first gradient arrives.
pub struct GradBuffer {
    flat: Option<Tensor>,
    slots: Vec<Slot>,
    numel: usize,
}

struct Slot {
    offset: usize,
    shape: Vec<usize>,
    uses: u32,
    arrived: u32,
    /// Nothing written since the step began: the next write replaces instead of adding.
    fresh: bool,
}

/// Gradients start on whole cache lines.
const ALIGN: usize = 64;

impl GradBuffer {
    /// The plan of a buffer; no memory yet.
    pub fn new(specs: &[ParamSpec]) -> GradBuffer {
        let mut numel = 0;
        let mut slots: Vec<Slot> = specs
            .iter()
            .rev()
            .map(|s| {
                let offset = numel;
                numel += s.numel().next_multiple_of(ALIGN);
                Slot { offset, shape: s.shape.clone(), uses: s.uses, arrived: 0, fresh: true }
            })
            .collect();
        slots.reverse();
        GradBuffer { flat: None, slots, numel }
    }

    /// A step begins: old contents are void. Nothing is zeroed; the first write of each gradient overwrites.
    pub fn begin_step(&mut self) {
        self.slots.iter_mut().for_each(|s| (s.fresh, s.arrived) = (true, 0));
    }

    /// A micro-batch begins: readiness is counted anew, contents stay.
    pub fn begin_micro_batch(&mut self) {
        self.slots.iter_mut().for_each(|s| s.arrived = 0);
    }

    /// Where the gradient of `id` goes, and whether to add (true) or overwrite (false). Call it only when
    /// about to write: the answer is "overwrite" once a step.
    fn main_grad(&mut self, rank: &Rank, id: ParamId) -> Result<(Tensor, bool)> {
        let tensor = self.view(rank, id)?;
        Ok((tensor, !std::mem::replace(&mut self.slots[id.0].fresh, false)))
    }

    /// All of it.
    pub(crate) fn flat(&mut self, rank: &Rank) -> Result<Tensor> {
        if let Some(flat) = &self.flat {
            return Ok(flat.clone());
        }
        // Zeros once, for the gaps between gradients, which are summed over ranks like the rest.
        let flat = rank.compute.zeros(&[self.numel], DType::F32, Category::Gradients)?;
        Ok(self.flat.insert(flat).clone())
    }

    fn view(&mut self, rank: &Rank, id: ParamId) -> Result<Tensor> {
        let flat = self.flat(rank)?;
        let slot = &self.slots[id.0];
        flat.narrow(0, slot.offset, slot.shape.iter().product())?.view(&slot.shape)
    }

    fn ready(&mut self, id: ParamId) {
        self.slots[id.0].arrived += 1;
    }

    /// Has every use of the parameter contributed in this micro-batch?
    pub fn is_ready(&self, id: ParamId) -> bool {
        self.slots[id.0].arrived == self.slots[id.0].uses
    }

    /// All gradients of the step, after the last micro-batch. Parameters that got none have zeros.
    pub fn finish(&mut self, rank: &Rank) -> Result<Vec<Tensor>> {
        (0..self.slots.len())
            .map(|i| {
                let grad = self.view(rank, ParamId(i))?;
                if std::mem::replace(&mut self.slots[i].fresh, false) {
                    rank.compute.zero(&grad)?;
                }
                Ok(grad)
            })
            .collect()
    }
}

/// Work that forms weight gradients. It owns its operands, so it can wait: until the next module's backward is
/// under way, or until a pipeline has nothing better to do. Only running it marks gradients as ready.
#[must_use = "weight gradients appear only when this is run"]
#[derive(Default)]
pub struct WeightGrad {
    jobs: Vec<Job>,
}

type Deferred = Box<dyn FnOnce(&Rank, &Tensor, bool) -> Result<()> + Send>;

struct Job {
    param: ParamId,
    work: Work,
}

enum Work {
    /// `dyᵀ·x`
    Product { dy: Tensor, x: Tensor },
    /// Column sums of `dy`.
    Columns { dy: Tensor },
    /// An f32 gradient that backward had to form anyway.
    Value(Tensor),
    /// Anything else: writes or adds into the gradient it is given.
    Other(Deferred),
}

impl WeightGrad {
    /// `weight [out, in]` gets `dyᵀ·x` from `dy [tokens, out]` and `x [tokens, in]`.
    pub(crate) fn product(param: ParamId, dy: &Tensor, x: &Tensor) -> WeightGrad {
        WeightGrad::one(param, Work::Product { dy: dy.clone(), x: x.clone() })
    }

    /// `bias [out]` gets the column sums of `dy [tokens, out]`.
    pub(crate) fn columns(param: ParamId, dy: &Tensor) -> WeightGrad {
        WeightGrad::one(param, Work::Columns { dy: dy.clone() })
    }

    /// A gradient already formed in f32.
    pub(crate) fn value(param: ParamId, grad: Tensor) -> WeightGrad {
        WeightGrad::one(param, Work::Value(grad))
    }

    /// Work of another kind: called with the gradient's memory and whether to add to it.
    pub(crate) fn other(
        param: ParamId,
        work: impl FnOnce(&Rank, &Tensor, bool) -> Result<()> + Send + 'static,
    ) -> WeightGrad {
        WeightGrad::one(param, Work::Other(Box::new(work)))
    }

    fn one(param: ParamId, work: Work) -> WeightGrad {
        WeightGrad { jobs: vec![Job { param, work }] }
    }

    /// Both, this one first.
    pub fn and(mut self, mut other: WeightGrad) -> WeightGrad {
        self.jobs.append(&mut other.jobs);
        self
    }

    /// Forms the gradients in `grads` and marks them ready.
    pub fn run(self, rank: &Rank, grads: &mut GradBuffer) -> Result<()> {
        for Job { param, work } in self.jobs {
            let (grad, accumulate) = grads.main_grad(rank, param)?;
            let (k, s) = (&rank.kernels, &rank.compute);
            match work {
                Work::Product { dy, x } => k.gemm(
                    s,
                    &Gemm { a: &dy, trans_a: true, b: &x, trans_b: false, bias: None, accumulate, c: &grad },
                )?,
                Work::Columns { dy } => k.column_sum(s, &dy, accumulate, &grad)?,
                Work::Value(v) if accumulate => k.add_assign(s, &grad, &v)?,
                Work::Value(v) => k.copy(s, &v, &grad)?,
                Work::Other(f) => f(rank, &grad, accumulate)?,
            }
            grads.ready(param);
        }
        Ok(())
    }
}

impl GradBuffer {
    /// The gradient of one parameter, for reading; an error before it exists.
    pub fn get(&self, id: ParamId) -> Result<Tensor> {
        let slot = &self.slots[id.0];
        match &self.flat {
            Some(flat) => flat.narrow(0, slot.offset, slot.shape.iter().product())?.view(&slot.shape),
            None => Err(Error::Unsupported { op: "gradient", what: "no backward pass has run yet".into() }),
        }
    }
}
