//! Weight gradients as deferred computations.

use crate::data_parallel::GradBuffer;
use crate::quant::{GemmOperand, GemmOptions, LinearGemm};
use crate::{ParamId, Rank, StepContext};
use ferrotron_kernels::{Gemm, LinearWgrad};
use ferrotron_tensor::{DType, Result, Tensor};

/// A deferred weight-gradient computation. It owns its operands, so it can run later: while the next module's backward is
/// under way, or in a pipeline bubble. Only running it marks gradients as ready.
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
    /// `dyᵀ·x`, and the column sums of `dy` for the bias, in one kernel.
    Linear { dy: Tensor, x: Tensor, bias: ParamId },
    /// `dyᵀ·x` of quantized operands.
    QuantizedGemm(Box<[GemmOperand; 2]>),
    /// Column sums of `dy`.
    ColumnSums { dy: Tensor },
    /// Anything else: writes or accumulates into the gradient it is given.
    Deferred(Deferred),
}

impl WeightGrad {
    /// `dW [out, in] = dyᵀ·x` from `dy [tokens, out]` and `x [tokens, in]`.
    pub(crate) fn gemm(param: ParamId, dy: &Tensor, x: &Tensor) -> WeightGrad {
        WeightGrad::one(param, Work::Gemm { dy: dy.clone(), x: x.clone() })
    }

    /// `dW [out, in]` from the columnwise operands `dyᵀ [out, tokens]` and `xᵀ [in, tokens]`, contracted over tokens.
    pub(crate) fn quantized_gemm(param: ParamId, dy: GemmOperand, x: GemmOperand) -> WeightGrad {
        WeightGrad::one(param, Work::QuantizedGemm(Box::new([dy, x])))
    }

    /// `dW [out, in] = dyᵀ·x` and `db [out]`, the column sums of `dy`.
    pub(crate) fn linear(weight: ParamId, bias: ParamId, dy: &Tensor, x: &Tensor) -> WeightGrad {
        WeightGrad::one(weight, Work::Linear { dy: dy.clone(), x: x.clone(), bias })
    }

    /// `db [out]`, the column sums of `dy [tokens, out]`, or of partial sums f32 `[parts, out]`.
    pub(crate) fn column_sums(param: ParamId, dy: &Tensor) -> WeightGrad {
        WeightGrad::one(param, Work::ColumnSums { dy: dy.clone() })
    }

    /// Any other computation; it is called with the gradient's memory and whether to accumulate.
    pub(crate) fn deferred(
        param: ParamId,
        work: impl FnOnce(&Rank, &Tensor, bool) -> Result<()> + Send + 'static,
    ) -> WeightGrad {
        WeightGrad::one(param, Work::Deferred(Box::new(work)))
    }

    /// A gradient that is already computed, f32.
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

    /// Both computations, this one first.
    pub fn and(mut self, mut other: WeightGrad) -> WeightGrad {
        self.jobs.append(&mut other.jobs);
        self
    }

    /// Computes the gradients into `grads` and marks them ready.
    pub fn run(self, rank: &Rank, grads: &mut GradBuffer) -> Result<()> {
        for Job { param, work } in self.jobs {
            if grads.is_frozen(param) {
                // Its bias, if any, is trained by itself.
                if let Work::Linear { dy, bias, .. } = work {
                    WeightGrad::column_sums(bias, &dy).run(rank, grads)?;
                }
                grads.ready(rank, param)?;
                continue;
            }
            let (grad, accumulate) = grads.main_grad(rank, param)?;
            match work {
                Work::Linear { dy, x, bias } if grads.is_frozen(bias) => {
                    Work::Gemm { dy, x }.run(rank, &grad, accumulate)?;
                    grads.ready(rank, bias)?;
                }
                Work::Linear { dy, x, bias } => {
                    let (sums, onto) = grads.main_grad(rank, bias)?;
                    let (dw, db) = ((&grad, accumulate), (&sums, onto));
                    rank.kernels.linear_wgrad(&rank.compute, &LinearWgrad { dy: &dy, x: &x, dw, db })?;
                    drop((dy, x));
                    grads.ready(rank, param)?;
                    grads.ready(rank, bias)?;
                    continue;
                }
                other => other.run(rank, &grad, accumulate)?,
            }
            grads.ready(rank, param)?;
        }
        Ok(())
    }
}

impl Work {
    /// Writes or accumulates the gradient of a weight; of a linear without that of its bias.
    fn run(self, rank: &Rank, grad: &Tensor, accumulate: bool) -> Result<()> {
        let (k, s) = (&rank.kernels, &rank.compute);
        match self {
            Work::Gemm { dy, x } | Work::Linear { dy, x, .. } => k.gemm(
                s,
                &Gemm { a: &dy, trans_a: true, b: &x, trans_b: false, bias: None, accumulate, c: grad },
            ),
            Work::QuantizedGemm(sides) => {
                let [dy, x] = *sides;
                let how = GemmOptions { product: LinearGemm::Wgrad, bias: None, accumulate, fast: false };
                dy.gemm(rank, &x, how, grad)
            }
            Work::ColumnSums { dy } => k.column_sum(s, &dy, accumulate, grad),
            Work::Deferred(f) => f(rank, grad, accumulate),
        }
    }
}

/// Sums of weight gradients over parts of a micro-batch, whose operands are freed part by part.
#[derive(Default)]
pub(crate) struct WeightGradSums {
    /// f32, in the order of first use.
    sums: Vec<(ParamId, Tensor)>,
}

impl WeightGradSums {
    /// Computes the gradients of one part and adds them.
    pub(crate) fn add(&mut self, p: &StepContext, grads: WeightGrad) -> Result<()> {
        for Job { param, work } in grads.jobs {
            if let Work::Linear { dy, bias, .. } = &work {
                self.add_one(p, *bias, Work::ColumnSums { dy: dy.clone() })?;
            }
            self.add_one(p, param, work)?;
        }
        Ok(())
    }

    fn add_one(&mut self, p: &StepContext, param: ParamId, work: Work) -> Result<()> {
        let spec = &p.params.specs()[param.0];
        if let Some((_, sum)) = self.sums.iter().find(|(id, _)| *id == param) {
            return if spec.group.frozen { Ok(()) } else { work.run(p.rank, sum, true) };
        }
        // Nothing is computed for a frozen parameter, but it is counted as ready.
        let shape: &[usize] = if spec.group.frozen { &[0] } else { &spec.shape };
        let sum = p.rank.activation(shape, DType::F32)?;
        if !spec.group.frozen {
            work.run(p.rank, &sum, false)?;
        }
        self.sums.push((param, sum));
        Ok(())
    }

    /// The sums as gradients of the micro-batch.
    pub(crate) fn into_weight_grad(self) -> WeightGrad {
        let add = |all: WeightGrad, (param, sum)| all.and(WeightGrad::computed(param, sum));
        self.sums.into_iter().fold(WeightGrad::default(), add)
    }
}
