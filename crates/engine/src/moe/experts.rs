//! The experts of a rank, as two stacked maps with a non-linearity between them. Rows come sorted by expert.

use crate::precision::{Columns, Eight, Multiply, Product, Role, SavedSide, Side, Uses};
use crate::{Declarations, Init, Measured, ParamId, Part, Pass, Saved, SavedTensor, Split, WeightGrad};
use ferrotron_kernels::{Act, BLOCK, Bytes, RowBias, RowMap, Scaling, Segments};
use ferrotron_tensor::{Category, DType, Result, Tensor};

use super::MoeShape;

/// `down_e(p·act(gate_e(x))·up_e(x))` for the rows x of expert e; p is the probability of the choice.
pub struct Experts {
    up: ParamId,
    up_bias: Option<ParamId>,
    down: ParamId,
    down_bias: Option<ParamId>,
    /// Which products of the maps up and down have narrow factors.
    eight: [Option<Eight>; 2],
    act: Act,
    gated: bool,
    /// Experts here, width of their input, and width inside as this rank has it.
    count: usize,
    width: usize,
    ffn: usize,
}

/// Rows of tokens on their way to experts: their inputs, or the gradients of their outputs.
pub(crate) struct Outgoing {
    /// `[T, width]`: numbers, or bytes.
    pub(crate) rows: Tensor,
    /// What else is known of them, by all ranks alike.
    pub(crate) sent: Sent,
}

/// What is known of rows that travel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sent {
    /// What bytes are multiplied by to be numbers again, f32 `[1]`; none of numbers.
    scale_inv: Option<Tensor>,
    /// Their largest magnitude f32 `[1]`, where somebody needs it later.
    amax: Option<Tensor>,
}

/// Rows where the experts are.
pub(crate) struct Rows {
    /// `[T, width]`: as they came, in the order of the map's tokens.
    pub(crate) x: Tensor,
    pub(crate) sent: Sent,
    /// f32 `[N]`: the probabilities of their choices, sorted by expert; 0 for rows that are nobody's.
    pub(crate) probs: Tensor,
    /// Whose they are.
    pub(crate) map: RowMap,
}

/// Inputs of the steps.
pub struct ExpertsSaved {
    a: Option<SavedSide>,
    /// The largest magnitude of `a`, where it is made again.
    amax: Option<SavedTensor>,
    h: SavedTensor,
    x: SavedSide,
    /// Is x sorted by expert?
    sorted: bool,
    probs: SavedTensor,
    map: RowMap,
}

