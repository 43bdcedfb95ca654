//! Tensor-parallel GEMMs overlapped with their collectives.
//!
//! | GEMM | communication | algorithm | reason |
//! |---|---|---|---|
//! | column-parallel fprop; row-parallel dgrad | all-gather of rows | ring | each chunk of rows is multiplied while it is forwarded and the next arrives |
//! | row-parallel fprop; column-parallel dgrad | reduce-scatter of partial sums | pipelined | the GEMM runs owner by owner; one part is sent while the next is computed, the rank's own part last |
//! | column-parallel wgrad | all-gather of the input | bulk | only wgrad needs it, and wgrad may run much later |
//! | row-parallel wgrad | none | | the ring of dgrad has gathered all rows |
//!
//! The reduce-scatter of column-parallel dgrad is not overlapped with wgrad in bulk: a pipeline schedule may defer wgrad,
//! and the next module needs the input gradient before.
//!
//! Without [`crate::Rank::overlap`] the same steps run in the same order on one stream. A GEMM split by rows need not be
//! bit-equal to the full one, so overlap never decides how it is split.

use crate::quant::{GemmOperand, GemmOptions, LinearGemm};
use crate::{ParamId, StepContext, WeightGrad};
use ferrotron_tensor::{DType, DeviceKind, Event, Result, Stream, Tensor, shape_error};

/// Minimum rows per chunk on a GPU. GEMM tiles have this height: smaller chunks would cost as much, and in sum more than
/// the communication they hide.
const TILE: usize = 128;

/// The right-hand side of a GEMM `x·wᵀ (+ bias)`.
#[derive(Clone)]
pub(crate) struct WeightOperand<'a> {
    /// `[n, k]`
    pub(crate) w: GemmOperand,
    /// `[n]`
    pub(crate) bias: Option<&'a Tensor>,
    /// Which of the linear layer's GEMMs it is.
    pub(crate) product: LinearGemm,
    /// Fast accumulation: FP8 tensor cores keep partial sums at reduced precision.
    pub(crate) fast: bool,
}

impl<'a> WeightOperand<'a> {
    /// fprop of a weight `[out, in]`.
    pub(crate) fn fprop(w: &Tensor, bias: Option<&'a Tensor>) -> WeightOperand<'a> {
        WeightOperand { w: GemmOperand::rowwise(w), bias, product: LinearGemm::Fprop, fast: false }
    }

    /// dgrad of a weight `[out, in]`.
    pub(crate) fn dgrad(w: &Tensor) -> WeightOperand<'a> {
        WeightOperand { w: GemmOperand::columnwise(w), bias: None, product: LinearGemm::Dgrad, fast: false }
    }

    fn outputs(&self) -> usize {
        self.w.rows()
    }
}

/// Rows that communication beside computation brings. Whoever drops them makes computation wait: their memory belongs to
/// the compute stream.
pub(crate) struct InFlight {
    side: GemmOperand,
    /// Read until it has arrived.
    _from: Tensor,
    done: Option<(Stream, Event)>,
}

impl InFlight {
    /// Rows that are there.
    pub(crate) fn ready_now(side: GemmOperand) -> InFlight {
        let _from = side.memory().clone();
        InFlight { side, _from, done: None }
    }

    /// Their memory, if there is nothing to wait for.
    pub(crate) fn if_ready(&self) -> Option<&Tensor> {
        self.done.is_none().then_some(self.side.memory())
    }

    /// The rows; computation given from now on finds them whole.
    pub(crate) fn ready(mut self) -> Result<GemmOperand> {
        if let Some((compute, done)) = self.done.take() {
            compute.wait(&done)?;
        }
        Ok(self.side.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some((compute, done)) = self.done.take() {
            // Fails only if the card is lost, which the next call says.
            let _ = compute.wait(&done);
        }
    }
}

/// `weight` gets `dyᵀ·x` once the values `x` are there.
pub(crate) fn wgrad_gemm(weight: ParamId, dy: &Tensor, x: InFlight) -> WeightGrad {
    if let Some(x) = x.if_ready() {
        return WeightGrad::gemm(weight, dy, x);
    }
    let dy = GemmOperand::columnwise(dy);
    WeightGrad::deferred(weight, move |rank, grad, accumulate| {
        let x = GemmOperand::columnwise(x.ready()?.memory());
        let how = GemmOptions { product: LinearGemm::Wgrad, bias: None, accumulate, fast: false };
        dy.gemm(rank, &x, how, grad)
    })
}

impl StepContext<'_> {
    /// [`StepContext::all_gather`], while computation goes on.
    pub(crate) fn begin_all_gather(&self, x: &GemmOperand, label: &'static str) -> Result<InFlight> {
        let tp = &self.rank.tp;
        if tp.size() == 1 || !self.rank.overlap {
            return Ok(InFlight::ready_now(self.all_gather_operand(x, label)?));
        }
        let side = x.empty_like(self.rank, x.rows() * tp.size())?;
        let (from, to) = (x.memory(), side.memory());
        let done = self.beside(self.mark()?, |s| Ok(tp.all_gather(s, from, to, label)?))?;
        let _from = from.clone();
        Ok(InFlight { side, _from, done: done.map(|e| (self.rank.compute.clone(), e)) })
    }

