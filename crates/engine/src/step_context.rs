//! The surroundings of one forward or backward pass.

use crate::moe::MoeBatch;
use crate::{ParamId, Params, Rank, Saved, SavedTensor};
use ferrotron_kernels::RngKey;
use ferrotron_tensor::{DType, Result, Tensor};

/// What modules are given besides their inputs.
#[derive(Clone, Copy)]
pub struct StepContext<'a> {
    /// The worker.
    pub rank: &'a Rank,
    /// The weights.
    pub params: &'a Params,
    /// Random switching-off of activations, in training only.
    pub dropout: Option<Dropout<'a>>,
    /// What backward recomputes instead of keeping.
    pub recompute: Recompute,
    /// Backward may follow: keep what it needs.
    pub train: bool,
    /// What mixtures are told of the micro-batch.
    pub moe: Option<MoeBatch<'a>>,
    /// Forward runs once more for backward: what was counted is not counted again.
    pub recomputing: bool,
    /// Orientations of the same layer before this one, where a layer is used repeatedly: it draws as if it were so many layers
    /// further on.
    pub repeat: u32,
}

/// Dropout of one micro-batch. What is dropped depends on the seed, the step, the layer, the place in it and the
/// number of the token in the step: on no layout, and on no size of micro-batches.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Chance that an activation is dropped.
    pub p: f32,
    /// Step of the run.
    pub step: u64,
    /// i32: number in the step of the token of each row of the residual stream that this rank holds.
    pub rows: &'a Tensor,
}

/// Which results are dropped after forward and computed again in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    /// Everything inside a layer; only its input is kept.
    pub layer: bool,
    /// Everything inside the attention block; its input is kept.
    pub attention: bool,
    /// Everything inside the MLP; its input is kept.
    pub mlp: bool,
    /// The output of the MLP's non-linearity.
    pub activation: bool,
    /// Outputs of norms.
    pub norm: bool,
}

impl<'a> StepContext<'a> {
    /// A pass without dropout that keeps everything.
    pub fn new(rank: &'a Rank, params: &'a Params) -> StepContext<'a> {
        StepContext {
            rank,
            params,
            dropout: None,
            recompute: Recompute::default(),
            train: true,
            moe: None,
            recomputing: false,
            repeat: 0,
        }
    }

    /// The same pass, for forward once more.
    pub fn for_recompute(&self) -> StepContext<'a> {
        StepContext { recomputing: true, ..*self }
    }

    /// The type the model computes in.
    pub fn dtype(&self) -> DType {
        self.params.dtype()
    }

    /// A weight, which the compute stream waits for if it is still on its way.
    pub fn weight(&self, id: ParamId) -> Result<&'a Tensor> {
        self.params.weight(self.rank, id)
    }

    /// New activation memory in the type the model computes in.
    pub fn empty(&self, shape: &[usize]) -> Result<Tensor> {
        self.rank.activation(shape, self.dtype())
    }

    /// Applies dropout at a place of a layer, forward or backward: the mask depends on the place only.
    pub fn dropout(&self, layer: u32, site: u32, x: Tensor) -> Result<Tensor> {
        let Some(d) = self.dropout.filter(|d| d.p > 0.0) else { return Ok(x) };
        let key = RngKey { seed: self.rank.seed, step: d.step, layer: layer + self.repeat, site };
        let y = self.rank.activation(x.shape(), x.dtype())?;
        self.rank.kernels.dropout(
            &self.rank.compute,
            &ferrotron_kernels::Dropout { p: d.p, key, rows: d.rows, x: &x, y: &y },
        )?;
        Ok(y)
    }
}

/// What a module keeps: all that backward needs, or its input, from which forward is run again.
pub enum Checkpointed<S> {
    /// Everything.
    Full(S),
    /// Only the input.
    Input(SavedTensor),
}

impl<S> Checkpointed<S> {
    /// Drops `saved` for `input` where `recompute` is set.
    pub fn new(recompute: bool, input: &Tensor, saved: S) -> Checkpointed<S> {
        if recompute {
            Checkpointed::Input(SavedTensor::activation(input))
        } else {
            Checkpointed::Full(saved)
        }
    }
}

impl<S: Saved> Saved for Checkpointed<S> {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        match self {
            Checkpointed::Full(s) => s.tensors(f),
            Checkpointed::Input(x) => f(x),
        }
    }
}
