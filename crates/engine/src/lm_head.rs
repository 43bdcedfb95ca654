//! The output matrix and the loss as one module.
//!
//! The weight of every row in the final loss is known before forward, so the loss kernel turns the logits into
//! their gradient where they lie: f32 logits never exist, and backward starts from two products. Where even the
//! logits of all tokens are too much, rows go through in chunks: forward forms the gradient of the hidden
//! states chunk by chunk and throws the logits away, and the weight gradient forms them once more.

use crate::linear::LinearSaved;
use crate::quant::{GemmOperand, LinearQuant, Role};
use crate::tensor_parallel::{WeightOperand, wgrad_gemm};
use crate::{
    Declarations, Init, ParamId, Part, Rank, Saved, SavedTensor, Split, StepContext, WeightGrad, WithAmax,
};
use ferrotron_kernels::{CrossEntropy, Gemm, LabelSmoothing, VocabParallelCrossEntropy, VocabParallelLogits};
use ferrotron_tensor::{DType, Result, Tensor, shape_error};

/// Rows of the weight of a whole vocabulary on a card are a multiple of this in products.
const PAD_VOCAB_TO: usize = 64;

/// `[tokens, hidden] → logits [tokens, V] → loss`
#[derive(Clone)]
pub struct LmHead {
    pub(crate) weight: ParamId,
    /// First row of the weight that this rank holds, how many, and rows in all.
    first: usize,
    pub(crate) rows: usize,
    vocab: usize,
    softcap: Option<f32>,
    /// Targets are softened by this.
    pub smoothing: LabelSmoothing,
    /// Rows at a time; all at once if there are no more.
    pub chunk: usize,
    /// Rows of the weight in products are a multiple of this, the last of them zeros; unset means of 64 on a card, of 16
    /// where factors are bytes.
    pub pad_vocab_to: Option<usize>,
    /// Which of its products have narrow factors.
    pub(crate) quant: Option<LinearQuant>,
}

/// Labels and row weights of a batch, on the device.
#[derive(Clone)]
pub struct Targets {
    /// i32 `[tokens]`, [`ferrotron_kernels::IGNORE`] where there is none.
    pub labels: Tensor,
    /// f32 `[tokens]`: factor of each row in the loss.
    pub weights: Tensor,
}

/// What backward starts from.
pub enum LmHeadSaved {
    /// Gradient of all logits, and the hidden states.
    Full {
        /// `[tokens, V]`
        dlogits: SavedTensor,
        /// `[tokens, hidden]`
        x: SavedTensor,
    },
    /// Gradient of the hidden states, and the hidden states.
    Chunked {
        /// `[tokens, hidden]`
        dx: SavedTensor,
        /// `[tokens, hidden]`
        x: SavedTensor,
        /// To form the logits' gradient again.
        targets: Box<Targets>,
    },
    /// As [`LmHeadSaved::Full`], with what a narrow map keeps of the hidden states.
    Quantized {
        /// `[tokens, V]`
        dlogits: SavedTensor,
        /// Of the hidden states.
        x: Box<LinearSaved>,
    },
}

impl Saved for LmHeadSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        let (a, b) = match self {
            LmHeadSaved::Full { dlogits, x } => (dlogits, x),
            LmHeadSaved::Chunked { dx, x, .. } => (dx, x),
            LmHeadSaved::Quantized { dlogits, x } => {
                f(dlogits);
                return x.tensors(f);
            }
        };
        f(a);
        f(b);
    }
}

impl LmHead {
    /// Declares `<name>.weight [V, hidden]`, or shares `tied`.
    pub fn declare(
        d: &mut Declarations,
        name: &str,
        vocab: usize,
        hidden: usize,
        tied: Option<ParamId>,
        softcap: Option<f32>,
        std: f32,
    ) -> Result<LmHead> {
        match tied {
            None => LmHead::declare_as(d, &format!("{name}.weight"), vocab, hidden, softcap, std, false),
            Some(id) => {
                d.share(id);
                Ok(LmHead::over(d, id, vocab, softcap, true))
            }
        }
    }

