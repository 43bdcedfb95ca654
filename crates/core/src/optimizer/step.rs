//! The update step: gradient norm, clip factor, and the update of every parameter group on this rank.

use super::executor::Executor;
use super::state::StateKind;
use super::streamed::StatePiece;
use super::{GroupRule, Optimizer, StepRates, UpdateRule, outcome};
use crate::Result;
use ferrotron_comm::ReduceOp;
use ferrotron_engine::moe::MoeState;
use ferrotron_engine::quant::Precomputed;
use ferrotron_engine::{GradBuffer, ParamId, ParamSpec, Params, Rank, StepState};
use ferrotron_kernels::{Kernels, Moment, ParamUpdate, scalars};
use ferrotron_tensor::{Category, DType, Stream, Tensor};

impl Optimizer {
    /// One step with reduced gradients. Returns, on the device, the global gradient norm before clipping and the loss scale
    /// ([`outcome`]). If the norm is not finite, nothing changes; it is not where an MoE message did not hold its tokens.
    pub fn step(
        &self,
        rank: &Rank,
        params: &Params,
        step_state: &StepState,
        grads: &GradBuffer,
        rates: StepRates,
    ) -> Result<Tensor> {
        rank.compute.upload_into(self.scalars(), &self.scalar_values(rates))?;
        self.apply(rank, params, step_state, grads)
    }

    /// The device part of a step. It reads its inputs from [`Optimizer::scalars`], so that a CUDA graph can replay it.
    pub(crate) fn apply(
        &self,
        rank: &Rank,
        params: &Params,
        step_state: &StepState,
        grads: &GradBuffer,
    ) -> Result<Tensor> {
        let (k, s) = (&rank.kernels, &rank.compute);
        params.wait_params(rank)?;
        // Exactly one rank counts each element of the model.
        let counted = grads.norm_shards(rank)?;
        let square = Tensor::empty(s, &[1], DType::F64, Category::Communication)?;
        k.grad_square_sum(s, &counted.iter().collect::<Vec<_>>(), &square)?;
        if let Some(splits) = step_state.moe().and_then(MoeState::split_sizes) {
            // Tokens that did not reach their experts are missing from the gradients of all ranks.
            k.overflow_to_infinity(s, &splits.overflow()?, &square)?;
        }
        rank.world.all().all_reduce(s, &square, ReduceOp::Sum, "gradient norm")?;
        if let Some(scale) = &self.loss_scale {
            scale.unscale(rank, &square)?;
        }
        k.clip_factor_from_square_sum(s, &square, self.max_norm, self.scalars())?;
        if let Some(scale) = &self.loss_scale {
            scale.update(rank, self.scalars())?;
        }
        for (i, clock) in self.clocks.iter().enumerate() {
            if i > 0 {
                s.copy(self.scalars(), &clock.scalars)?;
            }
            k.advance_step(s, clock.betas, &clock.counter, &clock.scalars)?;
        }
        // Nothing reads the old weights any more, nor a checkpoint the old state.
        params.wait_params(rank)?;
        self.reads.wait(rank)?;
        // Adam computes the amax of new FP8 weights (or casts them) in the same pass.
        let looks = self.groups.all_adam();
        if looks {
            params.begin_update(rank, step_state, self.scalars())?;
        }
        let scalars: Vec<&Tensor> = self.clocks.iter().map(|c| &c.scalars).collect();
        let executor = match &self.stream {
            Some(stream) => stream.begin_step(rank, &scalars)?,
            None => Executor::Device,
        };
        for buckets in params.update_order(rank, step_state, self.scheme.optimizer) {
            for (index, group) in self.groups.rules().iter().enumerate().filter(|(_, g)| !g.frozen) {
                let is_muon = matches!(group.rule, UpdateRule::Muon(_));
                let mine = |i: &usize| {
                    params.specs()[*i].group.index == index
                        && !self.pieces[*i].param_range.is_empty()
                        && buckets.contains(&params.plan().slot(ParamId(*i)).0)
                        && (is_muon || !self.is_streamed(*i))
                };
                let list: Vec<usize> = (0..self.pieces.len()).filter(mine).collect();
                match &group.rule {
                    UpdateRule::Muon(rule) => self.muon_step(rank, params, grads, (group, rule), &list)?,
                    _ => {
                        let list: Vec<StatePiece> = list.iter().map(|i| self.whole(*i)).collect();
                        self.elementwise_step(rank, params, (step_state, looks), grads, (group, &list))?;
                    }
                }
            }
            self.streamed_step(rank, params, (step_state, looks), grads, (buckets.clone(), executor))?;
            if step_state.quant().is_some() {
                // Weights are quantized from their masters.
                self.wait_state(rank)?;
            }
            self.all_gather_params(rank, params, step_state, (buckets, looks))?;
        }
        // A copy: the next step overwrites the buffer.
        let outcome = Tensor::empty(s, &[outcome::COUNT], DType::F32, Category::Workspace)?;
        s.copy(&self.scalars().narrow(0, scalars::GRAD_NORM, outcome::COUNT)?, &outcome)?;
        Ok(outcome)
    }

