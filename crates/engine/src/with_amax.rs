//! Rows with what was taken of them while they were written: a pass over memory less for who needs it.

use crate::StepContext;
use ferrotron_comm::ReduceOp;
use ferrotron_kernels::{Act, ActBackward, ActForward};
use ferrotron_tensor::{Category, DType, Result, Tensor};

/// Rows `[tokens, n]`. What is absent, who needs it takes himself.
#[derive(Clone, Debug)]
pub struct WithAmax {
    /// `[tokens, n]`
    pub values: Tensor,
    /// f32 `[1]`: the largest magnitude of these rows, on which no other rank has agreed.
    pub amax: Option<Tensor>,
    /// f32 `[parts, n]`: parts of the column sums.
    pub sums: Option<Tensor>,
}

/// What is asked of rows besides their values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GradExtras {
    /// The largest magnitude.
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
    /// Zero, f32 `[1]`, for a largest magnitude to be raised in.
    pub(crate) fn zero_amax(&self) -> Result<Tensor> {
        match self.state.quant() {
            // What is zeroed for many belongs to a step: a pass outside of it would keep memory from before it.
            Some(state) if self.train => state.zero_amax(self.rank),
            _ => self.rank.compute.zeros(&[1], DType::F32, Category::Workspace),
        }
    }

    /// The largest magnitude of rows, f32 `[1]`, on which ranks that share layers agree.
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
        self.rank.tp.all_reduce(s, &amax, ReduceOp::Max, "largest magnitude")?;
        Ok(amax)
    }

    /// The non-linearity of `h`, `[tokens, width]`, measured or not.
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

    /// The gradient of `h` from that of its non-linearity. Gated, it comes without sums.
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
            k.act_backward_dbias(
                s,
                &ActBackward { act: act, gated: false, x: h, dy: dy, dx: &dh.values },
                &sums,
            )?;
            dh.sums = Some(sums);
        } else {
            k.act_backward(s, &ActBackward { act, gated, x: h, dy, dx: &dh.values })?;
        }
        Ok(dh)
    }

    /// Memory for parts of the column sums of the gradient of `h`.
    pub(crate) fn act_sums(&self, h: &Tensor) -> Result<Tensor> {
        let [rows, n] = [h.shape()[0], h.shape()[1]];
        self.rank.activation(&[self.rank.kernels.act_partials(h.dtype(), rows, n), n], DType::F32)
    }
}
