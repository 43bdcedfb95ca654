//! Gradients of weights: the buffer they gather in, and the work that puts them there.

use crate::data_parallel::{BucketPlan, Placement, ShardingStrategy, bucket_elements};
use crate::quant::{GemmOperand, GemmOptions, LinearGemm};
use crate::{ParamId, ParamSpec, Params, Rank};
use ferrotron_kernels::{Gemm, LinearWgrad};
use ferrotron_tensor::{Category, DType, Error, Event, Result, Tensor};
use std::collections::VecDeque;
use std::sync::Arc;

/// f32 gradients of all parameters, in the buckets of a [`BucketPlan`]. Memory is taken when the first gradient of a bucket
/// arrives. When the last has, the bucket is summed over ranks, beside the rest of backward where that is wanted.
pub struct GradBuffer {
    pub(crate) plan: Arc<BucketPlan>,
    pub(crate) scheme: ShardingStrategy,
    pub(crate) specs: Vec<ParamSpec>,
    slots: Vec<Slot>,
    pub(crate) buckets: Vec<Memory>,
    /// Of the step; if unknown, nothing is summed before the end.
    pub(crate) micro_batches: Option<usize>,
    /// Sums over ranks begun in this step: every bucket in turn, once, or once for each micro-batch.
    pub(crate) begun: usize,
    pub(crate) in_flight: VecDeque<InFlight>,
}

#[derive(Clone)]
struct Slot {
    /// Contributions in this step.
    arrived: usize,
    /// Nothing written since the step began: the next write replaces instead of adding.
    fresh: bool,
}

/// What there is of a bucket.
#[derive(Default)]
pub(crate) struct Memory {
    /// This rank's own gradients.
    pub(crate) whole: Option<Tensor>,
    /// Its part of the sum, where gradients are divided between micro-batches.
    pub(crate) part: Option<Tensor>,
}

/// A sum under way beside computation.
pub(crate) struct InFlight {
    pub(crate) done: Event,
    /// Memory that nobody needs afterwards.
    pub(crate) _memory: Option<Tensor>,
}

impl GradBuffer {
    /// Buffers for a model that no other rank has a copy of, or only whole copies; no memory yet.
    pub fn new(specs: &[ParamSpec]) -> GradBuffer {
        let plan = Arc::new(BucketPlan::new(specs, [1; 2], bucket_elements(1)));
        GradBuffer::over(plan, specs.to_vec(), ShardingStrategy::REPLICATED)
    }

    /// Buffers with the buckets of `params`, divided as `scheme` says; no memory yet.
    pub fn of(params: &Params, scheme: ShardingStrategy) -> GradBuffer {
        GradBuffer::over(params.plan().clone(), params.specs().to_vec(), scheme)
    }

    fn over(plan: Arc<BucketPlan>, specs: Vec<ParamSpec>, scheme: ShardingStrategy) -> GradBuffer {
        let slots = vec![Slot { arrived: 0, fresh: true }; specs.len()];
        let buckets = plan.buckets().iter().map(|_| Memory::default()).collect();
        let (micro_batches, begun, in_flight) = (None, 0, VecDeque::new());
        GradBuffer { plan, scheme, specs, slots, buckets, micro_batches, begun, in_flight }
    }

    /// A step of so many micro-batches begins, in whatever order and however interleaved: old contents are void.
    /// Nothing is zeroed; the first write of each gradient overwrites.
    pub fn begin_step(&mut self, micro_batches: usize) {
        self.slots.iter_mut().for_each(|s| (s.fresh, s.arrived) = (true, 0));
        (self.micro_batches, self.begun) = (Some(micro_batches), 0);
    }