    /// Declares its weight under a name of the caller's. A `mirror` is the table of a tied embedding once more, on the
    /// last stage of a pipeline.
    pub fn declare_as(
        d: &mut Declarations,
        name: &str,
        vocab: usize,
        hidden: usize,
        softcap: Option<f32>,
        std: f32,
        mirror: bool,
    ) -> Result<LmHead> {
        let weight = d.declare(vec![Part {
            name: name.into(),
            shape: vec![vocab, hidden],
            init: Init::Normal(std),
            split: Split::Rows { unit: 1 },
        }])?;
        if mirror {
            d.mark_tied_across_stages(weight, true);
        }
        Ok(LmHead::over(d, weight, vocab, softcap, mirror))
    }

    /// `table`: whether the weight is looked up in, too.
    fn over(
        d: &mut Declarations,
        weight: ParamId,
        vocab: usize,
        softcap: Option<f32>,
        table: bool,
    ) -> LmHead {
        let quant = d.quantize_lm_head(weight, table);
        let spec = d.spec(weight);
        let (first, rows) = (spec.shards[0].range.start, spec.shape[0]);
        let (smoothing, chunk, pad_vocab_to) = (LabelSmoothing::None, usize::MAX, None);
        LmHead { weight, first, rows, vocab, softcap, smoothing, chunk, pad_vocab_to, quant }
    }

    /// `[tokens, V]` in the type the model computes in; of the columns this rank holds.
    pub fn logits(&self, p: &StepContext, x: impl Into<WithAmax>) -> Result<Tensor> {
        let x = &x.into();
        if let Some((map, e)) = self.fp8_linear(p, &x.values)? {
            let (z, _) = map.forward_fp8(p, e, x, true)?;
            self.cap(p.rank, &z)?;
            return self.unpadded(p, &z);
        }
        self.high_precision_logits(p, &x.values)
    }

    fn high_precision_logits(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        let f = WeightOperand::fprop(p.weight(self.weight)?, None);
        let (z, _) = p.all_gather_gemm(&GemmOperand::rowwise(x), &f, false, "hidden states")?;
        self.cap(p.rank, &z)?;
        Ok(z)
    }

    /// The same of rows that every rank has.
    pub fn logits_of(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        if let Some(map) = self.fp8_linear(p, x)? {
            return self.logits_fp8(p, map, x);
        }
        self.local_logits(p.rank, p.weight(self.weight)?, x)
    }

    fn local_logits(&self, rank: &Rank, w: &Tensor, x: &Tensor) -> Result<Tensor> {
        let z = rank.activation(&[x.shape()[0], w.shape()[0]], x.dtype())?;
        let g = Gemm { a: x, trans_a: false, b: w, trans_b: true, bias: None, accumulate: false, c: &z };
        rank.kernels.gemm(&rank.compute, &g)?;
        self.cap(rank, &z)?;
        Ok(z)
    }

    /// The weight as products want it: on a card products over an odd vocabulary are several times slower than over an even
    /// one, whatever the strides, and a copy of the weight is cheap. The loss leaves what lies beyond the vocabulary alone.
    fn padded_weight(&self, rank: &Rank, w: &Tensor) -> Result<Tensor> {
        let [v, h] = [w.shape()[0], w.shape()[1]];
        // The cap's slope has no mask, and columns of other ranks follow on this one's.
        let fixed = self.softcap.is_some() || rank.tp.size() > 1;
        let pad = self.pad_vocab_to.unwrap_or(if rank.device().gpu().is_some() { PAD_VOCAB_TO } else { 1 });
        if v.is_multiple_of(pad) || fixed {
            return Ok(w.clone());
        }
        let rows = v.next_multiple_of(pad);
        let padded = rank.activation(&[rows, h], w.dtype())?;
        rank.compute.copy(w, &padded.narrow(0, 0, v)?)?;
        rank.compute.zero(&padded.narrow(0, v, rows - v)?)?;
        Ok(padded)
    }

    pub(crate) fn cap(&self, rank: &Rank, z: &Tensor) -> Result<()> {
        self.softcap.map_or(Ok(()), |cap| rank.kernels.softcap_forward(&rank.compute, cap, z))
    }

