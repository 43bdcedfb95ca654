//! LM head: the output projection fused with the cross-entropy loss.
//!
//! The weight of every token in the final loss is known before forward, so the loss kernel overwrites the logits with their
//! gradient in place: f32 logits never exist, and backward starts with the dgrad and wgrad GEMMs. Where the logits of all
//! tokens take too much memory, [`LossOptions::chunk`] splits the tokens: forward computes the gradient of the hidden states
//! chunk by chunk and drops the logits, and wgrad computes them once more.

use crate::error::missing_activation;
use crate::linear::LinearSaved;
use crate::quant::{GemmOperand, LinearQuant, Role};
use crate::tensor_parallel::{WeightOperand, wgrad_gemm};
use crate::{
    Declarations, Init, ParamId, Part, Rank, Saved, SavedTensor, Split, StepContext, WeightGrad, WithAmax,
};
use ferrotron_kernels::{CrossEntropy, Gemm, LabelSmoothing, VocabParallelCrossEntropy, VocabParallelLogits};
use ferrotron_tensor::{DType, Result, Tensor};

/// On a GPU, GEMMs over a full vocabulary see it padded to a multiple of this.
const PAD_VOCAB_TO: usize = 64;

/// Sizes and initialization of an LM head.
#[derive(Clone, Copy, Debug)]
pub struct LmHeadConfig {
    /// Vocabulary size (V).
    pub vocab: usize,
    /// Hidden size (h).
    pub hidden: usize,
    /// Soft cap of the logits, `cap·tanh(z/cap)`.
    pub softcap: Option<f32>,
    /// Standard deviation of initial weights.
    pub std: f32,
}

impl LmHeadConfig {
    fn declare_weight(&self, d: &mut Declarations, name: &str) -> Result<ParamId> {
        d.declare(vec![Part {
            name: name.into(),
            shape: vec![self.vocab, self.hidden],
            init: Init::Normal(self.std),
            split: Split::Rows { unit: 1 },
        }])
    }
}

/// How the LM head computes the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossOptions {
    /// Tokens whose logits are computed at a time; None computes all at once. An FP8 head does not support it.
    pub chunk: Option<usize>,
    /// Label smoothing.
    pub label_smoothing: LabelSmoothing,
}

impl Default for LossOptions {
    fn default() -> LossOptions {
        LossOptions { chunk: None, label_smoothing: LabelSmoothing::None }
    }
}

/// LM head and loss: `[tokens, hidden] → logits [tokens, V] → loss [tokens]`, vocabulary-parallel over the tensor-parallel
/// ranks.
#[derive(Clone)]
pub struct LmHead {
    pub(crate) weight: ParamId,
    /// First vocabulary entry of this rank, how many it holds, and the vocabulary size.
    first: usize,
    pub(crate) rows: usize,
    vocab: usize,
    softcap: Option<f32>,
    /// Chunking and label smoothing.
    pub loss: LossOptions,
    /// GEMMs see the vocabulary padded to a multiple of this with zero rows; None means 64 on a GPU (16 in FP8), 1 on the
    /// CPU.
    pub pad_vocab_to: Option<usize>,
    /// Quantization of its GEMMs.
    pub(crate) quant: Option<LinearQuant>,
}

/// Labels and loss weights of a batch, on the device.
#[derive(Clone)]
pub struct Targets {
    /// i32 `[tokens]`; [`ferrotron_kernels::IGNORE`] for tokens without a label.
    pub labels: Tensor,
    /// f32 `[tokens]`: weight of each token's loss.
    pub weights: Tensor,
}

