//! Products of segments of rows, each with a matrix of its own.

mod plain;

use super::CudaKernels;
use crate::grouped::GroupedSizes;
use crate::{Grouped, GroupedGrad, GroupedKernels};
use ferrotron_tensor::{Launch, Result, Stream, read, shape_error, write};
use plain::Segments;

/// Offsets and counts are the launch's first two arguments.
fn segments(l: &Launch, z: &GroupedSizes) -> Result<Segments> {
    let Ok(rows) = i32::try_from(z.rows) else {
        return shape_error(l.op(), format!("{} rows are more than 32 bits count", z.rows));
    };
    Ok(Segments { offsets: l.address(0)?, counts: l.address(1)?, count: z.segments as i32, rows })
}

impl GroupedKernels for CudaKernels {
    fn grouped(&self, s: &Stream, g: &Grouped) -> Result<()> {
        let z = g.sizes()?;
        if z.rows * z.n == 0 {
            return Ok(());
        }
        let mut args =
            vec![read(g.segments.offsets), read(g.segments.counts), read(g.x), read(g.w), write(g.y)];
        args.extend(g.bias.map(read));
        s.launch(g.name(), &args, |l| self.plain_grouped(l, g, &z, segments(l, &z)?))
    }

    fn grouped_grad(&self, s: &Stream, g: &GroupedGrad) -> Result<()> {
        let z = g.sizes()?;
        if z.segments * z.n * z.k == 0 {
            return Ok(());
        }
        let args = [read(g.segments.offsets), read(g.segments.counts), read(g.dy), read(g.x), write(g.dw.0)];
        s.launch(GroupedGrad::NAME, &args, |l| self.plain_grouped_grad(l, g, &z, segments(l, &z)?))
    }
}
