//! Products beside the communication they need.
//!
//! | product | what moves | how | why |
//! |---|---|---|---|
//! | rows of W, forward; columns of W, backward | rows are gathered | ring | each chunk of rows is multiplied while it is sent on and the next comes |
//! | columns of W, forward; rows of W, backward | partial sums go to their owners | pipeline | the product is made owner by owner, one part travels while the next is made; the owner's own is last |
//! | rows of W, weight gradient | the input is gathered again | bulk | only the weight gradient needs it, which may come much later |
//! | columns of W, weight gradient | nothing | | the ring of the backward product has left all rows |
//!
//! Input gradients of rows of W do not travel in bulk beside the weight gradient's product: that product may be put
//! off until a pipeline has nothing better to do, and the next module needs the input gradient before.
//!
//! Without [`crate::Rank::overlap`] the same steps happen in the same order on one stream. A product cut into rows
//! need not give the bits of the whole, so overlap never decides how it is cut.

use crate::quant::{GemmOperand, GemmOptions, LinearGemm};
use crate::{ParamId, StepContext, WeightGrad};
use ferrotron_tensor::{DType, DeviceKind, Event, Result, Stream, Tensor, shape_error};

/// Rows of a chunk on a card at least. Products there work in tiles of this height: smaller chunks would cost as much,
/// and all of them more than the exchange they hide.
const TILE: usize = 128;

/// The right-hand side of a product `x·wᵀ (+ bias)`.
#[derive(Clone)]
pub(crate) struct WeightOperand<'a> {
    /// `[n, k]`
    pub(crate) w: GemmOperand,
    /// `[n]`
    pub(crate) bias: Option<&'a Tensor>,
    /// Which product it is.
    pub(crate) product: LinearGemm,
    /// Let the matrix unit keep sums short.
    pub(crate) fast: bool,
}

impl<'a> WeightOperand<'a> {
    /// Of a weight `[out, in]`, for the output.
    pub(crate) fn fprop(w: &Tensor, bias: Option<&'a Tensor>) -> WeightOperand<'a> {
        WeightOperand { w: GemmOperand::rowwise(w), bias, product: LinearGemm::Fprop, fast: false }
    }

    /// Of a weight `[out, in]`, for the gradient of the input.
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

    /// `x·wᵀ + bias`
    pub(crate) fn gemm(&self, x: &GemmOperand, f: &WeightOperand) -> Result<Tensor> {
        let y = self.empty(&[x.rows(), f.outputs()])?;
        self.multiply(x, f, &y)?;
        Ok(y)
    }

    /// The product of all rows from every rank's `x [n/t, k]`: `[n, out]`; and, with `keep`, the rows `[n, k]`.
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
        // Where nobody wants the rows afterwards, two chunks are enough: one that comes, one that is used.
        let pair = if keep { Vec::new() } else { (1..t.min(3)).map(|_| memory(m)).collect::<Result<_>>()? };
        if let Some(all) = &all {
            self.rank.compute.copy(x.memory(), rows(all, 0)?.memory())?;
        }
        let mut held = x.clone();
        for hop in 0..t {
            // From here on the chunk of the hop before is free to be overwritten.
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

    /// This rank's rows of the sum over ranks of the products of `x [n, k]`: `[n/t, out]`. Parts are added in the
    /// order of ranks, in f32, and rounded once.
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
        // Products under way, kept until they have left.
        let mut made: Vec<(Tensor, Option<Event>)> = Vec::with_capacity(t);
        let mut there = None;
        for step in 1..=t {
            let owner = (me + step) % t;
            let product = if owner == me { parts.select(0, me)? } else { self.empty(&[m, out])? };
            self.multiply(&x.narrow(owner * m, m)?, f, &product)?;
            // Behind this product goes the one before, so that computation has work while hosts meet.
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

    /// On the host always: it gains nothing, and tests there what cards do.
    fn chunks_pay(&self, rows: usize) -> bool {
        self.rank.device().kind() == DeviceKind::Cpu || rows >= TILE
    }

    /// A point of the computation so far; None where communication is in line with it anyway.
    fn mark(&self) -> Result<Option<Event>> {
        self.rank.overlap.then(|| self.rank.compute.record()).transpose()
    }

    /// Communicates after a mark, beside what is computed from there on; its end.
    fn beside(&self, mark: Option<Event>, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Option<Event>> {
        let Some(mark) = mark else {
            work(&self.rank.compute)?;
            return Ok(None);
        };
        self.rank.comm_stream.wait(&mark)?;
        work(&self.rank.comm_stream)?;
        self.rank.comm_stream.record().map(Some)
    }

    /// Computation from now on finds what communication brought.
    fn wait(&self, there: Option<Event>) -> Result<()> {
        there.map_or(Ok(()), |e| self.rank.compute.wait(&e))
    }
}