    /// Loss of each row f32 `[tokens]` (without weights), and what backward needs if `train`.
    pub fn loss(
        &self,
        p: &StepContext,
        x: impl Into<WithAmax>,
        targets: &Targets,
        train: bool,
    ) -> Result<(Tensor, Option<LmHeadSaved>)> {
        let x = &x.into();
        if let Some(map) = self.fp8_linear(p, &x.values)? {
            return self.loss_fp8(p, map, x, targets, train);
        }
        let x = &x.values;
        let x_saved = SavedTensor::activation(x);
        let tokens = x.shape()[0] * p.rank.tp.size();
        let rows = p.rank.activation(&[tokens], DType::F32)?;
        if tokens <= self.chunk {
            let alone = p.rank.tp.size() == 1;
            let z = match alone {
                true => self.local_logits(p.rank, &self.padded_weight(p.rank, p.weight(self.weight)?)?, x)?,
                false => self.high_precision_logits(p, x)?,
            };
            self.row_loss(p.rank, &z, targets, &rows, train)?;
            let saved = LmHeadSaved::Full { dlogits: SavedTensor::activation(&z), x: x_saved };
            return Ok((rows, train.then_some(saved)));
        }
        let x = &p.all_gather(x, "hidden states")?;
        let dx = p.empty(if train { x.shape() } else { &[0] })?;
        let w = &self.padded_weight(p.rank, p.weight(self.weight)?)?;
        for (start, len) in chunks(tokens, self.chunk) {
            let part = targets.rows(start, len)?;
            let x = x.narrow(0, start, len)?;
            let d = self.local_logits(p.rank, w, &x)?;
            self.row_loss(p.rank, &d, &part, &rows.narrow(0, start, len)?, train)?;
            if train {
                gemm(p.rank, &d, w, &dx.narrow(0, start, len)?)?;
            }
        }
        let saved = LmHeadSaved::Chunked {
            dx: SavedTensor::activation(&dx),
            x: x_saved,
            targets: Box::new(targets.clone()),
        };
        Ok((rows, train.then_some(saved)))
    }

    /// The loss of rows with logits `z`, and (with `train`) their gradient in place of the logits.
    pub(crate) fn row_loss(
        &self,
        rank: &Rank,
        z: &Tensor,
        t: &Targets,
        rows: &Tensor,
        train: bool,
    ) -> Result<()> {
        // The derivative of the cap needs the capped logits, which the loss overwrites.
        let capped = match self.softcap.filter(|_| train) {
            Some(cap) => {
                let copy = rank.activation(z.shape(), z.dtype())?;
                rank.kernels.copy(&rank.compute, z, &copy)?;
                Some((cap, copy))
            }
            None => None,
        };
        if rank.tp.size() == 1 {
            let c = CrossEntropy {
                logits: z,
                vocab: self.vocab,
                labels: &t.labels,
                weights: &t.weights,
                smoothing: self.smoothing,
                loss: rows,
                gradient: train,
            };
            rank.kernels.cross_entropy(&rank.compute, &c)?;
        } else {
            // Each rank sums up its columns; the sums of all give the loss and each rank's gradient.
            let (k, s, n) = (&rank.kernels, &rank.compute, z.shape()[0]);
            let shard =
                VocabParallelLogits { logits: z, first: self.first, vocab: self.vocab, labels: &t.labels };
            let mine = rank.activation(&[n, 4], DType::F32)?;
            let all = rank.activation(&[rank.tp.size(), n, 4], DType::F32)?;
            k.cross_entropy_stats(s, &shard, &mine)?;
            rank.tp.all_gather(s, &mine, &all, "sums of the loss")?;
            k.vocab_parallel_cross_entropy(
                s,
                &VocabParallelCrossEntropy {
                    x: &shard,
                    stats: &all,
                    weights: &t.weights,
                    smoothing: self.smoothing,
                    loss: rows,
                    gradient: train,
                },
            )?;
        }
        if let Some((cap, y)) = capped {
            rank.kernels.softcap_backward(&rank.compute, cap, &y, z)?;
        }
        Ok(())
    }