    /// Where the gradient of `id` goes, and whether to add (true) or overwrite (false). Call it only when
    /// about to write: the answer is "overwrite" once a step.
    fn main_grad(&mut self, rank: &Rank, id: ParamId) -> Result<(Tensor, bool)> {
        if self.begun > (self.rounds() - 1) * self.buckets.len() + self.plan.slot(id).0 {
            let name = self.specs[id.0].parts.first().map_or("", |p| &p.name);
            let what = format!("'{name}' gets one after its last of the step was summed over ranks");
            return Err(Error::Unsupported { op: "gradient", what });
        }
        let tensor = self.view(rank, id)?;
        Ok((tensor, !std::mem::replace(&mut self.slots[id.0].fresh, false)))
    }

    /// Times that every bucket is summed over ranks in a step.
    pub(crate) fn rounds(&self) -> usize {
        if self.scheme.grad.is_full_size() { 1 } else { self.micro_batches.unwrap_or(1).max(1) }
    }

    /// This rank's own gradients of a bucket.
    pub(crate) fn whole(&mut self, rank: &Rank, bucket: usize) -> Result<Tensor> {
        if let Some(whole) = &self.buckets[bucket].whole {
            return Ok(whole.clone());
        }
        let layout = &self.plan.buckets()[bucket];
        let whole = Tensor::empty(&rank.compute, &[layout.len], DType::F32, Category::Gradients)?;
        // What lies between gradients is summed over ranks like the rest.
        layout.gaps().try_for_each(|r| rank.compute.zero(&whole.narrow(0, r.start, r.len())?))?;
        Ok(self.buckets[bucket].whole.insert(whole).clone())
    }

    fn view(&mut self, rank: &Rank, id: ParamId) -> Result<Tensor> {
        let (bucket, range) = self.plan.slot(id);
        let whole = self.whole(rank, bucket)?;
        whole.narrow(0, range.start, range.len())?.view(&self.specs[id.0].shape)
    }

    fn ready(&mut self, rank: &Rank, id: ParamId) -> Result<()> {
        self.slots[id.0].arrived += 1;
        if self.micro_batches.is_some() { self.reduce_ready(rank, false) } else { Ok(()) }
    }

    /// Has every use of the parameter contributed in so many micro-batches?
    pub(crate) fn arrived(&self, id: ParamId, micro_batches: usize) -> bool {
        self.slots[id.0].arrived >= micro_batches * self.specs[id.0].uses as usize
    }

    /// Has every use of the parameter contributed in all micro-batches of the step?
    pub fn is_ready(&self, id: ParamId) -> bool {
        self.arrived(id, self.micro_batches.unwrap_or(1))
    }

    /// Zeros for the parameters of a bucket that got nothing. With `void`, what is there is not needed again.
    pub(crate) fn complete(&mut self, rank: &Rank, bucket: usize, void: bool) -> Result<()> {
        for k in 0..self.plan.buckets()[bucket].spans.len() {
            let id = self.plan.buckets()[bucket].spans[k].param;
            if std::mem::replace(&mut self.slots[id.0].fresh, void) {
                rank.compute.zero(&self.view(rank, id)?)?;
            }
        }
        Ok(())
    }

    /// All gradients of this rank's own data, after the last micro-batch. Parameters that got none have zeros.
    pub fn finish(&mut self, rank: &Rank) -> Result<Vec<Tensor>> {
        (0..self.buckets.len()).try_for_each(|b| self.complete(rank, b, false))?;
        (0..self.slots.len()).map(|i| self.view(rank, ParamId(i))).collect()
    }