impl Saved for ExpertsSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.a.tensors(f);
        self.amax.tensors(f);
        f(&mut self.h);
        self.x.tensors(f);
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
        let names = |all: &[&str]| all.iter().map(|what| format!("{name}.{what}")).collect::<Vec<_>>();
        let eight = [d.narrow_experts(up, &names(ups)), d.narrow_experts(down, &names(&["down"]))];
        let count = own.len();
        Ok(Experts { up, up_bias, down, down_bias, eight, act: c.act, gated: c.gated, count, width, ffn })
    }

    /// Rows of an expert start at multiples of this.
    pub(super) fn align(&self) -> usize {
        if self.eight.iter().any(Option::is_some) { BLOCK } else { 1 }
    }

    /// Which products are narrow in this pass: none while magnitudes are only collected.
    fn eight(&self, p: &Pass) -> [Option<Eight>; 2] {
        let collecting = p.params.eight().is_some_and(|s| s.is_collecting());
        if collecting { [None; 2] } else { self.eight }
    }

    /// Does it need the largest magnitude of its input, now or in backward?
    pub(super) fn measures_input(&self, p: &Pass) -> bool {
        self.eight[0].is_some_and(|e| e.recipe.measures() && (e.output || (p.train && e.weight_grad)))
    }

    /// Width of h.
    fn inner(&self) -> usize {
        self.ffn * if self.gated { 2 } else { 1 }
    }

    /// A bias as `[experts, n]`.
    fn bias(&self, p: &Pass, id: Option<ParamId>, n: usize) -> Result<Option<Tensor>> {
        id.map(|id| p.weight(id)?.view(&[self.count, n])).transpose()
    }

    /// The weights of a map `[n, k]` as the right-hand side of a product, and whether its sums may be short.
    fn factor(
        &self,
        p: &Pass,
        (id, e): (ParamId, Option<Eight>),
        [n, k]: [usize; 2],
        product: Product,
    ) -> Result<(Side, bool)> {
        let shape = [self.count, n, k];
        let values = |trans| Ok((Side::Values { t: p.weight(id)?.view(&shape)?, trans }, false));
        match (product, e) {
            (Product::Output, Some(e)) if e.output => {
                Ok((p.narrow_stack(id, shape, Uses::ROWS)?.take_rows()?, e.recipe.fast_forward()))
            }
            (Product::InputGrad, Some(e)) if e.input_grad => {
                Ok((p.narrow_stack(id, shape, Uses::COLS)?.take_cols()?, false))
            }
            (Product::Output, _) => values(false),
            _ => values(true),
        }
    }

    /// What travels of rows of tokens that an operand of map `id` is made of, and whether that is `bytes`.
    fn outgoing(
        &self,
        p: &Pass,
        (id, e): (ParamId, Option<Eight>),
        role: Role,
        x: &Measured,
        (used, bytes): (bool, bool),
    ) -> Result<Outgoing> {
        let as_it_is = |amax| Outgoing { rows: x.values.clone(), sent: Sent { scale_inv: None, amax } };
        let Some(e) = e.filter(|_| used) else {
            p.collects(id, role, &x.values)?;
            return Ok(as_it_is(None));
        };
        let amax = e.recipe.measures().then(|| p.agreed_on_way(x)).transpose()?;
        if !bytes {
            return Ok(as_it_is(amax));
        }
        match p.narrow(id, role, &x.values, Uses::ROWS, amax.as_ref(), None)?.take_rows()? {
            Side::Bytes(b) => {
                Ok(Outgoing { rows: b.data, sent: Sent { scale_inv: Some(b.scale_inv), amax: None } })
            }
            Side::Values { .. } => Ok(as_it_is(amax)),
        }
    }

    /// Tokens `[T, width]` on their way.
    pub(super) fn send(&self, p: &Pass, x: &Measured) -> Result<Outgoing> {
        let [e, _] = self.eight(p);
        let used = e.is_some_and(|e| e.output || (p.train && e.weight_grad));
        // Bytes serve all that is made of the input.
        let bytes = e.is_some_and(|e| e.recipe.per_tensor() && e.output && (e.weight_grad || !p.train));
        self.outgoing(p, (self.up, e), Role::Input, x, (used, bytes))
    }

    /// Gradients of outputs `[T, width]` on their way.
    pub(super) fn send_gradient(&self, p: &Pass, dy: &Tensor) -> Result<Outgoing> {
        let [_, e] = self.eight(p);
        let used = e.is_some_and(|e| e.input_grad || e.weight_grad);
        // The gradient of a bias is made of the numbers.
        let both = e.is_some_and(|e| e.recipe.per_tensor() && e.input_grad && e.weight_grad);
        let bytes = both && self.down_bias.is_none();
        self.outgoing(p, (self.down, e), Role::Gradient, &Measured::from(dy), (used, bytes))
    }

    /// Rows that came, sorted, as the factors that products of map `id` want, those along columns not always sorted yet.
    fn sorted(
        &self,
        p: &Pass,
        (id, role): (ParamId, Role),
        (came, sent, map): (Tensor, &Sent, &RowMap),
        uses: Uses,
    ) -> Result<(Side, Columns, Tensor)> {
        let rows = p.rank.activation(&[map.source.numel(), came.shape()[1]], came.dtype())?;
        p.rank.kernels.spread_rows(&p.rank.compute, &came, map, &rows)?;
        if let Some(scale_inv) = &sent.scale_inv {
            let (scaling, cols) = (Scaling::Tensor, self.width);
            let side = |data: &Tensor| {
                Side::Bytes(Bytes { data: data.clone(), scale_inv: scale_inv.clone(), scaling, cols })
            };
            return Ok((side(&rows), Columns { side: side(&came), sorted: false }, rows));
        }
        drop(came);
        let made = p.narrow(id, role, &rows, uses, sent.amax.as_ref(), None)?;
        let cols = made.cols.unwrap_or_else(|| Side::cols_of(&rows));
        let side = made.rows.unwrap_or_else(|| Side::rows_of(&rows));
        Ok((side, Columns { side: cols, sorted: true }, rows))
    }

    /// The weighted non-linearity of h, measured where the map down needs it.
    fn activate(&self, p: &Pass, h: &Tensor, probs: &Tensor, measure: bool) -> Result<Measured> {
        let (k, s, a) = (&p.rank.kernels, &p.rank.compute, p.empty(&[h.shape()[0], self.ffn])?);
        if !measure {
            k.act_weighted(s, self.act, self.gated, h, probs, &a)?;
            return Ok(Measured::from(&a));
        }
        let amax = p.magnitude()?;
        k.act_weighted_amax(s, self.act, self.gated, h, probs, &a, &amax)?;
        Ok(Measured { values: a, amax: Some(amax), sums: None })
    }

    /// `[N, width]` of sorted rows, weighted by the probabilities; partial sums where ranks share experts.
    pub(crate) fn forward(&self, p: &Pass, rows: Rows) -> Result<(Tensor, ExpertsSaved)> {
        let (k, s, [up, down]) = (&p.rank.kernels, &p.rank.compute, self.eight(p));
        let Rows { x, sent, probs, map } = rows;
        let (n, segments) = (map.source.numel(), segments(&map));
        let uses = |e: Option<Eight>, cols: bool| Uses {
            rows: e.is_some_and(|e| e.output),
            cols: e.is_some_and(|e| cols && p.train && e.weight_grad),
        };
        let (x, kept, _) = self.sorted(p, (self.up, Role::Input), (x, &sent, &map), uses(up, true))?;
        let h = p.empty(&[n, self.inner()])?;
        let bias = self.bias(p, self.up_bias, self.inner())?;
        p.collects_weight(self.up)?;
        let (w, fast) = self.factor(p, (self.up, up), [self.inner(), self.width], Product::Output)?;
        let how = Multiply { product: Product::Output, bias: bias.as_ref(), accumulate: false, fast };
        x.times_each(p.rank, &w, segments, how, &h)?;
        drop((x, w));
        let again = p.recompute.activation;
        let measure = down.is_some_and(|e| e.recipe.measures() && (e.output || (p.train && e.weight_grad)));
        let a = self.activate(p, &h, &probs, measure)?;
        let amax = measure.then(|| p.agreed_over(&p.rank.etp, &a)).transpose()?;
        p.collects(self.down, Role::Input, &a.values)?;
        let made = p.narrow(self.down, Role::Input, &a.values, uses(down, !again), amax.as_ref(), None)?;
        let cols = made.cols.unwrap_or_else(|| Side::cols_of(&a.values));
        let a = made.rows.unwrap_or_else(|| Side::rows_of(&a.values));
        let y = p.empty(&[n, self.width])?;
        p.collects_weight(self.down)?;
        let (w, fast) = self.factor(p, (self.down, down), [self.width, self.ffn], Product::Output)?;
        let how = Multiply { product: Product::Output, bias: None, accumulate: false, fast };
        a.times_each(p.rank, &w, segments, how, &y)?;
        if let Some(bias) = self.bias(p, self.down_bias, self.width)?.filter(|_| p.rank.etp.rank() == 0) {
            k.add_bias(s, &RowBias { segments, bias: &bias, weights: &probs }, &y)?;
        }
        let saved = ExpertsSaved {
            a: (!again).then(|| SavedSide::of(&cols)),
            amax: amax.filter(|_| again).as_ref().map(SavedTensor::small),
            h: SavedTensor::activation(&h),
            x: SavedSide::of(&kept.side),
            sorted: kept.sorted,
            probs: SavedTensor::small(&probs),
            map,
        };
        Ok((y, saved))
    }

    /// Gradients of the rows, sorted, and of their probabilities f32 `[N]`, from those of the outputs as they came.
    pub(crate) fn backward(
        &self,
        p: &Pass,
        saved: ExpertsSaved,
        (dy, sent): (Tensor, Sent),
    ) -> Result<(Tensor, Tensor, WeightGrad)> {
        let (k, s, [up, down]) = (&p.rank.kernels, &p.rank.compute, self.eight(p));
        let ExpertsSaved { a, amax, h, x, sorted, probs, map } = saved;
        let (n, segments) = (map.source.numel(), segments(&map));
        let uses = |e: Option<Eight>| Uses {
            rows: e.is_some_and(|e| e.input_grad),
            cols: e.is_some_and(|e| e.weight_grad),
        };
        let (rows, dy_cols, dy) =
            self.sorted(p, (self.down, Role::Gradient), (dy, &sent, &map), uses(down))?;
        // Only the gradient of a bias is made of it.
        let dy = self.down_bias.map(|_| dy);
        let a = match a {
            Some(a) => a.side(),
            None => {
                let a = self.activate(p, &h, &probs, false)?.values;
                let uses = Uses { rows: false, ..uses(down) };
                let made = p.narrow(self.down, Role::Input, &a, uses, amax.as_deref(), None)?;
                made.cols.unwrap_or_else(|| Side::cols_of(&a))
            }
        };
        let how = Multiply { product: Product::InputGrad, bias: None, accumulate: false, fast: false };
        let da = p.empty(&[n, self.ffn])?;
        let (w, _) = self.factor(p, (self.down, down), [self.width, self.ffn], Product::InputGrad)?;
        rows.times_each(p.rank, &w, segments, how, &da)?;
        drop((rows, w));
        let (dh, dp) = (p.empty(h.shape())?, p.rank.activation(&[n], DType::F32)?);
        let amax = match up.is_some_and(|e| e.recipe.measures() && (e.input_grad || e.weight_grad)) {
            false => {
                k.act_weighted_backward(s, self.act, self.gated, &h, &probs, &map.source, &da, &dh, &dp)?;
                None
            }
            true => {
                let amax = p.magnitude()?;
                let live = &map.source;
                k.act_weighted_backward_amax(
                    s, self.act, self.gated, &h, &probs, live, &da, &dh, &dp, &amax,
                )?;
                let dh = Measured { values: dh.clone(), amax: Some(amax), sums: None };
                Some(p.agreed_over(&p.rank.etp, &dh)?)
            }
        };
        drop((da, h));
        let mut grads = self.weight_grad(
            self.down,
            [self.width, self.ffn],
            dy_cols,
            Columns { side: a, sorted: true },
            &map,
        );
        let bias = self.bias(p, self.down_bias, self.width)?.filter(|_| p.rank.etp.rank() == 0);
        if let Some((bias, dy)) = bias.zip(dy) {
            // Its gradient later, that of the probabilities now.
            let sums = Tensor::empty(s, &[self.count, self.width], DType::F32, Category::Workspace)?;
            let b = RowBias { segments, bias: &bias, weights: &probs };
            k.add_bias_backward(s, &b, &dy, (&sums, false), Some(&dp))?;
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
        p.collects(self.up, Role::Gradient, &dh)?;
        let made = p.narrow(self.up, Role::Gradient, &dh, uses(up), amax.as_ref(), None)?;
        let rows = made.rows.unwrap_or_else(|| Side::rows_of(&dh));
        let dx = p.empty(&[n, self.width])?;
        let (w, _) = self.factor(p, (self.up, up), [self.inner(), self.width], Product::InputGrad)?;
        rows.times_each(p.rank, &w, segments, how, &dx)?;
        if let Some(bias) = self.bias(p, self.up_bias, self.inner())? {
            let sums = Tensor::empty(s, &[self.count, self.inner()], DType::F32, Category::Workspace)?;
            let ones = s.upload(&vec![1f32; n], &[n], Category::Workspace)?;
            let b = RowBias { segments, bias: &bias, weights: &ones };
            k.add_bias_backward(s, &b, &dh, (&sums, false), None)?;
            grads = grads.and(self.up_bias.map(|id| WeightGrad::made(id, sums)).unwrap_or_default());
        }
        let dh = Columns { side: made.cols.unwrap_or_else(|| Side::cols_of(&dh)), sorted: true };
        let x = Columns { side: x.side(), sorted };
        grads = grads.and(self.weight_grad(self.up, [self.inner(), self.width], dh, x, &map));
        Ok((dx, dp, grads))
    }

    /// `dW_e = Σ dyᵀ·x` over the rows of each expert; `shape`: of one expert's W.
    fn weight_grad(
        &self,
        id: ParamId,
        shape: [usize; 2],
        dy: Columns,
        x: Columns,
        map: &RowMap,
    ) -> WeightGrad {
        let (count, map) = (self.count, map.clone());
        WeightGrad::other(id, move |rank, grad, accumulate| {
            let dw = grad.view(&[count, shape[0], shape[1]])?;
            dy.gradient(rank, &x, &map, (&dw, accumulate))
        })
    }
}