    /// Computes `x·wᵀ + bias`.
    pub(crate) fn gemm(&self, x: &GemmOperand, f: &WeightOperand) -> Result<Tensor> {
        let y = self.empty(&[x.rows(), f.outputs()])?;
        self.multiply(x, f, &y)?;
        Ok(y)
    }

    /// All-gather + GEMM: multiplies all rows from every rank's `x [n/t, k]` into `[n, out]`; with `keep`, also returns the
    /// gathered rows `[n, k]`.
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
        // Where the gathered rows are not kept, two chunk buffers suffice: one arrives while the other is used.
        let pair = if keep { Vec::new() } else { (1..t.min(3)).map(|_| memory(m)).collect::<Result<_>>()? };
        if let Some(all) = &all {
            self.rank.compute.copy(x.memory(), rows(all, 0)?.memory())?;
        }
        let mut held = x.clone();
        for hop in 0..t {
            // From here on the previous hop's chunk may be overwritten.
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
            let there = self.beside(before, |s| Ok(tp.send_recv(s, &sends, &receives, label)?))?;
            self.wait(there)?;
            held = next;
        }
        Ok((y, all))
    }

    /// GEMM + reduce-scatter: this rank's rows `[n/t, out]` of the sum over ranks of `x·wᵀ`, `x [n, k]`. Partial sums are
    /// added in rank order, in f32, and rounded once.
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
        // Partial outputs in flight, kept alive until they are sent.
        let mut made: Vec<(Tensor, Option<Event>)> = Vec::with_capacity(t);
        let mut there = None;
        for step in 1..=t {
            let owner = (me + step) % t;
            let product = if owner == me { parts.select(0, me)? } else { self.empty(&[m, out])? };
            self.multiply(&x.narrow(owner * m, m)?, f, &product)?;
            // Send the previous part after launching this GEMM, so that the compute stream has work meanwhile.
            if let Some((product, ready)) = made.last_mut() {
                let (to, from) = ((me + step - 1) % t, (me + t + 1 - step) % t);
                let part = parts.select(0, from)?;
                there = self.beside(ready.take(), |s| {
                    Ok(tp.send_recv(s, &[(to, product)], &[(from, &part)], label)?)
                })?;
            }
            made.push((product, self.mark()?));
        }
        self.wait(there)?;
        self.sum_in_rank_order(&parts)
    }

    /// `[t, m, n] → [m, n]`
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

    /// Always split on the CPU: it gains nothing there, and tests what GPUs do.
    fn chunks_pay(&self, rows: usize) -> bool {
        self.rank.device().kind() == DeviceKind::Cpu || rows >= TILE
    }

    /// An event on the compute stream; `None` where communication runs on the compute stream itself.
    fn mark(&self) -> Result<Option<Event>> {
        self.rank.overlap.then(|| self.rank.compute.record()).transpose()
    }

    /// Runs communication after an event of the compute stream, overlapped with what follows; returns its end event.
    fn beside(&self, mark: Option<Event>, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Option<Event>> {
        let Some(mark) = mark else {
            work(&self.rank.compute)?;
            return Ok(None);
        };
        self.rank.comm_stream.wait(&mark)?;
        work(&self.rank.comm_stream)?;
        self.rank.comm_stream.record().map(Some)
    }

    /// Makes the compute stream wait for communication.
    fn wait(&self, there: Option<Event>) -> Result<()> {
        there.map_or(Ok(()), |e| self.rank.compute.wait(&e))
    }
}