    /// The gradient of one parameter, for reading; an error before it exists, or where ranks divide it.
    pub fn get(&self, id: ParamId) -> Result<Tensor> {
        let (bucket, range) = self.plan.slot(id);
        let missing = |what: &str| Err(Error::Unsupported { op: "gradient", what: what.into() });
        match &self.buckets[bucket].whole {
            _ if self.scheme.optimizer != Placement::Replicate => missing("ranks divide it; gather it first"),
            Some(whole) => whole.narrow(0, range.start, range.len())?.view(&self.specs[id.0].shape),
            None => missing("no backward pass has run yet"),
        }
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
    Gemm { dy: Tensor, x: Tensor },
    /// `dyᵀ·x`, and the column sums of `dy` for the bias.
    Linear { dy: Tensor, x: Tensor, bias: ParamId },
    /// The product of two factors.
    QuantizedGemm(Box<[GemmOperand; 2]>),
    /// Column sums of `dy`.
    ColumnSums { dy: Tensor },
    /// Anything else: writes or adds into the gradient it is given.
    Deferred(Deferred),
}

impl WeightGrad {
    /// `weight [out, in]` gets `dyᵀ·x` from `dy [tokens, out]` and `x [tokens, in]`.
    pub(crate) fn gemm(param: ParamId, dy: &Tensor, x: &Tensor) -> WeightGrad {
        WeightGrad::one(param, Work::Gemm { dy: dy.clone(), x: x.clone() })
    }

    /// `weight [out, in]` gets the product of `dyᵀ [out, tokens]` and `xᵀ [in, tokens]`, both contracted over tokens.
    pub(crate) fn quantized_gemm(param: ParamId, dy: GemmOperand, x: GemmOperand) -> WeightGrad {
        WeightGrad::one(param, Work::QuantizedGemm(Box::new([dy, x])))
    }

    /// `weight [out, in]` gets `dyᵀ·x` and `bias [out]` the column sums of `dy`.
    pub(crate) fn linear(weight: ParamId, bias: ParamId, dy: &Tensor, x: &Tensor) -> WeightGrad {
        WeightGrad::one(weight, Work::Linear { dy: dy.clone(), x: x.clone(), bias })
    }

    /// `bias [out]` gets the column sums of `dy [tokens, out]`, or of partial sums f32 `[parts, out]`.
    pub(crate) fn column_sums(param: ParamId, dy: &Tensor) -> WeightGrad {
        WeightGrad::one(param, Work::ColumnSums { dy: dy.clone() })
    }

    /// Work of another kind: called with the gradient's memory and whether to add to it.
    pub(crate) fn deferred(
        param: ParamId,
        work: impl FnOnce(&Rank, &Tensor, bool) -> Result<()> + Send + 'static,
    ) -> WeightGrad {
        WeightGrad::one(param, Work::Deferred(Box::new(work)))
    }

    /// A gradient that is there already, f32.
    pub(crate) fn computed(param: ParamId, sums: Tensor) -> WeightGrad {
        WeightGrad::deferred(param, move |rank, grad, accumulate| {
            let sums = sums.view(grad.shape())?;
            match accumulate {
                true => rank.kernels.add_assign(&rank.compute, grad, &sums),
                false => rank.compute.copy(&sums, grad),
            }
        })
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
                Work::Gemm { dy, x } => k.gemm(
                    s,
                    &Gemm { a: &dy, trans_a: true, b: &x, trans_b: false, bias: None, accumulate, c: &grad },
                )?,
                Work::Linear { dy, x, bias } => {
                    let (sums, onto) = grads.main_grad(rank, bias)?;
                    let (dw, db) = ((&grad, accumulate), (&sums, onto));
                    k.linear_wgrad(s, &LinearWgrad { dy: &dy, x: &x, dw, db })?;
                    drop((dy, x));
                    grads.ready(rank, param)?;
                    grads.ready(rank, bias)?;
                    continue;
                }
                Work::QuantizedGemm(sides) => {
                    let [dy, x] = *sides;
                    let how = GemmOptions { product: LinearGemm::Wgrad, bias: None, accumulate, fast: false };
                    dy.gemm(rank, &x, how, &grad)?;
                }
                Work::ColumnSums { dy } => k.column_sum(s, &dy, accumulate, &grad)?,
                Work::Deferred(f) => f(rank, &grad, accumulate)?,
            }
            grads.ready(rank, param)?;
        }
        Ok(())
    }
}
