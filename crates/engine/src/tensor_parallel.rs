//! GEMMs of tensor-parallel linears, overlapped with their communication.
//!
//! | GEMM | communication | how | why |
//! |---|---|---|---|
//! | column-parallel fprop; row-parallel dgrad | all-gather of the input rows | ring | each chunk of rows is multiplied while it is sent on and the next one arrives |
//! | row-parallel fprop; column-parallel dgrad | reduce-scatter of partial sums | pipeline | the GEMM runs owner by owner; one part is sent while the next is computed, this rank's own comes last |
//! | column-parallel wgrad | all-gather of the input, again | bulk | only wgrad needs it, which may run much later |
//! | row-parallel wgrad | none | | the ring of dgrad has left all rows |
//!
//! Column-parallel dgrad is not reduce-scattered in bulk beside wgrad: wgrad may be deferred until a pipeline bubble, and
//! the next module needs the input gradient before.
//!
//! Without [`crate::Rank::overlap`] the same steps run in the same order on one stream. A GEMM split by rows need not give
//! the bits of the unsplit one, so `overlap` never decides how it is split.

use crate::quant::{GemmOperand, GemmOptions, LinearGemm};
use crate::{ParamId, StepContext, WeightGrad};
use ferrotron_comm::InFlight;
use ferrotron_tensor::{DType, DeviceKind, Event, Result, Stream, Tensor, shape_error};

/// Smallest chunk of rows on a GPU. GEMM tiles have this height there: a smaller chunk costs as much, and all chunks
/// together more than the communication they hide.
const TILE: usize = 128;

/// The right-hand operand of a GEMM `x·wᵀ (+ bias)`.
#[derive(Clone)]
pub(crate) struct WeightOperand<'a> {
    /// `[n, k]`
    pub(crate) w: GemmOperand,
    /// `[n]`
    pub(crate) bias: Option<&'a Tensor>,
    /// Which GEMM of the linear it is.
    pub(crate) product: LinearGemm,
    /// Allow fast FP8 accumulation.
    pub(crate) fast: bool,
}

impl<'a> WeightOperand<'a> {
    /// Operand of fprop, from a weight `[out, in]`.
    pub(crate) fn fprop(w: &Tensor, bias: Option<&'a Tensor>) -> WeightOperand<'a> {
        WeightOperand { w: GemmOperand::rowwise(w), bias, product: LinearGemm::Fprop, fast: false }
    }

    /// Operand of dgrad, from a weight `[out, in]`.
    pub(crate) fn dgrad(w: &Tensor) -> WeightOperand<'a> {
        WeightOperand { w: GemmOperand::columnwise(w), bias: None, product: LinearGemm::Dgrad, fast: false }
    }

    fn outputs(&self) -> usize {
        self.w.rows()
    }
}

/// wgrad `dW = dyᵀ·x` of an input in the model's dtype, which may still be in flight.
pub(crate) fn wgrad_gemm(weight: ParamId, dy: &Tensor, x: InFlight<GemmOperand>) -> WeightGrad {
    if let Some(x) = x.if_ready() {
        return WeightGrad::gemm(weight, dy, x.memory());
    }
    let dy = GemmOperand::columnwise(dy);
    WeightGrad::deferred(weight, move |rank, grad, accumulate| {
        let x = GemmOperand::columnwise(x.wait(&rank.compute)?.memory());
        let how = GemmOptions { product: LinearGemm::Wgrad, bias: None, accumulate, fast: false };
        dy.gemm(rank, &x, how, grad)
    })
}