    /// A step of a group whose rule updates every element by itself: one launch for many parameters.
    pub(super) fn elementwise_step(
        &self,
        rank: &Rank,
        params: &Params,
        (step_state, looks): (&StepState, bool),
        grads: &GradBuffer,
        (group, list): (&GroupRule, &[StatePiece]),
    ) -> Result<()> {
        let pieces = self.updated_pieces(rank, params, (step_state, looks), grads, (group, list))?;
        if params.host().weights && self.masters.kind() == StateKind::Masters {
            // A skipped step leaves the slot as it is, which is copied to the host all the same.
            for (master, weight) in pieces.iter().filter_map(|p| Some((&p.master, p.weight.as_ref()?))) {
                rank.kernels.copy(&rank.compute, master, weight)?;
            }
        }
        let list: Vec<ParamUpdate> = pieces.iter().filter_map(|p| p.update(group)).collect();
        group.rule.launch(&*rank.kernels, &rank.compute, self.scalars_of(&group.rule), &list)
    }

    /// The tensors of a group's pieces.
    pub(super) fn updated_pieces<'a>(
        &self,
        rank: &Rank,
        params: &'a Params,
        (step_state, looks): (&StepState, bool),
        grads: &GradBuffer,
        (group, list): (&GroupRule, &[StatePiece]),
    ) -> Result<Vec<UpdatedPiece<'a>>> {
        let narrow = params.dtype() != DType::F32;
        let named = |name: &str| self.moments.iter().position(|m| m.name() == name);
        let states: Vec<usize> = group.states().iter().filter_map(|(n, _)| named(n)).map(|i| 1 + i).collect();
        let mut pieces = Vec::with_capacity(list.len());
        for piece in list {
            let (i, range) = (piece.param, &piece.range);
            let spec = &params.specs()[i];
            let weight = match narrow && !spec.fp8_resident() {
                true => {
                    let weight = self.weight(params, i)?.narrow(0, range.start, range.len())?;
                    Some(self.through_slot(piece, weight)?)
                }
                false => None,
            };
            let begin = self.pieces[i].param_range.start;
            let inside = begin + range.start..begin + range.end;
            let fp8 = match looks {
                true => params.precomputed(step_state, ParamId(i), &inside)?,
                false => None,
            };
            let fp8 = match fp8 {
                Some(outputs) => Some(match outputs.fp8().cloned() {
                    Some(data) => outputs.through(self.through_slot(piece, data)?),
                    None => outputs,
                }),
                None => None,
            };
            let (master, grad) = (self.state_of(0, piece)?.0, self.grad_of(rank, grads, piece)?);
            let moments = states.iter().map(|m| self.state_of(*m, piece)).collect::<Result<Vec<_>>>()?;
            pieces.push(UpdatedPiece { spec, master, weight, grad, moments, fp8 });
        }
        Ok(pieces)
    }

    /// Number of zero elements in the reduced gradients of the model, f64 `[1]` on the device. Collective.
    pub fn count_zero_grads(&self, rank: &Rank, grads: &GradBuffer) -> Result<Tensor> {
        let s = &rank.compute;
        let zeros = Tensor::empty(s, &[1], DType::F64, Category::Communication)?;
        rank.kernels.count_zeros(s, &grads.norm_shards(rank)?.iter().collect::<Vec<_>>(), &zeros)?;
        rank.world.all().all_reduce(s, &zeros, ReduceOp::Sum, "zeros")?;
        Ok(zeros)
    }
}

impl UpdateRule {
    /// A step of a rule that updates every element by itself.
    pub(super) fn launch(
        &self,
        k: &dyn Kernels,
        s: &Stream,
        scalars: &Tensor,
        list: &[ParamUpdate],
    ) -> Result<()> {
        match *self {
            UpdateRule::Adam(adam) => k.adam(s, adam, scalars, list)?,
            UpdateRule::Sgd(sgd) => k.sgd(s, sgd, scalars, list)?,
            UpdateRule::Lion(lion) => k.lion(s, lion, scalars, list)?,
            UpdateRule::Muon(_) => {}
        }
        Ok(())
    }
}

/// The tensors of a range of a parameter that is updated.
pub(super) struct UpdatedPiece<'a> {
    pub(super) spec: &'a ParamSpec,
    pub(super) master: Tensor,
    pub(super) weight: Option<Tensor>,
    pub(super) grad: Tensor,
    /// Values and block scales.
    pub(super) moments: Vec<(Tensor, Option<Tensor>)>,
    pub(super) fp8: Option<Precomputed>,
}

impl UpdatedPiece<'_> {
    /// As kernels take it; none without a moment.
    pub(super) fn update(&self, group: &GroupRule) -> Option<ParamUpdate<'_>> {
        let mut moments =
            self.moments.iter().map(|(values, scales)| Moment { values, scales: scales.as_ref() });
        Some(ParamUpdate {
            master: &self.master,
            weight: self.weight.as_ref(),
            grad: &self.grad,
            first: moments.next()?,
            second: moments.next(),
            lr_mult: group.lr,
            wd_mult: group.weight_decay_of(self.spec),
            fp8: self.fp8.as_ref().map(Precomputed::kernel_outputs),
        })
    }
}
