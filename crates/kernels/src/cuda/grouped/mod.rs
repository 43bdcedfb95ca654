//! Products of segments of rows, each with a matrix of its own: by the matrix units where they can reach the operands, or
//! else in plain arithmetic.

mod hopper;
mod hopper8;
mod plain;
mod plain8;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests8;

use super::CudaKernels;
use crate::grouped::GroupedSizes;
use crate::{Grouped, Grouped8, GroupedGrad, GroupedGrad8, GroupedKernels};
use ferrotron_tensor::{Category, DType, Launch, Result, Stream, read, shape_error, write};
use hopper::{Kind, turns};
use hopper8::Kind8;
use plain::Segments;

/// Offsets and counts are the launch's first two arguments.
fn segments(l: &Launch, z: &GroupedSizes) -> Result<Segments> {
    let Ok(rows) = i32::try_from(z.rows) else {
        return shape_error(l.op(), format!("{} rows are more than 32 bits count", z.rows));
    };
    Ok(Segments { offsets: l.address(0)?, counts: l.address(1)?, count: z.segments as i32, rows })
}

impl CudaKernels {
    /// By a kernel for Hopper, or in plain arithmetic.
    fn queue_grouped(&self, s: &Stream, g: &Grouped, z: &GroupedSizes, kind: Option<&Kind>) -> Result<()> {
        let mut args =
            vec![read(g.segments.offsets), read(g.segments.counts), read(g.x), read(g.w), write(g.y)];
        args.extend(g.bias.map(read));
        s.launch(g.name(), &args, |l| match kind {
            Some(kind) => self.hopper_grouped(l, g, z, segments(l, z)?, kind),
            None => self.plain_grouped(l, g, z, segments(l, z)?),
        })
    }

    /// The same.
    fn queue_grouped_grad(
        &self,
        s: &Stream,
        g: &GroupedGrad,
        z: &GroupedSizes,
        kind: Option<&Kind>,
    ) -> Result<()> {
        let mut args =
            vec![read(g.segments.offsets), read(g.segments.counts), read(g.dy), read(g.x), write(g.dw.0)];
        let turns = kind.and_then(|kind| turns(kind, z));
        let turns = turns.map(|n| s.zeros(&[n], DType::I32, Category::Workspace)).transpose()?;
        args.extend(turns.as_ref().map(write));
        s.launch(GroupedGrad::NAME, &args, |l| match kind {
            Some(kind) => self.hopper_grouped_grad(l, g, z, segments(l, z)?, kind),
            None => self.plain_grouped_grad(l, g, z, segments(l, z)?),
        })
    }

    /// The same, of bytes.
    fn queue_grouped8(&self, s: &Stream, g: &Grouped8, z: &GroupedSizes, kind: Option<&Kind8>) -> Result<()> {
        let args = [
            read(g.segments.offsets),
            read(g.segments.counts),
            read(&g.x.data),
            read(&g.x.scale_inv),
            read(&g.w.data),
            read(&g.w.scale_inv),
            write(g.y),
        ];
        s.launch(g.name, &args, |l| match kind {
            Some(kind) => self.hopper_grouped8(l, g, z, segments(l, z)?, kind),
            None => self.plain_grouped8(l, g, z, segments(l, z)?),
        })
    }

    /// The same, of bytes.
    fn queue_grouped_grad8(
        &self,
        s: &Stream,
        g: &GroupedGrad8,
        z: &GroupedSizes,
        kind: Option<&Kind8>,
    ) -> Result<()> {
        let turns = kind.and_then(|kind| turns(&kind.kind, z));
        let turns = turns.map(|n| s.zeros(&[n], DType::I32, Category::Workspace)).transpose()?;
        let mut args = vec![
            read(g.segments.offsets),
            read(g.segments.counts),
            read(&g.dy.data),
            read(&g.dy.scale_inv),
            read(&g.x.data),
            read(&g.x.scale_inv),
            write(g.dw.0),
        ];
        args.extend(turns.as_ref().map(write));
        s.launch(GroupedGrad8::NAME, &args, |l| match kind {
            Some(kind) => self.hopper_grouped_grad8(l, g, z, segments(l, z)?, kind),
            None => self.plain_grouped_grad8(l, g, z, segments(l, z)?),
        })
    }
}

impl GroupedKernels for CudaKernels {
    fn grouped(&self, s: &Stream, g: &Grouped) -> Result<()> {
        let z = g.sizes()?;
        if z.rows * z.n == 0 {
            return Ok(());
        }
        self.queue_grouped(s, g, &z, g.hopper(self, &z))
    }

    fn grouped_grad(&self, s: &Stream, g: &GroupedGrad) -> Result<()> {
        let z = g.sizes()?;
        if z.segments * z.n * z.k == 0 {
            return Ok(());
        }
        self.queue_grouped_grad(s, g, &z, g.hopper(self, &z))
    }

    fn grouped8(&self, s: &Stream, g: &Grouped8) -> Result<()> {
        let z = g.sizes()?;
        if z.rows * z.n == 0 {
            return Ok(());
        }
        self.queue_grouped8(s, g, &z, g.hopper(self, &z))
    }

    fn grouped_grad8(&self, s: &Stream, g: &GroupedGrad8) -> Result<()> {
        let z = g.sizes()?;
        if z.segments * z.n * z.k == 0 {
            return Ok(());
        }
        self.queue_grouped_grad8(s, g, &z, g.hopper(self, &z))
    }
}
