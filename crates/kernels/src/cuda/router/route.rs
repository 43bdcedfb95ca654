//! Top-k selection and probabilities.

use super::{code, row_blocks, sized};
use crate::cuda::CudaKernels;
use crate::cuda::args::kernel_args;
use crate::router::check;
use crate::router::check::Sizes;
use crate::{ExpertSelection, Route, RouteBackward, RouterParams};
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

kernel_args! {
    header "args/router_route.cuh", includes [];

    /// Indices of the k largest scores of each row.
    struct TopKArgs {
        /// f32 `[tokens, experts]`.
        scores: u64,
        /// f32 `[experts]`, subtracted first, or 0.
        minus: u64,
        /// i32 `[tokens, k]`.
        index: u64,
        tokens: i64,
        experts: i32,
        k: i32,
    }

    /// Top-k routing: experts and probabilities of each token, and the gradient.
    struct RouteArgs {
        logits: u64,
        /// i32 `[tokens, k]`, written, or read where it is given.
        index: u64,
        /// f32 `[experts]`, or 0: added to scores for the selection only.
        bias: u64,
        /// f32 `[tokens, k]`: probabilities, or their gradients.
        probs: u64,
        dlogits: u64,
        fault: u64,
        tokens: i64,
        experts: i32,
        k: i32,
        /// `Score` of router/common.cuh.
        score: i32,
        /// Groups of experts, and how many of them a token may use; 0 without a limit.
        groups: i32,
        keep: i32,
        /// Experts whose scores rank a group.
        best: i32,
        scale: f32,
        /// The index is given.
        given: u32,
        /// Divide scores of the selected experts by their sum.
        normalize: u32,
        pad: u32,
    }
}

impl RouteArgs {
    fn new(how: RouterParams, z: Sizes) -> RouteArgs {
        RouteArgs {
            logits: 0,
            index: 0,
            bias: 0,
            probs: 0,
            dlogits: 0,
            fault: 0,
            tokens: z.tokens as i64,
            experts: z.experts as i32,
            k: z.k as i32,
            score: code(how.score),
            groups: how.groups.map_or(0, |g| g.count as i32),
            keep: how.groups.map_or(0, |g| g.keep as i32),
            best: how.groups.map_or(0, |g| g.best as i32),
            scale: how.scale,
            given: 0,
            normalize: how.normalize.into(),
            pad: 0,
        }
    }
}

impl CudaKernels {
    pub(super) fn launch_top_k(
        &self,
        s: &Stream,
        scores: &Tensor,
        minus: Option<&Tensor>,
        index: &Tensor,
    ) -> Result<()> {
        const OP: &str = "top_k";
        let z = check::top_k(OP, scores, minus, index)?;
        let kernel = match z.experts {
            ..=128 => "top_k_4_f32",
            129..=256 => "top_k_8_f32",
            _ => "top_k_32_f32",
        };
        let kernel = crate::cuda::Kernel::new("router/route", kernel);
        let grid = row_blocks(OP, z.tokens, z.experts, 1)?;
        s.launch(OP, &[read(scores), write(index), read(minus.unwrap_or(scores))], |l| {
            let args = TopKArgs {
                scores: l.address(0)?,
                minus: if minus.is_some() { l.address(2)? } else { 0 },
                index: l.address(1)?,
                tokens: z.tokens as i64,
                experts: z.experts as i32,
                k: z.k as i32,
            };
            self.launch_kernel(l, kernel, grid, &args)
        })
    }

    pub(super) fn launch_route(&self, s: &Stream, route: &Route) -> Result<()> {
        const OP: &str = "route";
        let &Route { params: how, selection, logits, index, probs } = route;
        let z = check::route(OP, how, selection, logits, index, probs)?;
        let (given, bias) = match selection {
            ExpertSelection::Given => (true, None),
            ExpertSelection::TopK { bias } => (false, bias),
        };
        let kernel = sized!(OP, logits.dtype(), z.experts, "router/route", "route")?;
        let grid = row_blocks(OP, z.tokens, z.experts, 1)?;
        let chosen = if given { read(index) } else { write(index) };
        s.launch(OP, &[read(logits), chosen, write(probs), read(bias.unwrap_or(logits))], |l| {
            let args = RouteArgs {
                logits: l.address(0)?,
                index: l.address(1)?,
                bias: if bias.is_some() { l.address(3)? } else { 0 },
                probs: l.address(2)?,
                fault: l.fault()?,
                given: given.into(),
                ..RouteArgs::new(how, z)
            };
            self.launch_kernel(l, kernel, grid, &args)
        })
    }

    pub(super) fn launch_route_backward(&self, s: &Stream, route: &RouteBackward) -> Result<()> {
        const OP: &str = "route_backward";
        let &RouteBackward { params: how, logits, index, dprobs, dlogits } = route;
        let z = check::route_backward(OP, logits, index, dprobs, dlogits)?;
        let kernel = sized!(OP, logits.dtype(), z.experts, "router/route", "route_backward")?;
        let grid = row_blocks(OP, z.tokens, z.experts, 1)?;
        s.launch(OP, &[read(logits), read(index), read(dprobs), write(dlogits)], |l| {
            let args = RouteArgs {
                logits: l.address(0)?,
                index: l.address(1)?,
                probs: l.address(2)?,
                dlogits: l.address(3)?,
                fault: l.fault()?,
                ..RouteArgs::new(how, z)
            };
            self.launch_kernel(l, kernel, grid, &args)
        })
    }
}
