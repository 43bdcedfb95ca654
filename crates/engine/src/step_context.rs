//! The context of one forward or backward pass.

use crate::moe::{MoeBatch, SavedRouting};
use crate::offload::ActivationOffload;
use crate::{Module, ParamId, Params, Rank, Saved, SavedTensor, StepState, UnitGuard, UnitId, Weight};
use ferrotron_kernels::{CapturedSequences, RngKey, StepKey};
use ferrotron_tensor::{DType, Result, Tensor};

/// What every module needs besides its inputs: the rank, the weights, the state of the step and the pass' options.
#[derive(Clone, Copy)]
pub struct StepContext<'a> {
    /// Device, streams and process groups.
    pub rank: &'a Rank,
    /// Model weights.
    pub params: &'a Params,
    /// Quantization and MoE state of the step.
    pub state: &'a StepState,
    /// Dropout, in training only.
    pub dropout: Option<Dropout<'a>>,
    /// Activation recomputation.
    pub recompute: Recompute,
    /// Whether a backward pass may follow: save what it needs.
    pub train: bool,
    /// The micro-batch as MoE layers need to know it.
    pub moe: Option<MoeBatch<'a>>,
    /// Where the pass is captured and its packed sequences differ from replay to replay: these sequences.
    pub captured: Option<&'a CapturedSequences>,
    /// This forward pass repeats one for backward: counters are not advanced again.
    pub recomputing: bool,
    /// With `recomputing`: the routing of the pass that is repeated, where it is that of an MoE layer.
    pub saved_routing: Option<&'a SavedRouting>,
    /// Offloading of saved activations.
    pub offload: Option<&'a ActivationOffload>,
    /// Tokens of this rank that a dense MLP computes at a time, at most. Backward recomputes it chunk by chunk.
    pub mlp_chunk: Option<usize>,
    /// How often the same layer ran before in this pass (shared MTP layers): its random numbers are those of a layer that
    /// many positions further on.
    pub repeat: u32,
}

/// The number of a step, on which random draws depend.
#[derive(Clone, Copy, Debug)]
pub enum StepNumber<'a> {
    /// Steps done before this one.
    Known(u64),
    /// The same as i32 `[1]` on the device: the pass is captured, and replayed in many steps.
    OnDevice(&'a Tensor),
}

/// Dropout of one micro-batch. The mask depends on the seed, the step, the layer, the site in it and the token's index in
/// the step; it does not depend on the layout or the micro-batch size.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Probability that an activation is dropped.
    pub p: f32,
    /// Step of the run.
    pub step: StepNumber<'a>,
    /// i32: index in the step of the token of each of this rank's rows of the residual stream.
    pub rows: &'a Tensor,
}

/// What is dropped after forward and recomputed in backward (activation checkpointing).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    /// The whole layer; only its input is saved.
    pub layer: bool,
    /// The attention block.
    pub attention: bool,
    /// The MLP or MoE block.
    pub mlp: bool,
    /// The output of the MLP's activation function.
    pub activation: bool,
    /// The outputs of norms.
    pub norm: bool,
}

impl<'a> StepContext<'a> {
    /// A training pass without dropout that saves every activation.
    pub fn new(rank: &'a Rank, params: &'a Params, state: &'a StepState) -> StepContext<'a> {
        StepContext {
            rank,
            params,
            state,
            dropout: None,
            recompute: Recompute::default(),
            train: true,
            moe: None,
            captured: None,
            recomputing: false,
            saved_routing: None,
            offload: None,
            mlp_chunk: None,
            repeat: 0,
        }
    }

    /// The same pass for a recomputation, with the routing that was saved for it.
    pub fn for_recompute<'b>(&'b self, routing: Option<&'b SavedRouting>) -> StepContext<'b> {
        StepContext { recomputing: true, saved_routing: routing, ..*self }
    }

    /// The model's compute dtype.
    pub fn dtype(&self) -> DType {
        self.params.dtype()
    }

    /// A weight. The compute stream waits for it if it is still being gathered.
    pub fn weight(&self, id: ParamId) -> Result<Weight> {
        self.params.weight(self.rank, id)
    }

    /// Whether a parameter is not trained.
    pub fn is_frozen(&self, id: ParamId) -> bool {
        self.params.specs()[id.0].group.frozen
    }

    /// Where weights are sharded: gathers a unit, which stays while the guard is held, and the `next` ones ahead.
    pub fn enter_unit(&self, unit: UnitId, next: &[UnitId]) -> Result<Option<UnitGuard>> {
        self.params.enter_unit(self.rank, unit, next)
    }

    /// New activation memory in the model's compute dtype.
    pub fn empty(&self, shape: &[usize]) -> Result<Tensor> {
        self.rank.activation(shape, self.dtype())
    }

    /// Key of the random draws at a site of a layer.
    pub(crate) fn random_key<'s>(&self, step: StepNumber<'s>, layer: u32, site: u32) -> StepKey<'s> {
        let (number, step) = match step {
            StepNumber::Known(number) => (number, None),
            StepNumber::OnDevice(step) => (0, Some(step)),
        };
        let key = RngKey { seed: self.rank.seed, step: number, layer: layer + self.repeat, site };
        StepKey { key, step }
    }

    /// Applies dropout at a site of a layer, in forward and backward alike: the mask depends on the site only.
    pub fn dropout(&self, layer: u32, site: u32, x: Tensor) -> Result<Tensor> {
        let Some(d) = self.dropout.filter(|d| d.p > 0.0) else { return Ok(x) };
        let key = self.random_key(d.step, layer, site);
        let y = self.rank.activation(x.shape(), x.dtype())?;
        self.rank.kernels.dropout(
            &self.rank.compute,
            &ferrotron_kernels::Dropout { p: d.p, key, rows: d.rows, x: &x, y: &y },
        )?;
        Ok(y)
    }
}

/// The saved activations of a module, or only its input where it is recomputed.
#[expect(clippy::large_enum_variant, reason = "handles of a few words, once a layer")]
pub enum Checkpointed<S> {
    /// Everything backward needs.
    Full(S),
    /// The input, from which forward runs again.
    Input {
        /// Input of the module.
        x: SavedTensor,
        /// Routing of the MoE layer in it: recomputation must not select other experts.
        routing: Option<SavedRouting>,
    },
}

impl<S: Saved> Checkpointed<S> {
    /// Keeps `saved`, or with `recompute` only `input` and the routing.
    pub fn new(recompute: bool, input: &Tensor, saved: S) -> Checkpointed<S> {
        match recompute {
            false => Checkpointed::Full(saved),
            true => {
                Checkpointed::Input { x: SavedTensor::activation(input), routing: saved.routing().cloned() }
            }
        }
    }
}

impl<S: Saved> Saved for Checkpointed<S> {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.modules(&mut |_, t| f(t));
    }

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        match self {
            Checkpointed::Full(s) => s.modules(f),
            Checkpointed::Input { x, routing } => {
                f(Module::LayerInput, x);
                routing.tensors(&mut |t| f(Module::Router, t));
            }
        }
    }
}