impl StepContext<'_> {
    /// Starts an all-gather of a GEMM operand's rows, overlapped with computation.
    pub(crate) fn begin_all_gather(
        &self,
        x: &GemmOperand,
        label: &'static str,
    ) -> Result<InFlight<GemmOperand>> {
        let tp = &self.rank.tp;
        if tp.size() == 1 || !self.rank.overlap {
            return Ok(InFlight::ready(self.all_gather_operand(x, label)?));
        }
        let all = x.empty_like(self.rank, x.rows() * tp.size())?;
        let streams = (&self.rank.compute, &self.rank.comm_stream);
        InFlight::launch(streams, all, vec![x.memory().clone()], |s, all| {
            Ok(tp.all_gather(s, x.memory(), all.memory(), label)?)
        })
    }

    /// `x·wᵀ + bias`
    pub(crate) fn gemm(&self, x: &GemmOperand, f: &WeightOperand) -> Result<Tensor> {
        let y = self.empty(&[x.rows(), f.outputs()])?;
        self.multiply(x, f, &y)?;
        Ok(y)
    }

    /// All-gather, then GEMM: from every rank's `x [n/t, k]` to `[n, out]`; with `keep` also the gathered rows `[n, k]`.
    pub(crate) fn all_gather_gemm(
        &self,
        x: &GemmOperand,
        f: &WeightOperand,
        keep: bool,
        label: &'static str,
    ) -> Result<(Tensor, Option<GemmOperand>)> {
        let tp = &self.rank.tp;
        let (t, me, m) = (tp.size(), tp.rank(), x.rows());
        if t == 1 || !self.chunks_pay(m) {
            let all = self.all_gather_operand(x, label)?;
            return Ok((self.gemm(&all, f)?, keep.then_some(all)));
        }
        let y = self.empty(&[t * m, f.outputs()])?;
        let chunk = |of: &Tensor, hop: usize| of.narrow(0, (me + t - hop) % t * m, m);
        let memory = |rows| x.empty_like(self.rank, rows);
        let rows = |of: &GemmOperand, hop: usize| of.narrow((me + t - hop) % t * m, m);
        let all = keep.then(|| memory(t * m)).transpose()?;
        // Where the rows are not kept, two buffers suffice: one receives while the other is multiplied.
        let pair = if keep { Vec::new() } else { (1..t.min(3)).map(|_| memory(m)).collect::<Result<_>>()? };
        if let Some(all) = &all {
            self.rank.compute.copy(x.memory(), rows(all, 0)?.memory())?;
        }
        let mut held = x.clone();
        for hop in 0..t {
            // After this point the chunk of the previous hop may be overwritten.
            let before = self.mark()?;
            self.multiply(&held, f, &chunk(&y, hop)?)?;
            if hop + 1 == t {
                break;
            }
            let next = match &all {
                Some(all) => rows(all, hop + 1)?,
                None => pair[hop % 2].clone(),
            };
            let (to, from) = ((me + 1) % t, (me + t - 1) % t);
            let sends: Vec<_> = held.moves().map(|t| (to, t)).collect();
            let receives: Vec<_> = next.moves().map(|t| (from, t)).collect();
            let received = self.beside(before, |s| Ok(tp.send_recv(s, &sends, &receives, label)?))?;
            self.wait(received)?;
            held = next;
        }
        Ok((y, all))
    }

    /// GEMM, then reduce-scatter: from `x [n, k]` to this rank's rows of the sum over ranks, `[n/t, out]`. Partial sums
    /// are added in rank order, in f32, and rounded once.
    pub(crate) fn gemm_reduce_scatter(
        &self,
        x: &GemmOperand,
        f: &WeightOperand,
        label: &'static str,
    ) -> Result<Tensor> {
        let tp = &self.rank.tp;
        let (t, me, n) = (tp.size(), tp.rank(), x.rows());
        if t == 1 || !x.divides() || !self.chunks_pay(n / t) {
            return self.reduce_scatter(&self.gemm(x, f)?, label);
        }
        if !n.is_multiple_of(t) {
            return shape_error(label, format!("{n} rows do not divide over {t} ranks"));
        }
        let (m, out) = (n / t, f.outputs());
        let parts = self.empty(&[t, m, out])?;
        // Parts that are being sent stay alive until the last of them has arrived.
        let mut sent: Vec<(Tensor, Option<Event>)> = Vec::with_capacity(t);
        let mut received = None;
        for step in 1..=t {
            let owner = (me + step) % t;
            let product = if owner == me { parts.select(0, me)? } else { self.empty(&[m, out])? };
            self.multiply(&x.narrow(owner * m, m)?, f, &product)?;
            // The previous part is sent after this GEMM is enqueued, so that the GPU has work while ranks rendezvous.
            if let Some((product, ready)) = sent.last_mut() {
                let (to, from) = ((me + step - 1) % t, (me + t + 1 - step) % t);
                let part = parts.select(0, from)?;
                received = self.beside(ready.take(), |s| {
                    Ok(tp.send_recv(s, &[(to, product)], &[(from, &part)], label)?)
                })?;
            }
            sent.push((product, self.mark()?));
        }
        self.wait(received)?;
        self.sum_in_rank_order(&parts)
    }

    /// `[t, m, n] → [m, n]`, accumulated in f32.
    fn sum_in_rank_order(&self, parts: &Tensor) -> Result<Tensor> {
        let (k, s, t) = (&self.rank.kernels, &self.rank.compute, parts.shape()[0]);
        let y = self.rank.activation(&parts.shape()[1..], parts.dtype())?;
        let exact = parts.dtype() == DType::F32;
        let sum = if exact { y.clone() } else { self.rank.activation(y.shape(), DType::F32)? };
        k.copy(s, &parts.select(0, 0)?, &sum)?;
        for r in 1..t {
            k.add_assign(s, &sum, &parts.select(0, r)?)?;
        }
        if !exact {
            k.copy(s, &sum, &y)?;
        }
        Ok(y)
    }

    fn multiply(&self, x: &GemmOperand, f: &WeightOperand, y: &Tensor) -> Result<()> {
        let how = GemmOptions { product: f.product, bias: f.bias, accumulate: false, fast: f.fast };
        x.gemm(self.rank, &f.w, how, y)
    }

    /// On the CPU always: it gains nothing there, but tests what GPUs do. A meta device stands for a GPU.
    fn chunks_pay(&self, rows: usize) -> bool {
        let device = self.rank.device();
        rows >= TILE || device.kind() == DeviceKind::Cpu && !device.is_meta()
    }

    /// Records the computation so far; None where communication runs on the compute stream.
    fn mark(&self) -> Result<Option<Event>> {
        self.rank.overlap.then(|| self.rank.compute.record()).transpose()
    }

    /// Runs communication on its own stream after `mark`; returns its end.
    fn beside(&self, mark: Option<Event>, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Option<Event>> {
        let Some(mark) = mark else {
            work(&self.rank.compute)?;
            return Ok(None);
        };
        self.rank.comm_stream.wait(&mark)?;
        work(&self.rank.comm_stream)?;
        self.rank.comm_stream.record().map(Some)
    }

    /// Makes the compute stream wait for the communication.
    fn wait(&self, done: Option<Event>) -> Result<()> {
        done.map_or(Ok(()), |e| self.rank.compute.wait(&e))
    }
}