    /// The output matrix.
    pub fn weight(&self) -> ParamId {
        self.weight
    }

    /// Gradient of the hidden states alone: the output matrix gets none.
    pub fn backward_input(&self, p: &StepContext, saved: LmHeadSaved) -> Result<Tensor> {
        match saved {
            LmHeadSaved::Full { dlogits, .. } => {
                let f = WeightOperand::dgrad(&self.padded_weight(p.rank, p.weight(self.weight)?)?);
                p.gemm_reduce_scatter(&GemmOperand::rowwise(&dlogits), &f, "gradient of hidden states")
            }
            LmHeadSaved::Chunked { dx, .. } => p.reduce_scatter(&dx, "gradient of hidden states"),
            quantized @ LmHeadSaved::Quantized { .. } => Ok(self.backward(p, quantized)?.0),
        }
    }

    /// Gradient of the hidden states.
    pub fn backward(&self, p: &StepContext, saved: LmHeadSaved) -> Result<(Tensor, WeightGrad)> {
        match saved {
            LmHeadSaved::Quantized { dlogits, x } => match self.quant {
                Some(e) => self.backward_fp8(p, e, &dlogits, *x),
                None => shape_error("head", "it is narrow in forward alone"),
            },
            LmHeadSaved::Full { dlogits, x } => {
                p.calibrates(self.weight, Role::Gradient, &dlogits)?;
                let w = p.weight(self.weight)?;
                let f = WeightOperand::dgrad(&self.padded_weight(p.rank, w)?);
                let dx =
                    p.gemm_reduce_scatter(&GemmOperand::rowwise(&dlogits), &f, "gradient of hidden states")?;
                let x = p.begin_all_gather(&GemmOperand::rowwise(&x), "hidden states, again")?;
                // Behind the vocabulary there is nothing to add to.
                let dlogits = dlogits.narrow(1, 0, w.shape()[0])?;
                Ok((dx, wgrad_gemm(self.weight, &dlogits, x)))
            }
            LmHeadSaved::Chunked { dx, x, targets } => {
                let dx = p.reduce_scatter(&dx, "gradient of hidden states")?;
                let x = p.begin_all_gather(&GemmOperand::rowwise(&x), "hidden states, again")?;
                // The weight as it is now: the optimizer may not have run when this does.
                let w = self.padded_weight(p.rank, p.weight(self.weight)?)?;
                let me = self.clone();
                let grads = WeightGrad::deferred(self.weight, move |rank, grad, mut accumulate| {
                    let rows = x.ready()?;
                    let x = rows.memory();
                    for (start, len) in chunks(x.shape()[0], me.chunk) {
                        let x = x.narrow(0, start, len)?;
                        let rows = rank.activation(&[len], DType::F32)?;
                        let d = me.local_logits(rank, &w, &x)?;
                        me.row_loss(rank, &d, &targets.rows(start, len)?, &rows, true)?;
                        let d = d.narrow(1, 0, grad.shape()[0])?;
                        let g = Gemm {
                            a: &d,
                            trans_a: true,
                            b: &x,
                            trans_b: false,
                            bias: None,
                            accumulate,
                            c: grad,
                        };
                        rank.kernels.gemm(&rank.compute, &g)?;
                        accumulate = true;
                    }
                    Ok(())
                });
                Ok((dx, grads))
            }
        }
    }
}

impl Targets {
    fn rows(&self, start: usize, len: usize) -> Result<Targets> {
        Ok(Targets {
            labels: self.labels.narrow(0, start, len)?,
            weights: self.weights.narrow(0, start, len)?,
        })
    }
}

fn chunks(tokens: usize, chunk: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).step_by(chunk.max(1)).map(move |start| (start, chunk.max(1).min(tokens - start)))
}

/// `out = d·w`
fn gemm(rank: &Rank, d: &Tensor, w: &Tensor, out: &Tensor) -> Result<()> {
    let g = Gemm { a: d, trans_a: false, b: w, trans_b: false, bias: None, accumulate: false, c: out };
    rank.kernels.gemm(&rank.compute, &g)
}
