//! Grouped GEMM (one matrix for each segment of rows, as for experts): by WGMMA kernels on Hopper and by mma.sync on other
//! cards where operands allow it, otherwise by FMA instructions.

pub(super) mod generic;
pub(super) mod generic_fp8;
pub(super) mod hopper;
mod hopper_fp8;
mod mma;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_fp8;

use super::CudaKernels;
use crate::grouped_gemm::GroupedSizes;
use crate::{Fp8GroupedGemm, Fp8GroupedWgrad, GroupedBias, GroupedGemm, GroupedGemmKernels, GroupedWgrad};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, Tensor, read, shape_error, write};
use generic::Segments;
use hopper::{KernelVariant, wgrad_counters};
use hopper_fp8::Fp8KernelVariant;
use mma::MmaVariant;

/// The kernel of a grouped GEMM.
#[derive(Clone, Copy, Debug)]
enum Chosen {
    Hopper(&'static KernelVariant),
    Mma(&'static MmaVariant),
    Generic,
}

impl Chosen {
    /// The first that there is.
    fn first(hopper: Option<&'static KernelVariant>, mma: Option<&'static MmaVariant>) -> Chosen {
        hopper.map(Chosen::Hopper).or(mma.map(Chosen::Mma)).unwrap_or(Chosen::Generic)
    }
}

/// Offsets and counts are the launch's first two arguments.
fn segments(l: &Launch, z: &GroupedSizes) -> Result<Segments> {
    let Ok(rows) = i32::try_from(z.rows) else {
        return shape_error(l.op(), format!("{} rows are more than 32 bits count", z.rows));
    };
    Ok(Segments { offsets: l.address(0)?, counts: l.address(1)?, count: z.segments as i32, rows })
}

impl CudaKernels {
    /// Launches fprop or dgrad.
    fn launch_grouped(&self, s: &Stream, g: &GroupedGemm, z: &GroupedSizes, chosen: Chosen) -> Result<()> {
        let mut args =
            vec![read(g.segments.offsets), read(g.segments.counts), read(g.x), read(g.w), write(g.y)];
        args.extend(g.bias.map(read));
        s.launch(g.name(), &args, |l| match chosen {
            Chosen::Hopper(variant) => self.hopper_grouped(l, g, z, segments(l, z)?, variant),
            Chosen::Mma(variant) => self.mma_grouped(l, g, z, segments(l, z)?, variant),
            Chosen::Generic => self.generic_grouped(l, g, z, segments(l, z)?),
        })
    }

    /// Launches wgrad.
    fn launch_grouped_wgrad(
        &self,
        s: &Stream,
        g: &GroupedWgrad,
        z: &GroupedSizes,
        chosen: Chosen,
    ) -> Result<()> {
        let mut args =
            vec![read(g.segments.offsets), read(g.segments.counts), read(g.dy), read(g.x), write(g.dw.0)];
        let counters = match chosen {
            Chosen::Hopper(variant) => wgrad_counters(variant, z),
            Chosen::Mma(variant) => Some(variant.wgrad_counters(z)),
            Chosen::Generic => None,
        };
        let counters = counters.map(|n| s.zeros(&[n], DType::I32, Category::Workspace)).transpose()?;
        args.extend(counters.as_ref().map(write));
        s.launch(GroupedWgrad::NAME, &args, |l| match chosen {
            Chosen::Hopper(variant) => self.hopper_grouped_wgrad(l, g, z, segments(l, z)?, variant),
            Chosen::Mma(variant) => self.mma_grouped_wgrad(l, g, z, segments(l, z)?, variant),
            Chosen::Generic => self.generic_grouped_wgrad(l, g, z, segments(l, z)?),
        })
    }

    /// Launches FP8 fprop or dgrad.
    fn launch_grouped_fp8(
        &self,
        s: &Stream,
        g: &Fp8GroupedGemm,
        z: &GroupedSizes,
        variant: Option<&Fp8KernelVariant>,
    ) -> Result<()> {
        let args = [
            read(g.segments.offsets),
            read(g.segments.counts),
            read(&g.x.data),
            read(&g.x.scale_inv),
            read(&g.w.data),
            read(&g.w.scale_inv),
            write(g.y),
        ];
        s.launch(g.name, &args, |l| match variant {
            Some(variant) => self.hopper_grouped_fp8(l, g, z, segments(l, z)?, variant),
            None => self.generic_grouped_fp8(l, g, z, segments(l, z)?),
        })
    }

    /// Launches FP8 wgrad.
    fn launch_grouped_wgrad_fp8(
        &self,
        s: &Stream,
        g: &Fp8GroupedWgrad,
        z: &GroupedSizes,
        variant: Option<&Fp8KernelVariant>,
    ) -> Result<()> {
        let counters = variant.and_then(|variant| wgrad_counters(&variant.variant, z));
        let counters = counters.map(|n| s.zeros(&[n], DType::I32, Category::Workspace)).transpose()?;
        let mut args = vec![
            read(g.segments.offsets),
            read(g.segments.counts),
            read(&g.dy.data),
            read(&g.dy.scale_inv),
            read(&g.x.data),
            read(&g.x.scale_inv),
            write(g.dw.0),
        ];
        args.extend(counters.as_ref().map(write));
        s.launch(Fp8GroupedWgrad::NAME, &args, |l| match variant {
            Some(variant) => self.hopper_grouped_wgrad_fp8(l, g, z, segments(l, z)?, variant),
            None => self.generic_grouped_wgrad_fp8(l, g, z, segments(l, z)?),
        })
    }
}

impl GroupedGemmKernels for CudaKernels {
    fn grouped_gemm(&self, s: &Stream, g: &GroupedGemm) -> Result<()> {
        let z = g.sizes()?;
        if z.rows * z.n == 0 {
            return Ok(());
        }
        self.launch_grouped(s, g, &z, Chosen::first(g.hopper(self, &z), g.mma(&z)))
    }

    fn grouped_wgrad(&self, s: &Stream, g: &GroupedWgrad) -> Result<()> {
        let z = g.sizes()?;
        if z.segments * z.n * z.k == 0 {
            return Ok(());
        }
        self.launch_grouped_wgrad(s, g, &z, Chosen::first(g.hopper(self, &z), g.mma(&z)))
    }

    fn fp8_grouped_gemm(&self, s: &Stream, g: &Fp8GroupedGemm) -> Result<()> {
        let z = g.sizes()?;
        if z.rows * z.n == 0 {
            return Ok(());
        }
        self.launch_grouped_fp8(s, g, &z, g.hopper(self, &z))
    }

    fn fp8_grouped_wgrad(&self, s: &Stream, g: &Fp8GroupedWgrad) -> Result<()> {
        let z = g.sizes()?;
        if z.segments * z.n * z.k == 0 {
            return Ok(());
        }
        self.launch_grouped_wgrad_fp8(s, g, &z, g.hopper(self, &z))
    }

    fn grouped_bias(&self, s: &Stream, b: &GroupedBias, y: &Tensor) -> Result<()> {
        self.launch_grouped_bias(s, b, y)
    }

    fn grouped_bias_backward(
        &self,
        s: &Stream,
        b: &GroupedBias,
        dy: &Tensor,
        dbias: (&Tensor, bool),
        dweights: Option<&Tensor>,
    ) -> Result<()> {
        self.launch_grouped_bias_backward(s, b, dy, dbias, dweights)
    }
}
