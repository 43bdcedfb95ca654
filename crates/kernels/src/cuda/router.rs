use super::CudaKernels;
use crate::{Balance, Choice, DropoutKey, RouterKernels, Routing};
use ferrotron_tensor::{Error, Result, Stream, Tensor};

fn missing(op: &'static str) -> Result<()> {
    Err(Error::Unsupported { op, what: "routing has no kernels for cards yet; train on the CPU".into() })
}

impl RouterKernels for CudaKernels {
    fn top_k(&self, _: &Stream, _: &Tensor, _: Option<&Tensor>, _: &Tensor) -> Result<()> {
        missing("top_k")
    }

    fn route(&self, _: &Stream, _: Routing, _: Choice, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("route")
    }

    fn route_backward(
        &self,
        _: &Stream,
        _: Routing,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<()> {
        missing("route_backward")
    }

    fn balance(&self, _: &Stream, _: &Balance, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("balance")
    }

    fn balance_backward(&self, _: &Stream, _: &Balance, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("balance_backward")
    }

    fn balance_weights(
        &self,
        _: &Stream,
        _: f32,
        _: usize,
        _: &Tensor,
        _: &Tensor,
        _: Option<&Tensor>,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<()> {
        missing("balance_weights")
    }

    fn z_loss(&self, _: &Stream, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("z_loss")
    }

    fn z_loss_backward(
        &self,
        _: &Stream,
        _: f32,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<()> {
        missing("z_loss_backward")
    }

    fn count_choices(&self, _: &Stream, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("count_choices")
    }

    fn drop_beyond(
        &self,
        _: &Stream,
        _: usize,
        _: usize,
        _: bool,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<()> {
        missing("drop_beyond")
    }

    fn update_bias(&self, _: &Stream, _: f32, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("update_bias")
    }

    fn sinkhorn(&self, _: &Stream, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("sinkhorn")
    }

    fn quantiles(&self, _: &Stream, _: usize, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("quantiles")
    }

    fn gate_exact(&self, _: &Stream, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("gate_exact")
    }

    fn gate_exact_backward(
        &self,
        _: &Stream,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: bool,
    ) -> Result<()> {
        missing("gate_exact_backward")
    }

    fn fill_normal_logits(&self, _: &Stream, _: DropoutKey, _: &Tensor, _: &Tensor) -> Result<()> {
        missing("fill_normal_logits")
    }
}
