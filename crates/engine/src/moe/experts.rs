//! The experts of a rank, as two stacked maps with a non-linearity between them. Rows come sorted by expert.

use crate::{Declarations, Init, ParamId, Part, Pass, Saved, SavedTensor, Split, WeightGrad};
use ferrotron_kernels::{Act, Grouped, GroupedGrad, RowBias, RowMap, Segments};
use ferrotron_tensor::{Category, DType, Result, Tensor};

use super::MoeShape;

/// `down_e(p·act(gate_e(x))·up_e(x))` for the rows x of expert e; p is the probability of the choice.
pub struct Experts {
    up: ParamId,
    up_bias: Option<ParamId>,
    down: ParamId,
    down_bias: Option<ParamId>,
    act: Act,
    gated: bool,
    /// Experts here, width of their input, and width inside as this rank has it.
    count: usize,
    width: usize,
    ffn: usize,
}

/// Rows sorted by expert, with the probabilities of their choices.
#[derive(Clone)]
pub(crate) struct Rows {
    /// `[N, width]`
    pub(crate) x: Tensor,
    /// f32 `[N]`, 0 for rows that are nobody's.
    pub(crate) probs: Tensor,
    /// Whose they are.
    pub(crate) map: RowMap,
}

/// Inputs of the steps.
pub struct ExpertsSaved {
    a: Option<SavedTensor>,
    h: SavedTensor,
    x: SavedTensor,
    probs: SavedTensor,
    map: RowMap,
}

impl Saved for ExpertsSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.a.tensors(f);
        f(&mut self.h);
        f(&mut self.x);
        f(&mut self.probs);
    }
}

pub(crate) fn segments(map: &RowMap) -> Segments<'_> {
    Segments { offsets: &map.offsets, counts: &map.counts }
}

impl Experts {
    /// Declares `<name>.<e>.gate`, `.up`, `.down` of this rank's experts e.
    pub(super) fn declare(d: &mut Declarations, name: &str, c: &MoeShape) -> Result<Experts> {
        let own = d.experts().own(c.experts);
        let width = c.latent.unwrap_or(c.hidden);
        let ups: &[&str] = if c.gated { &["gate", "up"] } else { &["up"] };
        let part = |e: usize, what: &str, kind: &str, shape: &[usize], init, split| Part {
            name: format!("{name}.{e}.{what}.{kind}"),
            shape: shape.to_vec(),
            init,
            split,
        };
        let (rows, columns) = (Split::Rows { unit: 1 }, Split::Columns { unit: 1 });
        let zero = Init::Constant(0.0);
        let of_ups = |kind: &str, shape: &[usize], init| {
            let one = |e| ups.iter().map(move |u| (e, *u));
            own.clone().flat_map(one).map(|(e, u)| part(e, u, kind, shape, init, rows)).collect::<Vec<_>>()
        };
        let up = d.declare_experts(of_ups("weight", &[c.ffn, width], Init::Normal(c.std.0)))?;
        let up_bias = c.bias.then(|| d.declare_experts(of_ups("bias", &[c.ffn], zero))).transpose()?;
        let downs =
            own.clone().map(|e| part(e, "down", "weight", &[width, c.ffn], Init::Normal(c.std.1), columns));
        let down = d.declare_experts(downs.collect())?;
        // Partial sums over the ranks that share an expert: the first of them adds the bias.
        let biases = own.clone().map(|e| part(e, "down", "bias", &[width], zero, Split::Replicated));
        let down_bias = c.bias.then(|| d.declare_experts(biases.collect())).transpose()?;
        let ffn = d.spec(down).shape[1];
        Ok(Experts { up, up_bias, down, down_bias, act: c.act, gated: c.gated, count: own.len(), width, ffn })
    }

    /// Width of h.
    fn inner(&self) -> usize {
        self.ffn * if self.gated { 2 } else { 1 }
    }

