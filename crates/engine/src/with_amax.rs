//! Activations with by-products of the kernel that wrote them (amax, column sums), which saves a pass over memory.

use crate::StepContext;
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::{Act, ActBackward, ActForward};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// Activations `[tokens, n]`; what is absent is computed by whoever needs it.
#[derive(Clone, Debug)]
pub struct WithAmax {
    /// `[tokens, n]`
    pub values: Tensor,
    /// f32 `[1]`: amax of this rank's values, not yet all-reduced.
    pub amax: Option<Tensor>,
    /// f32 `[parts, n]`: partial column sums.
    pub sums: Option<Tensor>,
}

/// By-products wanted of a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GradExtras {
    /// amax.
    pub(crate) amax: bool,
    /// Column sums.
    pub(crate) sums: bool,
}

impl From<&Tensor> for WithAmax {
    fn from(t: &Tensor) -> WithAmax {
        WithAmax { values: t.clone(), amax: None, sums: None }
    }
}

impl From<&WithAmax> for WithAmax {
    fn from(m: &WithAmax) -> WithAmax {
        m.clone()
    }
}

impl StepContext<'_> {
    /// A zeroed f32 `[1]` for an amax.
    pub(crate) fn zero_amax(&self) -> Result<Tensor> {
        match self.state.quant() {
            // Memory zeroed for many belongs to a step; a pass outside of one would keep it alive.
            Some(state) if self.train => state.zero_amax(self.rank),
            _ => self.rank.compute.zeros(&[1], DType::F32, Category::Workspace),
        }
    }

    /// amax of activations, f32 `[1]`, all-reduced over the tensor-parallel group.
    pub(crate) fn reduced_amax(&self, x: &WithAmax) -> Result<Tensor> {
        let s = &self.rank.compute;
        let amax = match &x.amax {
            Some(amax) => amax.clone(),
            None => {
                let amax = self.zero_amax()?;
                self.rank.kernels.amax(s, &x.values, &amax)?;
                amax
            }
        };
        self.rank.tp.all_reduce(s, &amax, ReduceOp::Max, "amax")?;
        Ok(amax)
    }

    /// Activation function of `h`, `[tokens, width]`, with amax if `measure`.
    pub(crate) fn act_forward(
        &self,
        act: Act,
        gated: bool,
        h: &Tensor,
        width: usize,
        measure: bool,
    ) -> Result<WithAmax> {
        let (k, s) = (&self.rank.kernels, &self.rank.compute);
        let y = self.empty(&[h.shape()[0], width])?;
        if !measure {
            k.act_forward(s, &ActForward { act, gated, x: h, y: &y })?;
            return Ok(WithAmax::from(&y));
        }
        let amax = self.zero_amax()?;
        k.act_forward_amax(s, &ActForward { act, gated, x: h, y: &y }, &amax)?;
        Ok(WithAmax { values: y, amax: Some(amax), sums: None })
    }

    /// Gradient of `h` from that of its activation function. Gated activations give no column sums.
    pub(crate) fn act_backward(
        &self,
        act: Act,
        gated: bool,
        h: &Tensor,
        dy: &Tensor,
        extras: GradExtras,
    ) -> Result<WithAmax> {
        let (k, s) = (&self.rank.kernels, &self.rank.compute);
        let mut dh = WithAmax::from(&self.empty(h.shape())?);
        if extras.amax {
            let amax = self.zero_amax()?;
            k.act_backward_amax(s, &ActBackward { act, gated, x: h, dy, dx: &dh.values }, &amax)?;
            dh.amax = Some(amax);
        } else if extras.sums && !gated {
            let sums = self.act_sums(h)?;
            k.act_backward_dbias(s, &ActBackward { act, gated: false, x: h, dy, dx: &dh.values }, &sums)?;
            dh.sums = Some(sums);
        } else {
            k.act_backward(s, &ActBackward { act, gated, x: h, dy, dx: &dh.values })?;
        }
        Ok(dh)
    }

    /// Memory for partial column sums of the gradient of `h`.
    pub(crate) fn act_sums(&self, h: &Tensor) -> Result<Tensor> {
        let [rows, n] = [h.shape()[0], h.shape()[1]];
        self.rank.activation(&[self.rank.kernels.act_partials(h.dtype(), rows, n), n], DType::F32)
    }
}