/// What [`LmHead::backward`] needs.
pub enum LmHeadSaved {
    /// Gradient of the logits of all tokens, and the hidden states.
    Full {
        /// `[tokens, V]`
        dlogits: SavedTensor,
        /// `[tokens, hidden]`
        x: SavedTensor,
    },
    /// Gradient of the hidden states, and the hidden states, of a loss computed in chunks.
    Chunked {
        /// `[tokens, hidden]`
        dx: SavedTensor,
        /// `[tokens, hidden]`
        x: SavedTensor,
        /// To recompute the gradient of the logits for wgrad.
        targets: Box<Targets>,
    },
    /// Like [`LmHeadSaved::Full`], with the hidden states as an FP8 linear saves them.
    Quantized {
        /// `[tokens, V]`
        dlogits: SavedTensor,
        /// The saved hidden states.
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
    /// Declares `<name>` `[V, hidden]` as the output matrix.
    pub fn declare(d: &mut Declarations, name: &str, config: &LmHeadConfig) -> Result<LmHead> {
        let weight = config.declare_weight(d, name)?;
        Ok(LmHead::over(d, weight, config, false))
    }

    /// Uses the embedding table `table`, declared by the embedding of this rank, as the output matrix.
    pub fn tied(d: &mut Declarations, table: ParamId, config: &LmHeadConfig) -> LmHead {
        d.share(table);
        LmHead::over(d, table, config, true)
    }

    /// Declares a second copy `<name>` of a tied embedding table that another pipeline stage owns.
    pub fn tied_across_stages(d: &mut Declarations, name: &str, config: &LmHeadConfig) -> Result<LmHead> {
        let weight = config.declare_weight(d, name)?;
        d.mark_tied_across_stages(weight, true);
        Ok(LmHead::over(d, weight, config, true))
    }

    /// The head over a declared weight; `tied`: it is an embedding table too, which stays unquantized in memory.
    fn over(d: &mut Declarations, weight: ParamId, c: &LmHeadConfig, tied: bool) -> LmHead {
        let (quant, loss) = (d.quantize_lm_head(weight, tied), d.loss());
        let spec = d.spec(weight);
        let (first, rows) = (spec.shards[0].range.start, spec.shape[0]);
        let (vocab, softcap) = (c.vocab, c.softcap);
        LmHead { weight, first, rows, vocab, softcap, loss, pad_vocab_to: None, quant }
    }

    /// Logits `[tokens, V]` in the model's dtype, of this rank's vocabulary entries.
    pub fn logits(&self, p: &StepContext, x: impl Into<WithAmax>) -> Result<Tensor> {
        let x = &x.into();
        if let Some((map, e)) = self.fp8_linear(p, &x.values)? {
            let (z, _) = map.forward_fp8(p, e, x, (true, None))?;
            self.cap(p.rank, &z)?;
            return self.unpadded(p, &z);
        }
        self.high_precision_logits(p, &x.values)
    }

    fn high_precision_logits(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        let f = WeightOperand::fprop(&*p.weight(self.weight)?, None);
        let (z, _) = p.all_gather_gemm(&GemmOperand::rowwise(x), &f, false, "hidden states")?;
        self.cap(p.rank, &z)?;
        Ok(z)
    }

    /// [`LmHead::logits`] of hidden states that every tensor-parallel rank has.
    pub fn logits_of(&self, p: &StepContext, x: &Tensor) -> Result<Tensor> {
        if let Some(map) = self.fp8_linear(p, x)? {
            return self.logits_fp8(p, map, x);
        }
        self.local_logits(p.rank, &*p.weight(self.weight)?, x)
    }

    fn local_logits(&self, rank: &Rank, w: &Tensor, x: &Tensor) -> Result<Tensor> {
        let z = rank.activation(&[x.shape()[0], w.shape()[0]], x.dtype())?;
        let g = Gemm { a: x, trans_a: false, b: w, trans_b: true, bias: None, accumulate: false, c: &z };
        rank.kernels.gemm(&rank.compute, &g)?;
        self.cap(rank, &z)?;
        Ok(z)
    }

    /// The weight with its vocabulary padded: GEMMs over an odd vocabulary are several times slower on a GPU, whatever the
    /// strides, and a copy of the weight is cheap. The loss kernel ignores logits beyond the vocabulary.
    fn padded_weight(&self, rank: &Rank, w: &Tensor) -> Result<Tensor> {
        let [v, h] = [w.shape()[0], w.shape()[1]];
        // The soft cap's gradient has no mask, and with tp the next rank's vocabulary follows this one's.
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

    /// Tokens per chunk of the loss.
    pub(crate) fn chunk(&self) -> usize {
        self.loss.chunk.unwrap_or(usize::MAX)
    }

    /// Applies the soft cap in place.
    pub(crate) fn cap(&self, rank: &Rank, z: &Tensor) -> Result<()> {
        self.softcap.map_or(Ok(()), |cap| rank.kernels.softcap_forward(&rank.compute, cap, z))
    }

    /// Unweighted loss of each token, f32 `[tokens]`, and with `train` what backward needs.
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
        // Only wgrad reads the hidden states again.
        let x_saved = match p.is_frozen(self.weight) {
            true => SavedTensor::small(&p.empty(&[0])?),
            false => SavedTensor::activation(x),
        };
        let tokens = x.shape()[0] * p.rank.tp.size();
        let rows = p.rank.activation(&[tokens], DType::F32)?;
        let chunk = self.chunk();
        if tokens <= chunk {
            let alone = p.rank.tp.size() == 1;
            let z = match alone {
                true => {
                    self.local_logits(p.rank, &self.padded_weight(p.rank, &*p.weight(self.weight)?)?, x)?
                }
                false => self.high_precision_logits(p, x)?,
            };
            self.row_loss(p.rank, &z, targets, &rows, train)?;
            let saved = LmHeadSaved::Full { dlogits: SavedTensor::activation(&z), x: x_saved };
            return Ok((rows, train.then_some(saved)));
        }
        let x = &p.all_gather(x, "hidden states")?;
        let dx = p.empty(if train { x.shape() } else { &[0] })?;
        let w = &self.padded_weight(p.rank, &*p.weight(self.weight)?)?;
        for (start, len) in chunks(tokens, chunk) {
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

    /// Loss of tokens with logits `z`; with `train` the gradient overwrites the logits.
    pub(crate) fn row_loss(
        &self,
        rank: &Rank,
        z: &Tensor,
        t: &Targets,
        rows: &Tensor,
        train: bool,
    ) -> Result<()> {
        // The soft cap's gradient needs the capped logits, which the loss overwrites.
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
                smoothing: self.loss.label_smoothing,
                loss: rows,
                gradient: train,
            };
            rank.kernels.cross_entropy(&rank.compute, &c)?;
        } else {
            // Vocabulary-parallel: all-gather each rank's partial softmax sums, then compute loss and local gradient.
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
                    smoothing: self.loss.label_smoothing,
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

    /// The output matrix' parameter.
    pub fn weight(&self) -> ParamId {
        self.weight
    }

    /// Gradient of the hidden states only; the output matrix gets none.
    pub fn backward_input(&self, p: &StepContext, saved: LmHeadSaved) -> Result<Tensor> {
        match saved {
            LmHeadSaved::Full { dlogits, .. } => {
                let f = WeightOperand::dgrad(&self.padded_weight(p.rank, &*p.weight(self.weight)?)?);
                p.gemm_reduce_scatter(&GemmOperand::rowwise(&dlogits), &f, "gradient of hidden states")
            }
            LmHeadSaved::Chunked { dx, .. } => p.reduce_scatter(&dx, "gradient of hidden states"),
            quantized @ LmHeadSaved::Quantized { .. } => Ok(self.backward(p, quantized)?.0),
        }
    }

    /// Gradient of the hidden states.
    pub fn backward(&self, p: &StepContext, saved: LmHeadSaved) -> Result<(Tensor, WeightGrad)> {
        match saved {
            LmHeadSaved::Full { .. } | LmHeadSaved::Chunked { .. } if p.is_frozen(self.weight) => {
                Ok((self.backward_input(p, saved)?, WeightGrad::default()))
            }
            LmHeadSaved::Quantized { dlogits, x } => match self.quant {
                Some(e) => self.backward_fp8(p, e, &dlogits, *x),
                None => missing_activation("LM head", "unquantized hidden states"),
            },
            LmHeadSaved::Full { dlogits, x } => {
                p.calibrates(self.weight, Role::Gradient, &dlogits)?;
                let w = p.weight(self.weight)?;
                let f = WeightOperand::dgrad(&self.padded_weight(p.rank, &w)?);
                let dx =
                    p.gemm_reduce_scatter(&GemmOperand::rowwise(&dlogits), &f, "gradient of hidden states")?;
                let x = p.begin_all_gather(&GemmOperand::rowwise(&x), "hidden states, again")?;
                // Padding has no gradient to add to.
                let dlogits = dlogits.narrow(1, 0, w.shape()[0])?;
                Ok((dx, wgrad_gemm(self.weight, &dlogits, x)))
            }
            LmHeadSaved::Chunked { dx, x, targets } => {
                let dx = p.reduce_scatter(&dx, "gradient of hidden states")?;
                let x = p.begin_all_gather(&GemmOperand::rowwise(&x), "hidden states, again")?;
                // The current weight: the optimizer must not run before this does.
                let weight = p.weight(self.weight)?;
                let me = self.clone();
                let grads = WeightGrad::deferred(self.weight, move |rank, grad, mut accumulate| {
                    let w = me.padded_weight(rank, &weight)?;
                    let rows = x.wait(&rank.compute)?;
                    let x = rows.memory();
                    for (start, len) in chunks(x.shape()[0], me.chunk()) {
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
    /// Those of tokens `start..start + len`.
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