    fn up_weight<'a>(&self, p: &Pass<'a>) -> Result<Tensor> {
        p.weight(self.up)?.view(&[self.count, self.inner(), self.width])
    }

    fn down_weight<'a>(&self, p: &Pass<'a>) -> Result<Tensor> {
        p.weight(self.down)?.view(&[self.count, self.width, self.ffn])
    }

    /// A bias as `[experts, n]`.
    fn bias(&self, p: &Pass, id: Option<ParamId>, n: usize) -> Result<Option<Tensor>> {
        id.map(|id| p.weight(id)?.view(&[self.count, n])).transpose()
    }

    fn activate(&self, p: &Pass, h: &Tensor, probs: &Tensor) -> Result<Tensor> {
        let a = p.empty(&[h.shape()[0], self.ffn])?;
        p.rank.kernels.act_weighted(&p.rank.compute, self.act, self.gated, h, probs, &a)?;
        Ok(a)
    }

    /// `[N, width] → [N, width]`, weighted by the probabilities; partial sums where ranks share experts.
    pub(crate) fn forward(&self, p: &Pass, rows: &Rows) -> Result<(Tensor, ExpertsSaved)> {
        let (k, s, n) = (&p.rank.kernels, &p.rank.compute, rows.x.shape()[0]);
        let segments = segments(&rows.map);
        let h = p.empty(&[n, self.inner()])?;
        let (w, bias) = (self.up_weight(p)?, self.bias(p, self.up_bias, self.inner())?);
        let up = Grouped { x: &rows.x, w: &w, as_stored: false, segments, bias: bias.as_ref(), y: &h };
        k.grouped(s, &up)?;
        let a = self.activate(p, &h, &rows.probs)?;
        let y = p.empty(&[n, self.width])?;
        let w = self.down_weight(p)?;
        k.grouped(s, &Grouped { x: &a, w: &w, as_stored: false, segments, bias: None, y: &y })?;
        if let Some(bias) = self.bias(p, self.down_bias, self.width)?.filter(|_| p.rank.etp.rank() == 0) {
            k.add_bias(s, &RowBias { segments, bias: &bias, weights: &rows.probs }, &y)?;
        }
        let saved = ExpertsSaved {
            a: (!p.recompute.activation).then(|| SavedTensor::activation(&a)),
            h: SavedTensor::activation(&h),
            x: SavedTensor::activation(&rows.x),
            probs: SavedTensor::small(&rows.probs),
            map: rows.map.clone(),
        };
        Ok((y, saved))
    }

    /// Gradients of the rows and of their probabilities f32 `[N]`.
    pub(crate) fn backward(
        &self,
        p: &Pass,
        saved: ExpertsSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor, WeightGrad)> {
        let (k, s, n) = (&p.rank.kernels, &p.rank.compute, dy.shape()[0]);
        let ExpertsSaved { a, h, x, probs, map } = saved;
        let segments = segments(&map);
        let a = match a {
            Some(a) => (*a).clone(),
            None => self.activate(p, &h, &probs)?,
        };
        let da = p.empty(&[n, self.ffn])?;
        let w = self.down_weight(p)?;
        k.grouped(s, &Grouped { x: dy, w: &w, as_stored: true, segments, bias: None, y: &da })?;
        let (dh, dp) = (p.empty(h.shape())?, p.rank.activation(&[n], DType::F32)?);
        k.act_weighted_backward(s, self.act, self.gated, &h, &probs, &map.source, &da, &dh, &dp)?;
        drop((da, h));
        let mut grads = self.weight_grad(self.down, [self.width, self.ffn], dy, &a, &map);
        if let Some(bias) = self.bias(p, self.down_bias, self.width)?.filter(|_| p.rank.etp.rank() == 0) {
            // Its gradient later, that of the probabilities now.
            let sums = Tensor::empty(s, &[self.count, self.width], DType::F32, Category::Workspace)?;
            let b = RowBias { segments, bias: &bias, weights: &probs };
            k.add_bias_backward(s, &b, dy, (&sums, false), Some(&dp))?;
            grads = grads.and(self.down_bias.map(|id| WeightGrad::made(id, sums)).unwrap_or_default());
        } else if let Some(id) = self.down_bias {
            grads =
                grads.and(WeightGrad::other(
                    id,
                    |rank, grad, accumulate| {
                        if accumulate { Ok(()) } else { rank.compute.zero(grad) }
                    },
                ));
        }
        let dx = p.empty(x.shape())?;
        let w = self.up_weight(p)?;
        k.grouped(s, &Grouped { x: &dh, w: &w, as_stored: true, segments, bias: None, y: &dx })?;
        if let Some(bias) = self.bias(p, self.up_bias, self.inner())? {
            let sums = Tensor::empty(s, &[self.count, self.inner()], DType::F32, Category::Workspace)?;
            let ones = s.upload(&vec![1f32; n], &[n], Category::Workspace)?;
            let b = RowBias { segments, bias: &bias, weights: &ones };
            k.add_bias_backward(s, &b, &dh, (&sums, false), None)?;
            grads = grads.and(self.up_bias.map(|id| WeightGrad::made(id, sums)).unwrap_or_default());
        }
        grads = grads.and(self.weight_grad(self.up, [self.inner(), self.width], &dh, &x, &map));
        Ok((dx, dp, grads))
    }

    /// `dW_e = Σ dyᵀ·x` over the rows of each expert; `shape`: of one expert's W.
    fn weight_grad(
        &self,
        id: ParamId,
        shape: [usize; 2],
        dy: &Tensor,
        x: &Tensor,
        map: &RowMap,
    ) -> WeightGrad {
        let (count, dy, x, map) = (self.count, dy.clone(), x.clone(), map.clone());
        WeightGrad::other(id, move |rank, grad, accumulate| {
            let dw = grad.view(&[count, shape[0], shape[1]])?;
            let g = GroupedGrad { dy: &dy, x: &x, segments: segments(&map), dw: (&dw, accumulate) };
            rank.kernels.grouped_grad(&rank.compute, &g)
        })
    }
}
